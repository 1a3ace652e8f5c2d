"""tmctl says what the daemon says, in tables or as JSON, and never shows a traceback for a user's mistake."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from tests.cli.conftest import Tmctl
from tests.cli.fake_daemon import (
    DONE,
    JOB,
    JOB_COST,
    NODES,
    STANDBY,
    STATUS,
    FakeDaemon,
    event,
    migration_view,
    plain,
)
from tmd.cli.main import main
from tmd.core.views import JobView
from tmd.daemon.main import main as tmd
from tmd.protocol.handoff import HandoffReport, HandoffSource

LOCAL_JOB = {
    "job_id": "local-1",
    "nnodes": 1,
    "standby": 1,
    "nproc_per_node": 1,
    "command": ["train.py"],
    "created_s": 1000.0,
    "agents": [
        {
            "node": "n1",
            "life": 1,
            "pid": 12,
            "exit_code": None,
            "running": True,
            "log": "/logs/n1.log",
            "started_s": 1.0,
            "ended_s": None,
        }
    ],
}


def fine(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.output


LOOKS: list[tuple[list[str], str, Any, list[str]]] = [
    (["status"], "GET /v1/status", STATUS, ["up 2 h 0 min", "local-1", "waiting for n5", "median 1.80 ms", "1 running"]),
    (["jobs"], "GET /v1/jobs", {"jobs": [plain(JOB)]}, ["local-1", "1/1 ready", "step (ms)", "151"]),
    (["jobs"], "GET /v1/jobs", {"jobs": []}, ["no jobs"]),
    (
        ["job", "show", "local-1"],
        "GET /v1/jobs/local-1",
        plain(JOB),
        ["  train.py --steps 60", "4 nodes with 1 rank each, 4 ranks in all", "local-1.2", "4711", "in step 41", "fan"],
    ),
    (
        ["job", "cost", "local-1"],
        "GET /v1/jobs/local-1/cost",
        JOB_COST,
        ["pause (ms)", "61.2", "449", "in all", "rank 1 on n2: 4096", "the costs of 1 migration are not known"],
    ),
    (
        ["job", "cost", "local-1"],
        "GET /v1/jobs/local-1/cost",
        {**JOB_COST, "migrations": [], "unmeasured": 0},
        ["no migrations: nothing was lost"],
    ),
    (["nodes"], "GET /v1/nodes", NODES, ["ALLOCATED+DRAIN", "rack=r1 zone=z1", "rank 1 moves to n5", "IDLE"]),
    (["standby"], "GET /v1/standbys", {"standbys": [plain(STANDBY)]}, ["local-1.5", "ready", "n5"]),
    (
        ["migrations"],
        "GET /v1/migrations?limit=100",
        {"migrations": [plain(migration_view(**DONE))]},
        ["first_step (ms)", "310", "downtime (ms)", "61.2", "lost time (ms)", "510"],
    ),
    (
        ["migrations", "--job", "local-1", "--limit", "3"],
        "GET /v1/migrations?limit=3&job=local-1",
        {"migrations": []},
        ["no migrations"],
    ),
    (
        ["migration", "show", "m1"],
        "GET /v1/migrations/m1",
        plain(migration_view(**DONE)),
        ["rank 1: local-1.2 → local-1.5", "n2 → n5", "drain of n2: fan", "copy (ms)", "52.0"],
    ),
    (["local", "job", "local-1"], "GET /v1/local/jobs/local-1", LOCAL_JOB,
     ["1 node and 1 standby, 1 rank on each", "/logs/n1.log", "running"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "line", "answer", "shown"), LOOKS)
def test_a_look_shows_what_matters_and_json_is_the_api(
    daemon: FakeDaemon, tmctl: Tmctl, arguments: list[str], line: str, answer: Any, shown: list[str]
) -> None:
    daemon.answers[line] = answer
    output = fine(tmctl(*arguments))
    for text in shown:
        assert text in output
    assert json.loads(fine(tmctl(*arguments, "--json"))) == answer
    assert [asked for asked, _ in daemon.asked] == [line, line]


ACTS: list[tuple[list[str], str, Any, Any, str]] = [
    (["drain", "n2", "--reason", "fan"], "POST /v1/nodes/n2/drain", {"reason": "fan"},
     {"node": "n2", "state": "draining"}, "draining"),
    (["resume", "n2"], "POST /v1/nodes/n2/resume", {}, {"node": "n2", "state": "up"}, "node n2 is up"),
    (["pause"], "POST /v1/pause", {}, {"paused": True}, "tmctl unpause"),
    (["unpause"], "POST /v1/unpause", {}, {"paused": False}, "active"),
    (["job", "cancel", "local-1"], "POST /v1/jobs/local-1/cancel", {}, plain(JOB), "job local-1 is running"),
    (["job", "token", "local-1"], "POST /v1/jobs/local-1/token", {}, {"token": "abc"}, "abc"),
    (["migration", "abort", "m1"], "POST /v1/migrations/m1/abort", {}, plain(migration_view("aborted")), "m1 is aborted"),
    (
        ["migrate", "local-1", "--node", "n2", "--to", "n5"],
        "POST /v1/migrations",
        {"job": "local-1", "node": "n2", "to_node": "n5", "dry_run": False},
        {"migration_id": "m1", "migration": plain(migration_view("queued"))},
        "tmctl migration show m1 --wait",
    ),
    (
        ["migrate", "local-1", "--rank", "1", "--dry-run"],
        "POST /v1/migrations",
        {"job": "local-1", "rank": 1, "dry_run": True},
        {"explanation": "rank 1 would move from n2 to n5"},
        "rank 1 would move from n2 to n5",
    ),
    (["local", "kill", "n2"], "POST /v1/local/nodes/n2/kill", {}, {"node": "n2", "state": "ALLOCATED"}, "lost power"),
    (["local", "down", "n2", "--reason", "smoke"], "POST /v1/local/nodes/n2/down", {"reason": "smoke"},
     {"node": "n2", "state": "DOWN"}, "DOWN"),
    (["local", "freeze", "n2"], "POST /v1/local/nodes/n2/freeze", {}, {"node": "n2", "state": "ALLOCATED"}, "frozen"),
    (["local", "thaw", "n2"], "POST /v1/local/nodes/n2/thaw", {}, {"node": "n2", "state": "ALLOCATED"}, "goes on"),
    (["local", "up", "n2"], "POST /v1/local/nodes/n2/up", {}, {"node": "n2", "state": "IDLE"}, "is back"),
    (["local", "cancel", "local-1"], "POST /v1/local/jobs/local-1/cancel", {}, LOCAL_JOB, "local-1"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "line", "body", "answer", "shown"), ACTS)
def test_an_act_asks_for_what_was_said(
    daemon: FakeDaemon, tmctl: Tmctl, arguments: list[str], line: str, body: Any, answer: Any, shown: str
) -> None:
    daemon.answers[line] = answer
    assert shown in fine(tmctl(*arguments))
    assert daemon.asked == [(line, body)]
    assert json.loads(fine(tmctl(*arguments, "--json"))) == answer


def test_nodes_leave_out_what_they_were_used_for_once(daemon: FakeDaemon, tmctl: Tmctl) -> None:
    daemon.answers["GET /v1/nodes"] = NODES
    lines = fine(tmctl("nodes")).splitlines()
    assert [line.split()[0] for line in lines] == ["node", "n2", "n6"]
    assert "local-0" not in lines[1]


def test_a_traceback_is_one_line_in_a_table_and_shown_whole_of_its_job(daemon: FakeDaemon, tmctl: Tmctl) -> None:
    reason = 'rank 1 on n2 failed in the user\'s script:\nTraceback …\n  File "train.py", line 7\nValueError: bad batch\n'
    failed = msgspec.structs.replace(JOB.record, state="failed", reason=reason)
    answer = plain(msgspec.structs.replace(JOB, record=failed, sentence=reason))
    daemon.answers |= {"GET /v1/jobs": {"jobs": [answer]}, "GET /v1/jobs/local-1": answer}
    row = fine(tmctl("jobs")).splitlines()[1]
    assert row.endswith("rank 1 on n2 failed in the user's script: ValueError: bad batch")
    assert 'File "train.py", line 7\n' in fine(tmctl("job", "show", "local-1"))


def test_a_job_of_which_only_its_end_is_known_shows_no_step(daemon: FakeDaemon, tmctl: Tmctl) -> None:
    daemon.answers["GET /v1/jobs"] = {"jobs": [plain(JobView(record=JOB.record))]}
    header, row = fine(tmctl("jobs")).splitlines()
    assert row[header.index("next step") :].split()[0] == "-"


def test_the_port_is_told_from_an_ipv6_address(daemon: FakeDaemon, tmctl: Tmctl) -> None:
    view = plain(JOB)
    view["ranks"][0]["host"] = "fd00::7"
    daemon.answers["GET /v1/jobs/local-1"] = view
    assert " [fd00::7]:4000 " in fine(tmctl("job", "show", "local-1"))


def test_names_are_quoted_on_the_way(daemon: FakeDaemon, tmctl: Tmctl) -> None:
    tmctl("job", "show", "a/b?c")
    assert daemon.asked[0][0] == "GET /v1/jobs/a%2Fb%3Fc"


def test_plain_output_is_neither_cut_nor_wrapped(daemon: FakeDaemon, tmctl: Tmctl) -> None:
    sentence = "waiting " * 60
    daemon.answers["GET /v1/jobs"] = {"jobs": [plain(JOB) | {"sentence": sentence.strip()}]}
    header, row = fine(tmctl("jobs")).splitlines()
    assert row.endswith(sentence.strip())
    assert "─" not in header


# ---------------------------------------------------------------- story


def test_a_story_puts_causes_first_and_indents_what_follows(daemon: FakeDaemon, tmctl: Tmctl) -> None:
    daemon.answers["GET /v1/story/m1?limit=1000"] = {
        "subject": "m1",
        "events": [
            event(4, 0, 100.000, "n2", "drain", "fan"),
            event(5, 4, 100.002, "m1", "queued", "n2 has rank 1"),
            event(6, 5, 100.004, "m1", "selected", "n5"),
            event(9, 5, 100.300, "m1", "armed", "all staged"),
        ],
    }
    lines = fine(tmctl("story", "m1")).splitlines()
    assert "drain: fan" in lines[1]
    assert "  queued: n2 has rank 1" in lines[2]
    assert "    selected: n5" in lines[3]
    assert "    armed: all staged (because of 5)" in lines[4]
    assert [line.split()[1] for line in lines[1:]] == ["-2", "+0", "+2", "+298"]
    assert lines[2].index("queued") - lines[1].index("drain") == 2


# ---------------------------------------------------------------- waiting


def test_wait_shows_the_phases_as_they_pass(daemon: FakeDaemon, tmctl: Tmctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmd.cli.migrate.POLL_S", 0.01)
    answers = [
        migration_view("preparing", phases_s={"detect": 0.001}),
        migration_view("installing", phases_s={"detect": 0.001, "select": 0.002, "prepare": 0.3}),
        migration_view(**DONE),
    ]
    daemon.answers["POST /v1/migrations"] = {"migration_id": "m1", "migration": plain(migration_view("queued"))}
    daemon.answers["GET /v1/migrations/m1"] = lambda: plain(answers.pop(0) if len(answers) > 1 else answers[0])
    result = tmctl("migrate", "local-1", "--rank", "1", "--wait", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == plain(migration_view(**DONE))
    told = [line.split()[0] for line in result.stderr.splitlines()]
    assert told == ["m1", "detect", "select", "m1", "prepare", "install", "copy", "first_step"]


def test_the_bytes_of_a_handoff_are_shown_by_source_if_there_were_several(daemon: FakeDaemon, tmctl: Tmctl) -> None:
    """Records of before know none."""
    sources = tuple(HandoffSource(rank=rank, node=f"n{rank}", transport="tcp", size_bytes=10 + rank) for rank in (2, 3))
    report = HandoffReport(
        transport="tcp",
        why="",
        source="rank 2 on n2, rank 3 on n3",
        bytes_by_transport={"tcp": 25},
        parts_s={"manifest": 0.0034032650000881404, "bytes": 0.25},
        sources=sources,
    )
    answer = plain(migration_view(**DONE, handoffs={1: report}))
    daemon.answers["GET /v1/migrations/m1"] = answer
    output = fine(tmctl("migration", "show", "m1"))
    assert "tcp, from rank 2 on n2, rank 3 on n3" in output
    assert "12 by tcp from rank 2, 13 by tcp from rank 3" in output
    assert "manifest 3.4, bytes 250\n" in output
    del answer["record"]["handoffs"]["1"]["sources"]
    assert "25 by tcp" in fine(tmctl("migration", "show", "m1"))
    assert msgspec.convert(answer["record"]["handoffs"]["1"], HandoffReport).sources == ()


def test_wait_fails_if_the_migration_does(daemon: FakeDaemon, tmctl: Tmctl) -> None:
    daemon.answers["GET /v1/migrations/m1"] = plain(migration_view("aborted", reason="the joiner died in copy"))
    result = tmctl("migration", "show", "m1", "--wait")
    assert result.exit_code == 1
    assert "m1 is aborted: the joiner died in copy" in result.stderr
    assert "tmctl story m1" in result.stderr


def test_wait_outlives_a_daemon_that_is_started_again(daemon: FakeDaemon, tmctl: Tmctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. The first answer is given. 2. The socket is gone for three tries. 3. It is back, and the migration has ended."""
    away = daemon.socket.with_name("away")
    tries: list[float] = []

    def first() -> Any:
        daemon.socket.rename(away)
        daemon.answers["GET /v1/migrations/m1"] = plain(migration_view(**DONE))
        return plain(migration_view("preparing"))

    def pass_time(seconds: float) -> None:
        tries.append(seconds)
        if len(tries) == 4:
            away.rename(daemon.socket)

    monkeypatch.setattr(time, "sleep", pass_time)
    daemon.answers["GET /v1/migrations/m1"] = first
    result = tmctl("migration", "show", "m1", "--wait")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("the daemon is away, m1 goes on meanwhile") == 1


def test_wait_ends_if_the_daemon_stays_away(daemon: FakeDaemon, tmctl: Tmctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmd.cli.shell.PATIENCE_S", 0.05)
    monkeypatch.setattr("tmd.cli.shell.RETRY_S", 0.01)
    view = plain(migration_view("preparing"))
    daemon.answers["GET /v1/migrations/m1"] = lambda: daemon.socket.unlink() or view  # type: ignore[func-returns-value]
    result = tmctl("migration", "show", "m1", "--wait")
    assert result.exit_code == 2
    assert "the daemon is away, m1 goes on meanwhile" in result.stderr
    assert "there is no such socket" in result.stderr


def test_ctrl_c_leaves_the_migration_running_and_says_so(
    daemon: FakeDaemon, tmctl: Tmctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tmd.cli.migrate.time.sleep", interrupt)
    daemon.answers["GET /v1/migrations/m1"] = plain(migration_view("preparing"))
    result = tmctl("migration", "show", "m1", "--wait")
    assert result.exit_code == 130
    assert "m1 goes on without you; watch it: tmctl migration show m1 --wait" in result.stderr
    assert {line.split()[0] for line, _ in daemon.asked} == {"GET"}


# ---------------------------------------------------------------- jobs on local nodes


def test_run_sends_command_environment_and_folder(
    daemon: FakeDaemon, tmctl: Tmctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOUR", "blue")
    (tmp_path / "train.py").touch()
    daemon.answers["POST /v1/local/jobs"] = (201, LOCAL_JOB)
    output = fine(tmctl("local", "run", "--nodes", "4", "--standby", "2", "--log-dir", "logs", "--", "train.py", "--steps", "3"))
    assert "job local-1 started on n1" in output
    body = daemon.asked[0][1]
    assert body["env"]["COLOUR"] == "blue"
    del body["env"]
    assert body == {
        "command": ["train.py", "--steps", "3"],
        "nnodes": 4,
        "standby": 2,
        "nproc_per_node": 1,
        "cwd": str(tmp_path),
        "log_dir": str(tmp_path / "logs"),
    }


@pytest.mark.parametrize(
    ("options", "set_to", "sent"),
    [
        (["--nodes", "2"], None, "1"),
        (["--standby", "1"], None, "1"),
        (["--nproc-per-node", "2"], "", "1"),
        (["--nodes", "2"], "4", "4"),
        ([], None, None),
    ],
)
def test_processes_that_share_this_machine_get_one_thread_each(
    daemon: FakeDaemon, tmctl: Tmctl, monkeypatch: pytest.MonkeyPatch, options: list[str], set_to: str | None, sent: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_to is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", set_to)
    daemon.answers["POST /v1/local/jobs"] = (201, LOCAL_JOB)
    fine(tmctl("local", "run", *options, "--", "-m", "train"))
    assert daemon.asked[0][1]["env"].get("OMP_NUM_THREADS") == sent


def test_run_refuses_an_unreadable_script_before_anything_starts(daemon: FakeDaemon, tmctl: Tmctl) -> None:
    result = tmctl("local", "run", "--", "nowhere.py")
    assert result.exit_code == 2
    assert "script nowhere.py cannot be read: No such file or directory" in result.stderr
    assert daemon.asked == []


@pytest.mark.parametrize(("state", "exit_code"), [("done", 0), ("failed", 1)])
def test_follow_prints_whole_lines_until_the_job_ends(
    daemon: FakeDaemon, tmctl: Tmctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, exit_code: int
) -> None:
    monkeypatch.setattr("tmd.cli.watch.POLL_S", 0.01)
    log = tmp_path / "n1.log"
    agent = {**LOCAL_JOB["agents"][0], "log": str(log)}  # type: ignore[index]
    texts = ["step 0\nste", "p 1\nlast words"]

    def grow() -> Any:
        with log.open("a") as file:
            file.write(texts.pop(0))
        return {**LOCAL_JOB, "agents": [{**agent, "running": bool(texts)}]}

    job = plain(JOB)
    reason = "rank 1 on n2 failed in the user's script:\nTraceback …\nValueError: bad batch"
    job["record"] |= {"state": state, "reason": reason if state == "failed" else "all 4 ranks finished"}
    daemon.answers |= {
        "POST /v1/local/jobs": (201, {**LOCAL_JOB, "agents": [agent]}),
        "GET /v1/local/jobs/local-1": grow,
        "GET /v1/jobs/local-1": job,
    }
    result = tmctl("local", "run", "--follow", "--", "-m", "train")
    assert result.exit_code == exit_code
    assert result.stdout.splitlines() == ["n1| step 0", "n1| step 1", "n1| last words"]
    told = result.stderr.splitlines()[1:]
    if state == "done":
        assert told == ["job local-1 is done: all 4 ranks finished"]
    else:
        assert told == [
            "error: job local-1 failed: rank 1 on n2 failed in the user's script: ValueError: bad batch",
            "  what to do: tmctl story local-1",
        ]


# ---------------------------------------------------------------- what goes wrong


def test_no_daemon_says_where_it_looked_and_how_to_start_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--socket", str(tmp_path / "tmd.sock"), "status"])
    assert result.exit_code == 2
    assert f"no daemon at {tmp_path / 'tmd.sock'}: there is no such socket" in result.stderr
    assert "systemctl start tmd" in result.stderr
    assert "TMD_SOCKET" in result.stderr


def test_a_dead_socket_is_told_from_a_missing_one(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    result = CliRunner().invoke(main, ["--socket", str(tmp_path / "s"), "jobs", "--json"])
    assert result.exit_code == 2
    assert "nobody listens there" in json.loads(result.stderr)["error"]


def test_the_socket_can_come_from_the_environment(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMD_SOCKET", str(daemon.socket))
    daemon.answers["GET /v1/jobs"] = {"jobs": []}
    assert fine(CliRunner().invoke(main, ["jobs"])) == "no jobs\n"


def test_a_socket_one_may_not_use_names_who_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tmd.cli.client._UnixConnection.connect", refuse)
    result = CliRunner().invoke(main, ["--socket", str(tmp_path / "s"), "jobs"])
    assert result.exit_code == 2
    assert f"as user {os.geteuid()}" in result.stderr
    assert "become a member of group" in result.stderr


def test_a_refusal_is_shown_with_its_remedy(daemon: FakeDaemon, tmctl: Tmctl) -> None:
    refusal = {"error": "there is no job local-9", "remedy": "jobs here: local-1"}
    daemon.answers["POST /v1/migrations"] = (404, refusal)
    result = tmctl("migrate", "local-9", "--rank", "0")
    assert result.exit_code == 1
    assert result.stderr == "error: there is no job local-9\n  what to do: jobs here: local-1\n"
    assert json.loads(tmctl("migrate", "local-9", "--rank", "0", "--json").stderr) == refusal


@pytest.mark.parametrize("answer", [(500, b"<html>oops"), (200, b"not json")])
def test_an_answer_that_is_none_is_shown(daemon: FakeDaemon, tmctl: Tmctl, answer: Any) -> None:
    daemon.answers["GET /v1/jobs"] = answer
    result = tmctl("jobs")
    assert result.exit_code == 1
    assert f"answered {answer[0]}: {answer[1].decode()}" in result.stderr


@pytest.mark.parametrize("choice", [[], ["--node", "n1", "--rank", "1"]])
def test_migrate_needs_either_a_node_or_a_rank(daemon: FakeDaemon, tmctl: Tmctl, choice: list[str]) -> None:
    result = tmctl("migrate", "local-1", *choice)
    assert result.exit_code == 2
    assert "either --node N or --rank R" in result.stderr
    assert daemon.asked == []


def test_status_tells_job_by_job_and_in_the_order_of_numbers(daemon: FakeDaemon, tmctl: Tmctl) -> None:
    daemon.answers["GET /v1/status"] = STATUS
    table = fine(tmctl("status")).split("\n\n")[1].splitlines()
    assert [line.split()[:2] for line in table] == [
        ["job", "object"],
        ["local-1", "local-1"],
        ["local-1", "m1"],
        ["local-1", "n2"],
        ["local-1", "n10"],
        ["local-10", "local-10"],
    ]


def test_a_job_that_has_ended_has_no_running_ranks(daemon: FakeDaemon, tmctl: Tmctl) -> None:
    view = plain(JOB)
    view["record"] |= {"state": "failed", "reason": "cancelled by root"}
    view["ranks"][0] |= {"connected": False, "sentence": "the agent of n2 is not connected"}
    daemon.answers["GET /v1/jobs/local-1"] = view
    output = fine(tmctl("job", "show", "local-1"))
    assert "agent away" not in output
    assert "not connected" not in output
    assert "running" not in output
    assert "ended" in output


def leaves(command: Any, path: list[str]) -> list[list[str]]:
    if not hasattr(command, "commands"):
        return [path]
    return [leaf for name, each in command.commands.items() for leaf in leaves(each, [*path, name])]


def test_every_command_explains_itself_and_its_exit_codes() -> None:
    for path in leaves(main, []):
        output = fine(CliRunner().invoke(main, [*path, "--help"]))
        assert "Exit codes: 0 done" in output, path
        assert "--json" in output, path


@pytest.mark.parametrize("program", [main, tmd], ids=["tmctl", "tmd"])
def test_every_command_shows_an_example_of_itself(program: click.Command) -> None:
    name = "tmctl" if program is main else "tmd"
    for path in [[], *leaves(program, [])]:
        output = fine(CliRunner().invoke(program, [*path, "--help"]))
        examples = output.partition("Example")[2]
        own = " ".join(path) if path[:1] in (["config"], ["ledger"]) else " ".join([name, *path])
        assert own in examples, path
