"""A whole migration between the two hosts: daemon and standby on this one, two ranks on the other, of which rank 1 moves here.

All of it is the product's own: `tmd serve`, `tmd-run`, the ranks. [handoff] transport is rdma, so that it fails where that cannot
be used. The other host's agents come over TCP, with a token. Then the same job runs once more, a rank on either host, and nothing
happens to it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.rdma.guest.handoffs import Source
from tests.rdma.guest.lines import CONTROL_NETWORK
from tmd.cli.client import Client, ClientError

MOVED, UNDISTURBED = "moved", "undisturbed"
MOVED_RANK = 1
#: Enough for the move, during which there is one a second, and for the five after it over which its cost is counted.
STEPS = 40
#: No step from this one on before a standby is ready.
HELD_STEP = 6
#: What is left for after the move.
LAST_STEPS = 8
HERE = f"{CONTROL_NETWORK}2"
PORT = 7070
SCRIPT = Path(__file__).with_name("train.py")
#: On both hosts.
FOLDER = Path("/tmp/jobs")
SOCKET = FOLDER / "tmd.sock"
START_S = 900.0
MOVE_S = 300.0
POLL_S = 0.5
PACE_S = 1.0
#: An emulated processor is slow, and is not lost for that.
SLOW = {
    "TMD_CORE_HEARTBEAT_S": "2",
    "TMD_CORE_HEARTBEAT_TIMEOUT_S": "60",
    "TMD_CORE_AGENT_GRACE_S": "60",
    "TMD_CORE_REPORT_TIMEOUT_S": "120",
    "TMD_CORE_INSTALL_TIMEOUT_S": "120",
    "TMD_CORE_PLAN_TIMEOUT_S": "200",
}
#: Kernels that need no newer instructions: each of those is emulated as many old ones.
KERNELS = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}

Value = TypeVar("Value")


def migration() -> dict[str, Any]:
    """The move's record, and what the ranks of both jobs wrote on either host."""
    faulthandler.cancel_dump_traceback_later()  # each wait here has a deadline, and then the logs tell more
    source = Source([])
    with contextlib.ExitStack() as running:
        hosts = _Hosts(source, running)
        try:
            hosts.start_daemon()
            moved = _Job(hosts, MOVED).move()
            return {**moved, "undisturbed": _Job(hosts, UNDISTURBED).run(), "parts_s": hosts.seconds}
        except BaseException:
            hosts.show_logs()
            raise


class _Hosts:
    """What runs on either host, and waiting for it."""

    def __init__(self, source: Source, running: contextlib.ExitStack) -> None:
        self.source = source
        self.client = Client(SOCKET, timeout_s=60.0)
        self._running = running
        self._logs: dict[Path, bool] = {}
        self._began_s = time.monotonic()
        self._sentence = "the daemon has not been asked yet"
        self.seconds: dict[str, float] = {}
        self.make_folder(FOLDER)

    def make_folder(self, folder: Path) -> None:
        folder.mkdir()
        self.source.ask("run", argv=["mkdir", str(folder)])

    def start_daemon(self) -> None:
        places = ["--state-dir", str(FOLDER / "state"), "--socket", str(SOCKET), "--listen", f"{HERE}:{PORT}"]
        argv = [sys.executable, "-m", "tmd.daemon.main", "serve", "--resource-manager", "none", *places]
        self.start(argv, FOLDER / "daemon.log", {**SLOW, "TMD_HANDOFF_TRANSPORT": "rdma"})

        def answers() -> bool:
            with contextlib.suppress(ClientError):
                return bool(self.client.get("/v1/health")["ok"])
            return False

        self.until(answers, "the daemon answers", START_S)
        self.mark("daemon")

    def start(self, argv: list[str], log: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        self._logs[log] = False
        with log.open("wb") as output:
            environ = {**os.environ, **environ}
            process = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self._running.callback(process.kill)
        return process

    def start_there(self, argv: list[str], log: Path, environ: dict[str, str]) -> None:
        self._logs[log] = True
        self.source.ask("start", argv=argv, environ=environ, log=str(log))

    def until(self, condition: Callable[[], Value | None], what: str, within_s: float, every_s: float = POLL_S) -> Value:
        deadline_s = time.monotonic() + within_s
        while not (value := condition()):
            assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}; {self._sentence}"
            time.sleep(every_s)
        return value

    def say(self, sentence: str) -> None:
        """On the console, when it changes."""
        if sentence != self._sentence:
            self._sentence = sentence
            print(f"{time.monotonic() - self._began_s:.1f} s: {sentence}", flush=True)

    def mark(self, part: str) -> None:
        """So long after the beginning this was done."""
        self.seconds[part] = round(time.monotonic() - self._began_s, 1)

    def show_logs(self) -> None:
        """On the console."""
        for path, is_there in self._logs.items():
            text = self.source.ask("read", path=str(path))["text"] if is_there else path.read_text(errors="replace")
            print(f"----- {path}\n{text[-6000:]}", flush=True)


class _Job:
    """Of two ranks, each on a node of its own."""

    def __init__(self, hosts: _Hosts, job_id: str) -> None:
        self._hosts = hosts
        self._id = job_id
        self._out = FOLDER / job_id
        hosts.make_folder(self._out)
        token = hosts.client.post(f"/v1/jobs/{job_id}/token")["token"]
        hosts.source.ask("write", path=str(self._out / "token"), text=token)

    def move(self) -> dict[str, Any]:
        """Both ranks begin on the other host; rank 1 comes to this one."""
        self._allow(HELD_STEP)
        for index in (0, 1):
            self._start_there(f"n{index + 1}", index)
        # Who comes later than the first two is a standby.
        self._hosts.until(lambda: len(self._nodes()) == 2, "the daemon knows both nodes of the other host", START_S)
        standby = self._start_here("n3")
        self._hosts.until(self._is_ready, "both ranks train and the standby is ready", START_S)
        self._hosts.mark("ready")
        move = self._hosts.client.post("/v1/migrations", {"job": self._id, "rank": MOVED_RANK})["migration_id"]
        record = self._hosts.until(lambda: self._ended(move), f"{move} has ended", MOVE_S, PACE_S)
        assert record["state"] == "done", f"{move} is {record['state']}: {record['reason']}"
        self._hosts.mark("moved")
        self._allow(STEPS)
        return {**self._finish(standby), "migration": self._record(move)}

    def run(self) -> dict[str, Any]:
        """A rank on either host; nothing happens."""
        self._start_there("n1", 0)
        return self._finish(self._start_here("n3", "--node-index", "1"))

    # ---------------------------------------------------------------- agents

    def _start_there(self, node: str, index: int) -> None:
        proof = ["--auth", "token", "--token-file", str(self._out / "token")]
        argv = self._agent(node, "--daemon", f"http://{HERE}:{PORT}", "--node-index", str(index), *proof)
        self._hosts.start_there(argv, self._out / f"{node}.log", KERNELS)

    def _start_here(self, node: str, *options: str) -> subprocess.Popen[bytes]:
        argv = self._agent(node, "--daemon", f"unix:{SOCKET}", "--host", HERE, *options)
        return self._hosts.start(argv, self._out / f"{node}.log", KERNELS)

    def _agent(self, node: str, *options: str) -> list[str]:
        agent = [sys.executable, "-m", "tmd_worker.agent", "--job-id", self._id, "--node", node, "--nnodes", "2", *options]
        return [*agent, str(SCRIPT), "--out", str(self._out), "--steps", str(STEPS)]

    # ---------------------------------------------------------------- what the daemon says

    def _view(self) -> dict[str, Any] | None:
        """None as long as it knows no such job."""
        try:
            view: dict[str, Any] = self._hosts.client.get(f"/v1/jobs/{self._id}")
        except ClientError as error:
            if error.status == 404:
                return None
            raise
        assert view["record"]["state"] != "failed", view["record"]["reason"]
        standbys = ", ".join(f"{each['record']['node']}: {each['sentence']}" for each in view["standbys"])
        self._hosts.say(f"{self._id}: step {view['next_step']}: {view['sentence']}; standbys: {standbys or 'none'}")
        return view

    def _nodes(self) -> set[str]:
        view = self._view()
        return set() if view is None else {each["node"] for each in view["nodes"]}

    def _is_ready(self) -> bool:
        view = self._view()
        if view is None:
            return False
        ready = any(each["sentence"] == "ready" and each["record"]["state"] == "standby" for each in view["standbys"])
        return ready and view["record"]["state"] == "running" and view["next_step"] >= HELD_STEP

    def _record(self, move: str) -> dict[str, Any]:
        record: dict[str, Any] = self._hosts.client.get(f"/v1/migrations/{move}")["record"]
        return record

    def _ended(self, move: str) -> dict[str, Any] | None:
        """The record, once it is. Until then the job may take one more step each time."""
        record, view = self._record(move), self._view()
        assert view is not None
        if record["ended_s"] is not None:
            return record
        assert view["next_step"] < STEPS - LAST_STEPS, f"the job comes near its end, and {move} has not ended"
        self._allow(view["next_step"] + 1)
        return None

    def _is_done(self) -> dict[str, Any] | None:
        view = self._view()
        return view if view is not None and view["record"]["state"] == "done" else None

    # ---------------------------------------------------------------- steps

    def _allow(self, step: int) -> None:
        """Rank 0, which is on the other host, and so the job may begin the steps before this one."""
        self._hosts.source.ask("write", path=str(self._out / "limit"), text=str(step))

    def _finish(self, agent: subprocess.Popen[bytes]) -> dict[str, Any]:
        view = self._hosts.until(self._is_done, f"job {self._id} is done", START_S)
        code = agent.wait(START_S)
        self._hosts.mark(self._id)
        return {
            "job": {name: view["record"][name] for name in ("state", "steps", "reason", "approximations")},
            "agent_exit": code,
            "rows": {
                "1": self._rows(lambda path: self._hosts.source.ask("read", path=path)["text"]),
                "2": self._rows(lambda path: Path(path).read_text() if Path(path).exists() else ""),
            },
        }

    def _rows(self, read: Callable[[str], str]) -> dict[str, list[dict[str, Any]]]:
        """Rank -> the lines that it wrote on one host."""
        texts = {rank: read(str(self._out / f"steps-rank{rank}.jsonl")) for rank in ("0", "1")}
        return {rank: [json.loads(line) for line in text.splitlines()] for rank, text in texts.items()}
