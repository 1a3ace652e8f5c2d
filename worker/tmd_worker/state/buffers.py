"""All buffers of the tracked modules, persistent or not: copied at a step's start, put back, written into a record.

Contract: a buffer is found by its place (module and name), so one that the user's code replaces, registers or removes in a
step is put back too. A tensor that sits in several places counts once, under its first name.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator

import torch

from tmd_worker.state.errors import StateMismatch
from tmd_worker.state.record import Item
from tmd_worker.state.tensors import DTYPES, dtype_name, from_bytes, refuse_special, size_bytes, to_bytes, write_into

_PREFIX = "buffer/"


@dataclasses.dataclass(frozen=True, slots=True)
class _Spec:
    """A buffer that shadow steps made: it may come with a record although it is not here."""

    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


class _Place:
    """One module that may have buffers."""

    def __init__(self, prefix: str, module: torch.nn.Module) -> None:
        self.prefix = prefix
        self.module = module
        self.buffers = module._buffers


class BufferSnapshot:
    """Which tensor sat where, and a copy of its content."""

    def __init__(self) -> None:
        self.seats: list[dict[str, torch.Tensor | None]] = []
        self.originals: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []


class Buffers:
    """The buffers of a growing set of modules."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._learned: dict[str, _Spec] = {}
        self._snapshot = BufferSnapshot()

    def add(self, name: str, module: torch.nn.Module) -> None:
        """Raises TrackRefused for a buffer that cannot be kept."""
        places = [_Place(f"{name}/{path}." if path else f"{name}/", part) for path, part in module.named_modules()]
        for place in places:
            for local, buffer in place.buffers.items():
                if buffer is not None:
                    refuse_special(f"buffer {place.prefix}{local}", buffer)
        self._places += places

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor), each tensor once."""
        seen = set()
        for place in self._places:
            for local, buffer in place.buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield place.prefix + local, buffer

    # ---------------------------------------------------------------- rollback

    def snapshot(self, *, reuse: bool = True) -> BufferSnapshot:
        """With `reuse` the memory of the last such snapshot is written into, which ends that one."""
        now = BufferSnapshot()
        now.seats = [dict(place.buffers) for place in self._places]
        now.originals = [buffer for _, buffer in self]
        if now.originals:
            self._copy(now, self._snapshot if reuse else BufferSnapshot())
        if reuse:
            self._snapshot = now
        return now

    @torch.no_grad()
    def _copy(self, now: BufferSnapshot, before: BufferSnapshot) -> None:
        """What the buffers of `now` hold, into the memory of `before` if they are the same."""
        if len(before.originals) == len(now.originals) and all(
            a is b and _alike(copy, b) for a, b, copy in zip(before.originals, now.originals, before.copies, strict=True)
        ):
            now.copies = before.copies
            torch._foreach_copy_(now.copies, now.originals)
        else:
            now.copies = [buffer.detach().clone() for buffer in now.originals]

    @torch.no_grad()
    def restore(self, snapshot: BufferSnapshot) -> None:
        """The same tensors in the same places with the same content."""
        for place, seats in zip(self._places, snapshot.seats, strict=True):
            if place.buffers.keys() != seats.keys() or any(place.buffers[local] is not seat for local, seat in seats.items()):
                place.buffers.clear()
                place.buffers.update(seats)
        for original, copy in zip(snapshot.originals, snapshot.copies, strict=True):
            write_into(original, copy)

    def learn(self, snapshot: BufferSnapshot) -> None:
        """Remember what has been registered since `snapshot`, before it is removed."""
        for place, seats in zip(self._places, snapshot.seats, strict=True):
            for local, buffer in place.buffers.items():
                if buffer is not None and seats.get(local) is None:
                    self._learned[place.prefix + local] = _Spec(buffer.dtype, buffer.shape, buffer.device)

    # ---------------------------------------------------------------- records

    def items(self) -> dict[str, Item]:
        """Copied in one piece for each type and device: a network may have hundreds of small ones."""
        buffers = list(self)
        if not buffers:
            return {}
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for _, buffer in buffers:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer.detach())
        bodies = {kind: io.BytesIO(to_bytes(torch._C._nn.flatten_dense_tensors(same))) for kind, same in kinds.items()}
        return {
            _PREFIX + name: Item(
                dtype_name(buffer.dtype), tuple(buffer.shape), bodies[buffer.dtype, buffer.device].read(size_bytes(buffer))
            )
            for name, buffer in buffers
        }

    def check(self, items: dict[str, Item]) -> None:
        """Raises StateMismatch unless `items` holds exactly the buffers that are here, or that shadow steps have made."""
        here = {_PREFIX + name: (dtype_name(buffer.dtype), tuple(buffer.shape)) for name, buffer in self}
        learned = {_PREFIX + name: (dtype_name(spec.dtype), tuple(spec.shape)) for name, spec in self._learned.items()}
        there = {name: (item.dtype, item.shape) for name, item in items.items() if name.startswith(_PREFIX)}
        for name in here.keys() - there.keys():
            raise StateMismatch(f"record: {name} is missing, it is a buffer of a tracked module; nothing was changed")
        for name, (dtype, shape) in there.items():
            known = here.get(name) or learned.get(name)
            if known is None:
                raise StateMismatch(f"record: {name} is no buffer of a tracked module here; nothing was changed")
            if known != (dtype, shape):
                raise StateMismatch(
                    f"record: {name} is {dtype}{list(shape)} there and {known[0]}{list(known[1])} here; nothing was changed"
                )
            if len(items[name].data) != torch.Size(shape).numel() * DTYPES[dtype].itemsize:
                raise StateMismatch(f"record: {name} has {len(items[name].data)} bytes; nothing was changed")

    @torch.no_grad()
    def put(self, items: dict[str, Item]) -> None:
        """After `check`."""
        here = dict(self)
        for full, item in items.items():
            if not full.startswith(_PREFIX):
                continue
            name = full.removeprefix(_PREFIX)
            value = from_bytes(item.data, item.dtype, item.shape)
            if name in here:
                write_into(here[name], value)
            else:
                self._register(name, value.to(self._learned[name].device))

    def _register(self, name: str, value: torch.Tensor) -> None:
        for place in self._places:
            local = name.removeprefix(place.prefix)
            if name.startswith(place.prefix) and "." not in local:
                place.buffers[local] = value
                return
        raise StateMismatch(f"record: the module of {name} is not here")


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
