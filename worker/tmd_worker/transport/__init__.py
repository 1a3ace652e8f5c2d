"""The `delta` transport: pairwise links between ranks that are opened, swapped and closed one by one.

From the bottom up:
- `wire` (frames), `link` (one connection), `exchange` (both directions at once), `watcher` (who hung up);
- `handshake`, `listener`, `dialing`, `tables`, `ports` (who may connect, and to what), `opening`, `epochs` (many links at once);
- `topology`, `tensors`, `collectives` (algorithms), `group` (a thread and the links of one process group), `pairs` (send/recv);
- `vote` and `buddy` (the commit vote, the records of small state);
- `work`, `calls`, `sandbox`, `recording` (what becomes of a call: sent, local, replayed or refused);
- `fabric` (all of it, per process; `events`: what it tells the runtime), `process`, `shell` (what PyTorch sees).
"""
