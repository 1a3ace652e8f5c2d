"""A state arrives bit for bit and ready to go on, or is refused with the entry's name and nothing half done."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from tests.state.builds import Build, build, warmed
from tests.state.test_tracked import BUILDS, run
from tmd_worker.state import rng
from tmd_worker.state.errors import StateError, StateMismatch, TransferBroken
from tmd_worker.state.handoff import receive_record, receive_state, send_record, send_state
from tmd_worker.state.manifest import Manifest, TensorEntry
from tmd_worker.state.stream import MAX_FRAME_BYTES
from tmd_worker.state.tracked import Tracked

DEADLINE_S = 10.0

Sides = tuple[Manifest | BaseException, BaseException | None]


def hand_over(
    source: Tracked,
    target: Tracked,
    *,
    step: int,
    per_rank: bool = True,
    change: Callable[[Manifest, list[torch.Tensor]], tuple[Manifest, list[torch.Tensor]]] = lambda m, t: (m, t),
    wire: Callable[[socket.socket, socket.socket], None] | None = None,
    deadline_s: float = DEADLINE_S,
) -> Sides:
    """(the manifest or the receiver's error, the sender's error). `wire` stands between the two and may damage bytes."""
    manifest, tensors = change(*source.full_state(step=step, epoch=3))
    ends = socket.socketpair()
    sockets = list(ends)
    relay = None
    if wire is not None:
        middle = socket.socketpair()
        sockets += middle
        relay = threading.Thread(target=wire, args=(ends[1], middle[0]))
        relay.start()
        ends = (ends[0], middle[1])
    heard: list[BaseException | None] = [None]

    def send() -> None:
        try:
            send_state(ends[0], manifest, tensors, deadline_s)
        except StateError as error:
            heard[0] = error

    sender = threading.Thread(target=send)
    sender.start()
    received: Manifest | BaseException
    try:
        received = receive_state(ends[1], target, deadline_s, per_rank=per_rank)
    except StateError as error:
        received = error
    if isinstance(received, TransferBroken):
        ends[1].close()
    sender.join(2 * DEADLINE_S)
    assert not sender.is_alive()
    for sock in sockets:
        sock.close()
    if relay is not None:
        relay.join(DEADLINE_S)
        assert not relay.is_alive()
    return received, heard[0]


class Closed(Exception):
    """Raised by a `change` with the last bytes that get through."""


def forward(left: socket.socket, right: socket.socket, change: Callable[[bytes], bytes]) -> None:
    """Carries bytes both ways until either end closes; those from left to right through `change`, which may end it."""

    def back() -> None:
        try:
            while data := right.recv(1 << 16):
                left.sendall(data)
        except OSError:
            pass

    answers = threading.Thread(target=back)
    answers.start()
    try:
        while data := left.recv(1 << 16):
            right.sendall(change(data))
    except Closed as last:
        right.sendall(*last.args)
    except OSError:
        pass
    for sock in (left, right):
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
    answers.join(DEADLINE_S)


# ---------------------------------------------------------------- what arrives


@pytest.mark.parametrize("name", BUILDS)
def test_a_joiner_goes_on_exactly_as_the_leaver_would_have(name: str) -> None:
    make = BUILDS[name]
    undisturbed = make(0)
    expected = run(undisturbed, 13)

    leaver = make(0)
    losses = run(leaver, 7)
    with leaver.own_rng():
        joiner = make(1)
        snapshot = joiner.tracked.snapshot_all()
        run(joiner, 2)
        joiner.tracked.restore_all(snapshot, keep_allocated=True)
    received, _ = hand_over(leaver.tracked, joiner.tracked, step=7)
    assert isinstance(received, Manifest)
    assert (received.step, received.epoch) == (7, 3)
    assert joiner.tracked.digest() == leaver.tracked.digest()
    losses += run(joiner, 6)
    assert losses == expected
    assert joiner.tracked.digest() == undisturbed.tracked.digest()


def test_state_without_any_step_arrives() -> None:
    source, target = build(0), warmed(1)
    received, heard = hand_over(source.tracked, target.tracked, step=0)
    assert isinstance(received, Manifest)
    assert heard is None
    assert target.tracked.digest() == source.tracked.digest()
    assert not target.optimizer.state


def test_parameters_keep_their_memory_and_identity() -> None:
    source, target = build(0), warmed(1)
    run(source, 3)
    before = [(parameter, parameter.data_ptr()) for parameter in target.model.parameters()]
    hand_over(source.tracked, target.tracked, step=3)
    assert [(parameter, parameter.data_ptr()) for parameter in target.model.parameters()] == before


def test_parameters_whose_memory_has_gaps_are_copied_into() -> None:
    def make(value: float) -> tuple[nn.Module, Tracked]:
        model = nn.Module()
        model.weight = nn.Parameter(torch.full((4, 8), value)[:, :4])
        tracked = Tracked()
        tracked.add("model", model)
        return model, tracked

    (_, source), (model, target) = make(2.0), make(0.0)
    received, _ = hand_over(source, target, step=0)
    assert isinstance(received, Manifest)
    assert torch.equal(model.weight, torch.full((4, 4), 2.0))
    assert model.weight.stride() == (8, 1)


def test_a_replica_gives_all_but_what_is_the_lost_ranks_own() -> None:
    """The lost rank's record has its RNG, position and buffers; the rest is the replica's."""
    lost = build(0)
    run(lost, 4)
    record = lost.tracked.record(3)
    after_vote = lost.tracked.digest()
    replica = build(0)
    run(replica, 4)
    replica.model[1].running_mean.add_(3)
    torch.rand(5)
    replica.tracked.record(3)
    joiner = warmed(1)
    received, _ = hand_over(replica.tracked, joiner.tracked, step=4, per_rank=False)
    assert isinstance(received, Manifest)
    assert joiner.tracked.digest()["small"] != after_vote["small"]
    assert joiner.tracked.adopt_record(record, b"", received) == "exact"
    assert joiner.tracked.digest() == after_vote


def replicas_at_vote_and_after(tail: Callable[[Build], Any]) -> tuple[Build, Build, bytes]:
    """Two ranks with the same parameters and other buffers and RNG, at step 3's vote; the replica has done its tail."""
    lost = build(0)
    run(lost, 3)
    record = lost.tracked.record(3)
    replica = build(0)
    run(replica, 3)
    replica.model[1].running_mean.add_(3)
    torch.rand(3)
    replica.tracked.record(3)
    tail(replica)
    return lost, replica, record


def test_an_unknown_tail_is_assumed_to_do_what_it_did_on_the_replica() -> None:
    lost, replica, record = replicas_at_vote_and_after(lambda b: b.tracked.modules["average"].n_averaged.add_(1))
    with replica.own_rng():
        joiner = warmed(1)
    received, _ = hand_over(replica.tracked, joiner.tracked, step=4, per_rank=False)
    assert isinstance(received, Manifest)
    assert joiner.tracked.adopt_record(record, None, received) == "assumed"
    lost.tracked.modules["average"].n_averaged.add_(1)
    assert joiner.tracked.digest() == lost.tracked.digest()


def test_an_unknown_tail_that_changed_what_differs_between_ranks_is_approximate() -> None:
    _, replica, record = replicas_at_vote_and_after(lambda b: b.model[1].running_mean.add_(1))
    joiner = warmed(1)
    received, _ = hand_over(replica.tracked, joiner.tracked, step=4, per_rank=False)
    assert isinstance(received, Manifest)
    assert joiner.tracked.adopt_record(record, None, received) == "approximate"


def test_without_a_record_the_replicas_buffers_and_position_are_taken_and_said_to_be_approximate() -> None:
    replica, joiner = build(0), warmed(1)
    run(replica, 5)
    received, _ = hand_over(replica.tracked, joiner.tracked, step=5, per_rank=False)
    assert isinstance(received, Manifest)
    before = rng.encode(rng.capture())
    assert joiner.tracked.adopt_record(None, None, received) == "approximate"
    assert rng.encode(rng.capture()) == before
    assert joiner.tracked.loaders["data"].state() == replica.tracked.loaders["data"].state()
    assert torch.equal(joiner.model[1].running_mean, replica.model[1].running_mean)


def test_a_record_of_another_step_is_refused_and_changes_nothing() -> None:
    replica, joiner = build(0), warmed(1)
    run(replica, 5)
    old = replica.tracked.record(3)
    received, _ = hand_over(replica.tracked, joiner.tracked, step=5, per_rank=False)
    assert isinstance(received, Manifest)
    before = joiner.tracked.digest()
    with pytest.raises(StateMismatch, match=r"step 3 came.*step 4"):
        joiner.tracked.adopt_record(old, b"", received)
    assert joiner.tracked.digest() == before


def test_buffers_that_the_first_step_makes_arrive_at_a_joiner_that_was_reset() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "cache"):
                self.register_buffer("cache", x.detach().sum())
            return self.weight * self.cache

    def make() -> tuple[Lazy, Tracked]:
        model, tracked = Lazy(), Tracked()
        tracked.add("model", model)
        snapshot = tracked.snapshot_all()
        model(torch.full((1,), 9.0))
        tracked.restore_all(snapshot)
        return model, tracked

    (model, source), (joiner, target) = make(), make()
    model(torch.full((1,), 7.0))
    received, _ = hand_over(source, target, step=1)
    assert isinstance(received, Manifest)
    assert joiner.cache == 7


# ---------------------------------------------------------------- what is refused


def edited(**fields: Any) -> Callable[[Manifest, list[torch.Tensor]], tuple[Manifest, list[torch.Tensor]]]:
    return lambda manifest, tensors: (msgspec.structs.replace(manifest, **fields), tensors)


def with_entries(
    edit: Callable[[list[TensorEntry]], list[TensorEntry]],
) -> Callable[[Manifest, list[torch.Tensor]], tuple[Manifest, list[torch.Tensor]]]:
    return lambda manifest, tensors: (
        msgspec.structs.replace(manifest, entries=tuple(edit(list(manifest.entries)))),
        tensors,
    )


def replaced(index: int, **fields: Any) -> Any:
    def edit(entries: list[TensorEntry]) -> list[TensorEntry]:
        entries[index] = msgspec.structs.replace(entries[index], **fields)
        return entries

    return with_entries(edit)


def entry(name: str, count: int) -> TensorEntry:
    return TensorEntry(name, "float32", (count,), (), 4 * count, "cpu")


DAMAGES: dict[str, tuple[Any, str]] = {
    "missing parameter": (with_entries(lambda e: e[1:]), "model/0.weight is tracked here but missing"),
    "renamed parameter": (replaced(1, name="model/0.slope"), "model/0.bias is tracked here but missing"),
    "parameters swapped": (with_entries(lambda e: [e[1], e[0], *e[2:]]), "model/0.bias stands where model/0.weight"),
    "twice": (with_entries(lambda e: [*e, e[0]]), "model/0.weight: it is there twice"),
    "other type": (replaced(0, dtype="int32"), "model/0.weight has type 'int32' there and 'float32' here"),
    "other shape": (replaced(0, shape=(8, 16)), r"model/0.weight has shape \(8, 16\) there and \(16, 8\) here"),
    "other order": (replaced(0, order=(1, 16)), "model/0.weight has memory order"),
    "impossible order": (replaced(0, order=(3, 3)), "model/0.weight: it has the impossible memory order"),
    "unknown type": (replaced(0, dtype="float31"), "model/0.weight: it has the impossible type"),
    "negative shape": (replaced(0, shape=(-16, -8)), "model/0.weight: it has the impossible type or shape"),
    "wrong size": (replaced(0, size_bytes=4), "model/0.weight: it announces 4 bytes"),
    "extra entry": (with_entries(lambda e: [*e, entry("model/9.weight", 3)]), "model/9.weight is in the state but belongs"),
    "missing optimizer entry": (with_entries(lambda e: e[:-1]), "malformed.*exp_avg_sq"),
    "optimizer entry of another shape": (replaced(-1, shape=(2, 4)), r"exp_avg_sq has shape \(2, 4\)"),
    "beyond all reason": (with_entries(lambda e: [*e, entry("x", 1 << 40)]), "is the most for"),
    "structure": (edited(structure=b"\x91\xa1d"), "structure: malformed"),
    "structure of nothing": (edited(structure=b"\xc0"), "structure: malformed"),
    "record": (edited(record=b""), "too short to be one"),
    "step": (edited(step=9), "step 3 came"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_manifest_that_does_not_fit_is_refused_by_name_on_both_sides_and_nothing_changes(name: str) -> None:
    change, message = DAMAGES[name]
    source, target = build(0), warmed(1)
    run(source, 4)
    source.tracked.record(3)
    before = target.tracked.digest()
    received, heard = hand_over(source.tracked, target.tracked, step=4, change=change)
    assert isinstance(received, StateMismatch)
    assert isinstance(heard, StateMismatch)
    with pytest.raises(StateMismatch, match=message):
        raise received
    with pytest.raises(StateMismatch, match=message):
        raise heard
    assert target.tracked.intact
    assert target.tracked.digest() == before


def test_another_script_is_refused_by_name() -> None:
    source = build(0)
    run(source, 2)

    def other(change: Callable[[Tracked, nn.Module], None], model: nn.Module) -> BaseException:
        tracked = Tracked()
        tracked.set_role(0, 1)
        tracked.add("model", model)
        change(tracked, model)
        received, _ = hand_over(source.tracked, tracked, step=2)
        assert isinstance(received, StateMismatch)
        return received

    wide = nn.Sequential(nn.Linear(8, 32))
    assert "model/0.weight has shape (16, 8) there and (32, 8) here" in str(other(lambda t, m: None, wide))
    assert "optimizers differ: ['optimizer'] only there" in str(other(lambda t, m: t.add("average", average(m)), build(0).model))


def average(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model, use_buffers=True)


def test_hyperparameters_and_schedulers_of_another_kind_are_refused_by_name() -> None:
    source = build(0)
    other = build(0, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    received, _ = hand_over(source.tracked, other.tracked, step=0)
    assert "optimizer: group 0 differs in the hyperparameters ['amsgrad', 'betas'" in str(received)
    other = build(0, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2))
    received, _ = hand_over(source.tracked, other.tracked, step=0)
    assert "scheduler differ: ['gamma', 'step_size'] only here" in str(received)


# ---------------------------------------------------------------- what happens on the way


class Cut:
    """Lets `limit_bytes` pass, then closes the connection."""

    def __init__(self, limit_bytes: int) -> None:
        self.left_bytes = limit_bytes

    def __call__(self, data: bytes) -> bytes:
        if len(data) > self.left_bytes:
            raise Closed(data[: self.left_bytes])
        self.left_bytes -= len(data)
        return data


class Flip:
    """Changes one bit of the byte at `place`."""

    def __init__(self, place: int, bit: int) -> None:
        self.place, self.bit, self.passed = place, bit, 0

    def __call__(self, data: bytes) -> bytes:
        at = self.place - self.passed
        self.passed += len(data)
        if 0 <= at < len(data):
            return data[:at] + bytes([data[at] ^ 1 << self.bit]) + data[at + 1 :]
        return data


def wire_bytes(source: Tracked) -> int:
    """How much the sender sends, about."""
    manifest, _ = source.full_state(step=4, epoch=3)
    return manifest.total_bytes + len(msgspec.msgpack.encode(manifest)) + 17 * len(manifest.entries)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.3, 0.4, 0.5, 0.6, 0.8, 0.9])
def test_a_transfer_that_breaks_leaves_the_state_untouched_or_unusable_and_can_be_repeated(fraction: float) -> None:
    source, target = build(0), warmed(1)
    run(source, 4)
    untouched = target.tracked.digest()
    cut = Cut(int(fraction * wire_bytes(source.tracked)))
    received, heard = hand_over(source.tracked, target.tracked, step=4, wire=lambda a, b: forward(a, b, cut))
    assert isinstance(received, TransferBroken)
    assert isinstance(heard, TransferBroken)
    assert "receiving" in str(received)
    if target.tracked.intact:
        assert target.tracked.digest() == untouched
    else:
        assert fraction > 0
    hand_over(source.tracked, target.tracked, step=4)
    assert target.tracked.digest() == source.tracked.digest()


def test_any_damaged_byte_is_detected() -> None:
    """Wherever it is: in the manifest, a header, an entry or a digest. A damaged length may also look like a stall."""
    source, target = build(0), warmed(1)
    run(source, 4)
    names = {entry.name for entry in source.tracked.full_state(step=4, epoch=3)[0].entries}
    generator = random.Random(7)
    blamed = set()
    for place in [0, 5, 9, 11, *(generator.randrange(wire_bytes(source.tracked)) for _ in range(16))]:
        flip = Flip(place, generator.randrange(8))
        received, heard = hand_over(
            source.tracked, target.tracked, step=4, wire=lambda a, b, flip=flip: forward(a, b, flip), deadline_s=0.5
        )
        assert flip.passed > place
        assert isinstance(received, TransferBroken)
        assert isinstance(heard, TransferBroken)
        blamed.add(str(received).partition(" arrived")[0].partition(",")[0])
    assert "the manifest" in blamed
    assert blamed & names


def test_the_damaged_entry_is_the_one_that_is_named() -> None:
    source, target = build(0), warmed(1)
    run(source, 4)
    manifest, tensors = source.tracked.full_state(step=4, epoch=3)
    wanted = next(n for n, e in enumerate(manifest.entries) if e.name == "optimizer/model/3.weight.exp_avg")
    needle = tensors[wanted].numpy().tobytes()

    def spoil(data: bytes) -> bytes:
        place = data.find(needle[:64])
        return data if place < 0 else data[: place + 5] + bytes([data[place + 5] ^ 1]) + data[place + 6 :]

    received, heard = hand_over(source.tracked, target.tracked, step=4, wire=lambda a, b: forward(a, b, spoil))
    assert str(received).startswith("optimizer/model/3.weight.exp_avg arrived with other bytes than were sent")
    assert not target.tracked.intact
    assert isinstance(heard, TransferBroken)


def test_a_peer_that_stalls_is_given_up_with_the_name_of_what_was_awaited() -> None:
    target = warmed(1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        began_s = time.monotonic()
        with pytest.raises(TransferBroken, match=r"nothing moved for 0.2 s while receiving the manifest"):
            receive_state(ours, target.tracked, 0.2, per_rank=True)
        assert time.monotonic() - began_s < 5
        assert ours.gettimeout() is None
    assert target.tracked.intact


def test_a_frame_that_is_too_large_is_refused_before_memory_is_taken() -> None:
    target = warmed(1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"TMDS" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"))
        with pytest.raises(TransferBroken, match="too large"):
            receive_state(ours, target.tracked, DEADLINE_S, per_rank=True)


def test_records_travel_with_what_is_not_known() -> None:
    for record, tail in ((b"r" * 5_000_000, b""), (b"r", None), (None, None), (b"", b"t")):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            sender = threading.Thread(target=send_record, args=(ours, 8, record, tail, DEADLINE_S))
            sender.start()
            assert receive_record(theirs, 8, DEADLINE_S) == (record, tail)
            sender.join(DEADLINE_S)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_record(ours, 7, b"r", b"", DEADLINE_S)
        with pytest.raises(TransferBroken, match=r"step 7 came.*step 8"):
            receive_record(theirs, 8, DEADLINE_S)


def test_half_a_gibibyte_moves_in_seconds() -> None:
    def make(value: float) -> Tracked:
        model = nn.Module()
        for index in range(8):
            setattr(model, f"weight{index}", nn.Parameter(torch.full((16 << 20,), value)))
        tracked = Tracked()
        tracked.add("model", model)
        return tracked

    source, target = make(1.5), make(0.0)
    began_s = time.monotonic()
    received, _ = hand_over(source, target, step=0)
    took_s = time.monotonic() - began_s
    assert isinstance(received, Manifest)
    assert received.total_bytes == 512 << 20
    assert took_s < 8
    assert all(np.all(parameter.detach().numpy() == 1.5) for parameter in target.parameters.values())
