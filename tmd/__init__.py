"""tmd: replaces one machine of a running distributed training job at the cost of that machine, not of the job.

Importing this package loads nothing heavy: `tmd.protocol` is shared by head and compute nodes, everything else here is
for the head node alone.
"""

__version__ = "0.1.0"
