"""A job on local nodes is watched from its start: what it waits for is said, and watching changes nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.cli.conftest import Tmctl
from tests.cli.fake_daemon import JOB, FakeDaemon, plain
from tmd.cli.main import main

RUN = ("local", "run", "--nodes", "1", "--standby", "1", "--wait", "--", "-m", "train")
UNKNOWN = (404, {"error": "there is no job local-1", "remedy": "tmctl jobs"})


def agent(node: str, *, running: bool = True) -> dict[str, Any]:
    exit_code = None if running else 3
    return {"node": node, "life": 1, "pid": 12, "exit_code": exit_code, "running": running, "log": f"/logs/{node}.log"}


def local_job(*agents: dict[str, Any]) -> dict[str, Any]:
    shape = {"nnodes": 1, "standby": 1, "nproc_per_node": 1}
    return {"job_id": "local-1", **shape, "command": ["-m", "train"], "created_s": 1.0, "agents": list(agents)}


def view(state: str = "running", *, next_step: int = 4, rank: str = "running", standby: str = "ready") -> dict[str, Any]:
    answer: dict[str, Any] = plain(JOB)
    answer["record"] |= {"state": state, "world_size": 1, "reason": ""}
    answer |= {"next_step": next_step, "sentence": state}
    answer["ranks"][0]["phase"] = rank
    answer["standbys"][0]["phase"] = standby
    return answer


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmd.cli.watch.POLL_S", 0.01)


@pytest.fixture
def started(daemon: FakeDaemon) -> FakeDaemon:
    daemon.answers |= {
        "POST /v1/local/jobs": (201, local_job(agent("n1"), agent("n2"))),
        "GET /v1/local/jobs/local-1": local_job(agent("n1"), agent("n2")),
    }
    return daemon


def test_wait_says_what_is_missing_until_the_job_is_whole(started: FakeDaemon, tmctl: Tmctl) -> None:
    answers: list[Any] = [
        UNKNOWN,
        view("installing", next_step=0, rank="building", standby="starting"),
        view(next_step=0, standby="building"),
        view(next_step=0, standby="building") | {"sentence": "rank 0 builds: no step yet"},
        view(standby="building"),
        view(standby="building"),
        view(),
    ]
    started.answers["GET /v1/jobs/local-1"] = lambda: answers.pop(0)
    result = tmctl(*RUN)
    assert result.exit_code == 0, result.output
    assert result.stdout == "job local-1 trains: step 4, 1 rank, 1 standby ready on n5\n"
    assert result.stderr.splitlines()[1:] == [
        "local-1: waiting for its agents to reach the daemon",
        "local-1: installing",
        "local-1: running, waiting for the first step",
        "local-1: rank 0 builds: no step yet",
        "local-1: trains; 0 of 1 standby ready",
    ]
    assert answers == []


@pytest.mark.parametrize(
    ("agents", "job", "said"),
    [
        ([agent("n1", running=False)] * 2, UNKNOWN, "job local-1 never began: its agents ended at once (exit code 3 on n1"),
        ([agent("n1"), agent("n2", running=False)], view(standby="building"), "the agent on n2 ended with 3; the job goes on"),
        ([agent("n1"), agent("n2")], view("failed"), "job local-1 failed: "),
    ],
)
def test_wait_ends_when_there_is_nothing_to_wait_for(
    started: FakeDaemon, tmctl: Tmctl, agents: list[dict[str, Any]], job: Any, said: str
) -> None:
    started.answers |= {"GET /v1/local/jobs/local-1": local_job(*agents), "GET /v1/jobs/local-1": job}
    result = tmctl(*RUN)
    assert result.exit_code == 1
    assert said in result.stderr


def test_wait_has_an_end(started: FakeDaemon, tmctl: Tmctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmd.cli.watch.WHOLE_TIMEOUT_S", 0.05)
    started.answers["GET /v1/jobs/local-1"] = view(standby="building")
    result = tmctl(*RUN)
    assert result.exit_code == 1
    assert "job local-1 goes on, but is not whole after 0 s: trains; 0 of 1 standby ready" in result.stderr


def test_ctrl_c_leaves_the_job_alone_and_says_so(started: FakeDaemon, tmctl: Tmctl, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tmd.cli.watch.time.sleep", interrupt)
    started.answers["GET /v1/jobs/local-1"] = view(standby="building")
    result = tmctl(*RUN)
    assert result.exit_code == 130
    assert "local-1 goes on; watch it: tmctl job show local-1; end it: tmctl job cancel local-1" in result.stderr
    assert [line for line, _ in started.asked if not line.startswith("GET")] == ["POST /v1/local/jobs"]


def test_a_job_cannot_be_waited_for_and_followed(started: FakeDaemon, tmctl: Tmctl) -> None:
    result = tmctl("local", "run", "--wait", "--follow", "--", "-m", "train")
    assert result.exit_code == 2
    assert started.asked == []


# ---------------------------------------------------------------- what is not there yet


@pytest.mark.parametrize(
    "arguments", [["job", "show", "local-1"], ["job", "cancel", "local-1"], ["migrate", "local-1", "--rank", "0"]]
)
def test_a_job_that_is_being_started_is_told_from_one_that_does_not_exist(
    started: FakeDaemon, tmctl: Tmctl, arguments: list[str]
) -> None:
    for line in ("GET /v1/jobs/local-1", "POST /v1/jobs/local-1/cancel", "POST /v1/migrations"):
        started.answers[line] = UNKNOWN
    result = tmctl(*arguments)
    assert result.exit_code == 1
    assert "job local-1 was started, no agent has reached the daemon yet" in result.stderr
    assert "tmctl local job local-1" in result.stderr
    started.answers["GET /v1/local/jobs/local-1"] = local_job(agent("n1", running=False))
    assert "job local-1 never began: its agents ended at once (exit code 3 on n1)" in tmctl(*arguments).stderr
    started.answers["GET /v1/local/jobs/local-1"] = UNKNOWN
    assert "error: there is no job local-1\n" in tmctl(*arguments).stderr


def test_a_rank_that_a_job_does_not_have_is_no_job_that_is_being_started(started: FakeDaemon, tmctl: Tmctl) -> None:
    started.answers["POST /v1/migrations"] = (404, {"error": "job local-1 has no rank 9", "remedy": ""})
    started.answers["GET /v1/jobs/local-1"] = view()
    assert tmctl("migrate", "local-1", "--rank", "9").stderr == "error: job local-1 has no rank 9\n"


def test_run_waits_for_a_daemon_that_is_being_started(tmp_path: Path) -> None:
    """1. Nobody listens. 2. tmctl says that it waits. 3. A daemon listens and is asked once."""
    socket = tmp_path / "s"
    daemon = FakeDaemon(socket)
    daemon.answers["POST /v1/local/jobs"] = (201, local_job(agent("n1")))
    says_that_it_waits = threading.Event()
    results: list[Any] = []

    def say(message: str, **_: Any) -> None:
        if "waiting" in message:
            says_that_it_waits.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tmd.cli.shell.click.echo", say)
        call = ["--socket", str(socket), "local", "run", "--", "-m", "train"]
        thread = threading.Thread(target=lambda: results.append(CliRunner().invoke(main, call)))
        thread.start()
        try:
            assert says_that_it_waits.wait(10)
            with daemon:
                thread.join(20)
        finally:
            thread.join(20)
    assert [result.exit_code for result in results] == [0]
    assert [line for line, _ in daemon.asked] == ["POST /v1/local/jobs"]


def test_run_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmd.cli.shell.DAEMON_START_S", 0.05)
    monkeypatch.setattr("tmd.cli.shell.RETRY_S", 0.01)
    result = CliRunner().invoke(main, ["--socket", str(tmp_path / "s"), "local", "run", "--", "-m", "train"])
    assert result.exit_code == 2
    assert result.stderr.count("no daemon listens") == 1
    assert "there is no such socket" in result.stderr
