"""The record: the part of a rank's state that no replica has, as its buddy keeps it. Pure values; no torch, no pickle.

A record holds named items (RNG, loader positions, buffers, other tracked objects) as they are at the vote on `step`. A tail
holds those that code after the vote changed until the next step began; it names the record that it belongs to by its digest.
Layout: length of the header, header (MessagePack), the items' bytes, xxh3_128 of all before. Equal content, equal bytes.
"""

from __future__ import annotations

import struct

import msgspec
import xxhash

from tmd_worker.state.errors import StateMismatch

VERSION = 1
_LENGTH = struct.Struct("!I")
_DIGEST_BYTES = 16


class Item(msgspec.Struct, frozen=True):
    """One named part. `dtype` "tree": encoded by tree.encode (or rng.encode), and `shape` is ()."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Record(msgspec.Struct, frozen=True):
    """`base` is empty for a record, and for a tail the digest of its record."""

    step: int
    items: dict[str, Item]
    base: bytes = b""


class _Line(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    step: int
    base: bytes
    lines: tuple[_Line, ...]


_DECODER = msgspec.msgpack.Decoder(_Header)


def encode(record: Record) -> bytes:
    items = record.items
    lines = tuple(_Line(name, item.dtype, item.shape, len(item.data)) for name, item in items.items())
    header = msgspec.msgpack.encode(_Header(VERSION, record.step, record.base, lines))
    body = b"".join([_LENGTH.pack(len(header)), header, *(item.data for item in items.values())])
    return body + xxhash.xxh3_128_digest(body)


def decode(data: bytes) -> Record:
    """Raises StateMismatch if any byte is not as it was written."""
    view = memoryview(data)
    if len(view) < _LENGTH.size + _DIGEST_BYTES:
        raise StateMismatch(f"record of {len(view)} bytes is too short to be one; nothing was taken from it")
    body, digest = view[:-_DIGEST_BYTES], view[-_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(body) != digest:
        raise StateMismatch(f"record of {len(view)} bytes is damaged: its digest differs; nothing was taken from it")
    (size,) = _LENGTH.unpack_from(body)
    try:
        header = _DECODER.decode(body[_LENGTH.size : _LENGTH.size + size])
    except msgspec.DecodeError as error:
        raise StateMismatch(f"record has a malformed header: {error}; nothing was taken from it") from error
    if header.version != VERSION:
        raise StateMismatch(f"record of version {header.version}, this release reads {VERSION}; install the same tmd everywhere")
    return Record(header.step, _cut(header.lines, body[_LENGTH.size + size :]), header.base)


def _cut(lines: tuple[_Line, ...], content: memoryview) -> dict[str, Item]:
    items: dict[str, Item] = {}
    offset = 0
    for line in lines:
        end = offset + line.size_bytes
        if line.size_bytes < 0 or end > len(content) or line.name in items:
            raise StateMismatch(f"record: {line.name!r} is there twice or larger than the record; nothing was taken from it")
        items[line.name] = Item(line.dtype, line.shape, bytes(content[offset:end]))
        offset = end
    if offset != len(content):
        raise StateMismatch(f"record: {len(content) - offset} bytes belong to no item; nothing was taken from it")
    return items


def digest_of(encoded: bytes) -> bytes:
    """The digest that a tail of this encoded record names as its base."""
    return encoded[-_DIGEST_BYTES:]


def changes(before: Record, encoded: bytes, after: dict[str, Item]) -> Record | None:
    """The tail: items of `after` that differ from `before` (whose encoding is `encoded`), or None. An item that is gone has
    dtype "gone"."""
    changed = {name: item for name, item in after.items() if before.items.get(name) != item}
    changed |= {name: Item("gone", (), b"") for name in before.items if name not in after}
    return Record(before.step, changed, digest_of(encoded)) if changed else None


def patched(record: Record, encoded: bytes, tail: Record) -> dict[str, Item]:
    """The items after the tail. Raises StateMismatch if it is the tail of another record."""
    if tail.base != digest_of(encoded) or tail.step != record.step:
        raise StateMismatch(f"the tail of step {tail.step} belongs to another record than that of step {record.step} held here")
    items = record.items | tail.items
    return {name: item for name, item in items.items() if item.dtype != "gone"}


def infer_tail(lost: Record, replica: Record, after: dict[str, Item]) -> tuple[dict[str, Item], tuple[str, ...]]:
    """What the lost rank's items were after its tail, judged by what the tail did on a replica (`replica` to `after`).

    An item that was equal on both ranks before is taken to be equal after. Returns the items, and the names of those that
    the replica's tail changed but that had differed before: they keep the value from before the tail.
    """
    items = dict(lost.items)
    unknown = []
    for name in {**replica.items, **after}:
        if replica.items.get(name) == after.get(name):
            continue
        if lost.items.get(name) != replica.items.get(name):
            unknown.append(name)
        elif name in after:
            items[name] = after[name]
        else:
            items.pop(name, None)
    return items, tuple(unknown)
