"""A benchmark that is told to end leaves nothing running, whatever it is doing: Ctrl-C and timeout(1) come at any moment."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.demo.left_behind import started, until

#: Small ones, with something that shows how far they are.
RECOVERY = ("bench.recovery", ["--kills", "1", "--resident-mib", "1"])
STEADY = ("bench.steady", ["--rounds", "1", "--ranks", "2", "--steps", "20"])


@pytest.mark.parametrize(
    ("command", "moment"),
    [(RECOVERY, "kill 1/1"), (STEADY, "round 1/1, tmd")],
    ids=["its stack is being ended", "plain ranks are starting"],
)
def test_nothing_is_left(command: tuple[str, list[str]], moment: str, tmp_path: Path) -> None:
    module, options = command
    with started(module, [*options, "--out", str(tmp_path / "out")], tmp_path / "output") as bench:
        until(lambda: bench.says(moment), moment)
        bench.tell_to_end(signal.SIGINT)
        assert bench.says("Aborted!")
        until(lambda: not bench.running(), "nothing is left")
