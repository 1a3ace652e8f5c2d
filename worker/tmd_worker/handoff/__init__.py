"""How the bytes of a role's state move from a source's memory to a joiner's: `transfer` is the interface, `agreement` says which
transport two ends use, and each transport has a module of its own.

Nothing here knows of torch, of steps or of epochs: what is moved is addresses and lengths.
"""
