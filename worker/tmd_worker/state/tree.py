"""Nested Python values (state_dicts, RNG states) as bytes and back, exactly: types, order of keys and every bit of a float.

MessagePack with the kind of each container in front, so that a tuple comes back as a tuple; no pickle, no code. Tensors are
written inline, or handed to `tensors` and written as a reference to the name they get there.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from tmd_worker.state.errors import StateMismatch, TrackRefused
from tmd_worker.state.tensors import DTYPES, dtype_name, from_bytes, refuse_special, to_bytes

#: Deeper nesting is refused: it is a cycle or an attack on the stack.
MAX_DEPTH = 64
_PLAIN = (type(None), bool, float, str, bytes)
_MAPPINGS: dict[str, type] = {"d": dict, "o": collections.OrderedDict, "c": collections.Counter}
_MAPPING_TAGS = {kind: tag for tag, kind in _MAPPINGS.items()}
_SEQUENCES: dict[str, type] = {"l": list, "t": tuple, "s": torch.Size}
_SEQUENCE_TAGS = {kind: tag for tag, kind in _SEQUENCES.items()}

#: Takes a tensor that is to travel outside the tree, under the name given.
TensorSink = Callable[[str, torch.Tensor], None]


def encode(value: Any, name: str, tensors: TensorSink | None = None) -> bytes:
    """Raises TrackRefused naming the part of `name` that is of no known kind."""
    return msgspec.msgpack.encode(_encode(value, name, tensors, 0))


def decode(data: bytes, name: str, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Raises StateMismatch if `data` is malformed or refers to a tensor that is not in `tensors`."""
    try:
        return _decode(msgspec.msgpack.decode(data), tensors or {}, 0)
    except (msgspec.DecodeError, TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise StateMismatch(f"{name}: malformed: {error}; nothing was taken from it") from error


def _encode(value: Any, name: str, tensors: TensorSink | None, depth: int) -> Any:
    kind = type(value)
    if kind is str and not _is_text(value):
        return ["u", value.encode(errors="surrogatepass")]
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else ["i", str(value)]
    if depth >= MAX_DEPTH:
        raise TrackRefused(f"cannot track {name}: it is nested deeper than {MAX_DEPTH} levels (does it contain itself?)")
    if kind in _SEQUENCE_TAGS:
        return [_SEQUENCE_TAGS[kind], *(_encode(part, f"{name}[{i}]", tensors, depth + 1) for i, part in enumerate(value))]
    if kind in _MAPPING_TAGS:
        flat: list[Any] = [_MAPPING_TAGS[kind]]
        for key, part in value.items():
            flat += [_encode(key, f"{name}: key {key!r}", None, depth + 1), _encode(part, f"{name}.{key}", tensors, depth + 1)]
        return flat
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, name, tensors)
    return _encode_other(value, name)


def _is_text(value: str) -> bool:
    """UTF-8 can hold it: it has no half of a surrogate pair, as os.listdir gives for names that are not UTF-8."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_tensor(value: torch.Tensor, name: str, tensors: TensorSink | None) -> list[Any]:
    refuse_special(name, value)
    if tensors is not None:
        if not _is_text(name):
            raise TrackRefused(f"cannot track {name!r}: the name of a tensor must be UTF-8")
        tensors(name, value)
        return ["r", name]
    return ["x", dtype_name(value.dtype), list(value.shape), to_bytes(value)]


def _encode_other(value: Any, name: str) -> list[Any]:
    kind = type(value)
    if kind is complex:
        return ["z", value.real, value.imag]
    if kind in (set, frozenset):
        parts = sorted((_encode(part, name, None, MAX_DEPTH - 1) for part in value), key=msgspec.msgpack.encode)
        return ["e" if kind is set else "f", *parts]
    if kind is np.ndarray and not value.dtype.hasobject:
        return ["a", value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return ["n", value.dtype.str, value.tobytes()]
    if kind is torch.dtype:
        return ["D", dtype_name(value)]
    if kind is torch.device:
        return ["V", str(value)]
    raise TrackRefused(
        f"cannot track {name}: a {kind.__module__}.{kind.__qualname__} has no form in which it could be handed to another "
        "machine; its state_dict() should hold numbers, strings, lists, dicts and tensors"
    )


def _decode(node: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    if not isinstance(node, list):
        if isinstance(node, dict):
            raise ValueError("a bare map")
        return node
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    tag, *parts = node
    if tag == "r":
        (name,) = parts
        return tensors[name]
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_decode(part, tensors, depth + 1) for part in parts)
    if tag in _MAPPINGS:
        items = [_decode(part, tensors, depth + 1) for part in parts]
        pairs = list(zip(items[::2], items[1::2], strict=True))
        return _MAPPINGS[tag](dict(pairs)) if tag == "c" else _MAPPINGS[tag](pairs)
    if tag in ("e", "f"):
        members = [_decode(part, tensors, depth + 1) for part in parts]
        return set(members) if tag == "e" else frozenset(members)
    return _decode_leaf(tag, parts, tensors)


def _decode_leaf(tag: str, parts: list[Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    match tag, parts:
        case "i", [text]:
            return int(text)
        case "u", [data]:
            return bytes(data).decode(errors="surrogatepass")
        case "x", [dtype, shape, data]:
            return from_bytes(data, dtype, tuple(shape))
        case "z", [real, imag]:
            return complex(real, imag)
        case "a", [dtype, shape, data]:
            return np.frombuffer(data, dtype=_plain_dtype(dtype)).reshape(shape).copy()
        case "n", [dtype, data]:
            return np.frombuffer(data, dtype=_plain_dtype(dtype))[0]
        case "D", [name]:
            return DTYPES[name]
        case "V", [name]:
            return torch.device(name)
    raise ValueError(f"unknown kind {tag!r}")


def _plain_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError(f"array of {name}")
    return dtype
