"""The daemon's decisions without I/O and without a clock: events in, instructions out. Driven by the daemon, by the
simulator and by replay of the ledger alike."""
