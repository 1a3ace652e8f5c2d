"""A seeded simulation of a whole job: the real cores of ranks and daemon over a simulated network, with faults.

Discrete events, one random generator, no clock, no threads: the same seed gives the same run to the last message. After each
event the rules of DESIGN.md section 12 are checked. `python -m tests.simulator --help` says how to run and replay seeds.
"""
