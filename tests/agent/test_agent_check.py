"""`tmd-run --check`: one process without a cluster says what the script forgot; its exit code is that of a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tmd_worker.agent.main import tmd_run

ROOT = Path(__file__).parents[2]

BEGINNING = """
import random
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tmd_worker import Session

def batch(position, rank):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * rank + position))

def build(session):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    return model, torch.optim.AdamW(model.parameters())

"""

GOOD = """
def main(session):
    model, optimizer = build(session)
    print("built for", session.world_size, "ranks with", sys.argv[1:])
    session.track(model=model, optimizer=optimizer, data=batch)
    for step in session.steps(10):
        with step:
            optimizer.zero_grad()
            model(step.batch).sum().backward()
            optimizer.step()

Session.run(main)
"""

FORGETFUL = """
def main(session):
    model, optimizer = build(session)
    scaler = torch.amp.GradScaler("cpu")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    idle = nn.Linear(2, 2)
    session.track(model=model, optimizer=optimizer, data=batch)
    for step in session.steps(10):
        with step:
            optimizer.zero_grad()
            scaler.scale(model(step.batch).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        schedule.step()

Session.run(main)
"""


def check(tmp_path: Path, script: str, *options: str, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs `tmd-run --check` on a script in `tmp_path`, which is no scratch directory for it."""
    path = tmp_path / "train.py"
    path.write_text(BEGINNING + script)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'worker'}", "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}
    return subprocess.run(
        [sys.executable, "-m", "tmd_worker.agent.main", "--check", *options, "train.py", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def line_of(text: str) -> int:
    """The number of the line that begins with `text`."""
    lines = (BEGINNING + FORGETFUL).splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.lstrip().startswith(text))


def test_a_script_that_forgets_nothing_passes_and_sees_what_a_rank_would_see(tmp_path: Path) -> None:
    done = check(tmp_path, GOOD, "--nnodes", "2", "--nproc-per-node", "2", arguments=("--lr", "3"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "built for 4 ranks with ['--lr', '3']" in done.stdout
    assert done.stdout.endswith("train.py: no errors, no warnings after 2 shadow steps\n")


def test_an_optimizer_that_was_not_tracked_is_refused_in_its_step_and_named_where_it_is_bound(tmp_path: Path) -> None:
    done = check(tmp_path, GOOD.replace("optimizer=optimizer, ", ""), "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    refused, seen = report["findings"]
    assert (report["shadow_steps"], refused["severity"], refused["kind"], seen["severity"]) == (0, "error", "refused", "warning")
    assert "pass it to session.track" in refused["what"]
    assert (seen["name"], seen["what"]) == ("optimizer", "an AdamW that was not tracked")  # not that it never changes
    assert seen["remedy"].startswith("session.track(optimizer=optimizer)")


def test_each_thing_that_was_forgotten_is_named_with_its_line(tmp_path: Path) -> None:
    done = check(tmp_path, FORGETFUL, "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert (report["script"], report["ok"], report["shadow_steps"], report["errors"], report["warnings"]) == (
        "train.py",
        False,
        2,
        3,
        1,
    )
    found = {finding["name"]: finding for finding in report["findings"]}
    assert {name: finding["severity"] for name, finding in found.items()} == {
        "": "error",
        "scaler": "error",
        "schedule": "error",
        "idle": "warning",
    }
    assert "scheduler drives optimizer but is not tracked" in found[""]["what"]
    assert found["scaler"]["where"] == f"train.py:{line_of('scaler = ')}"
    assert found["scaler"]["remedy"] == "session.track(scaler=scaler)"
    assert found["scaler"]["why"] == "the loss scale and its growth counter"


def test_with_json_standard_output_is_the_report_alone(tmp_path: Path) -> None:
    done = check(tmp_path, GOOD, "--json")
    assert json.loads(done.stdout)["ok"] is True
    assert "built for 2 ranks" in done.stderr


CHECKPOINT = """
def main(session):
    model, optimizer = build(session)
    session.track(model=model, optimizer=optimizer, data=batch)
    for step in session.steps(10):
        with step:
            optimizer.zero_grad()
            model(step.batch).sum().backward()
            optimizer.step()
        torch.save(model.state_dict(), "checkpoint.pt")

Session.run(main)
"""

ALL_RANKS_ALIKE = """
def main(session):
    model, optimizer = build(session)
    session.track(model=model, optimizer=optimizer, data=iter((torch.ones(8, 4),) * 99))
    for step in session.steps(10):
        with step:
            optimizer.zero_grad()
            model(step.batch).sum().backward()
            optimizer.step()

Session.run(main)
"""


TWO_OPTIMIZERS = """
def main(session):
    (one, first), (other, last) = build(session), build(session)
    session.track(one=one, other=other, first=first, last=last, data=batch)
    for step in session.steps(10):
        with step:
            losses = one(step.batch).sum(), other(step.batch).sum()
            losses[0].backward()
            first.step()
            losses[1].backward()
            last.step()

Session.run(main)
"""

FORWARD_BETWEEN = """
def main(session):
    (one, first), (other, last) = build(session), build(session)
    session.track(one=one, other=other, first=first, last=last, data=batch)
    for step in session.steps(10):
        with step:
            one(step.batch).sum().backward()
            first.step()
            one(other(step.batch)).sum().backward()
            last.step()

Session.run(main)
"""

LATE_COLLECTIVE = GOOD.replace(
    "            optimizer.step()", "            optimizer.step()\n        torch.distributed.barrier()"
)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (TWO_OPTIMIZERS, ("a backward pass ran after first had stepped", "track first with undo=True")),
        (FORWARD_BETWEEN, ("was called after this step's commit vote", "a DDP module", "undo=True")),
        (LATE_COLLECTIVE, ("barrier was called after this step's commit vote", "session.log_only()")),
        (CHECKPOINT, ("refused to open for writing", "checkpoint.pt", "a check that rehearses", "train.py:28")),
        (ALL_RANKS_ALIKE, ("cannot track data: nothing tells this tuple_iterator which rank it serves", "data(position, rank)")),
        (
            "def main(session):\n    raise ValueError('a bug')\n\nSession.run(main)\n",
            ("main raised ValueError: a bug", "train.py:20"),
        ),
        ("Session.run(lambda session: None)\n", ("main returned without a loop over session.steps",)),
        ("print('no session')\n", ("the script ended without calling Session.run(main)",)),
        ("sys.exit(3)\n", ("the script ended with sys.exit(3) before it came to Session.run(main)",)),
        ("import nothing_of_that_name\n", ("the script raised ModuleNotFoundError", "nothing_of_that_name")),
    ],
    ids=[
        "two optimizers",
        "forward between",
        "late collective",
        "checkpoint",
        "iterator",
        "bug",
        "no loop",
        "no session",
        "exit",
        "import",
    ],
)
def test_what_a_rank_would_fail_with_is_an_error(script: str, words: tuple[str, ...], tmp_path: Path) -> None:
    done = check(tmp_path, script)
    assert done.returncode == 1, done.stderr
    assert all(word in done.stdout for word in words), done.stdout
    assert "1 error," in done.stdout
    assert not (tmp_path / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--check", "--no-python", "true"], "--check looks into a Python script"),
        (["--json", "train.py"], "--json is the form of what --check says"),
        (["--check", "missing.py"], "script 'missing.py' cannot be read"),
    ],
)
def test_a_command_that_cannot_be_checked_is_refused(arguments: list[str], words: str) -> None:
    done: Any = CliRunner().invoke(tmd_run, arguments)
    assert (done.exit_code, words in done.output) == (2, True), done.output
