"""Munge, through a thin binding to libmunge: proofs of a uid that hold on every machine which shares the site's munge key.

Needs msgspec and the system's libmunge; for the head and the compute node alike. `library` calls libmunge, `deadline` keeps its
calls off the event loop, `statements` says what is proven. The messages that carry credentials are in tmd.protocol.
"""
