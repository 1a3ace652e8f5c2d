"""The whole of tmd on this machine for a test: a daemon process, agents, ranks, tmctl; conditions that are waited for; and the
certainty that nothing is left behind.

Every process that is started from here has a mark in its environment, by which `kill_marked` finds it again, whoever started it.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from click.testing import CliRunner, Result

from tmd.cli.main import main as tmctl
from tmd.demo.stack import Stack
from tmd.protocol.control import TransportName

ROOT = Path(__file__).parents[2]
TRAIN = Path(__file__).with_name("train_small.py")
#: All jobs that are compared with the reference have this many ranks.
WORLD_SIZE = 4
#: A step lasts at least this long while a test acts on the job.
PACE_MS = 20
#: For anything that takes processes of torch to start, on a busy machine.
DEADLINE_S = 120.0
#: What takes seconds is not asked for so often that the asking slows it down.
STARTS_POLL_S = 0.1
MARK = "E2E_MARK"

Value = TypeVar("Value")


def until(condition: Callable[[], Value], what: str, *, within_s: float = DEADLINE_S, every_s: float = 0.02) -> Value:
    """What the condition gives as soon as that is true. Raises AssertionError naming what did not come."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(every_s)
    return value


# -------------------------------------------------------------------- processes


def marked() -> list[int]:
    """Living processes of this test run, but for this one."""
    needle = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0") and _state_of(int(entry.name)) not in "ZX":
                    found.append(int(entry.name))
    return found


def kill_marked() -> list[str]:
    """SIGKILL to every process of this test run; returns their command lines."""
    killed = []
    while pids := marked():
        for pid in pids:
            with contextlib.suppress(OSError):
                killed.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return killed


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_stopped(pid: int) -> bool:
    """SIGSTOP has taken effect on every thread."""
    return _state_of(pid) == "T"


# -------------------------------------------------------------------- daemon and tmctl


class Cluster:
    """A daemon with `nodes` local nodes. Use as a context manager."""

    def __init__(
        self, folder: Path, *, nodes: int, core: dict[str, float | bool] | None = None, database: str | None = None
    ) -> None:
        self.folder = folder
        self.stack = Stack(folder / "stack", nodes=nodes, core=core, database=database)
        self._numbers = itertools.count(1)

    def __enter__(self) -> Cluster:
        self.stack.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.__exit__(None, None, None)

    def tmctl(self, *arguments: str) -> Result:
        return CliRunner().invoke(tmctl, ["--socket", str(self.stack.socket), *arguments])

    def ask(self, *arguments: str) -> Any:
        """The JSON answer of a tmctl command that succeeds."""
        result = self.tmctl(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def refusal(self, *arguments: str) -> str:
        """What tmctl says on stderr when it fails, on one line."""
        result = self.tmctl(*arguments)
        assert result.exit_code == 1, f"tmctl {' '.join(arguments)} ended with {result.exit_code}:\n{result.output}"
        return " ".join(result.stderr.split())

    def node(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in self.ask("nodes")["nodes"] if each["name"] == name)
        return found

    def reboot(self, node: str) -> None:
        """A free node loses power and boots again: a new standby for the job that was there last."""
        self.ask("local", "kill", node)
        self.ask("local", "up", node)

    def tidy(self) -> None:
        """Every node is up and not drained."""
        for node in self.ask("nodes")["nodes"]:
            if "DRAIN" in node["manager_state"]:
                self.ask("resume", node["name"])
            if "DOWN" in node["manager_state"]:
                self.ask("local", "up", node["name"])

    def start_job(
        self,
        *,
        nnodes: int = WORLD_SIZE,
        standby: int = 0,
        nproc_per_node: int = 1,
        steps: int,
        arguments: tuple[str, ...] = (),
        pace_ms: float = PACE_MS,
        env: dict[str, str] | None = None,
        script: Path = TRAIN,
        transport: TransportName = "delta",
    ) -> Job:
        """Starts the training script on free nodes; returns once the daemon knows the job."""
        out = self.folder / f"job{next(self._numbers)}"
        out.mkdir(parents=True)
        job = Job(self, out)
        job.steps = steps
        job.set_pace(pace_ms)
        job.id = self.stack.submit(
            nnodes=nnodes,
            standby=standby,
            nproc_per_node=nproc_per_node,
            command=[str(script), "--out", str(out), "--steps", str(steps), *arguments],
            cwd=str(out),
            log_dir=str(out / "logs"),
            env={**os.environ, **job.faults.environment(), "TMD_TRANSPORT": transport, **(env or {})},
        )
        until(lambda: self.stack.job(job.id), f"the daemon knows {job.id}")
        return job

    def start_agent(self, job: Job, node: str, *, script: Path = TRAIN, env: dict[str, str] | None = None) -> HandAgent:
        """`tmd-run` by hand on a machine that the resource manager does not know."""
        return HandAgent(self, job, node, script, env or {})


class HandAgent:
    """One `tmd-run` process and what it says."""

    def __init__(self, cluster: Cluster, job: Job, node: str, script: Path, env: dict[str, str]) -> None:
        record = job.record()
        shape = ["--nnodes", str(record["nnodes"]), "--nproc-per-node", str(record["nproc_per_node"])]
        place = ["--daemon", f"unix:{cluster.stack.socket}", "--job-id", job.id, "--node", node, "--host", "127.0.0.99"]
        # The job's command as the first agent told it: kind, script, arguments.
        command = [str(script), *record["command"][2:]]
        self._log = job.out / f"{node}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tmd_worker.agent.main", *shape, *place, *command],
                env={**os.environ, **job.faults.environment(), **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self._process.wait(DEADLINE_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def output(self) -> str:
        return self._log.read_text()


# -------------------------------------------------------------------- jobs


class Faults:
    """Faults that a test arms while the job runs: every process looks whether the fault's file is there."""

    #: Where a fault may be armed; `action` is done by the first process with this rank that comes by.
    POINTS = (
        *("role.taken", "staged", "flag.raised", "flip", "frozen", "state.loading", "state.copying", "state.loaded"),
        *("install.received", "go.received", "optimizer.begin"),
    )
    ACTIONS = ("kill", "stop", "close_link")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._known = [
            {"point": point, "action": action, "rank": rank, "when": f"{action} {point} {rank}"}
            for point in self.POINTS
            for action in self.ACTIONS
            for rank in range(WORLD_SIZE)
        ]

    def environment(self) -> dict[str, str]:
        return {"TMD_FAULTS": json.dumps(self._known), "TMD_FAULTS_DIR": str(self._folder)}

    def arm(self, action: str, point: str, rank: int) -> Fault:
        """One of ACTIONS for the next process with this rank that passes this point."""
        number = next(number for number, each in enumerate(self._known) if each["when"] == f"{action} {point} {rank}")
        (self._folder / f"fault-{number}").unlink(missing_ok=True)
        (self._folder / f"{action} {point} {rank}").touch()
        return Fault(self._folder / f"{action} {point} {rank}", self._folder / f"fault-{number}")

    def disarm(self) -> None:
        """What was armed and has not struck will not strike any more."""
        for each in self._known:
            (self._folder / str(each["when"])).unlink(missing_ok=True)


class Fault:
    """One armed fault."""

    def __init__(self, armed: Path, fired: Path) -> None:
        self._armed, self._fired = armed, fired

    def pid(self) -> int:
        """The process that it struck, once it has."""
        text: str = until(lambda: self._fired.exists() and self._fired.read_text(), f"fault: {self._armed.name}")
        self._armed.unlink(missing_ok=True)
        return int(json.loads(text)["pid"])

    def stopped_pid(self) -> int:
        """The process that it has stopped."""
        pid = self.pid()
        until(lambda: is_stopped(pid), f"process {pid} is stopped")
        return pid


class Job:
    """One training job of this cluster."""

    def __init__(self, cluster: Cluster, out: Path) -> None:
        self.cluster = cluster
        self.out = out
        self.faults = Faults(out / "faults")
        self.id = ""
        #: How many it has.
        self.steps = 0

    def set_pace(self, pace_ms: float) -> None:
        """How long a step lasts at least; 0 lets the job run as fast as it can."""
        fresh = self.out / "pace.new"
        fresh.write_text(str(pace_ms))
        fresh.replace(self.out / "pace")

    # ---------------------------------------------------------------- what the daemon says

    def view(self) -> dict[str, Any]:
        view = self.cluster.stack.job(self.id)
        assert view is not None, f"the daemon does not know {self.id}"
        return view

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = self.view()["record"]
        return record

    def rank(self, rank: int) -> dict[str, Any]:
        """RankView of who holds this rank now."""
        found: dict[str, Any] = next(each for each in self.view()["ranks"] if each["record"]["rank"] == rank)
        return found

    def node_of(self, rank: int) -> str:
        node: str = self.rank(rank)["record"]["node"]
        return node

    def pids(self) -> dict[int, int]:
        return {each["record"]["rank"]: each["pid"] for each in self.view()["ranks"]}

    def use_of(self, node: str) -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in self.view()["nodes"] if each["node"] == node)
        return found

    def node_sentence(self, node: str) -> str:
        """Empty as long as the job does not know the node."""
        sentence: str = self.cluster.ask("status")["sentences"].get(node, "")
        return sentence

    def migration(self, migration_id: str) -> dict[str, Any]:
        record: dict[str, Any] = self.cluster.ask("migration", "show", migration_id)["record"]
        return record

    def migration_sentence(self, migration_id: str) -> str:
        sentence: str = self.cluster.ask("migration", "show", migration_id)["sentence"]
        return sentence

    def migrations(self) -> list[dict[str, Any]]:
        """Oldest first."""
        found = self.cluster.ask("migrations", "--job", self.id)["migrations"]
        return sorted((each["record"] for each in found), key=lambda record: record["started_s"])

    def story(self, subject: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.cluster.ask("story", subject)["events"]
        return events

    def kinds(self, subject: str) -> list[str]:
        """The kinds of events about this subject itself, in order."""
        return [event["kind"] for event in self.story(subject) if event["subject"] == subject]

    # ---------------------------------------------------------------- waiting

    def wait_state(self, *states: str, within_s: float = DEADLINE_S) -> dict[str, Any]:
        """The job's view once it is in one of these states. A daemon that died before it had written the job down knows it again
        as soon as an agent is back."""

        def reached() -> dict[str, Any] | None:
            view = self.cluster.stack.job(self.id)
            if view is None:
                return None
            record = view["record"]
            ended = record["state"] in ("done", "failed") and record["state"] not in states
            assert not ended, f"{self.id} is {record['state']}: {record['reason']}\n{self.logs()}"
            return view if record["state"] in states else None

        view = until(reached, f"{self.id} is {' or '.join(states)}", within_s=within_s)
        assert view is not None
        return view

    def wait_ready(self, standbys: int) -> list[dict[str, Any]]:
        """The standbys that can take a role, once there are as many and the job commits steps."""

        def ready() -> list[dict[str, Any]] | None:
            view = self.view()
            found = [each for each in view["standbys"] if each["sentence"] == "ready" and each["record"]["state"] == "standby"]
            return found if len(found) >= standbys and view["next_step"] > 3 and view["record"]["state"] == "running" else None

        found = until(ready, f"{standbys} standbys of {self.id} are ready", every_s=STARTS_POLL_S)
        assert found is not None
        return found

    def wait_progress(self, steps: int = 5) -> None:
        """So many more steps are committed: training goes on."""
        target = self.view()["next_step"] + steps
        until(lambda: self.view()["next_step"] >= target, f"{self.id} commits step {target - 1}: {self.view()['sentence']}")

    def wait_migration(self, migration_id: str, *states: str) -> dict[str, Any]:
        """The migration's record once it is in one of these states."""

        def reached() -> dict[str, Any] | None:
            record = self.migration(migration_id)
            ended = record["state"] in ("done", "aborted", "failed") and record["state"] not in states
            assert not ended, f"{migration_id} is {record['state']}, expected {states}: {record['reason']}"
            return record if record["state"] in states else None

        record = until(reached, f"{migration_id} is {' or '.join(states)}")
        assert record is not None
        return record

    def wait_measured(self, migration_id: str) -> dict[str, Any]:
        """The record of a migration that is done, with all that it cost."""
        self.wait_migration(migration_id, "done")
        until(lambda: self.migration(migration_id)["lost_time_s"] is not None, f"the costs of {migration_id} are known")
        return self.migration(migration_id)

    def request(self, *arguments: str) -> str:
        """tmctl migrate; returns the migration's id."""
        migration_id: str = self.cluster.ask("migrate", self.id, *arguments)["migration_id"]
        return migration_id

    def cancel(self) -> None:
        self.cluster.ask("job", "cancel", self.id)
        self.wait_gone()

    def end(self) -> None:
        """It is over, one way or the other, and every node is as good as new."""
        if self.record()["state"] not in ("done", "failed"):
            self.cancel()
        self.cluster.tidy()

    def wait_gone(self) -> None:
        """No process of it is left."""
        until(
            lambda: not any(agent["running"] for agent in self.agents()),
            f"the agents of {self.id} have ended",
        )

    def agents(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.cluster.ask("local", "job", self.id)["agents"]
        return found

    # ---------------------------------------------------------------- what the ranks wrote

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every whole line that a rank wrote of a committed step."""
        for rank in range(WORLD_SIZE):
            path = self.out / f"steps-rank{rank}.jsonl"
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            for line in lines:
                if line.endswith("\n"):
                    yield {"rank": rank, **json.loads(line)}

    def results(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """(rank, step) -> loss and, of every fifth step, digests. Raises AssertionError if two processes disagree."""
        found: dict[tuple[int, int], tuple[str, ...]] = {}
        for row in self.rows():
            result = (row["loss"], *(row.get(part, "") for part in ("parameters", "optimizer", "small")))
            key = (row["rank"], row["step"])
            assert found.setdefault(key, result) == result, f"rank, step {key} have two results in {self.out}"
        return found

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted((self.out / "logs").glob("*.log")))


def assert_unharmed(job: Job, reference: Job, *, lines_lost: Mapping[int, int] | None = None) -> None:
    """Every loss and the state after every fifth step so far are the reference's, bit by bit, and no step is missing: none at all
    of a job that is done.

    `lines_lost`: rank -> so many of its lines may be missing, because each of its processes that was killed may have died between
    a commit and the line about it.
    """
    results, expected = job.results(), reference.results()
    if job.record()["state"] == "done":
        last = job.steps
        assert all(any(result[1:]) for (_, step), result in results.items() if step == last - 1), (
            "the final state was not digested"
        )
    else:  # the ranks' files are read one after the other while the job goes on
        last = min(max(step for rank, step in results if rank == each) for each in range(WORLD_SIZE))
    assert results.keys() <= expected.keys(), "the reference is too short"
    different = [key for key, result in results.items() if result != expected[key]]
    assert not different, f"(rank, step) {sorted(different, key=lambda key: key[1])[:5]} differ from the undisturbed run"
    missing = [(rank, step) for rank in range(WORLD_SIZE) for step in range(last) if (rank, step) not in results]
    unexplained = collections.Counter(rank for rank, _ in missing) - collections.Counter(lines_lost or {})
    assert not unexplained, f"(rank, step) of {missing} were never committed: {dict(unexplained)} more than were killed"
