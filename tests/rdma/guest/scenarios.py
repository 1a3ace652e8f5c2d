"""The second host: reads from the sources on the first one, also where that goes wrong, and reports each scenario by a line.

scenarios [NAME…]: all, or these
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tests.rdma.guest.handoffs import (
    CONNECT_TIMEOUT_S,
    AfterChunks,
    Handoff,
    Source,
    in_child,
    set_link,
    wait_for_port,
    work_for,
)
from tests.rdma.guest.lines import DATA_NETWORK, SOURCES, dial, report
from tests.rdma.guest.migration import migration
from tests.rdma.guest.tensors import Tensors
from tmd_worker.handoff import rdma, rdma_ports, rdma_queues, verbs
from tmd_worker.handoff.rdma import Answer, Rdma
from tmd_worker.handoff.transfer import Region, TransferFailed

MIB = 1 << 20
#: 11 chunks.
LARGE = [24 * MIB, 12 * MIB + 4096, 8 * MIB - 1]
#: A fault comes after so many chunks, and with so few asked for at once that most are still to be asked for.
IN_THE_MIDDLE = 2
FEW_UNDER_WAY = 4
WR_RDMA_WRITE = 0
NOBODY = 65534
BOOT_TIMEOUT_S = 600.0
HANGS_S = 240.0
MEASURING_TIMEOUT_S = 180.0


def probe() -> dict[str, Any]:
    """What this host finds of its own, with its link up and down, and for a user who may lock no memory."""

    def locked() -> str:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
        os.setuid(NOBODY)
        return Rdma().probe()

    port = rdma_ports.best(rdma_ports.ports())
    assert port is not None
    gid = rdma_ports.gid_for(port)
    assert gid is not None
    usable = Rdma().probe()
    limited = in_child(locked)[1]
    set_link("down")
    down = Rdma().probe()
    set_link("up")
    again = wait_for_port(Rdma())
    return {
        "port": str(port),
        "gid": gid.address,
        "kind": gid.kind,
        "usable": usable,
        "limited": limited,
        "down": down,
        "again": again,
    }


def read() -> dict[str, Any]:
    """A whole state in large entries."""
    return _read_all(LARGE, gap_bytes=64)


def odd() -> dict[str, Any]:
    """Entries of no bytes, of few, unaligned, and one byte around the limits of pages and chunks."""
    return _read_all([0, 1, 2, 3, 0, 7, 4095, 4096, 4097, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 0, 65, 1, 0], gap_bytes=13)


def thousand() -> dict[str, Any]:
    """A thousand small tensors, each with memory of its own."""
    return _read_all([17 + number * 3 for number in range(1000)], gap_bytes=5)


def nothing() -> dict[str, Any]:
    """A state without a byte."""
    return _read_all([0, 0], gap_bytes=1)


def _read_all(sizes: list[int], gap_bytes: int) -> dict[str, Any]:
    source = Source(sizes, gap_bytes=gap_bytes)
    tensors = Tensors(sizes, gap_bytes)
    handoff = Handoff(source, tensors)
    work = work_for(sizes)
    handoff.read(work)
    facts = {
        "entries": len(sizes),
        "bytes": sum(sizes),
        "equal": tensors.checksums() == source.checksums,
        "guarded": tensors.guarded(),
        "missing": work.missing,
    }
    handoff.close()
    source.end()
    return facts


def keys() -> dict[str, Any]:
    """Wrong keys, another handoff's key, a key after its handoff, and writing where reading is allowed."""
    sizes = [MIB, 5000]
    source, other = Source(sizes), Source(sizes, seed=2)
    before = source.checksums

    def refused(regions: Callable[[Handoff], list[Region]], write: bool = False, close: bool = False) -> dict[str, Any]:
        tensors = Tensors(sizes, 64)
        handoff = Handoff(source, tensors)
        handoff.regions = regions(handoff)
        if close:
            source.ask("close", transport="rdma")
        work = work_for(sizes)
        with changed(verbs, "WR_RDMA_READ", WR_RDMA_WRITE if write else verbs.WR_RDMA_READ):
            reason = handoff.failing_read(work)
        handoff.end.close()
        if not close:
            source.ask("close", transport="rdma")
        return {"reason": reason, "untouched": tensors.untouched(), "missing": work.missing}

    another = Handoff(other, Tensors(sizes, 64))
    facts = {
        "wrong": refused(lambda handoff: [msgspec.structs.replace(region, key=region.key ^ 0x55) for region in handoff.regions]),
        "others": refused(lambda _: another.regions),
        "beside": refused(lambda handoff: [msgspec.structs.replace(r, address=r.address + 64) for r in handoff.regions]),
        "write": refused(lambda handoff: handoff.regions, write=True),
        "closed": refused(lambda handoff: handoff.regions, close=True),
        "unharmed": source.checksums == before,
    }
    another.close()
    return facts


@contextlib.contextmanager
def changed(module: types.ModuleType, name: str, value: int) -> Iterator[None]:
    """A constant of the transport has another value for a while."""
    usual = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, usual)


def nowhere() -> dict[str, Any]:
    """A source's address that no network here leads to, and one at which nobody is."""
    source = Source([MIB])

    def connect(gid: str) -> str:
        joiner = Rdma().joiner(lambda *_: (_ for _ in ()).throw(OSError("not dialed")))
        accepted = source.ask("accept", transport="rdma", hello=joiner.hello().hex(), timeout_s=CONNECT_TIMEOUT_S)
        answer = msgspec.msgpack.decode(bytes.fromhex(accepted["answer"]), type=Answer)
        moved = msgspec.structs.replace(answer, endpoint=msgspec.structs.replace(answer.endpoint, gid=gid))
        try:
            joiner.connect(msgspec.msgpack.encode(moved), CONNECT_TIMEOUT_S)
        except TransferFailed as error:
            return str(error)
        finally:
            joiner.close()
            source.ask("close", transport="rdma")
        raise AssertionError("there was a connection")

    return {
        "unrouted": connect("0000:0000:0000:0000:0000:ffff:0a51:0001"),
        "absent": connect("0000:0000:0000:0000:0000:ffff:0a50:0063"),
    }


def source_killed() -> dict[str, Any]:
    """
    1. two sources hold the same state; the joiner reads from the first one
    2. the first one is killed when some chunks have landed
    3. the second one is read for what is missing
    """
    first, second, killer = Source(LARGE), Source(LARGE), Source([])
    tensors = Tensors(LARGE, 64)
    before, after = Handoff(first, tensors), Handoff(second, tensors)
    fault = AfterChunks(IN_THE_MIDDLE, lambda: killer.ask("kill", pid=first.pid))
    work = work_for(LARGE, fault)
    facts = {"reason": before.failing_read(work), "noticed_s": fault.seconds, "missing": work.missing}
    after.read(work)
    facts |= {"equal": tensors.checksums() == second.checksums, "guarded": tensors.guarded()}
    before.end.close()
    after.close()
    return facts


def link_down() -> dict[str, Any]:
    """
    1. the joiner reads, and has a connection of tcp besides
    2. its link goes down when some chunks have landed; the rest goes over tcp
    3. the link comes up, and the next handoff goes over rdma again
    """
    source = Source(LARGE)
    tensors = Tensors(LARGE, 64)
    direct, tcp = Handoff(source, tensors), Handoff(source, tensors, "tcp")
    fault = AfterChunks(IN_THE_MIDDLE, lambda: set_link("down"))
    work = work_for(LARGE, fault)
    facts = {"reason": direct.failing_read(work), "noticed_s": fault.seconds, "missing": work.missing}
    tcp.read(work)
    facts |= {"equal": tensors.checksums() == source.checksums, "guarded": tensors.guarded()}
    set_link("up")  # before the source's end is closed: what it has sent and nobody takes would keep it for a minute and a half
    direct.close()
    tcp.close()
    return {**facts, "again": wait_for_port(Rdma()), "next": _read_all([MIB], 64)["equal"]}


def peer_down() -> dict[str, Any]:
    """The source's link goes down, which this host cannot see: the chunk's deadline ends it, and tcp moves the rest."""
    source = Source(LARGE)
    tensors = Tensors(LARGE, 64)
    direct, tcp = Handoff(source, tensors), Handoff(source, tensors, "tcp")

    def there(argv: list[str]) -> None:
        source.ask("run", argv=argv)

    fault = AfterChunks(IN_THE_MIDDLE, lambda: set_link("down", there))
    work = work_for(LARGE, fault)
    facts = {"reason": direct.failing_read(work, timeout_s=30.0), "noticed_s": fault.seconds, "missing": work.missing}
    tcp.read(work)
    facts |= {"equal": tensors.checksums() == source.checksums, "guarded": tensors.guarded()}
    # Before the source's end is closed: its kernel may panic when packets that wait for the link outlive their queue pair.
    set_link("up", there)
    direct.close()
    tcp.close()
    return facts


def joiner_killed() -> dict[str, Any]:
    """A joiner is killed while it reads: the source's memory is unharmed, its end closes, and the next joiner reads all."""
    source = Source(LARGE)
    before = source.checksums

    def join() -> str:
        Handoff(source, Tensors(LARGE, 64)).read(
            work_for(LARGE, AfterChunks(IN_THE_MIDDLE, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        )
        return "it was not killed"

    status, said = in_child(join)
    source.ask("close", transport="rdma")
    tensors = Tensors(LARGE, 64)
    handoff = Handoff(source, tensors)
    handoff.read(work_for(LARGE))
    facts = {
        "signal": os.WTERMSIG(status),
        "said": said,
        "unharmed": source.checksums == before,
        "next": tensors.checksums() == before,
    }
    handoff.close()
    return facts


def bandwidth() -> dict[str, Any]:
    """What `read` moves a second against perftest's ib_read_bw, in turns, both with reads of 4 MiB, and equally patient."""
    port = rdma_ports.best(rdma_ports.ports())
    assert port is not None
    gid = rdma_ports.gid_for(port)
    assert gid is not None
    sizes = [64 * MIB]
    source = Source(sizes)
    common = ["ib_read_bw", "-d", port.device, "-x", str(gid.index), "-s", str(4 * MIB), "-n", "16", "-F"]
    common += ["-u", str(rdma_queues.ANSWER_EXPONENT), "-p"]
    theirs, ours = [], []
    for turn in range(3):
        argv = [*common, str(18515 + turn)]
        source.ask("start", argv=argv)
        theirs.append(_ib_read_bw([*argv, SOURCES]))
        handoff = Handoff(source, Tensors(sizes, 64))
        started_s = time.monotonic()
        handoff.read(work_for(sizes))
        ours.append(64 / (time.monotonic() - started_s))
        handoff.close()
    return {"ib_read_bw_mib_s": theirs, "read_mib_s": ours, "ratio": sorted(ours)[1] / sorted(theirs)[1]}


def _ib_read_bw(argv: list[str]) -> float:
    """Its average, MiB/s. Its server may not listen yet."""
    deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=MEASURING_TIMEOUT_S)
        if done.returncode == 0:
            row = next(line.split() for line in done.stdout.splitlines() if line.split()[:1] == [str(4 * MIB)])
            return float(row[3])
        assert time.monotonic() < deadline_s, done.stdout + done.stderr
        time.sleep(0.2)


FAULTS = (source_killed, link_down, peer_down, joiner_killed)
SCENARIOS = (probe, read, odd, thousand, nothing, keys, nowhere, *FAULTS, bandwidth, migration)


def main() -> None:
    report("scenarios", address=f"{DATA_NETWORK}2")
    dial(time.monotonic() + BOOT_TIMEOUT_S).close()  # the other host is there
    names = sys.argv[1:]
    for scenario in [each for each in SCENARIOS if not names or each.__name__ in names]:
        faulthandler.dump_traceback_later(HANGS_S, repeat=True)  # what hangs is named on the console
        started_s = time.monotonic()
        try:
            with changed(rdma, "CHUNKS_UNDER_WAY", FEW_UNDER_WAY if scenario in FAULTS else rdma.CHUNKS_UNDER_WAY):
                facts = scenario()
        except Exception:
            facts = {"failed": traceback.format_exc()}
        report(scenario.__name__, seconds=round(time.monotonic() - started_s, 1), **facts)
    report("end")


if __name__ == "__main__":
    main()
