"""The rank's side of the protocol without I/O: events in, instructions out. Imports neither torch nor sockets."""
