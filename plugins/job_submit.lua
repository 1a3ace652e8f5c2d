-- job_submit.lua for a site that has none: `sbatch --standby` and nothing else. A site that has one adds the same calls to it, see
-- tmd_standby.lua. slurmctld reads this file anew when it has changed, but not tmd_standby.lua: touch this file after an upgrade.

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "/etc/slurm/"
local tmd = dofile(here .. "tmd_standby.lua")

function slurm_job_submit(job, partitions, uid)
    return tmd.submit(job, partitions, uid)
end

function slurm_job_modify(change, job, partitions, uid)
    return tmd.modify(change, job, partitions, uid)
end

return slurm.SUCCESS
