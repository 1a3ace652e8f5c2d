"""The rank processes of this node: start, signal, watch, end. Knows nothing of daemons and roles.

Contract: a process is `starting` or `running`, then `exiting` (seen dying, exit code unknown), then `exited`. All of it
happens on the event loop's thread; the main thread starts the processes, since the kernel ties their lives to that thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from tmd.protocol.agent import ProcessState
from tmd_worker.agent.exits import ExitWatch
from tmd_worker.agent.logs import Label, LogPump, LogStream
from tmd_worker.agent.settings import Launch, LogSettings

#: How long a process may take to disappear after SIGKILL (its memory is freed first).
KILL_WAIT_S = 60.0


class StartFailed(OSError):
    """The operating system did not start the process."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder:
    #: Unique on this node; names the log files.
    name: str
    label: str
    local_rank: int
    standby: bool
    #: Added to the agent's own environment.
    environment: Mapping[str, str]
    #: The rank's end of the control socket, inherited.
    control_fd: int | None = None
    keep_stdin: bool = False


class RankProcess:
    """One process, from its start to the exit code."""

    def __init__(self, order: StartOrder, popen: subprocess.Popen[bytes], pidfd: int, label: Label) -> None:
        self.name = order.name
        self.local_rank = order.local_rank
        self.label = label
        self.pid = popen.pid
        self.state: ProcessState = "starting"
        #: As in `subprocess`: negative for a signal; None while it is not known.
        self.exit_code: int | None = None
        #: When the exit was seen first, seconds since the Unix epoch.
        self.exit_seen_s = 0.0
        self.streams: list[LogStream] = []
        self.popen = popen
        self.pidfd = pidfd

    @property
    def alive(self) -> bool:
        return self.state != "exited"

    def send_signal(self, signum: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signum)


ProcessEvent = Callable[[RankProcess], None]


class Processes:
    """All rank processes that this agent has started and that still live."""

    def __init__(
        self, launch: Launch, logs: LogSettings, pump: LogPump, *, on_exiting: ProcessEvent, on_exited: ProcessEvent
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._launch = launch
        self._logs = logs
        self._pump = pump
        self._on_exiting = on_exiting
        self._on_exited = on_exited
        self._by_pid: dict[int, RankProcess] = {}
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        self._watch = ExitWatch(lambda pid: self._loop.call_soon_threadsafe(self._seen_exiting, pid))

    def start(self, order: StartOrder) -> RankProcess:
        """Raises StartFailed."""
        label = Label(order.label)
        outputs: list[_Output] = []
        try:
            outputs += [self._output(order, label, number) for number in (1, 2)]
            popen = self._spawn(order, outputs[0].child, outputs[1].child)
        except OSError as error:
            for output in outputs:
                output.abandon()
            raise StartFailed(f"cannot start a process for local rank {order.local_rank}: {error}") from error
        process = RankProcess(order, popen, os.pidfd_open(popen.pid), label)
        for output in outputs:
            os.close(output.child)
            if output.stream is not None:
                self._pump.attach(output.stream)
                process.streams.append(output.stream)
        self._by_pid[process.pid] = process
        self._all_gone.clear()
        self._loop.add_reader(process.pidfd, self._gone, process)
        self._watch.add(process.pid)
        return process

    def signal_all(self, signum: int) -> None:
        for process in list(self._by_pid.values()):
            process.send_signal(signum)

    def any_alive(self) -> bool:
        return bool(self._by_pid)

    async def wait_all(self, within_s: float) -> bool:
        """True once no process is left, False if some still lives after that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._all_gone.wait()
        return self._all_gone.is_set()

    async def end_all(self, grace_s: float, *, signum: int | None = signal.SIGTERM) -> bool:
        """Sends `signum` (None: it was sent already), then SIGKILL after `grace_s`. False if a process outlives even that."""
        if signum is not None:
            self.signal_all(signum)
        if await self.wait_all(grace_s):
            return True
        self.signal_all(signal.SIGKILL)
        return await self.wait_all(KILL_WAIT_S)

    def close(self) -> None:
        self._watch.close()

    # ---------------------------------------------------------------- details

    def _spawn(self, order: StartOrder, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        boot = [sys.executable, "-u", "-m", "tmd_worker.boot"]
        return subprocess.Popen(
            [*boot, *(["--standby"] if order.standby else []), *self._launch.boot_arguments()],
            env={**os.environ, **order.environment, "TMD_AGENT_PID": str(os.getpid())},
            stdin=None if order.keep_stdin else subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=() if order.control_fd is None else (order.control_fd,),
        )

    def _output(self, order: StartOrder, label: Label, number: int) -> _Output:
        to_file, to_console = self._logs.sinks(order.local_rank, number)
        file: int | None = None
        if to_file:
            folder = self._logs.folder_of(order.name)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / ("stdout.log" if number == 1 else "stderr.log")
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if file is not None and not to_console:
            return _Output(child=file, stream=None)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        return _Output(child=writer, stream=LogStream(reader, label, console=number, file=file))

    def _seen_exiting(self, pid: int) -> None:
        process = self._by_pid.get(pid)
        if process is not None and process.exit_seen_s == 0.0:
            process.exit_seen_s = time.time()
            process.state = "exiting"
            self._on_exiting(process)

    def _gone(self, process: RankProcess) -> None:
        """The pidfd is readable: the exit code is known."""
        self._seen_exiting(process.pid)
        process.exit_code = process.popen.wait()
        process.state = "exited"
        self._loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        self._watch.remove(process.pid)
        for stream in process.streams:
            self._pump.finish(stream)
        del self._by_pid[process.pid]
        if not self._by_pid:
            self._all_gone.set()
        self._on_exited(process)


@dataclasses.dataclass(frozen=True, slots=True)
class _Output:
    """Where a child writes (`child`), and what of it the pump reads."""

    child: int
    stream: LogStream | None

    def abandon(self) -> None:
        os.close(self.child)
        if self.stream is not None:
            os.close(self.stream.descriptor)
            if self.stream.file is not None:
                os.close(self.stream.file)
