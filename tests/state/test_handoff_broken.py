"""What can happen to a state on its way is detected and named, and never taken for a state."""

from __future__ import annotations

import random
import socket
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from tests.state.builds import build, run, warmed
from tests.state.handoff_rig import DEADLINE_S, Cut, Flip, hand_over, wire_bytes
from tmd_worker.handoff import control as handoff_control
from tmd_worker.handoff.agreement import Agreed, propose
from tmd_worker.handoff.control import MAX_FRAME_BYTES, Control
from tmd_worker.handoff.digests import DIGEST_BYTES, Digests
from tmd_worker.handoff.probe import Transports
from tmd_worker.handoff.tcp import Tcp
from tmd_worker.handoff.transfer import CHUNK_BYTES, Chunk
from tmd_worker.state.errors import TransferBroken
from tmd_worker.state.handoff import GO_ON, Answer, receive_digests, receive_record, send_record, send_state
from tmd_worker.state.manifest import Manifest
from tmd_worker.state.tracked import Tracked


def no_dialing(_fields: dict[str, object], _timeout_s: float) -> socket.socket:
    raise AssertionError("the source has not answered yet")


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.3, 0.4, 0.5, 0.6, 0.8, 0.9])
def test_a_transfer_that_breaks_leaves_the_state_untouched_or_unusable_and_can_be_repeated(fraction: float) -> None:
    source, target = build(0), warmed(1)
    run(source, 4)
    untouched = target.tracked.digest()
    cut = Cut(int(fraction * wire_bytes(source.tracked)))
    received, heard = hand_over(source.tracked, target.tracked, step=4, damage=cut)
    assert isinstance(received, TransferBroken)
    assert isinstance(heard, TransferBroken)
    if target.tracked.intact:
        assert target.tracked.digest() == untouched
    else:
        assert fraction > 0
    hand_over(source.tracked, target.tracked, step=4)
    assert target.tracked.digest() == source.tracked.digest()


def test_any_damaged_byte_is_detected() -> None:
    """Wherever it is: in the manifest, a header, an entry or a digest. A damaged length may also look like a stall. What was read
    damaged is read once more."""
    source, target = build(0), warmed(1)
    run(source, 4)
    generator = random.Random(7)
    blamed, repaired = set(), 0
    for place in [0, 5, 9, 11, *(generator.randrange(wire_bytes(source.tracked)) for _ in range(16))]:
        flip = Flip(place, generator.randrange(8))
        received, heard = hand_over(source.tracked, target.tracked, step=4, damage=flip, deadline_s=0.5)
        assert flip.passed > place
        if isinstance(received, Manifest):
            assert heard is None
            assert target.tracked.digest() == source.tracked.digest()
            repaired += 1
        else:
            assert isinstance(received, TransferBroken)
            assert isinstance(heard, TransferBroken)
            blamed.add(str(received).partition(" arrived")[0].partition(",")[0])
    assert "the manifest" in blamed
    assert repaired


def test_the_damaged_entry_is_the_one_that_is_named() -> None:
    source, target = build(0), warmed(1)
    run(source, 4)
    manifest, tensors = source.tracked.full_state(step=4, epoch=3)
    wanted = next(n for n, e in enumerate(manifest.entries) if e.name == "optimizer/model/3.weight.exp_avg")
    needle = tensors[wanted].numpy().tobytes()

    def spoil(data: bytes) -> bytes:
        place = data.find(needle[:64])
        return data if place < 0 else data[: place + 5] + bytes([data[place + 5] ^ 1]) + data[place + 6 :]

    received, heard = hand_over(source.tracked, target.tracked, step=4, damage=spoil)
    assert str(received).startswith("optimizer/model/3.weight.exp_avg arrived with other bytes than were sent")
    assert not target.tracked.intact
    assert isinstance(heard, TransferBroken)


def test_a_peer_that_stalls_is_given_up_with_the_name_of_what_was_awaited() -> None:
    target = warmed(1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        began_s = time.monotonic()
        with (
            Control(ours, 0.2) as control,
            pytest.raises(TransferBroken, match=r"nothing moved for 0.2 s while receiving the answer to an offer of transports"),
        ):
            propose(control, Transports([Tcp()]), "auto", no_dialing, [], 0.2)
        assert time.monotonic() - began_s < 5
        assert ours.gettimeout() is None
    assert target.tracked.intact


def test_digests_larger_than_any_buffer_wait_for_a_joiner_that_still_reads_bytes() -> None:
    """For longer than the deadline; it says meanwhile that bytes arrive."""
    source = build(0)
    manifest, tensors = source.tracked.full_state(step=0, epoch=3)
    pieces, deadline_s = 30_000, 0.5
    heard: list[str] = []
    ours, theirs = socket.socketpair()

    def send() -> None:
        try:
            with Control(theirs, deadline_s) as control:
                send_state(control, Agreed(Transports([Tcp()])), manifest, tensors[:1] * pieces)
        except TransferBroken as error:
            heard.append(str(error))

    sender = threading.Thread(target=send)
    with ours, theirs, Control(ours, DEADLINE_S) as control:
        sender.start()
        control.receive_bytes("the manifest")
        control.send("an answer", GO_ON)
        until_s = time.monotonic() + 4 * deadline_s
        while time.monotonic() < until_s:
            control.send("a beat", Answer(beat=True))
            threading.Event().wait(deadline_s / 10)
        control.send("an answer", GO_ON)
        assert len(receive_digests(control)) == DIGEST_BYTES * pieces
        control.send("an answer", GO_ON)
        sender.join(DEADLINE_S)
    assert not sender.is_alive()
    assert heard == []


@pytest.mark.parametrize("at_once", [True, False])
def test_digests_that_take_longer_than_the_deadline_are_waited_for(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source says meanwhile that it gets on: a fast wire brings bytes faster than a core computes their digests."""
    deadline_s = 2.0
    monkeypatch.setattr(handoff_control, "BEAT_S", deadline_s / 10)
    take = Digests.take

    def slowly(digests: Digests, chunk: Chunk) -> None:
        threading.Event().wait(deadline_s / 8)
        take(digests, chunk)

    monkeypatch.setattr(Digests, "take", slowly)
    source = build(0)
    manifest, tensors = source.tracked.full_state(step=0, epoch=3)
    large = torch.zeros(12 * CHUNK_BYTES, dtype=torch.uint8)
    ours, theirs = socket.socketpair()

    def send() -> None:
        with Control(theirs, DEADLINE_S) as control:
            send_state(control, Agreed(Transports([Tcp()])), manifest, [*tensors, large])

    sender = threading.Thread(target=send)
    with ours, theirs, Control(ours, deadline_s) as control:
        sender.start()
        control.receive_bytes("the manifest")
        control.send("an answer", Answer(digests=at_once))
        control.send("an answer", GO_ON)
        digests = receive_digests(control)
        control.send("an answer", GO_ON)
        sender.join(DEADLINE_S)
    assert not sender.is_alive()
    assert len(digests) % DIGEST_BYTES == 0
    assert len(digests) > 12 * DIGEST_BYTES


def test_a_frame_that_is_too_large_is_refused_before_memory_is_taken() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"TMDS" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"))
        with Control(ours, DEADLINE_S) as control, pytest.raises(TransferBroken, match="too large"):
            control.receive_bytes("the manifest")


def test_records_travel_with_what_is_not_known() -> None:
    for record, tail in ((b"r" * 5_000_000, b""), (b"r", None), (None, None), (b"", b"t")):
        ours, theirs = socket.socketpair()
        with ours, theirs, Control(ours, DEADLINE_S) as source, Control(theirs, DEADLINE_S) as joiner:
            sender = threading.Thread(target=send_record, args=(source, 8, record, tail))
            sender.start()
            assert receive_record(joiner, 8) == (record, tail)
            sender.join(DEADLINE_S)
    ours, theirs = socket.socketpair()
    with ours, theirs, Control(ours, DEADLINE_S) as source, Control(theirs, DEADLINE_S) as joiner:
        send_record(source, 7, b"r", b"")
        with pytest.raises(TransferBroken, match=r"step 7 came.*step 8"):
            receive_record(joiner, 8)


def test_half_a_gibibyte_moves_in_seconds() -> None:
    def make(value: float) -> Tracked:
        model = nn.Module()
        for index in range(8):
            setattr(model, f"weight{index}", nn.Parameter(torch.full((16 << 20,), value)))
        tracked = Tracked()
        tracked.add("model", model)
        return tracked

    source, target = make(1.5), make(0.0)
    received, _ = hand_over(source, target, step=0)
    assert isinstance(received, Manifest)
    assert received.total_bytes == 512 << 20
    assert all(np.all(parameter.detach().numpy() == 1.5) for parameter in target.parameters.values())
