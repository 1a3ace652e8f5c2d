"""What the ranks print: line by line with a prefix on this terminal, or raw into files.

Contract: one thread moves all of it, so a stalled terminal stalls the ranks' prints (as it would without an agent) but never
the agent. A line is never mixed with another; what a dying rank wrote last is read to the end of its pipe.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import select
import selectors
import threading
import time

_CHUNK_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20
#: A line longer than this is cut, so that a rank cannot fill this process's memory.
LINE_LIMIT_BYTES = 1 << 18
#: After a rank's exit, how long a process it left behind may keep its pipe open.
DRAIN_S = 2.0
#: A progress bar's carriage return ends a line as well.
_LINE = re.compile(rb"[^\r\n]*(?:\r?\n|\r)")


class Label:
    """The prefix of a process's lines; a standby's changes when it takes a role."""

    def __init__(self, text: str) -> None:
        self.set(text)

    @classmethod
    def none(cls) -> Label:
        """For lines that have their prefix already."""
        label = cls("")
        label.prefix = b""
        return label

    def set(self, text: str) -> None:
        self.text = text
        self.prefix = f"[{text}] ".encode()


class LineCutter:
    """Bytes in, whole prefixed lines out."""

    def __init__(self, label: Label) -> None:
        self._label = label
        self._partial = b""

    def feed(self, data: bytes) -> bytes:
        data = self._partial + data
        # A carriage return at the very end may be half of \r\n: it waits.
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
        self._partial = data[end:]
        lines = b"".join([self._label.prefix + line for line in _LINE.findall(data, 0, end)])
        return lines + self.rest() if len(self._partial) > LINE_LIMIT_BYTES else lines

    def rest(self) -> bytes:
        """The line that was begun and not ended, ended."""
        partial, self._partial = self._partial, b""
        return self._label.prefix + partial + b"\n" if partial else b""


class LogStream:
    """The reading end of one rank's stdout or stderr. Owned by the pump's thread once attached."""

    def __init__(self, descriptor: int, label: Label, *, console: int | None, file: int | None) -> None:
        self.descriptor = descriptor
        self.cutter = LineCutter(label)
        self.console = console
        self.file = file
        #: When to stop waiting for the end of the pipe (time.monotonic()), None while the process lives.
        self.deadline: float | None = None


class LogPump:
    """The thread that moves the ranks' output. All public methods may be called from any thread and never block for long."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._incoming: collections.deque[LogStream] = collections.deque()
        self._said: collections.deque[bytes] = collections.deque(maxlen=10_000)
        self._streams: set[LogStream] = set()
        self._dead_sinks: set[int] = set()
        self._close_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="log-pump", daemon=True)
        self._thread.start()

    def attach(self, stream: LogStream) -> None:
        os.set_blocking(stream.descriptor, False)
        self._incoming.append(stream)
        self._wake()

    def say(self, line: str) -> None:
        """A line of the agent itself, on stderr."""
        self._said.append(line.encode(errors="replace") + b"\n")
        self._wake()

    def finish(self, stream: LogStream) -> None:
        """The process has ended: read to the end of the pipe, or for DRAIN_S if something else holds it open."""
        stream.deadline = time.monotonic() + DRAIN_S
        self._wake()

    def close(self, within_s: float = DRAIN_S + 1.0) -> bool:
        """Waits until all is written; False if it did not end in time (a stalled terminal)."""
        self._close_by = time.monotonic() + within_s
        self._wake()
        self._thread.join(within_s + 1.0)
        return not self._thread.is_alive()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"\0")

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._timeout_s()):
                if key.fd == self._wake_reader:
                    os.read(self._wake_reader, 4096)
                else:
                    self._read(key.data)
            self._adopt()
            self._expire()
            if self._close_by is not None and (not self._streams or time.monotonic() >= self._close_by):
                break
        for stream in list(self._streams):
            self._end(stream)
        self._adopt()

    def _timeout_s(self) -> float | None:
        deadlines = [stream.deadline for stream in self._streams if stream.deadline is not None]
        if self._close_by is not None:
            deadlines.append(self._close_by)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _adopt(self) -> None:
        while self._said:
            self._write(2, self._said.popleft())
        while self._incoming:
            stream = self._incoming.popleft()
            self._streams.add(stream)
            self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)

    def _expire(self) -> None:
        now = time.monotonic()
        for stream in [s for s in self._streams if s.deadline is not None and now >= s.deadline]:
            for _ in range(_PIPE_BYTES // _CHUNK_BYTES):  # what the pipe can hold; whoever still writes to it is no rank
                if not self._read(stream):
                    break
            if stream in self._streams:
                self._end(stream)

    def _read(self, stream: LogStream) -> bool:
        """Moves one chunk; False if there was none."""
        try:
            data = os.read(stream.descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end(stream)
            return False
        if stream.file is not None:
            self._write(stream.file, data)
        if stream.console is not None:
            self._write(stream.console, stream.cutter.feed(data))
        return True

    def _end(self, stream: LogStream) -> None:
        if stream.console is not None:
            self._write(stream.console, stream.cutter.rest())
        self._selector.unregister(stream.descriptor)
        os.close(stream.descriptor)
        if stream.file is not None:
            os.close(stream.file)
            self._dead_sinks.discard(stream.file)
        self._streams.discard(stream)

    def _write(self, sink: int, data: bytes) -> None:
        """A sink that fails (closed terminal, full disk) is given up; the ranks go on."""
        if sink in self._dead_sinks:
            return
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(sink, view) :]
            except BlockingIOError:
                select.select([], [sink], [], 1.0)
            except OSError as error:
                self._dead_sinks.add(sink)
                if sink != 2:
                    what = "standard output" if sink == 1 else "a log file"
                    self._write(2, f"tmd-run: {what} cannot be written ({error.strerror}); its further lines are lost\n".encode())
                return
