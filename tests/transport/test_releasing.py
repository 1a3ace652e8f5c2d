"""What a library made is never given back in a thread while the interpreter ends: that would take the process down."""

from __future__ import annotations

import os
import subprocess
import sys

#: Sixty groups, so that the thread is in the middle of them when the main thread comes to its end.
PROGRAM = """
import datetime, sys, threading
import torch.distributed as dist
from tmd_worker.transport.releasing import give_back

store, held = dist.HashStore(), []
for number in range(60):
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = datetime.timedelta(seconds=10)
    held.append(dist.ProcessGroupGloo(dist.PrefixStore(str(number), store), 0, 1, options))
begun = threading.Event()

def give_all_back():
    while held:
        give_back(held.pop)
        begun.set()

threading.Thread(target=give_all_back, daemon=True).start()
begun.wait()
"""


def test_a_process_that_ends_while_a_thread_gives_back_ends_well() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert (ended.returncode, ended.stderr) == (0, "")
