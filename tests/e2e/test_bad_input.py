"""What users get wrong: each is told where and what, and nothing is left half done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster import DEADLINE_S, TRAIN, Cluster, Job, until

EXIT_USAGE = 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[core]\nheartbeat = 1.0\n", "2: core.heartbeat: unknown key; did you mean heartbeat_s?"),
        ('[core]\nheartbeat_s = "often"\n', "2: core.heartbeat_s: expected float, got str ('often')"),
        ("[cores]\nheartbeat_s = 1.0\n", "1: cores: unknown section; did you mean core?"),
        ("[core\n", "1: not valid TOML"),
    ],
)
def test_a_wrong_configuration_keeps_the_daemon_from_starting(tmp_path: Path, text: str, said: str) -> None:
    config = tmp_path / "tmd.toml"
    config.write_text(text)
    command = [sys.executable, "-m", "tmd.daemon.main", "serve", "--config", str(config), "--state-dir", str(tmp_path / "state")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == EXIT_USAGE
    assert f"{config}:{said}" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "state").exists()


def test_a_script_that_cannot_be_read(cluster: Cluster, tmp_path: Path) -> None:
    """tmctl sees it before anything is started; so do agents that get it from elsewhere."""
    missing = tmp_path / "missing.py"
    result = cluster.tmctl("local", "run", "--", str(missing))
    assert result.exit_code == EXIT_USAGE
    assert f"script {missing} cannot be read: No such file" in result.stderr
    job_id = cluster.stack.submit(nnodes=1, command=[str(missing)], log_dir=str(tmp_path))
    agent = until(lambda: [a for a in cluster.ask("local", "job", job_id)["agents"] if not a["running"]], "the agent ends")[0]
    assert agent["exit_code"] == EXIT_USAGE
    assert str(missing) in Path(agent["log"]).read_text()


def failed(job: Job) -> str:
    """Why the job failed; every process of it is gone, no step was committed."""
    record = job.wait_state("failed")["record"]
    job.wait_gone()
    assert job.results() == {}
    return str(record["reason"])


@pytest.mark.parametrize(
    ("forgotten", "said"),
    [
        ("optimizer", "AdamW.step() was called, but session.track was not told of this AdamW"),
        ("schedule", "a learning rate scheduler drives optimizer but is not tracked"),
        ("model", "belongs to no tracked module"),
    ],
)
def test_a_state_that_track_was_not_told_of_ends_the_job_at_its_first_step(cluster: Cluster, forgotten: str, said: str) -> None:
    job = cluster.start_job(nnodes=1, steps=10, arguments=("--forget", forgotten))
    reason = failed(job)
    assert said in reason
    assert "failed in the user's script" in reason
    assert "train_small.py" in reason


def test_a_fault_that_is_told_in_what_is_no_text_is_the_script_s_all_the_same(cluster: Cluster, tmp_path: Path) -> None:
    """As of a file whose name is not UTF-8: nobody is replaced for it."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nfrom tmd_worker import Session\n\ndef main(session):\n"
        "    raise ValueError('no ' + os.fsdecode(b'caf\\xe9') + chr(0))\n\nSession.run(main)\n"
    )
    job = cluster.start_job(nnodes=1, steps=1, script=script)
    reason = failed(job)
    assert r"ValueError: no caf\udce9" in reason
    assert "failed in the user's script" in reason
    assert not [event for event in job.story(job.id) if event["kind"] == "lost"], "it was started again"


def test_a_script_that_fails_on_import_ends_the_job_at_once(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import no_such_module\n")
    job = cluster.start_job(nnodes=1, steps=1, script=script)
    assert "exited with code 1" in failed(job)
    assert "No module named 'no_such_module'" in job.logs()
    assert not [event for event in job.story(job.id) if event["kind"] == "lost"], "it was started again"


def test_the_same_script_without_a_daemon(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tmd_worker.agent.main", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(TRAIN), "--out", str(tmp_path), "--steps", "20"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "TMD_DAEMON"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [[json.loads(line) for line in (tmp_path / f"steps-rank{rank}.jsonl").read_text().splitlines()] for rank in (0, 1)]
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]] == list(range(20))
    assert rows[0][-1]["parameters"] == rows[1][-1]["parameters"]
