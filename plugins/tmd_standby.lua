-- What `sbatch --standby=N[:pool]` makes of a job: N more nodes of the same shape, and a note of it in admin_comment.
--
-- Contract: a job without the flag is not touched. A job with it either gets what it needs or is refused with a message that says what
-- to write instead. `submit` and `modify` take and return what slurm_job_submit and slurm_job_modify do, so that a site's own
-- job_submit.lua can call them:
--
--     local tmd = dofile("/etc/slurm/tmd_standby.lua")
--     function slurm_job_submit(job, partitions, uid) ... return tmd.submit(job, partitions, uid) end
--     function slurm_job_modify(change, job, partitions, uid) ... return tmd.modify(change, job, partitions, uid) end
--
-- The flag comes from the SPANK plugin (spank_tmd.c); where that is not installed, from --comment=tmd:standby=N[:pool].
-- The note is "tmd:standby=N;nodes=M" with M the user's own node count ("2-4" for -N 2-4), and ";pool" after it for N:pool.

local tmd = {}

local MOST_STANDBY = 1024

-- Slurm has three ways to say that a number was not given.
local function given(number)
    return number ~= nil and number ~= 0 and number ~= slurm.NO_VAL and number ~= slurm.NO_VAL16
end

local function named(text)
    return text ~= nil and text ~= ""
end

-- ---------------------------------------------------------------- the flag

-- From the SPANK plugin: {count, pool}, or nil.
local function flag_of_spank(job)
    for _, entry in pairs(job.spank_job_env or {}) do
        local name, count = entry:match("^([%u_]+)=(%d+)$")
        if name == "TMD_STANDBY" or name == "TMD_STANDBY_POOL" then
            return { count = tonumber(count), pool = name == "TMD_STANDBY_POOL" }
        end
    end
end

-- From the comment: {count, pool}, or nil, or nil and what is wrong.
local function flag_of_comment(job)
    local text = (job.comment or ""):match("tmd:standby=([^%s,;]*)")
    if not text then
        return nil
    end
    local count, rest = text:match("^(%d+)(.*)$")
    count = tonumber(count)
    if not count or (rest ~= "" and rest ~= ":pool") then
        return nil, "--comment=tmd:standby=" .. text .. ": expected a number of nodes, and \":pool\" after it or nothing"
    end
    if count > MOST_STANDBY then
        return nil, "--comment=tmd:standby=" .. text .. ": more than " .. MOST_STANDBY .. " standby nodes"
    end
    if count > 0 then
        return { count = count, pool = rest == ":pool" }
    end
end

-- ---------------------------------------------------------------- what cannot be

-- Each: whether it is so, and what to tell the user.
local function refusals(job, by_comment)
    local function value(number)
        return given(number) and math.floor(number) or nil
    end
    local most = value(job.max_nodes) or value(job.min_nodes)
    local ranged = most ~= value(job.min_nodes)
    local tasks, per_node = value(job.num_tasks), value(job.ntasks_per_node)
    local environment = job.script and job.environment or {}
    return {
        {
            job.het_job_offset ~= nil and job.het_job_offset ~= slurm.NO_VAL,
            "heterogeneous jobs (\":\" between components) cannot have standby nodes",
        },
        {
            (job.dependency or ""):find("expand:", 1, true) ~= nil,
            "a job that expands another one cannot have standby nodes of its own: leave --standby out",
        },
        {
            -- srun's --standby is refused by the SPANK plugin. Since 23.02 salloc tells its command as well as srun does.
            by_comment and not job.script and (job.argc or 0) > 0,
            "a comment asks for standby nodes in sbatch or in salloc without a command: srun would start ranks on all of them",
        },
        {
            not value(job.min_nodes) and tasks,
            "-n alone does not say how many nodes the job needs: give -N as well, as in -N 2 -n 16",
        },
        { not value(job.min_nodes), "say how many nodes the job needs beside the standby ones: give -N, as in -N 2" },
        {
            ranged and tasks,
            "with a range of nodes the number of tasks is open: give one number to -N, or --ntasks-per-node instead of -n",
        },
        {
            named(job.tres_per_job),
            "--gpus and the like count for the whole job, so standby nodes would take from them: use --gpus-per-node or --gres",
        },
        {
            given(job.ntasks_per_tres) or given(job.ntasks_per_gpu),
            "--ntasks-per-gpu leaves the number of tasks open: use --ntasks-per-node",
        },
        {
            environment["SLURM_DISTRIBUTION"] == "arbitrary" or environment["SLURM_ARBITRARY_NODELIST"] ~= nil,
            "--distribution=arbitrary names the node of each task, so that none is left to stand by",
        },
        { tasks and per_node and most and tasks > per_node * most, "-n is more than --ntasks-per-node times -N" },
    }
end

-- The names of the partitions that the job may go to.
local function candidates(job, partitions)
    local names = {}
    for name in (job.partition or ""):gmatch("[^,]+") do
        names[#names + 1] = name
    end
    if #names == 0 then
        for name, partition in pairs(partitions or {}) do
            if partition.flag_default == 1 then
                names[#names + 1] = name
            end
        end
    end
    return names
end

-- Nil, or why no partition can ever give so many nodes. Slurm would leave such a job pending without end.
local function too_many(job, partitions, nodes, standby)
    local tried = {}
    for _, name in ipairs(candidates(job, partitions)) do
        local partition = partitions[name]
        if not partition then
            return nil -- Slurm itself says what is wrong with it
        end
        local limit = math.floor(partition.total_nodes)
        if given(partition.max_nodes) and partition.max_nodes < limit then
            limit = math.floor(partition.max_nodes)
        end
        if nodes + standby <= limit then
            return nil
        end
        tried[#tried + 1] = string.format("partition %s gives a job at most %d", name, limit)
    end
    if #tried == 0 then
        return nil
    end
    return string.format("%d nodes and %d on standby are %d, but %s", nodes, standby, nodes + standby, table.concat(tried, " and "))
end

-- ---------------------------------------------------------------- what is needed

-- The user's own node count, as text.
local function own_nodes(job)
    local least = math.floor(job.min_nodes)
    local most = given(job.max_nodes) and math.floor(job.max_nodes) or least
    return least == most and tostring(least) or least .. "-" .. most
end

-- Raises the job by `count` nodes of the shape that it has already.
local function raise(job, count)
    local nodes = job.min_nodes
    if given(job.num_tasks) then
        local cpus = given(job.cpus_per_task) and job.cpus_per_task or 1
        local per_node = given(job.ntasks_per_node) and job.ntasks_per_node or math.ceil(job.num_tasks / nodes)
        -- Else Slurm would spread the user's tasks over all nodes, and give each fewer processors.
        job.ntasks_per_node = per_node
        job.num_tasks = per_node * (nodes + count)
        if given(job.min_cpus) then
            job.min_cpus = math.max(job.num_tasks * cpus, math.ceil(job.min_cpus * (nodes + count) / nodes))
        end
    elseif given(job.min_cpus) then
        job.min_cpus = math.ceil(job.min_cpus * (nodes + count) / nodes)
    end
    job.max_nodes = (given(job.max_nodes) and job.max_nodes or nodes) + count
    job.min_nodes = nodes + count
end

-- For the script, and for spank_tmd.c in the batch step. Only a batch job has an environment here.
local function tell_job(job, flag, nodes)
    if not job.script then
        return
    end
    job.environment[flag.pool and "TMD_STANDBY_POOL" or "TMD_STANDBY"] = tostring(flag.count)
    job.environment["TMD_NODES_ASKED"] = nodes
    if tonumber(nodes) then
        job.environment["TMD_NNODES"] = nodes -- as tmd-run knows it
    end
    if given(job.num_tasks) then
        job.environment["TMD_NTASKS"] = tostring(math.floor(job.num_tasks))
    end
end

local function note(job, flag, nodes)
    local text = string.format("tmd:standby=%d;nodes=%s%s", flag.count, nodes, flag.pool and ";pool" or "")
    job.admin_comment = named(job.admin_comment) and job.admin_comment .. " " .. text or text
end

local function refuse(message)
    slurm.log_user("tmd: %s", message)
    return slurm.ERROR
end

function tmd.submit(job, partitions, _)
    local flag, wrong = flag_of_spank(job), nil
    local by_comment = not flag
    if by_comment then
        flag, wrong = flag_of_comment(job)
    end
    if wrong then
        return refuse(wrong)
    end
    if not flag then
        return slurm.SUCCESS
    end
    for _, refusal in ipairs(refusals(job, by_comment)) do
        if refusal[1] then
            return refuse(refusal[2])
        end
    end
    local nodes = own_nodes(job)
    local message = not flag.pool and too_many(job, partitions, math.floor(job.min_nodes), flag.count)
    if message then
        return refuse(message)
    end
    tell_job(job, flag, nodes)
    if not flag.pool then
        raise(job, flag.count)
    end
    note(job, flag, nodes)
    if not job.script and not flag.pool then
        slurm.log_user(
            "tmd: %s nodes and %d on standby are allocated, and salloc shows you all of them: give srun -N %s",
            nodes,
            flag.count,
            nodes
        )
    end
    return slurm.SUCCESS
end

-- The user's own node count is in the job's environment since it was submitted, and cannot be changed there.
function tmd.modify(change, job, _, _)
    local noted = (job.admin_comment or ""):find("tmd:standby=", 1, true)
    local pending = job.job_state ~= nil and job.job_state % 256 == 0
    if noted and pending and (given(change.min_nodes) or given(change.max_nodes) or given(change.num_tasks)) then
        return refuse("the size of a job with standby nodes is set when it is submitted: cancel it and submit it anew")
    end
    return slurm.SUCCESS
end

return tmd
