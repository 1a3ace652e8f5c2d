"""The registry of what the user tracks, and every operation on it as a whole.

Contract, in the order of a process's life:

- `add` at `session.track`; `snapshot_all` before the shadow steps, `restore_all` after them.
- each step: `snapshot_small` at its start (`restore_small` if it is discarded), `record` at the vote, `tail` at the next
  step's start, before that step's `snapshot_small`.
- a source of state: `full_state` at a boundary, the main thread standing still; see handoff.send_state.
- a joiner: `set_role`, then handoff.receive_state, then, unless the state came from the leaver itself, `adopt_record`.

Not thread-safe: one thread at a time, by the caller's order of things. What changes tensors runs under no_grad.
"""

from __future__ import annotations

from typing import Any

import torch

from tmd.protocol.rank import RecordOrigin
from tmd_worker.state.loader import LoaderCursor
from tmd_worker.state.manifest import Manifest


class LoadPlan:
    """A checked hand-over in progress: where each tensor of the manifest goes. See Tracked.prepare_load."""

    #: CPU memory for each entry of the manifest, in its order; contiguous in memory order.
    destinations: list[torch.Tensor]

    def begin(self) -> None:
        """From here on the state in memory is unusable until `finish`."""
        raise NotImplementedError

    def finish(self) -> None:
        """Every destination is filled and its digest right: put all in place; the state is usable again."""
        raise NotImplementedError


class SmallSnapshot:
    """What `restore_small` needs; opaque."""


class FullSnapshot:
    """What `restore_all` needs; opaque."""


class Tracked:
    """See the module's contract. Raises TrackRefused, StateMismatch, StateUnusable (all StateError)."""

    #: By the name given to `track`.
    modules: dict[str, torch.nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    loaders: dict[str, LoaderCursor]
    #: False while a hand-over that began has not ended: nothing here may be used.
    intact: bool

    def add(self, name: str, obj: Any, *, undo: bool = False) -> None:
        """Raises TrackRefused naming `name` and the entry in it that cannot be kept."""

    def needs_undo(self, optimizer: torch.optim.Optimizer) -> bool:
        """It was tracked with undo=True."""
        raise NotImplementedError

    def set_role(self, rank: int, world_size: int) -> None:
        """Tells every loader; raises TrackRefused if one cannot change its role in place."""

    # per step
    def snapshot_small(self) -> SmallSnapshot:
        """RNG, buffers, hyperparameters, schedulers, scalers, other tracked objects; loaders begin a step. The snapshot is
        valid until the next call (its memory is used again)."""
        raise NotImplementedError

    def restore_small(self, snapshot: SmallSnapshot) -> None:
        """The state as at `snapshot_small`; undoes the optimizers that were saved since, sets gradients to None, and lets the
        loaders replay the batches that were drawn."""

    def save_for_undo(self, optimizer: torch.optim.Optimizer) -> None:
        """Call before it steps: keeps its parameters and state. Only the first call in a step counts."""

    def undo(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes back every step of this optimizer since `save_for_undo` in this step; nothing was saved: does nothing."""

    def record(self, step: int) -> bytes:
        """The per-rank small state for the buddy, as it is at the vote on `step`: RNG, loader positions, buffers, other
        tracked objects."""
        raise NotImplementedError

    def tail(self, step: int) -> bytes | None:
        """What has changed since `record(step)`, None: nothing."""
        raise NotImplementedError

    # warm-up
    def snapshot_all(self) -> FullSnapshot:
        """A copy of everything, before the shadow steps."""
        raise NotImplementedError

    def restore_all(self, snapshot: FullSnapshot, *, keep_allocated: bool = False) -> None:
        """Everything as at `snapshot_all`, gradients None, batches given back. `keep_allocated` (a standby): the memory of
        the optimizer state of the shadow steps is kept for the state that will come."""

    # hand-over
    def full_state(self, *, step: int, epoch: int) -> tuple[Manifest, list[torch.Tensor]]:
        """The whole state of this role and the tensors of `Manifest.entries`, in order. No copy where memory is dense CPU
        memory: nothing may change until it is sent."""
        raise NotImplementedError

    def prepare_load(self, manifest: Manifest, *, per_rank: bool) -> LoadPlan:
        """Checks everything and touches nothing; raises StateMismatch naming the entry. `per_rank`: the source is the leaver,
        its RNG and loader position are taken too; else the source is a replica and `adopt_record` must follow."""
        raise NotImplementedError

    def load_full(self, manifest: Manifest, tensors: list[torch.Tensor], *, per_rank: bool) -> None:
        """prepare_load, copy and finish in one, for tensors that are here already."""

    def apply_record(self, data: bytes, *, rng: bool = True) -> None:
        """Raises StateMismatch before anything is touched."""

    def apply_tail(self, data: bytes) -> None:
        """A tail of the record applied last; raises StateMismatch before anything is touched."""

    def adopt_record(self, record: bytes | None, tail: bytes | None, manifest: Manifest) -> RecordOrigin:
        """On a joiner after a replica's state (`manifest`) was loaded: take the lost rank's record as its buddy kept it.

        `tail`: b"" if the buddy was told that nothing changed, None if it does not know. An unknown tail is inferred from what
        the replica's own tail did to entries that were equal on both: "assumed" if that explains all, else "approximate".
        `record` None: the replica's buffers and position are taken, RNG stays: "approximate".
        """
        raise NotImplementedError

    def digest(self) -> dict[str, str]:
        """Stable digests of "parameters", "optimizer" (state, hyperparameters, schedulers, scalers) and "small" (the record)."""
        raise NotImplementedError
