"""The two virtual machines, booted once for all tests. All that they reported is kept in out/rdma/results.json."""

from __future__ import annotations

import compileall
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.machine import CONSOLES, ROOT, VirtualMachine, write_initrd

#: Quiet, it takes two minutes; a machine that emulates two others is slow when others use it as well.
DEADLINE_S = 900.0
LINK_TIMEOUT_S = 60.0


@pytest.fixture(scope="session")
def results() -> Iterator[dict[str, dict[str, Any]]]:
    """What the scenarios reported, by name."""
    with tempfile.TemporaryDirectory(prefix="tmd-rdma-") as folder:
        _compile()
        initrd = Path(folder, "initrd")
        write_initrd(initrd, ROOT / "tests/rdma/guest/start")
        links = [Path(folder, "control"), Path(folder, "data")]
        machines: list[VirtualMachine] = []
        try:
            for host in (1, 2):
                arguments = {"tmd.host": str(host), "tmd.python": sys.executable, "tmd.root": str(ROOT)}
                machines.append(VirtualMachine(str(host), initrd, links, host == 1, arguments))
                _wait_for(links)
            deadline_s = time.monotonic() + DEADLINE_S
            machines[0].wait_for("sources", deadline_s)
            machines[1].wait_for("end", deadline_s)
            found = machines[1].results
            (CONSOLES / "results.json").write_text(json.dumps(found, indent=1) + "\n")
            yield found
        finally:
            for machine in machines:
                machine.close()


def _compile() -> None:
    """What the guests would do for themselves, ten times slower: they read this machine's files."""
    for place in ("tmd", "worker/tmd_worker", "tests/rdma"):
        assert compileall.compile_dir(ROOT / place, quiet=1), f"{place} does not compile"


def _wait_for(links: list[Path]) -> None:
    deadline_s = time.monotonic() + LINK_TIMEOUT_S
    while not all(link.exists() for link in links):
        assert time.monotonic() < deadline_s, "the first virtual machine does not serve its network"
        time.sleep(0.05)
