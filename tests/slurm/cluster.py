"""A real Slurm cluster on this one machine: munge, MariaDB, slurmdbd, slurmctld and a slurmd per node.

Contract: everything is in one folder and on free ports of the loopback, is started by `start` (a few seconds) and gone, folder
included, after `stop`, whatever happened in between; so it is if this process is killed. It is the tests' own: nothing of the
machine's Slurm, munge or MariaDB is read, written or spoken to. Needs root, as slurmd starts jobs as other users.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from tests.slurm import database
from tests.slurm.files import Options, Places, choose_places, installed_release, slurm_conf, write_all
from tests.slurm.processes import Processes
from tests.slurm.users import User, user

#: Every wait here ends after this long, and says what it waited for.
DEADLINE_S = 60.0
COMMAND_TIMEOUT_S = 20.0
POLL_S = 0.02

#: The parts that are one process each; nodes go by their own names.
MUNGED, MARIADBD, SLURMDBD, SLURMCTLD = "munged", "mariadbd", "slurmdbd", "slurmctld"

#: A user by name or number; None: root.
Who = str | int | None


class SlurmCluster:
    """Use as a context manager, or `start` and `stop`.

    `options.nodes` nodes n1, n2, ... at 127.0.0.11, 127.0.0.12, ...; `stop_part`, `start_part` and `restart` take
    "munged", "mariadbd", "slurmdbd", "slurmctld" or a node's name (its slurmd, whose steps live on).
    """

    def __init__(self, options: Options | None = None) -> None:
        assert os.geteuid() == 0, "slurmd starts jobs as other users: run these tests as root"
        self.options = options or Options()
        #: Before the machine's own: where commands and daemons are looked for.
        self.path = [str(self.options.prefix / name) for name in ("bin", "sbin")] if self.options.prefix else []
        #: As in "22.05.8".
        self.release = installed_release(self.options.prefix)
        major, minor = self.release.split(".")[:2]
        self.version = (int(major), int(minor))
        self.folder = Path(tempfile.mkdtemp(prefix="tmd-slurm-"))
        # Jobs of other users must come through, to `shared`.
        self.folder.chmod(0o755)
        self.places: Places = choose_places(self.folder, self.options)
        self._processes: Processes | None = None
        self._commands: list[subprocess.Popen[str]] = []

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---------------------------------------------------------------- life

    def start(self) -> None:
        """Returns once every node is IDLE."""
        try:
            self._processes = Processes()
            write_all(self.options, self.places, self.version)
            database.prepare(self.folder)
            (self.folder / "munge" / "key").write_bytes(secrets.token_bytes(1024))
            (self.folder / "munge" / "key").chmod(0o600)
            for part in (MUNGED, MARIADBD, SLURMDBD):
                self.start_part(part)
            self.run("sacctmgr", "-i", "add", "cluster", "tmd")
            for part in (SLURMCTLD, *self.options.node_names):
                self.start_part(part)
            self.wait_for(self._all_idle, "every node to be IDLE")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Everything is killed and the folder removed. Safe to repeat."""
        for command in self._commands:
            _end(command)
        self._commands.clear()
        try:
            if self._processes is not None:
                self._processes.close()
        finally:
            self._processes = None
            shutil.rmtree(self.folder, ignore_errors=True)

    def start_part(self, part: str, *options: str) -> None:
        """Returns once it answers; a slurmd once it listens. `options`: more of its command line."""
        argv, log = self._command(part)
        self._running.start(part, [*argv, *options], self.env, log)
        what = f"{part} to answer"
        if part == MUNGED:
            self.wait_for(lambda: self._answers("munge", "--no-input", "--socket", str(self.places.munge_socket)), what, part)
        elif part == MARIADBD:
            self.wait_for(lambda: _listens(self.places.database_port), what, part)
        elif part == SLURMDBD:
            self.wait_for(lambda: self._answers("sacctmgr", "-n", "-i", "list", "cluster"), what, part)
        elif part == SLURMCTLD:
            # The port first: a command that finds nobody there tries again only after a second.
            port = self.places.slurmctld_port
            self.wait_for(lambda: _listens(port) and self._answers("scontrol", "show", "config"), what, part)
        else:
            port = self.places.slurmd_ports[self.options.node_names.index(part)]
            self.wait_for(lambda: _listens(port), what, part)

    def stop_part(self, part: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Returns once it has ended; slurmctld takes up to 15 s to end by itself, SIGKILL is faster."""
        self._running.stop(part, number)

    def part_pid(self, part: str) -> int:
        return self._running.pid(part)

    def signal_part(self, part: str, number: signal.Signals) -> None:
        """SIGSTOP makes it silent as a machine that hangs, SIGCONT ends that."""
        self._running.send(part, number)

    def restart(self, part: str, number: signal.Signals = signal.SIGTERM) -> None:
        self.stop_part(part, number)
        self.start_part(part)

    def boot(self, node: str) -> None:
        """Its slurmd starts again and says that the node did, too."""
        self.stop_part(node)
        self.start_part(node, "-b")

    def settle(self) -> None:
        """Back to the beginning, for the next test: no job, no reservation, no drain, every part runs and every node is IDLE."""
        for part in self._parts:
            if not self._running.alive(part):
                self.start_part(part)
        for command in self._commands:
            _end(command)
        self._commands.clear()
        self.wait_for(self._settled, "no job and every node to be IDLE")
        # A slurmctld that was killed gives the numbers of its last jobs away again, and a job that may not write over another
        # user's output fails with 0:53.
        for output in self.places.shared.glob("slurm-*.out"):
            output.unlink()

    def _settled(self) -> bool:
        # By numbers alone: scancel takes nothing of a list with an array's "7_[2%1]" in it.
        jobs = self.run("squeue", "-h", "-o", "%A").stdout.split()
        if jobs:
            self.run("scancel", *jobs, check=False)
            # A step that lost one of its nodes would wait for that node's word for a minute.
            self._kill_steps()
        # A slurmctld that was killed has forgotten that one was deleted a moment before.
        for name in re.findall(r"^ReservationName=(\S+)", self.run("scontrol", "-o", "show", "reservation").stdout, re.MULTILINE):
            self.run("scontrol", "delete", f"reservationname={name}", check=False)
        states = self.states()
        for node, state in states.items():
            if any(word in state for word in ("DRAIN", "FAIL", "DOWN")):
                self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        return not jobs and self._all_idle()

    def _all_idle(self) -> bool:
        """Of the nodes that there are; others may be written into slurm.conf."""
        for part in self._parts:
            assert self._running.alive(part), f"{part} has ended\n{self.logs()}"
        states = self.states()
        return all(states.get(node) == "IDLE" for node in self.options.node_names)

    def _kill_steps(self) -> None:
        for node in self.options.node_names:
            for process in self.processes_of(node):
                if process.pid != self._running.pid(node):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()

    def reconfigure(self, lines: str) -> None:
        """Puts `lines` in the place of options.slurm_conf, and returns once every daemon goes by that.

        slurmctld answers before it has told any slurmd: one that is killed then never tells them.
        """
        self.options = dataclasses.replace(self.options, slurm_conf=lines)
        self.places.slurm_conf.write_text(slurm_conf(self.options, self.places))
        before = self._slurmd_readings()
        self.run("scontrol", "reconfigure")
        self.wait_for(
            lambda: all(now > before[node] for node, now in self._slurmd_readings().items()),
            "each slurmd to read slurm.conf anew",
        )

    def _slurmd_readings(self) -> dict[str, int]:
        """How often each has read slurm.conf, as its log says."""
        # From 23.11 on every daemon executes itself anew, and a slurmd that is told once more meanwhile is killed by that.
        sign = " slurmd started on " if self.version >= (23, 11) else "got reconfigure request"
        logs = {node: self.places.slurmd_log(node) for node in self.options.node_names}
        return {node: log.read_text().count(sign) for node, log in logs.items()}

    # ---------------------------------------------------------------- nodes

    def kill_node(self, node: str) -> None:
        """The node loses power: SIGKILL to its slurmd, its steps and all that they have started. Slurm is told nothing.

        `start_part` brings it back.
        """
        while victims := self.processes_of(node):
            for process in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(victims, timeout=DEADLINE_S)
        self._running.stop(node, signal.SIGKILL)

    def processes_of(self, node: str) -> list[psutil.Process]:
        """Its slurmd first, then its steps and everything below them, daemons of the user's included."""
        log = str(self.places.slurmd_log(node))
        everything = [process for process in self._running.below() if _alive(process)]
        roots = [each for each in everything if _has_open(each, log) or _environment(each).get("SLURMD_NODENAME") == node]
        found = {each.pid: each for each in roots}
        for root in roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {each.pid: each for each in root.children(recursive=True)}
        return list(found.values())

    def states(self) -> dict[str, str]:
        """Node -> state as Slurm shows it, "IDLE+DRAIN" for example."""
        text = self.run("scontrol", "-o", "show", "nodes").stdout
        return dict(re.findall(r"^NodeName=(\S+) .*? State=(\S+)", text, re.MULTILINE))

    def wait_state(self, node: str, *states: str) -> None:
        self.wait_for(lambda: self.states()[node] in states, f"{node} to be {' or '.join(states)}")

    # ---------------------------------------------------------------- commands

    @property
    def env(self) -> dict[str, str]:
        """For whatever is to speak to this cluster; without any SLURM_ variable of a job that this may run in."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SALLOC"))}
        path = [*self.path, *own.get("PATH", os.defpath).split(os.pathsep), "/usr/sbin", "/sbin"]
        return own | {"SLURM_CONF": str(self.places.slurm_conf), "PATH": os.pathsep.join(path), "LC_ALL": "C.UTF-8"}

    @property
    def bin_dir(self) -> str:
        """Of its commands, as tmd's `bin_dir` in [slurm]: empty for the machine's own Slurm."""
        return str(self.options.prefix / "bin") if self.options.prefix else ""

    def identity(self, who: Who, env: Mapping[str, str] | None) -> dict[str, object]:
        """What subprocess needs to start a command as somebody."""
        base = self.env | dict(env or {})
        if who is None:
            return {"env": base}
        other: User = user(who)
        return {"env": base | other.env, "user": other.uid, "group": other.gid, "extra_groups": []}

    def run(
        self,
        *argv: str,
        user: Who = None,
        check: bool = True,
        timeout_s: float = COMMAND_TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """A command as root, or as `user` (name or uid), in `shared` unless told otherwise. `check` asserts that it succeeds."""
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            input=stdin or "",
            timeout=timeout_s,
            cwd=cwd or self.places.shared,
            **self.identity(user, env),
        )
        assert not check or done.returncode == 0, f"{' '.join(argv)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def popen(self, *argv: str, user: Who = None, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """A command that goes on, salloc or srun; `stop` ends it."""
        self._commands.append(
            subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self.places.shared,
                start_new_session=True,
                **self.identity(user, env),
            )
        )
        return self._commands[-1]

    def sbatch(self, script: str, *options: str, user: Who = None, env: Mapping[str, str] | None = None) -> str:
        """Submits a script with this body; returns the job's id."""
        done = self.run("sbatch", "--parsable", *options, user=user, env=env, stdin=f"#!/bin/bash\n{script}\n")
        return done.stdout.strip().partition(";")[0]

    def save(self, job: str) -> None:
        """Returns once slurmctld has written down what it knows of the job, which it does up to 5 s after a change.

        Killed with SIGKILL before, it would know nothing of it when it starts again.
        """
        changed_s = time.time()
        self.run("scontrol", "update", f"jobid={job}", "nice=0")
        state = self.folder / "state" / "job_state"
        self.wait_for(lambda: state.exists() and state.stat().st_mtime > changed_s, f"job {job} to be saved")

    def wait_for(self, condition: Callable[[], bool], what: str, part: str = "") -> None:
        """Raises AssertionError after DEADLINE_S, or at once if `part` ends, with the ends of the logs."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert not part or self._running.alive(part), f"{part} has ended\n{self.logs()}"
            assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s for {what}\n{self.logs()}"
            time.sleep(POLL_S)

    def logs(self, lines: int = 15) -> str:
        """The end of each log."""
        ends = []
        for path in sorted(self.places.log.glob("*")):
            if path.suffix == ".out" and path.with_suffix(".log").exists():
                continue
            text = path.read_text(errors="replace").splitlines()[-lines:]
            ends.append("\n".join((f"--- {path.name}", *text)))
        return "\n".join(ends)

    # ---------------------------------------------------------------- inside

    @property
    def _parts(self) -> tuple[str, ...]:
        return (MUNGED, MARIADBD, SLURMDBD, SLURMCTLD, *self.options.node_names)

    @property
    def _running(self) -> Processes:
        assert self._processes is not None, "the cluster is not started"
        return self._processes

    def _command(self, part: str) -> tuple[list[str], Path]:
        """How a part is started, and where what it writes to standard output and error goes."""
        munge, log = self.folder / "munge", self.places.log
        if part == MUNGED:
            places = {"key-file": "key", "socket": "munge.socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
            options = [f"--{option}={munge / name}" for option, name in places.items()]
            # --force: what a killed one left is no obstacle.
            return ["munged", "--foreground", "--force", "--num-threads=2", *options], log / "munged.log"
        if part == MARIADBD:
            return database.command(self.folder, self.places.database_port), log / "mariadbd.log"
        if part == SLURMDBD:
            return [part, "-D"], log / "slurmdbd.out"
        if part == SLURMCTLD:
            # -i: some of its state 25.11 writes for the first time after five minutes, and killed before would not start without.
            return [part, "-D", "-i"], log / "slurmctld.out"
        return ["slurmd", "-D", "-N", part], log / f"slurmd.{part}.out"

    def _answers(self, *argv: str) -> bool:
        try:
            return self.run(*argv, check=False, timeout_s=5.0).returncode == 0
        except subprocess.TimeoutExpired:
            return False


def _listens(port: int) -> bool:
    """Without a connection, which Slurm's daemons would log as an error. Columns 2 and 4: local address, state (0A: LISTEN)."""
    rows = [row for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    return any(row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A" for row in rows)


def _end(command: subprocess.Popen[str]) -> None:
    """SIGKILL to it and what it has started, as far as that stayed in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(command.pid, signal.SIGKILL)
    command.wait(DEADLINE_S)
    if command.stdout is not None:
        command.stdout.close()


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _has_open(process: psutil.Process, path: str) -> bool:
    """slurmd and its steps keep the node's log open."""
    folder = f"/proc/{process.pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{name}") == path:
                    return True
    return False


def _environment(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ()
    return {}
