"""A whole state described for a joiner, and a state from elsewhere checked and put in place.

Contract: `prepare` compares everything that the manifest says with what is tracked here and touches nothing; between
LoadPlan.begin and LoadPlan.finish the memory of parameters is written straight into, and nothing may be used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tmd_worker.state import tree
from tmd_worker.state.errors import StateMismatch
from tmd_worker.state.manifest import Manifest, TensorEntry
from tmd_worker.state.optim import OptimizerState
from tmd_worker.state.optim import describe as describe_optimizer
from tmd_worker.state.records import Keeper, Small
from tmd_worker.state.tensors import DTYPES, allocate, in_memory, is_dense, refuse_unreadable, size_bytes, write_into
from tmd_worker.state.trackable import load_scaler

if TYPE_CHECKING:
    from tmd_worker.state.tracked import Tracked

_SAME_SCRIPT = "do both run the same script with the same arguments? Nothing was changed"


def describe(tracked: Tracked, records: Keeper, *, step: int, epoch: int) -> tuple[Manifest, list[torch.Tensor]]:
    """The manifest before `step`, and the memory of its entries in order. Raises TrackRefused for one that cannot be read."""
    found: dict[str, torch.Tensor] = dict(tracked.parameters)
    structure = {
        "optimizers": {
            name: describe_optimizer(name, optimizer, tracked.names, found.__setitem__)
            for name, optimizer in tracked.optimizers.items()
        },
        "schedulers": {name: tree.encode(part.state_dict(), name) for name, part in tracked.schedulers.items()},
        "scalers": {name: tree.encode(part.state_dict(), name) for name, part in tracked.scalers.items()},
        "gradients": tracked.gradients.presence(),
    }
    for name, tensor in found.items():
        refuse_unreadable(name, tensor)
    record, tail = records.before(step)
    manifest = Manifest(
        step=step,
        epoch=epoch,
        entries=tuple(TensorEntry.of(name, tensor) for name, tensor in found.items()),
        structure=tree.encode(structure, "structure"),
        record=record,
        tail=tail,
    )
    return manifest, [in_memory(tensor) for tensor in found.values()]


class LoadPlan:
    """A checked hand-over. `destinations`: CPU memory for each entry of the manifest, in its order."""

    def __init__(self, tracked: Tracked, manifest: Manifest, structure: _Structure, small: Small, *, per_rank: bool) -> None:
        self._tracked = tracked
        self._manifest = manifest
        self._structure = structure
        self._small = small
        self._per_rank = per_rank
        self.destinations: list[torch.Tensor] = list(structure.tensors.values())

    def begin(self) -> None:
        """From here on the state in memory is unusable until `finish`."""
        self._tracked.intact = False

    @torch.no_grad()
    def finish(self) -> None:
        """Every destination is filled and its digest right: put all in place; the state is usable again."""
        tracked, structure = self._tracked, self._structure
        for name, parameter in tracked.parameters.items():
            if structure.tensors[name].data_ptr() != parameter.data_ptr():
                write_into(parameter, structure.tensors[name])
        rest = self._manifest.entries[len(tracked.parameters) :]
        moved = None
        if any(entry.device != "cpu" for entry in rest):
            moved = {entry.name: structure.tensors[entry.name].to(_device(tracked, entry)) for entry in rest}
        for name, optimizer in tracked.optimizers.items():
            structure.optimizers[name].put(optimizer, tracked.parameters, moved)
        for name, scheduler in tracked.schedulers.items():
            scheduler.load_state_dict(structure.schedulers[name])
        for name, scaler in tracked.scalers.items():
            load_scaler(scaler, structure.scalers[name])
        tracked.gradients.adopt(structure.gradients)
        self._small.put(with_rng=self._per_rank, with_position=self._per_rank)
        tracked.pool = {}
        tracked.intact = True


class _Structure:
    """The structured part of a manifest, decoded, with memory for the tensors it refers to."""

    def __init__(self, tracked: Tracked, manifest: Manifest) -> None:
        parts = tree.decode(manifest.structure, "structure")
        try:
            self.optimizers = {name: OptimizerState(name, data) for name, data in parts["optimizers"].items()}
            self.schedulers = {name: tree.decode(data, name) for name, data in parts["schedulers"].items()}
            self.scalers = {name: tree.decode(data, name) for name, data in parts["scalers"].items()}
            self.gradients = tracked.gradients.check(parts["gradients"])
        except (TypeError, LookupError, AttributeError) as error:
            raise StateMismatch(f"structure: malformed: {error!r}; nothing was changed") from error
        self.tensors = {entry.name: _destination(tracked, entry) for entry in manifest.entries}

    def check(self, tracked: Tracked, manifest: Manifest) -> None:
        _same_names("optimizers", self.optimizers, tracked.optimizers)
        rest = {entry.name: self.tensors[entry.name] for entry in manifest.entries[len(tracked.parameters) :]}
        used: set[str] = set()
        for name, optimizer in tracked.optimizers.items():
            used |= self.optimizers[name].check(optimizer, tracked.parameters, rest)
        for name in rest.keys() - used:
            raise StateMismatch(f"{name} is in the state but belongs to nothing that is tracked here; {_SAME_SCRIPT}")
        _check_learned(tracked, manifest)
        for kind, there, here in (
            ("schedulers", self.schedulers, tracked.schedulers),
            ("scalers", self.scalers, tracked.scalers),
        ):
            _same_names(kind, there, here)
            for name, state in there.items():
                _same_names(name, state, here[name].state_dict())


def prepare(tracked: Tracked, records: Keeper, manifest: Manifest, *, per_rank: bool) -> LoadPlan:
    """Raises StateMismatch naming the entry; touches nothing."""
    manifest.check_sizes(sum(size_bytes(parameter) for parameter in tracked.parameters.values()))
    _check_parameters(tracked, manifest)
    structure = _Structure(tracked, manifest)
    structure.check(tracked, manifest)
    small = records.checked(manifest.record, manifest.tail, step=manifest.step - 1)
    return LoadPlan(tracked, manifest, structure, small, per_rank=per_rank)


def _check_parameters(tracked: Tracked, manifest: Manifest) -> None:
    here = [TensorEntry.of(name, parameter) for name, parameter in tracked.parameters.items()]
    there = manifest.entries[: len(here)]
    known = {entry.name for entry in manifest.entries}
    for number, ours in enumerate(here):
        if ours.name not in known:
            raise StateMismatch(f"{ours.name} is tracked here but missing in the state; {_SAME_SCRIPT}")
        theirs = there[number]
        if theirs.name != ours.name:
            raise StateMismatch(f"{theirs.name} stands where {ours.name} is expected; {_SAME_SCRIPT}")
        difference = theirs.difference(ours)
        if difference:
            raise StateMismatch(f"{ours.name} has {difference}; {_SAME_SCRIPT}")


def _check_learned(tracked: Tracked, manifest: Manifest) -> None:
    """Optimizer state that the shadow steps have made here must look the same there. Keys that they did not make are taken:
    some optimizers add state late."""
    there = {entry.name: entry for entry in manifest.entries[len(tracked.parameters) :]}
    stepped = {name.rpartition(".")[0] for name in there}
    for name, ours in tracked.learned.items():
        theirs = there.get(name)
        if theirs is None:
            if name.rpartition(".")[0] in stepped:
                raise StateMismatch(f"{name} is missing in the state; {_SAME_SCRIPT}")
        elif difference := theirs.difference(ours):
            raise StateMismatch(f"{name} has {difference}; {_SAME_SCRIPT}")


def _same_names(what: str, there: Any, here: Any) -> None:
    missing, extra = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
    if missing or extra:
        parts = [f"{names} {where}" for names, where in ((missing, "only here"), (extra, "only there")) if names]
        raise StateMismatch(f"{what} differ: {' and '.join(parts)}; {_SAME_SCRIPT}")


def _destination(tracked: Tracked, entry: TensorEntry) -> torch.Tensor:
    """The memory of the parameter itself where possible, else memory of the shadow steps, else new."""
    parameter = tracked.parameters.get(entry.name)
    if parameter is not None and parameter.device.type == "cpu" and is_dense(parameter):
        return parameter.detach()
    kept = tracked.pool.get(entry.name)
    if kept is not None and tracked.learned[entry.name] == entry:
        return kept
    return allocate(entry.shape, entry.order, DTYPES[entry.dtype])


def _device(tracked: Tracked, entry: TensorEntry) -> torch.device:
    """Where an optimizer's tensor belongs: the device of that kind that holds parameters."""
    if entry.device == "cpu":
        return torch.device("cpu")
    return next(parameter.device for parameter in tracked.parameters.values() if parameter.device.type == entry.device)
