"""Lines of output: cut, prefixed, and moved by the pump without loss."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmd_worker.agent.logs import LINE_LIMIT_BYTES, Label, LineCutter, LogPump, LogStream


def cut(*chunks: bytes) -> bytes:
    cutter = LineCutter(Label("r"))
    return b"".join([*map(cutter.feed, chunks), cutter.rest()])


def test_every_line_gets_the_prefix_and_the_last_gets_an_end() -> None:
    assert cut(b"a\nb", b"c\n\nd") == b"[r] a\n[r] bc\n[r] \n[r] d\n"


def test_progress_bars_show_each_update() -> None:
    assert cut(b"1%\r2%\r", b"3%\r", b"\nend\r\n") == b"[r] 1%\r[r] 2%\r[r] 3%\r\n[r] end\r\n"


def test_a_line_without_end_is_cut_at_the_limit() -> None:
    cutter = LineCutter(Label("r"))
    assert cutter.feed(b"x" * LINE_LIMIT_BYTES) == b""
    assert cutter.feed(b"x") == b"[r] " + b"x" * (LINE_LIMIT_BYTES + 1) + b"\n"


@given(st.lists(st.binary(max_size=8).map(lambda data: data.replace(b"\x00", b"\n"))))
def test_no_byte_is_lost_however_it_is_chopped(chunks: list[bytes]) -> None:
    cutter = LineCutter(Label("r"))
    cutter._label.prefix = b""
    whole = b"".join(chunks)
    moved = b"".join([*map(cutter.feed, chunks), cutter.rest()])
    assert moved in (whole, whole + b"\n")


@pytest.fixture
def pump() -> LogPump:
    return LogPump()


def fill(writer: int) -> None:
    """Writes until the pipe takes no more."""
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"z" * 4096)
    os.set_blocking(writer, True)


def attach(pump: LogPump, console: int) -> tuple[int, LogStream]:
    reader, writer = os.pipe()
    stream = LogStream(reader, Label("r"), console=console, file=None)
    pump.attach(stream)
    return writer, stream


def test_a_stalled_terminal_stalls_neither_the_caller_nor_loses_lines(pump: LogPump) -> None:
    """1. The terminal does not read. 2. A rank writes more than all pipes hold and ends. 3. The terminal reads again."""
    terminal, console = os.pipe()
    writer, stream = attach(pump, console)
    data = b"y" * 99 + b"\n"

    def rank() -> None:
        for _ in range(5000):
            os.write(writer, data)
        os.close(writer)

    thread = threading.Thread(target=rank)
    thread.start()
    began_s = time.monotonic()
    pump.finish(stream)
    pump.say("not held up")
    assert time.monotonic() - began_s < 5.0
    stream.deadline = None
    received = b""
    while len(received) < 5000 * (len(data) + len(b"[r] ")):
        received += os.read(terminal, 1 << 16)
    thread.join()
    assert received == (b"[r] " + data) * 5000
    assert pump.close()
    os.close(terminal)
    os.close(console)


def test_a_terminal_that_never_reads_does_not_keep_the_agent(pump: LogPump) -> None:
    terminal, console = os.pipe()
    fill(console)
    writer, _ = attach(pump, console)
    os.write(writer, b"a line\n")
    began_s = time.monotonic()
    assert not pump.close(within_s=0.2)
    assert time.monotonic() - began_s < 10.0
    os.close(terminal)  # the thread's write fails now, and it ends
    pump._thread.join(5.0)
    assert not pump._thread.is_alive()
    os.close(console)
    os.close(writer)
