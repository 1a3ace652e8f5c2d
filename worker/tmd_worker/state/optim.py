"""An optimizer's state by parameter name: read out, put back, cleared, undone.

Contract: state lives in `optimizer.state` (per parameter) and `optimizer.param_groups` (hyperparameters); tensors of either
keep their identity where they can. Names come from the tracked modules.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from tmd_worker.state import tree
from tmd_worker.state.errors import StateMismatch, TrackRefused

#: id of a parameter -> its name among the tracked modules.
Names = Mapping[int, str]
#: And the way back.
Parameters = Mapping[str, torch.nn.Parameter]


def refuse_special(name: str, optimizer: Optimizer) -> None:
    """Raises TrackRefused for the kinds whose step cannot be decided once for all ranks."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TrackRefused(
            f"cannot track {name}: LBFGS evaluates the model inside optimizer.step(), after the vote; use an optimizer that "
            "takes no closure"
        )
    # By name: importing it costs time and a deprecation warning, and who has one has imported it.
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise TrackRefused(
            f"cannot track {name}: ZeroRedundancyOptimizer keeps another part of the state on every rank; this release "
            "replaces ranks of replicated data parallel jobs only"
        )


def parameter_names(name: str, optimizer: Optimizer, names: Names) -> list[list[str]]:
    """Per group. Raises TrackRefused for a parameter that belongs to no tracked module."""
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise TrackRefused(
                    f"cannot track {name}: its parameter {index} of group {number} (shape {tuple(parameter.shape)}) belongs to "
                    "no tracked module, so a joiner would not get it; pass that module to session.track as well"
                )
        groups.append([names[id(parameter)] for parameter in group["params"]])
    return groups


def describe(name: str, optimizer: Optimizer, names: Names, sink: tree.TensorSink) -> bytes:
    """Groups and state as one tree; tensors of the state go to `sink`, named `name`/parameter/key."""
    groups = [
        [members, hyperparameters(group)]
        for members, group in zip(parameter_names(name, optimizer, names), optimizer.param_groups, strict=True)
    ]
    state = {}
    others: dict[Any, Any] = {}
    for key, value in optimizer.state.items():
        if isinstance(key, torch.Tensor):
            if id(key) not in names:
                raise TrackRefused(f"cannot track {name}: it holds state for a tensor that no tracked module knows")
            state[names[id(key)]] = value
        else:
            others[key] = value
    states = {member: tree.encode(value, f"{name}/{member}", sink) for member, value in state.items()}
    return tree.encode({"groups": groups, "state": states, "others": others}, name)


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


class OptimizerState:
    """What `describe` wrote, decoded: checked against an optimizer, then put in place."""

    def __init__(self, name: str, data: bytes) -> None:
        """Raises StateMismatch."""
        self._name = name
        parts = tree.decode(data, name)
        try:
            self.groups: list[tuple[list[str], dict[str, Any]]] = [(group[0], group[1]) for group in parts["groups"]]
            self._states: dict[str, bytes] = dict(parts["state"])
            self._others: dict[Any, Any] = dict(parts["others"])
            #: By parameter, made of the tensors that `check` was given.
            self._checked: dict[str, Any] = {}
        except (TypeError, LookupError, ValueError) as error:
            raise StateMismatch(f"{name}: malformed: {error!r}; nothing was changed") from error

    def check(self, optimizer: Optimizer, parameters: Parameters, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Raises StateMismatch naming what differs. Returns the names in `tensors` that the state refers to.

        The script may have made or changed groups since the build, as when layers are thawed one after the other.
        """
        for number, ((_, there), here) in enumerate(zip(self.groups, optimizer.param_groups, strict=False)):
            differing = sorted(set(there) ^ set(hyperparameters(here)))
            if differing:
                raise StateMismatch(
                    f"{self._name}: group {number} differs in the hyperparameters {differing}; nothing was changed"
                )
        listed = [member for members, _ in self.groups for member in members]
        for member in listed:
            if member not in parameters:
                raise StateMismatch(f"{self._name}: steps {member!r}, which is not tracked here; nothing was changed")
        members = set(listed)
        if len(members) < len(listed):
            raise StateMismatch(f"{self._name}: a parameter is in two groups; nothing was changed")
        for member in self._states:
            if member not in members:
                raise StateMismatch(f"{self._name}: state for {member!r}, which it does not step here; nothing was changed")
        seen = _Seen(tensors)
        self._checked = {member: tree.decode(data, f"{self._name}/{member}", seen) for member, data in self._states.items()}
        return seen.names

    def put(self, optimizer: Optimizer, parameters: Parameters, moved: Mapping[str, torch.Tensor] | None) -> None:
        """In place: groups, hyperparameters, and the state made of the tensors themselves that it was checked with, or of those
        that they were moved to."""
        regroup(optimizer, [[parameters[member] for member in members] for members, _ in self.groups])
        optimizer.state.clear()
        for member, data in self._states.items():
            state = self._checked[member] if moved is None else tree.decode(data, f"{self._name}/{member}", moved)
            optimizer.state[parameters[member]] = state
        optimizer.state.update(self._others)
        for (_, there), here in zip(self.groups, optimizer.param_groups, strict=True):
            put_hyperparameters(here, there)


class _Seen(dict[str, torch.Tensor]):
    """Notes which names were asked for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.names:
            raise ValueError(f"{name!r} is used twice")
        self.names.add(name)
        return super().__getitem__(name)


def put_hyperparameters(group: dict[str, Any], values: dict[str, Any]) -> None:
    """Tensors (a capturable learning rate) are written into, since compiled steps hold on to them."""
    for key, value in values.items():
        here = group.get(key)
        if isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor) and here.shape == value.shape:
            here.detach().copy_(value)
        else:
            group[key] = value


def regroup(optimizer: Optimizer, groups: list[list[torch.nn.Parameter]]) -> None:
    """As many groups as these, with these members; a group that has to be made has no hyperparameters yet."""
    here = optimizer.param_groups
    del here[len(groups) :]
    here.extend({"params": []} for _ in groups[len(here) :])
    for group, members in zip(here, groups, strict=True):
        if [id(member) for member in group["params"]] != [id(member) for member in members]:
            group["params"] = list(members)


class Hyperparameters:
    """A copy of every group's hyperparameters, and who its members are."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        self._groups = [copy_of(hyperparameters(group)) for group in optimizer.param_groups]

    def restore(self, optimizer: Optimizer) -> None:
        regroup(optimizer, self._members)
        for group, values in zip(optimizer.param_groups, self._groups, strict=True):
            for key in hyperparameters(group).keys() - values.keys():
                del group[key]
            put_hyperparameters(group, copy_of(values))


def copy_of(value: Any) -> Any:
    """Independent of `value`: tensors are cloned without their history, everything else is copied deeply."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.preserve_format)
    if type(value) in (int, float, bool, str, bytes, type(None)):
        return value
    if type(value) is dict:
        return {key: copy_of(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_of(part) for part in value)
    return copy.deepcopy(value)


class OptimizerCopy:
    """Parameters (if asked) and state of one optimizer, to go back to exactly that."""

    def __init__(self, optimizer: Optimizer, *, parameters: bool) -> None:
        self._optimizer = optimizer
        members = [p for group in optimizer.param_groups for p in group["params"]] if parameters else []
        self._parameters = [(member, copy_of(member)) for member in members]
        self._state = {key: copy_of(value) for key, value in optimizer.state.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """State that was created since is removed; tensors that are still there keep their identity."""
        for member, saved in self._parameters:
            member.copy_(saved)
        state = self._optimizer.state
        for key in [key for key in state if key not in self._state]:
            del state[key]
        for key, saved in self._state.items():
            state[key] = _written_into(state.get(key), saved)


def _written_into(here: Any, saved: Any) -> Any:
    """`saved`, but in the memory of `here` wherever the two are tensors of one shape and type."""
    if isinstance(here, torch.Tensor) and isinstance(saved, torch.Tensor):
        if (here.shape, here.dtype, here.device) == (saved.shape, saved.dtype, saved.device):
            here.copy_(saved)
            return here
        return saved.clone()
    if type(here) is dict and type(saved) is dict:
        return {key: _written_into(here.get(key), value) for key, value in saved.items()}
    return copy_of(saved)
