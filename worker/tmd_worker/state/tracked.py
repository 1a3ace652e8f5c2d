"""The registry of what the user tracks, and every operation on it as a whole.

Contract, in the order of a process's life:

- `set_role`, then `add` at `session.track`; `snapshot_all` before the shadow steps, `restore_all` after them.
- each step: `snapshot_small` at its start, `record` at the vote, `tail` at the next step's start, before that step's
  `snapshot_small`. If it is discarded: `keep_averages` before more of the user's code runs, `restore_small` after it and before
  anybody may be served.
- a source of state: `full_state` at a boundary, the main thread standing still; see state.handoff.
- a joiner: `set_role`, then state.receiving, then, unless the state came from the leaver itself, `adopt_record`.

Not thread-safe: one thread at a time, by the caller's order of things. What changes tensors runs under no_grad.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
import xxhash
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tmd.protocol.rank import RecordOrigin
from tmd_worker.state import generators, optim, records, rng, tree
from tmd_worker.state.buffers import Buffers, BufferSnapshot
from tmd_worker.state.errors import StateUnusable, TrackRefused
from tmd_worker.state.gradients import Gradients, Pattern
from tmd_worker.state.handover import LoadPlan, describe, prepare
from tmd_worker.state.loader import LoaderCursor
from tmd_worker.state.manifest import Manifest, TensorEntry
from tmd_worker.state.optim import Hyperparameters, OptimizerCopy, copy_of
from tmd_worker.state.sources import is_source
from tmd_worker.state.tensors import in_memory, is_dense, memory_of, memory_order, refuse_special, write_into
from tmd_worker.state.trackable import ExtraState, LoadsState, extra_states, load_scaler, refuse_module, unwrapped

#: A tracked object that is copied and sent at every step should not be larger than this.
LARGE_BYTES = 1 << 20

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class SmallSnapshot:
    """What `restore_small` needs."""

    rng: rng.RngState
    buffers: BufferSnapshot
    hyperparameters: dict[str, Hyperparameters]
    #: state_dicts of schedulers, scalers and others, encoded.
    states: dict[str, bytes]
    gradients: Pattern


@dataclasses.dataclass(frozen=True, slots=True)
class FullSnapshot:
    """What `restore_all` needs."""

    small: SmallSnapshot
    parameters: list[tuple[torch.Tensor, torch.Tensor]]
    optimizers: list[OptimizerCopy]


class Tracked:
    """See the module's contract. Raises TrackRefused, StateMismatch, StateUnusable (all StateError)."""

    def __init__(self) -> None:
        self.modules: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.loaders: dict[str, LoaderCursor] = {}
        self.schedulers: dict[str, LRScheduler] = {}
        self.scalers: dict[str, torch.amp.GradScaler] = {}
        self.others: dict[str, LoadsState] = {}
        #: What the script says is no part of the training state.
        self.excused: list[Any] = []
        self.buffers = Buffers()
        #: Every parameter once, under its first name; and the way back.
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.names: dict[int, str] = {}
        self.gradients = Gradients(self.parameters)
        #: What the shadow steps left in the optimizers, by entry name, and (on a standby) its memory.
        self.learned: dict[str, TensorEntry] = {}
        self.pool: dict[str, torch.Tensor] = {}
        #: False while a hand-over that began has not ended: nothing here may be used.
        self.intact = True
        self._role: tuple[int, int] | None = None
        self._tracked: dict[str, Any] = {}
        self._saved: dict[Optimizer, OptimizerCopy] = {}
        self._averages: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._records = records.Keeper(self)

    # ---------------------------------------------------------------- what is tracked

    def add(self, name: str, obj: Any, *, undo: bool = False) -> None:
        """Raises TrackRefused naming `name` and the entry in it that cannot be kept."""
        if not name or "/" in name:
            raise TrackRefused(f"cannot track something under the name {name!r}: a name is not empty and has no '/'")
        obj = unwrapped(obj)
        for known, other in self._tracked.items():
            if other is obj and known == name:
                return
            if other is obj or known == name:
                raise TrackRefused(
                    f"cannot track {name}: " + (f"it is tracked as {known}" if other is obj else "the name is taken")
                )
        if undo and not isinstance(obj, Optimizer):
            raise TrackRefused(f"cannot track {name} with undo=True: that is for optimizers, this is a {type(obj).__name__}")
        self._add(name, obj)
        self._tracked[name] = obj
        rng.note_device()

    def _add(self, name: str, obj: Any) -> None:
        if isinstance(obj, torch.nn.Module):
            self._add_module(name, obj)
        elif isinstance(obj, Optimizer):
            optim.refuse_special(name, obj)
            self.optimizers[name] = obj
        elif isinstance(obj, LRScheduler):
            tree.encode(obj.state_dict(), name)
            self.schedulers[name] = obj
        elif isinstance(obj, torch.amp.GradScaler):
            self.scalers[name] = obj
        elif generators.is_generator(obj):
            generators.tracked[name] = obj
        elif is_source(obj):
            if self._role is None:
                raise ValueError("Tracked.set_role comes before the first source of data")
            self.loaders[name] = LoaderCursor(name, obj, rank=self._role[0], world_size=self._role[1])
        elif hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"):
            self._add_other(name, obj)
        else:
            raise TrackRefused(
                f"cannot track {name}: a {type(obj).__name__} is neither module, optimizer, scheduler, GradScaler, generator nor "
                "data, and has no state_dict() and load_state_dict()"
            )

    def _add_module(self, name: str, module: torch.nn.Module) -> None:
        refuse_module(name, module)
        fresh = {}
        for path, parameter in module.named_parameters():
            refuse_special(f"parameter {name}/{path}", parameter)
            if id(parameter) not in self.names:
                fresh[f"{name}/{path}"] = parameter
        extra = extra_states(name, module)
        self.buffers.add(name, module)
        self.modules[name] = module
        self.parameters |= fresh
        self.names |= {id(parameter): full for full, parameter in fresh.items()}
        self.others |= extra

    def _add_other(self, name: str, obj: LoadsState) -> None:
        size_bytes = len(tree.encode(obj.state_dict(), name))
        if size_bytes > LARGE_BYTES:
            _log.warning(
                "%s has %.1f MiB of state that is copied and sent to another node at every step; an nn.Module is not "
                "(for averaged weights use torch.optim.swa_utils.AveragedModel)",
                name,
                size_bytes / (1 << 20),
            )
        self.others[name] = obj

    def holds(self, obj: Any) -> bool:
        """Whether this very object was tracked, maybe within a wrapper."""
        obj = unwrapped(obj)
        return any(other is obj for other in self._tracked.values())

    def check_complete(self) -> None:
        """Raises TrackRefused if something that belongs to the tracked optimizers was not tracked itself, or if a standby could
        not take over this rank's data."""
        for loader in self.loaders.values():
            loader.require_movable()
        scheduled = {id(scheduler.optimizer) for scheduler in self.schedulers.values()}
        for name, optimizer in self.optimizers.items():
            optim.parameter_names(name, optimizer, self.names)
            attached = hasattr(optimizer.step, "_wrapped_by_lr_sched") and not self.others.keys() - self._extra_names()
            if attached and id(optimizer) not in scheduled:
                raise TrackRefused(
                    f"a learning rate scheduler drives {name} but is not tracked, so a joiner would start it anew; pass it to "
                    "session.track as well"
                )

    def _extra_names(self) -> set[str]:
        return {name for name, other in self.others.items() if isinstance(other, ExtraState)}

    def set_role(self, rank: int, world_size: int) -> None:
        """Tells every loader; raises TrackRefused if one cannot change its role in place."""
        self._role = (rank, world_size)
        for loader in self.loaders.values():
            loader.set_role(rank, world_size)

    # ---------------------------------------------------------------- each step

    def snapshot_small(self) -> SmallSnapshot:
        """RNG, buffers, hyperparameters, schedulers, scalers, other tracked objects; loaders begin a step. The snapshot is
        valid until the next call (its memory is used again)."""
        self._require_intact()
        self._saved.clear()
        for loader in self.loaders.values():
            loader.begin_step()
        return self._snapshot(reuse=True)

    def _snapshot(self, *, reuse: bool) -> SmallSnapshot:
        hyperparameters = {name: Hyperparameters(optimizer) for name, optimizer in self.optimizers.items()}
        states = {name: tree.encode(part.state_dict(), name) for name, part in self._stateful().items()}
        return SmallSnapshot(rng.capture(), self.buffers.snapshot(reuse=reuse), hyperparameters, states, self.gradients.pattern())

    def _stateful(self) -> dict[str, LoadsState]:
        return {**self.schedulers, **self.scalers, **self.others}

    def restore_small(self, snapshot: SmallSnapshot) -> None:
        """The state as at `snapshot_small`; undoes the optimizers that were saved since, takes back what `keep_averages` kept,
        leaves gradients empty, and lets the loaders replay the batches that were drawn."""
        self._require_intact()
        for optimizer in list(self._saved):
            self.undo(optimizer)
        for parameter, value in self._averages:
            write_into(parameter, value)
        self._averages.clear()
        for loader in self.loaders.values():
            loader.rollback()
        self._restore(snapshot)

    @torch.no_grad()
    def _restore(self, snapshot: SmallSnapshot) -> None:
        self.buffers.restore(snapshot.buffers)
        for name, values in snapshot.hyperparameters.items():
            values.restore(self.optimizers[name])
        for name, part in self._stateful().items():
            state = tree.decode(snapshot.states[name], name)
            if isinstance(part, torch.amp.GradScaler):
                load_scaler(part, state)
            else:
                part.load_state_dict(state)
        self.gradients.restore(snapshot.gradients)
        rng.restore(snapshot.rng)

    def keep_averages(self) -> None:
        """The step is given up, and code after its body is still to run: keeps the parameters that no optimizer may step, as of
        averaged weights, which that code changes. A step that counts never pays for this copy."""
        groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        owned = {id(part) for group in groups for part in group["params"]}
        free = [part for part in self.parameters.values() if id(part) not in owned]
        self._averages = [(part, part.detach().to("cpu", copy=True)) for part in free]

    def save_for_undo(self, optimizer: Optimizer) -> None:
        """Call before it steps: keeps its parameters and state. Only the first call in a step counts."""
        if optimizer not in self._saved:
            self._saved[optimizer] = OptimizerCopy(optimizer, parameters=True)

    def undo(self, optimizer: Optimizer) -> None:
        """Takes back every step of this optimizer since `save_for_undo` in this step; nothing was saved: does nothing."""
        saved = self._saved.pop(optimizer, None)
        if saved is not None:
            saved.restore()

    def record(self, step: int) -> bytes:
        """The per-rank small state for the buddy, as it is at the vote on `step`: RNG, loader positions, buffers, other
        tracked objects."""
        self._require_intact()
        return self._records.take(step)

    def tail(self, step: int) -> bytes | None:
        """What has changed since `record(step)`, None: nothing. Raises KeyError if there is no such record."""
        self._require_intact()
        return self._records.tail(step)

    # ---------------------------------------------------------------- warm-up

    def snapshot_all(self) -> FullSnapshot:
        """A copy of everything, before the shadow steps. Raises TrackRefused if something that belongs was not tracked."""
        self._require_intact()
        self.check_complete()
        for loader in self.loaders.values():
            loader.hold()
        parameters: list[tuple[torch.Tensor, torch.Tensor]] = [(part, copy_of(part)) for part in self.parameters.values()]
        copies = [OptimizerCopy(optimizer, parameters=False) for optimizer in self.optimizers.values()]
        return FullSnapshot(self._snapshot(reuse=False), parameters, copies)

    @torch.no_grad()
    def restore_all(self, snapshot: FullSnapshot, *, keep_allocated: bool = False) -> None:
        """Everything as at `snapshot_all`, batches given back. `keep_allocated` (a standby): the memory of optimizer state and
        gradients of the shadow steps is kept for the state that will come."""
        self._learn(keep_allocated=keep_allocated)
        self.buffers.learn(snapshot.small.buffers)
        for parameter, saved in snapshot.parameters:
            write_into(parameter, saved)
        for copy in snapshot.optimizers:
            copy.restore()
        for loader in self.loaders.values():
            loader.give_back()
        self._saved.clear()
        self._records.forget()
        self._restore(snapshot.small)

    def _learn(self, *, keep_allocated: bool) -> None:
        found: dict[str, torch.Tensor] = {}
        for name, optimizer in self.optimizers.items():
            optim.describe(name, optimizer, self.names, found.__setitem__)
        self.learned = {name: TensorEntry.of(name, tensor) for name, tensor in found.items()}
        if keep_allocated:
            self.gradients.learn()
            self.pool = {
                name: tensor.detach()
                for name, tensor in found.items()
                if tensor.device.type == "cpu" and in_memory(tensor).data_ptr() == tensor.data_ptr()
            }

    # ---------------------------------------------------------------- hand-over

    def full_state(self, *, step: int, epoch: int) -> tuple[Manifest, list[torch.Tensor]]:
        """The whole state of this role before `step`, and the tensors of `Manifest.entries`, in order. No copy where memory is
        dense CPU memory: nothing may change until it is sent."""
        self._require_intact()
        return describe(self, self._records, step=step, epoch=epoch)

    def in_reach(self) -> list[torch.Tensor]:
        """Dense CPU memory that a hand-over from or to here will probably touch, as of now: parameters and what the optimizers
        hold (on a standby: held in its shadow steps). The one method that another thread may call while the script runs."""
        states = [
            dict(state)
            for optimizer in self.optimizers.values()
            for state in list(optimizer.state.values())
            if type(state) is dict
        ]
        held = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        tensors = [part.detach() for part in (*self.parameters.values(), *held, *self.pool.values())]
        return [part for part in tensors if part.device.type == "cpu" and is_dense(part)]

    def prepare_load(self, manifest: Manifest, *, per_rank: bool) -> LoadPlan:
        """Checks everything and touches nothing; raises StateMismatch naming the entry. `per_rank`: the source is the leaver,
        its RNG and loader position are taken too; else the source is a replica and `adopt_record` must follow."""
        return prepare(self, self._records, manifest, per_rank=per_rank)

    def apply_record(self, data: bytes, *, with_rng: bool = True) -> None:
        """Raises StateMismatch before anything is touched."""
        self._records.apply(data, with_rng=with_rng)

    def apply_tail(self, data: bytes) -> None:
        """A tail of the record applied last; raises StateMismatch before anything is touched."""
        self._records.apply_tail(data)

    def adopt_record(self, record: bytes | None, tail: bytes | None, manifest: Manifest) -> RecordOrigin:
        """On a joiner after a replica's state (`manifest`) was loaded: take the lost rank's record as its buddy kept it.

        `tail`: b"" if the buddy was told that nothing changed, None if it does not know. An unknown tail is inferred from what
        the replica's own tail did to entries that were equal on both: "assumed" if that explains all, else "approximate".
        `record` None: the replica's buffers and position are taken, RNG stays: "approximate".
        """
        self._require_intact()
        return self._records.adopt(record, tail, manifest)

    # ---------------------------------------------------------------- comparison

    def digest(self) -> dict[str, str]:
        """Stable digests of "parameters", "optimizer" (state, hyperparameters, schedulers, scalers) and "small" (the record)."""
        self._require_intact()
        manifest, tensors = describe(self, self._records, step=0, epoch=0)
        sums = {"parameters": xxhash.xxh3_128(), "optimizer": xxhash.xxh3_128(manifest.structure)}
        for index, (entry, tensor) in enumerate(zip(manifest.entries, tensors, strict=True)):
            total = sums["parameters" if index < len(self.parameters) else "optimizer"]
            total.update(f"{entry.name} {entry.dtype} {entry.shape} {memory_order(tensor)};".encode())
            total.update(memory_of(tensor).data)
        return {**{name: total.hexdigest() for name, total in sums.items()}, "small": self._records.digest()}

    def _require_intact(self) -> None:
        if not self.intact:
            raise StateUnusable(
                "a hand-over of state broke in the middle, so what is in memory is neither the old state nor the new one; it can "
                "only be loaded again"
            )
