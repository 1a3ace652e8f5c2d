"""tmctl against a real daemon with local nodes: the shapes that the other tests take for granted are the real ones."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tmd.cli.main import main
from tmd.demo.stack import Stack

SCRIPT = """
import torch
from tmd_worker import Session

def main(session):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.track(model=model, optimizer=optimizer)
    for step in session.steps(3):
        with step:
            optimizer.zero_grad()
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        if step.committed:
            print("committed", step.index, flush=True)

Session.run(main)
"""


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Daemon, agents and ranks are processes of their own: they find the packages as they would if these were installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'worker'}")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), nodes=3) as stack:
        yield stack


def call(stack: Stack, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--socket", str(stack.socket), *arguments])


def ask(stack: Stack, *arguments: str) -> Any:
    result = call(stack, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def states(stack: Stack) -> dict[str, str]:
    return {node["name"]: node["manager_state"] for node in ask(stack, "nodes")["nodes"]}


def until_idle(stack: Stack) -> None:
    """A cancelled job's agents have some seconds to end."""
    deadline = time.monotonic() + 30
    while set(states(stack).values()) != {"IDLE"}:
        assert time.monotonic() < deadline, states(stack)
        time.sleep(0.05)


def test_nodes_are_drained_resumed_lost_and_brought_back(stack: Stack) -> None:
    assert states(stack) == {"n1": "IDLE", "n2": "IDLE", "n3": "IDLE"}
    assert ask(stack, "drain", "n1", "--reason", "fan") == {"node": "n1", "state": "drained"}
    ask(stack, "local", "down", "n2", "--reason", "smoke")
    assert states(stack) == {"n1": "IDLE+DRAIN", "n2": "DOWN", "n3": "IDLE"}
    assert "fan" in call(stack, "nodes").output
    ask(stack, "resume", "n1")
    ask(stack, "local", "up", "n2")
    assert set(states(stack).values()) == {"IDLE"}


def test_pause_is_shown_until_it_ends(stack: Stack) -> None:
    ask(stack, "pause")
    assert "paused: nothing planned begins" in call(stack, "status").output
    ask(stack, "unpause")
    assert "paused" not in call(stack, "status").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["job", "show", "nowhere"], "there is no job nowhere"),
        (["job", "cancel", "nowhere"], "there is no job nowhere"),
        (["migrate", "nowhere", "--rank", "0"], "there is no job nowhere"),
        (["migration", "show", "m7", "--wait"], "there is no migration m7"),
        (["migration", "abort", "m7"], "there is no migration m7"),
        (["story", "nowhere"], "nothing is recorded about nowhere"),
        (["drain", "n9", "--reason", "fan"], "no node n9; known: n1, n2, n3"),
        (["drain", "n1", "--reason", " "], "a drain needs a reason"),
        (["local", "job", "nowhere"], "no local job nowhere"),
        (["local", "run", "--nodes", "9", "--", "-m", "this"], "9 nodes wanted"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(stack: Stack, arguments: list[str], said: str) -> None:
    result = call(stack, *arguments)
    assert result.exit_code == 1, result.output
    assert said in result.stderr
    assert "what to do: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["resume", "n1"], "node n1 is not drained, it is IDLE"),
        (["local", "up", "n1"], "node n1 is not off, it is IDLE"),
    ],
)
def test_where_nothing_has_to_be_done_no_remedy_is_made_up(stack: Stack, arguments: list[str], said: str) -> None:
    result = call(stack, *arguments)
    assert (result.exit_code, result.stderr) == (1, f"error: {said}\n")


def test_a_job_is_run_followed_and_told_of(stack: Stack, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = call(stack, "local", "run", "--follow", "--log-dir", str(tmp_path), "--", str(script))
    assert result.exit_code == 0, result.output
    for step in range(3):
        assert f"committed {step}" in result.stdout
    job = ask(stack, "jobs")["jobs"][0]["record"]
    assert (job["state"], job["world_size"], "job_key" in job) == ("done", 1, False)
    assert ask(stack, "local", "job", job["job_id"])["agents"][0]["exit_code"] == 0
    assert str(script) in call(stack, "job", "show", job["job_id"]).output
    assert "live: epoch 0 is live" in call(stack, "story", job["job_id"]).output
    assert set(states(stack).values()) == {"IDLE"}


def test_a_bug_in_the_script_ends_the_job_with_its_traceback(stack: Stack, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("optimizer.zero_grad()", "raise ValueError('a bug in the script')"))
    result = call(stack, "local", "run", "--follow", "--log-dir", str(tmp_path), "--", str(script))
    assert result.exit_code == 1
    assert "n1| [rank0] " in result.stdout
    assert result.output.count("Traceback") == 1
    assert result.output.count("raise ValueError('a bug in the script')") == 1
    *_, error, remedy = result.stderr.splitlines()
    assert error.endswith(" failed: rank 0 on n1 failed in the user's script: ValueError: a bug in the script")
    assert remedy.startswith("  what to do: tmctl story local-")


def test_what_track_refuses_is_told_with_the_users_own_line(stack: Stack, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("optimizer=optimizer)", "optimizer=optimizer, lock=object())"))
    result = call(stack, "local", "run", "--follow", "--log-dir", str(tmp_path), "--", str(script))
    assert result.exit_code == 1
    line = "session.track(model=model, optimizer=optimizer, lock=object())"
    assert f"| [rank0] {script}:8: {line}" in result.stdout
    assert "| [rank0] TrackRefused: cannot track lock: " in result.stdout
    assert "Traceback" not in result.output


def test_a_job_is_waited_for_until_ranks_and_standbys_are_ready(stack: Stack, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("session.steps(3)", "session.steps(1 << 40)"))
    run = ("local", "run", "--wait", "--nodes", "2", "--standby", "1", "--log-dir", str(tmp_path), "--", str(script))
    result = call(stack, *run)
    assert result.exit_code == 0, result.output
    assert "2 ranks, 1 standby ready on n3" in result.stdout
    job_id = result.stdout.split()[1]
    try:
        assert [standby["phase"] for standby in ask(stack, "standby")["standbys"]] == ["ready"]
        told = {(each["kind"], each["object"]) for each in ask(stack, "status")["now"] if each["job"] == job_id}
        assert told >= {("job", job_id), ("node", "n1"), ("node", "n2"), ("node", "n3")}
    finally:
        ask(stack, "job", "cancel", job_id)
    assert "not connected" not in call(stack, "job", "show", job_id).output
    assert job_id not in call(stack, "status").output
    assert "has ended already" in call(stack, "job", "cancel", job_id).stderr
    until_idle(stack)


def test_a_job_whose_agents_fail_at_once_says_so(stack: Stack) -> None:
    result = call(stack, "local", "run", "--follow", "--", "-m", "no_such_module")
    assert result.exit_code == 1
    assert "module 'no_such_module' is not on the Python path" in result.stdout
    assert "never began: its agents ended at once (exit code 2 on n1)" in result.stderr
