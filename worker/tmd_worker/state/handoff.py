"""A state or a record over a connected, already authenticated socket, straight into place, every byte covered by a digest.

State: manifest down, answer up, bytes of all entries, then their digests (xxh3_128, in order) down, answer up. An answer is
either "go on" or a refusal with its reason, so both sides know. Whatever goes wrong raises TransferBroken or StateMismatch with
the entry's name; before the first byte is received nothing is touched, after it `Tracked.intact` is False until all is well.
`deadline_s` bounds the time in which nothing at all moves.
"""

from __future__ import annotations

import socket

import torch

from tmd_worker.state.manifest import Manifest
from tmd_worker.state.tracked import Tracked


def send_state(sock: socket.socket, manifest: Manifest, tensors: list[torch.Tensor], deadline_s: float) -> None:
    """Returns once the receiver said that it holds the state."""


def receive_state(sock: socket.socket, tracked: Tracked, deadline_s: float, *, per_rank: bool) -> Manifest:
    """Returns the manifest of what is in place now (`step`, `total_bytes`, the source's record)."""
    raise NotImplementedError


def send_record(sock: socket.socket, step: int, record: bytes | None, tail: bytes | None, deadline_s: float) -> None:
    """A ward's record as its buddy holds it. None: not held (record), not known (tail; b"" is "nothing changed")."""


def receive_record(sock: socket.socket, step: int, deadline_s: float) -> tuple[bytes | None, bytes | None]:
    """(record, tail) of `step`. Raises TransferBroken, also if the record is of another step."""
    raise NotImplementedError
