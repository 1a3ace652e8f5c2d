"""`tmd-health`: looks whether this node is fit to work, and tells the daemon all that is wrong. Run by slurmd
(HealthCheckProgram) or by cron; imports neither torch nor aiohttp, and ends within Slurm's 60 s whatever hangs.
"""
