"""The two virtual machines, booted once for all tests."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.machine import ROOT, VirtualMachine, write_initrd

#: Quiet, it takes two minutes; a machine that emulates two others is slow when others use it as well.
DEADLINE_S = 900.0
LINK_TIMEOUT_S = 60.0


@pytest.fixture(scope="session")
def results() -> Iterator[dict[str, dict[str, Any]]]:
    """What the scenarios reported, by name."""
    with tempfile.TemporaryDirectory(prefix="tmd-rdma-") as folder:
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
            yield machines[1].results
        finally:
            for machine in machines:
                machine.close()


def _wait_for(links: list[Path]) -> None:
    deadline_s = time.monotonic() + LINK_TIMEOUT_S
    while not all(link.exists() for link in links):
        assert time.monotonic() < deadline_s, "the first virtual machine does not serve its network"
        time.sleep(0.05)
