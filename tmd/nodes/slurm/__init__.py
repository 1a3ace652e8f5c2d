"""Nodes and jobs of a Slurm cluster: what tmd asks of slurmctld, and what it makes of the answers."""
