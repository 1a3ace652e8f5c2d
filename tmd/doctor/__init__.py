"""`tmctl doctor`: an installation on the head node, looked at point by point. Nothing is changed by any check.

`asking` gathers what the daemon and Slurm say (`facts`), each other module judges some points by that, `examine` runs all of
them, each with a deadline of its own. A `Finding` is what comes out.
"""
