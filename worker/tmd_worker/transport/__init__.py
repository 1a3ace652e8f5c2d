"""The `delta` transport: pairwise links between ranks that are opened, swapped and closed one by one.

From the bottom up: `wire` (frames), `handshake` and `listener` (who may connect), `link` (one connection), `opening` (many
of them), `watcher` (who hung up), `group` (a thread and the links of one process group), `collectives` (algorithms),
`vote`, `buddy`, `fabric` (all of it, per process), `shell` (what PyTorch sees).
"""
