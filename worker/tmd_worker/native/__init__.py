"""The hot loops of the `delta` transport in C, on raw pointers and descriptors: no torch ABI, no GIL while bytes move.

`native.h` and `stream.h` are the contract; `shared.c` (memory between two processes), `stream.c` (the bytes of any link),
`frames.c` (one frame), `transfer.c` (both directions at once), `reduce.c` (arithmetic), `collectives.c` (one call per collective)
and `vote.c` (the commit vote) stand on one another; `ward.c` takes in small records. `building` compiles them, `library` loads
them. Where there is no compiler, or with TMD_NATIVE=0, the same is done in Python, with the same bits.
"""
