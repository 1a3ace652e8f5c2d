"""The main job in one command, on one machine: a training run outlives a drained node and a killed node, bit for bit."""
