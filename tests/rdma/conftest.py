"""The two virtual machines, booted once for all tests. All that they reported is kept in out/rdma/results.json."""

from __future__ import annotations

import compileall
import itertools
import json
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.machine import CONSOLES, ROOT, VirtualMachine, write_initrd
from tmd_worker.native import building

#: Beside other tests (load 5 to 13 on 2 cores) it takes eleven minutes: a machine that emulates two others is slow then.
DEADLINE_S = 1800.0
NATIVE = CONSOLES / "native"


@pytest.fixture(scope="session")
def results() -> Iterator[dict[str, dict[str, Any]]]:
    """What the scenarios reported, by name."""
    with tempfile.TemporaryDirectory(prefix="tmd-rdma-") as folder:
        _compile()
        initrd = Path(folder, "initrd")
        write_initrd(initrd, ROOT / "tests/rdma/guest/start")
        cables = [socket.socketpair(), socket.socketpair()]  # control and data
        machines: list[VirtualMachine] = []
        try:
            for host in (1, 2):
                arguments = {"tmd.host": str(host), "tmd.python": sys.executable, "tmd.root": str(ROOT)}
                machines.append(VirtualMachine(host, initrd, [cable[host - 1] for cable in cables], arguments))
            deadline_s = time.monotonic() + DEADLINE_S
            machines[0].wait_for("sources", deadline_s)
            machines[1].wait_for("end", deadline_s, needs=machines[0])
            found = machines[1].results
            (CONSOLES / "results.json").write_text(json.dumps(found, indent=1) + "\n")
            yield found
        finally:
            for machine in machines:
                machine.close()
            for end in itertools.chain(*cables):
                end.close()


def _compile() -> None:
    """What the guests would do for themselves, ten times slower: they read this machine's files."""
    for place in ("tmd", "worker/tmd_worker", "tests/rdma"):
        assert compileall.compile_dir(ROOT / place, quiet=1), f"{place} does not compile"
    library = building.cached()
    NATIVE.mkdir(parents=True, exist_ok=True)
    shutil.copy(library, NATIVE / library.name)
