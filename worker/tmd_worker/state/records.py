"""The records of what is tracked here: taken at the vote, compared at the next boundary, put in place on a joiner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from tmd.protocol.rank import RecordOrigin
from tmd_worker.state import record as wire
from tmd_worker.state import rng, tree
from tmd_worker.state.errors import StateMismatch
from tmd_worker.state.manifest import Manifest
from tmd_worker.state.record import Item, Record

if TYPE_CHECKING:
    from tmd_worker.state.tracked import Tracked

_RNG = "rng"
_LOADER = "loader/"
_OTHER = "other/"
_BUFFER = "buffer/"
#: Records kept: of the step under way, and of the one before in case it is discarded.
_GENERATIONS = 2


class Small:
    """Checked items, ready to be put in place."""

    def __init__(self, tracked: Tracked, items: dict[str, Item]) -> None:
        """Raises StateMismatch naming the item that does not fit what is tracked."""
        self._tracked = tracked
        self._items = items
        expected = {_RNG, *(_LOADER + name for name in tracked.loaders), *(_OTHER + name for name in tracked.others)}
        there = {name for name in items if not name.startswith(_BUFFER)}
        for name in sorted(expected - there):
            raise StateMismatch(f"record: {name} is missing, it is tracked here; nothing was changed")
        for name in sorted(there - expected):
            raise StateMismatch(f"record: {name} is not tracked here; nothing was changed")
        tracked.buffers.check(items)
        self._rng = rng.decode(items[_RNG].data)
        self._trees = {name: tree.decode(items[name].data, name) for name in sorted(there - {_RNG})}

    def put(self, *, with_rng: bool, with_position: bool) -> None:
        """If it fails in the middle the state is unusable (Tracked.intact)."""
        tracked = self._tracked
        tracked.intact = False
        if with_position:
            for name, loader in tracked.loaders.items():
                loader.load(self._trees[_LOADER + name])
        for name, other in tracked.others.items():
            other.load_state_dict(self._trees[_OTHER + name])
        tracked.buffers.put(self._items)
        if with_rng:
            rng.restore(self._rng)
        tracked.intact = True


class Keeper:
    """Takes and keeps the records of one process."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._kept: dict[int, tuple[Record, bytes]] = {}
        #: The record applied last, for its tail.
        self._applied: tuple[Record, bytes] | None = None
        #: The generators' state as it was encoded last.
        self._rng: tuple[rng.RngState, Item] | None = None

    # ---------------------------------------------------------------- own

    def _items(self) -> dict[str, Item]:
        tracked = self._tracked
        items = {_RNG: self._rng_item()}
        for name, loader in tracked.loaders.items():
            items[_LOADER + name] = Item("tree", (), tree.encode(loader.state(), name))
        for name, other in tracked.others.items():
            items[_OTHER + name] = Item("tree", (), tree.encode(other.state_dict(), name))
        return items | tracked.buffers.items()

    def _rng_item(self) -> Item:
        state = rng.capture()
        if self._rng is None or self._rng[0] is not state:
            self._rng = state, Item("tree", (), rng.encode(state))
        return self._rng[1]

    def take(self, step: int) -> bytes:
        record = Record(step, self._items())
        data = wire.encode(record)
        self._keep(record, data)
        return data

    def tail(self, step: int) -> bytes | None:
        record, data = self._kept[step]
        changes = wire.changes(record, data, self._items())
        return None if changes is None else wire.encode(changes)

    def before(self, step: int) -> tuple[bytes, bytes]:
        """Record of the vote before `step` and its tail as of now; without such a record, one made now."""
        if step - 1 not in self._kept:
            return wire.encode(Record(step - 1, self._items())), b""
        return self._kept[step - 1][1], self.tail(step - 1) or b""

    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(wire.encode(Record(0, self._items())))

    def forget(self) -> None:
        self._kept.clear()
        self._applied = None

    def _keep(self, record: Record, data: bytes) -> None:
        self._kept[record.step] = (record, data)
        for old in [step for step in self._kept if step <= record.step - _GENERATIONS]:
            del self._kept[old]

    # ---------------------------------------------------------------- from elsewhere

    def checked(self, record: bytes, tail: bytes, *, step: int) -> Small:
        """Raises StateMismatch, also if they are of another step."""
        return Small(self._tracked, _patched(_decoded(record, step), record, tail))

    def apply(self, data: bytes, *, with_rng: bool) -> None:
        record = wire.decode(data)
        if record.base:
            raise StateMismatch(f"the tail of step {record.step} came where a record is expected; nothing was changed")
        Small(self._tracked, record.items).put(with_rng=with_rng, with_position=True)
        self._applied = (record, data)

    def apply_tail(self, data: bytes) -> None:
        if self._applied is None:
            raise StateMismatch("a tail came without its record; nothing was changed")
        record, base = self._applied
        Small(self._tracked, _patched(record, base, data)).put(with_rng=True, with_position=True)

    def adopt(self, record: bytes | None, tail: bytes | None, manifest: Manifest) -> RecordOrigin:
        step = manifest.step - 1
        if record is None:
            self.checked(manifest.record, manifest.tail, step=step).put(with_rng=False, with_position=True)
            self.forget()
            return "approximate"
        lost = _decoded(record, step)
        origin: RecordOrigin = "exact"
        if tail is not None:
            items = _patched(lost, record, tail)
        else:
            replica = _decoded(manifest.record, step)
            items, unknown = wire.infer_tail(lost, replica, _patched(replica, manifest.record, manifest.tail))
            origin = "approximate" if unknown else "assumed"
        Small(self._tracked, items).put(with_rng=True, with_position=True)
        self._keep(lost, record)
        return origin


def _decoded(data: bytes, step: int) -> Record:
    record = wire.decode(data)
    if record.base or record.step != step:
        what = "tail" if record.base else "record"
        raise StateMismatch(
            f"the {what} of step {record.step} came where the record of step {step} is expected; nothing was changed"
        )
    return record


def _patched(record: Record, data: bytes, tail: bytes) -> dict[str, Item]:
    return wire.patched(record, data, wire.decode(tail)) if tail else record.items
