"""Nodes as groups of processes on this machine: the resource manager for a first look, the demo and the tests."""
