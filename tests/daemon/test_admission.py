"""Who may bring agents for which job."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import records
from tmd.core.records import JobRecord
from tmd.daemon.admission import Admissions, NotAdmitted, Tokens
from tmd.daemon.identity import UnknownUser, operator_uids, operators, slurm_user_uid
from tmd.protocol.agent import AgentHello
from tmd.protocol.codec import PROTOCOL

OWNER, STRANGER = 1000, 1001


def hello(job_id: str = "j1", **changes: Any) -> AgentHello:
    fields: dict[str, Any] = {"node": "n1", "agent_id": "a1", "host": "127.0.0.11", "nnodes": 2, "nproc_per_node": 1}
    return AgentHello(protocol=PROTOCOL, tmd_version="0", job_id=job_id, **{**fields, **changes})


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path)


@pytest.fixture
def jobs() -> dict[str, JobRecord]:
    return {}


@pytest.fixture
def admissions(tokens: Tokens, jobs: dict[str, JobRecord]) -> Admissions:
    return Admissions(tokens, jobs.get)


def test_the_first_agent_makes_the_owner_and_all_agents_get_the_same_key(
    admissions: Admissions, jobs: dict[str, JobRecord]
) -> None:
    first = admissions.admit(hello(), OWNER)
    assert (first.uid, len(first.job_key)) == (OWNER, 32)
    assert admissions.admit(hello(), OWNER).job_key == first.job_key
    with pytest.raises(NotAdmitted, match=f"belongs to uid {OWNER}.*runs as uid {STRANGER}"):
        admissions.admit(hello(), STRANGER)
    jobs["j1"] = records.job(owner_uid=OWNER, job_key=first.job_key)
    admissions.settled("j1")
    assert admissions.admit(hello(), OWNER).job_key == first.job_key
    assert admissions.admit(hello("j2"), OWNER).job_key != first.job_key


@pytest.mark.parametrize("uid", [OWNER, 0, os.geteuid()])
def test_owner_root_and_the_daemon_itself_may_bring_agents(admissions: Admissions, jobs: dict[str, JobRecord], uid: int) -> None:
    jobs["j1"] = records.job(owner_uid=OWNER)
    assert admissions.admit(hello(), uid).uid == uid


def test_over_tcp_a_token_of_the_job_and_owner_is_needed(
    admissions: Admissions, tokens: Tokens, jobs: dict[str, JobRecord]
) -> None:
    jobs["j1"] = records.job(owner_uid=OWNER)
    assert admissions.admit(hello(token=tokens.token("j1", OWNER)), None).uid == OWNER
    for wrong in ("", "rubbish", "1000.", tokens.token("j2", OWNER), tokens.token("j1", OWNER)[:-1] + "g", "9" * 200, "१.x"):
        with pytest.raises(NotAdmitted, match="TCP"):
            admissions.admit(hello(token=wrong), None)
    with pytest.raises(NotAdmitted, match="belongs to"):
        admissions.admit(hello(token=tokens.token("j1", STRANGER)), None)


def test_a_token_does_not_help_over_the_unix_socket(admissions: Admissions, tokens: Tokens, jobs: dict[str, JobRecord]) -> None:
    jobs["j1"] = records.job(owner_uid=OWNER)
    with pytest.raises(NotAdmitted, match="belongs to"):
        admissions.admit(hello(token=tokens.token("j1", OWNER)), STRANGER)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"job_id": "../../etc/passwd"}, "job id"),
        ({"job_id": ""}, "job id"),
        ({"node": "n 1"}, "node"),
        ({"agent_id": "x" * 129}, "agent id"),
        ({"nnodes": 0}, "nnodes is 0"),
        ({"nproc_per_node": 5000}, "nproc_per_node"),
    ],
)
def test_names_and_sizes_that_make_no_sense_are_refused(admissions: Admissions, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(NotAdmitted, match=says):
        admissions.admit(hello(**changes), OWNER)


def test_tokens_are_private_files_and_outlive_the_daemon(tmp_path: Path, tokens: Tokens) -> None:
    tokens.write_file("j1", OWNER)
    file = tmp_path / "tokens" / "j1"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert Tokens(tmp_path).owner("j1", file.read_text()) == OWNER
    tokens.remove_file("j1")
    assert not file.exists()


def test_an_operator_who_does_not_exist_is_named() -> None:
    assert operator_uids(["root", "4711"]) == {0, os.geteuid(), 4711}
    with pytest.raises(UnknownUser, match="no user 'nobody-of-this-name'"):
        operator_uids(["nobody-of-this-name"])


@pytest.mark.parametrize(
    ("text", "uid"),
    [
        ("SlurmUser=4711", 4711),
        ("slurmuser = root # the controller", 0),
        ("SlurmUser=root(0)", 0),
        ("#SlurmUser=4711", None),
        ("SlurmdUser=4711", None),
        ("SlurmUser=nobody-of-this-name", None),
        ("", None),
    ],
)
def test_slurms_user_is_an_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, uid: int | None) -> None:
    file = tmp_path / "slurm.conf"
    file.write_text(f"ClusterName=c\n{text}\n")
    assert slurm_user_uid(file) == uid
    monkeypatch.setenv("SLURM_CONF", str(file))
    assert operators([]) == {0, os.geteuid()} | ({uid} if uid is not None else set())


def test_without_slurm_nobody_is_added(tmp_path: Path) -> None:
    assert slurm_user_uid(tmp_path / "slurm.conf") is None
