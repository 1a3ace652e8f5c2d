"""What counts as training state in a script, how to tell that it changed, and what to say about it."""

from __future__ import annotations

import dataclasses
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType
from typing import Any

import numpy as np
import torch
import xxhash
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tmd_worker.check import places
from tmd_worker.state import generators, tree
from tmd_worker.state.errors import StateError
from tmd_worker.state.tensors import to_bytes

#: Of a larger tensor a sample is compared, spread over the whole of it: what trains or averages changes all of it.
MOST_BYTES = 4 << 20
_SAMPLES = 1 << 16
_COUNTING_ITERATORS: tuple[type, ...] = (type(iter(())), type(iter([])), type(iter(range(0))))


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    name: str
    #: What is lost with the rank.
    lost: str
    #: What to do; {path} stands for how the script reaches it, {name} for a name to track it by, {track} for the call that does.
    remedy: str
    #: Its state as bytes that differ when the state does.
    fingerprint: Callable[[Any], bytes]
    #: Whether it is worth a warning although it did not change.
    matters: Callable[[Any], bool] = lambda _: True
    #: It is hardly ever meant to be lost: when it changes, a run ends before its first step.
    sure: bool = True


# ---------------------------------------------------------------- fingerprints


def of_tensors(tensors: Iterable[torch.Tensor]) -> bytes:
    total = xxhash.xxh3_128()
    for tensor in tensors:
        total.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        total.update(_content(tensor))
    return total.digest()


@torch.no_grad()
def _content(tensor: torch.Tensor) -> bytes:
    """Its elements, or a sample of them; what cannot be read as memory is told apart by how often it was written."""
    tensor = tensor.detach()
    try:
        if tensor.numel() * tensor.element_size() > MOST_BYTES:
            tensor = tensor.reshape(-1)[:: tensor.numel() // _SAMPLES]
        return to_bytes(tensor)
    except (RuntimeError, TypeError, NotImplementedError):
        return str(tensor._version).encode()


def _of_state(state: Any) -> bytes:
    """Of nested values; tensors in it by content, what is of no known kind by its text."""
    found: list[torch.Tensor] = []
    try:
        structure = tree.encode(state, "state", lambda _, tensor: found.append(tensor))
    except StateError:
        structure = repr(state).encode()
    return structure + of_tensors(found)


def module_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def loader_parts(loader: DataLoader[Any]) -> list[Any]:
    """Its samplers: what is to be said about the loader covers them."""
    return [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]


def _of_optimizer(optimizer: Optimizer) -> bytes:
    rows = [[{**group, "params": len(group["params"])} for group in optimizer.param_groups], list(optimizer.state.values())]
    return _of_state(rows)


def _of_sampler(sampler: Any) -> bytes:
    return repr(sorted((key, value) for key, value in vars(sampler).items() if isinstance(value, (int, float, str)))).encode()


def _of_iterator(iterator: Any) -> bytes:
    if isinstance(iterator, _BaseDataLoaderIter):
        return str(iterator._num_yielded).encode()
    if not isinstance(iterator, GeneratorType):
        return str(operator.length_hint(iterator, -1)).encode()
    frame = iterator.gi_frame
    if frame is None:
        return b"ended"
    numbers = sorted((key, value) for key, value in places.variables_of(frame).items() if isinstance(value, (int, float, str)))
    return repr((frame.f_lasti, numbers)).encode()


def _of_collection(values: Any) -> bytes:
    return of_tensors(values.values() if isinstance(values, dict) else values)


# ---------------------------------------------------------------- the kinds

_SAY_SO = "or, if it is no part of the training state, say so: session.untracked({path})"
_OF_ITS_OWN = (
    "keep it in a tracked module (register_buffer) or in a tracked object with state_dict and load_state_dict; " + _SAY_SO
)

MODULE = Kind(
    "module",
    "its parameters and buffers; a joiner would have them as they were built",
    "{track}; " + _SAY_SO,
    lambda module: of_tensors(module_tensors(module)),
    matters=lambda module: any(tensor.requires_grad for tensor in module_tensors(module)),
)
OPTIMIZER = Kind("optimizer", "its moments and learning rates", "{track}", _of_optimizer)
SCHEDULER = Kind(
    "scheduler",
    "its position; a joiner would start the schedule anew",
    "{track}",
    lambda schedule: _of_state({key: value for key, value in vars(schedule).items() if isinstance(value, (int, float, list))}),
)
SCALER = Kind(
    "scaler",
    "the loss scale and its growth counter",
    "{track}",
    lambda scaler: _of_state(scaler.state_dict()),
)
GENERATOR = Kind(
    "generator",
    "its position; a joiner would draw other numbers",
    "{track}; " + _SAY_SO,
    lambda generator: _of_state(generators.state_of(generator)),
)
LOADER = Kind(
    "loader",
    "the position in the data; samples would be skipped or seen twice",
    "{track} and take batches from step.next_batch({name!r}); " + _SAY_SO,
    lambda _: b"",
)
SAMPLER = Kind(
    "sampler",
    "its epoch; a joiner would see samples in another order",
    "track the DataLoader that uses it; " + _SAY_SO,
    _of_sampler,
    sure=False,
)
ITERATOR = Kind(
    "iterator",
    "how far it has come; an iterator cannot be copied, so a joiner would start from its beginning",
    "track what it iterates over (a DataLoader, a function data(position, rank), an object with state_dict and "
    "load_state_dict) and take batches from step.next_batch(); " + _SAY_SO,
    _of_iterator,
    matters=lambda _: False,
    sure=False,
)
TENSOR = Kind("tensor", "its values", _OF_ITS_OWN, lambda tensor: of_tensors([tensor]), matters=lambda _: False, sure=False)
TENSORS = Kind(
    "tensors",
    "the tensors in it (averaged weights?)",
    "use torch.optim.swa_utils.AveragedModel and track it, or " + _OF_ITS_OWN,
    _of_collection,
    matters=lambda _: False,
    sure=False,
)
KINDS = (MODULE, OPTIMIZER, SCHEDULER, SCALER, GENERATOR, LOADER, SAMPLER, ITERATOR, TENSOR, TENSORS)


def kind_of(obj: Any) -> Kind | None:
    """None for what is no training state by itself. Runs no code of the object's class."""
    cls = type(obj)
    for kind, classes in _BY_CLASS:
        if issubclass(cls, classes):
            return kind if _counts(kind, obj) else None
    if cls in (dict, list, tuple) and obj and all(isinstance(v, torch.Tensor) for v in (obj.values() if cls is dict else obj)):
        return TENSORS
    return None


_BY_CLASS: tuple[tuple[Kind, tuple[type, ...]], ...] = (
    (MODULE, (torch.nn.Module,)),
    (OPTIMIZER, (Optimizer,)),
    (SCHEDULER, (LRScheduler,)),
    (SCALER, (torch.amp.GradScaler,)),
    (GENERATOR, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)),
    (LOADER, (DataLoader,)),
    (SAMPLER, (Sampler, BatchSampler)),
    (ITERATOR, (GeneratorType, _BaseDataLoaderIter, *_COUNTING_ITERATORS)),
    (TENSOR, (torch.Tensor,)),
)


def _counts(kind: Kind, obj: Any) -> bool:
    if kind is MODULE:
        return next(module_tensors(obj), None) is not None
    if kind is SCALER:
        return bool(obj.is_enabled())
    if kind is GENERATOR:
        return generators.is_generator(obj) and not any(obj is known for known in _global_generators())
    return not (kind is ITERATOR and isinstance(obj, GeneratorType) and obj.gi_running)


def _global_generators() -> list[Any]:
    """Kept by tmd without being asked."""
    return [torch.default_generator, *torch.cuda.default_generators, np.random.mtrand._rand, random._inst]
