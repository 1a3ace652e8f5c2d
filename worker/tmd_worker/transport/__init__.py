"""The `delta` transport: pairwise links between ranks that are opened, swapped and closed one by one.

From the bottom up:
- `wire` (frames), `link` (one connection), `exchange` (both directions at once), `watcher` (who hung up; `closing`: how it ends),
  `native` (the same in C, see tmd_worker.native);
- `handshake`, `listener`, `dialing`, `tables`, `ports` (who may connect, and to what), `opening`, `epochs` (many links at once);
- `topology`, `tensors`, `collectives` and `rooted` (algorithms), `group` (a thread and the links of one process group);
- `mailbox`, `channel`, `pairs` (send/recv, and the links between any two members);
- `vote` and `buddy` (the commit vote, the records of small state);
- `work`, `calls`, `sandbox`, `recording` (what becomes of a call: sent, local, replayed or refused);
- `fabric` (all of it, per process; `events`: what it tells the runtime), `process`;
- `calling`, and on it `reducing`, `moving`, `messaging` (PyTorch's calls by family), `shell` (the process group made of them).
"""
