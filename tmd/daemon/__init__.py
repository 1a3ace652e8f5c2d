"""The daemon's shell: it turns sockets, the clock and the resource manager into events of `tmd.core`, and the core's
instructions into writes and messages. It decides nothing about jobs itself."""
