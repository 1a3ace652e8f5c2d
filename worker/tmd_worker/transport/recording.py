"""Recorded answers of small collectives, so that a standby builds with the values that the live ranks saw.

Answers are found by group and call index; one that does not fit the call (other operation, other sizes) is not used.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from tmd_worker.transport.tensors import byte_view, flat, put_back, size_bytes

MAX_ANSWER_BYTES = 64 << 10
MAX_TOTAL_BYTES = 8 << 20


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    operation: str
    #: The bytes of each output tensor.
    outputs: tuple[bytes, ...]


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    #: Layout of what follows; another one is refused.
    version: int
    groups: dict[str, dict[int, _Answer]]
    built: tuple[str, ...]


_VERSION = 1
#: Group names and numbers beside the answers themselves.
_MAX_ENCODED_BYTES = 2 * MAX_TOTAL_BYTES


class BuildRecording:
    """Results per group and call index. Bounded: 64 KiB an answer, 8 MiB in all; what does not fit is left out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[str, dict[int, _Answer]] = {}
        self._total_bytes = 0
        #: What main has built with these answers, for comparison with what a standby builds; empty: not known.
        self.built: tuple[str, ...] = ()

    def __len__(self) -> int:
        return sum(len(answers) for answers in self._groups.values())

    def add(self, group: str, index: int, operation: str, outputs: Sequence[Tensor]) -> None:
        """Keeps a copy of what an operation has written."""
        size = sum(size_bytes(tensor) for tensor in outputs)
        with self._lock:
            if not outputs or size > MAX_ANSWER_BYTES or self._total_bytes + size > MAX_TOTAL_BYTES:
                return
            self._total_bytes += size
            answer = _Answer(operation, tuple(bytes(byte_view(flat(tensor))) for tensor in outputs))
            self._groups.setdefault(group, {})[index] = answer

    def replay(self, group: str, index: int, operation: str, outputs: Sequence[Tensor]) -> bool:
        """Writes the recorded answer into `outputs`; False, and nothing written, if there is none that fits."""
        answer = self._groups.get(group, {}).get(index)
        if answer is None or answer.operation != operation:
            return False
        if [len(data) for data in answer.outputs] != [size_bytes(tensor) for tensor in outputs]:
            return False
        with torch.no_grad():
            for data, tensor in zip(answer.outputs, outputs, strict=True):
                copy = flat(tensor)
                byte_view(copy)[:] = data
                put_back(copy, tensor)
        return True

    def to_bytes(self) -> bytes:
        with self._lock:
            return msgspec.msgpack.encode(_Stored(_VERSION, self._groups, self.built))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> BuildRecording:
        """Raises ValueError for anything that to_bytes did not make."""
        if len(data) > _MAX_ENCODED_BYTES:
            raise ValueError(f"a recording of {len(data)} bytes, the limit is {_MAX_ENCODED_BYTES}")
        try:
            stored = msgspec.msgpack.decode(data, type=_Stored)
        except msgspec.DecodeError as error:
            raise ValueError(f"not a recording of a build: {error}") from None
        if stored.version != _VERSION:
            raise ValueError(f"a recording of version {stored.version}, this tmd reads {_VERSION}")
        recording = cls()
        recording._groups, recording.built = stored.groups, stored.built
        recording._total_bytes = sum(
            len(data) for answers in stored.groups.values() for answer in answers.values() for data in answer.outputs
        )
        return recording
