"""What a script holds: everything that can be reached from the variables of its running functions and of its modules.

Contract: runs no code of the script (no properties, no iteration of its own types), changes nothing, and ends: at most
MOST_OBJECTS are looked at, and of a long list or dict only the first entries.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tmd_worker.check import kinds, places
from tmd_worker.check.kinds import Kind

MOST_OBJECTS = 200_000
#: Entries of a list or dict with more of them are taken to be all alike.
MOST_ENTRIES = 1_000

_ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    ModuleType,
    CodeType,
    FrameType,
    BuiltinFunctionType,
    torch.dtype,
)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
#: Iterators of Python's own around others.
_WRAPPERS = (zip, map, filter, enumerate, itertools.chain, itertools.cycle, itertools.islice)
#: Parts of torch and tmd whose insides are no business of the script.
_CLOSED = ("tmd", "tmd_worker", "torch.distributed", "torch._C", "torch._dynamo", "threading", "logging", "asyncio")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One object and the way to it."""

    obj: Any
    path: str
    parent: Node | None = None
    #: Says where it is bound; "" if that cannot be told.
    place: Callable[[], str] = str

    def where(self) -> str:
        """`file:line` at which it, or what holds it, is bound; "" if that is not known."""
        node: Node | None = self
        while node is not None:
            found = node.place()
            if found:
                return found
            node = node.parent
        return ""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Held:
    """State that the script holds and that was not tracked."""

    node: Node
    kind: Kind
    #: Of a module: those of its tensors that no tracked module knows.
    tensors: tuple[torch.Tensor, ...] = ()

    @property
    def obj(self) -> Any:
        return self.node.obj

    def fingerprint(self) -> bytes:
        return kinds.of_tensors(self.tensors) if self.tensors else self.kind.fingerprint(self.obj)

    def matters(self) -> bool:
        return any(tensor.requires_grad for tensor in self.tensors) if self.tensors else self.kind.matters(self.obj)


def roots(frame: FrameType) -> Iterator[Node]:
    """The variables of the user's functions that are running, outermost first, then those of the user's modules."""
    frames = places.users_frames(frame)
    for running in frames:
        yield from _variables(running)
    seen = {id(running.f_globals) for running in frames}
    for module in places.users_modules():
        if id(vars(module)) not in seen:
            file = str(vars(module)["__file__"])
            for name, value in list(vars(module).items()):
                yield Node(value, f"{module.__name__}.{name}", place=functools.partial(places.line_of_local, file, 0, name))


def _variables(frame: FrameType) -> Iterator[Node]:
    code = frame.f_code
    first_line = 0 if code.co_name == "<module>" else code.co_firstlineno
    for name, value in places.variables_of(frame).items():
        yield Node(value, name, place=functools.partial(places.line_of_local, code.co_filename, first_line, name))
    if first_line:
        for name, value in list(frame.f_globals.items()):
            yield Node(value, name, place=functools.partial(places.line_of_local, code.co_filename, 0, name))


class Walk:
    """One look at everything, breadth first, so that each object gets the shortest name."""

    def __init__(self, *, known_tensors: set[int], known: Callable[[Any], bool], excused: Sequence[Any] = ()) -> None:
        """`known_tensors`: by id; `known`: whether this very object needs no mention, `excused`: neither it nor what is in it."""
        self._known_tensors = set(known_tensors)
        self._known = known
        self._seen: set[int] = {id(obj) for obj in excused}
        #: Keeps what was seen alive, so that ids stay theirs.
        self._alive: list[Any] = []
        self._inside: set[int] = set()

    def run(self, start: Iterable[Node]) -> list[Held]:
        found: list[Held] = []
        queue = collections.deque(start)
        while queue and len(self._alive) < MOST_OBJECTS:
            node = queue.popleft()
            if issubclass(type(node.obj), _ATOMS) or id(node.obj) in self._seen:
                continue
            self._seen.add(id(node.obj))
            self._alive.append(node.obj)
            held = self._held(node)
            if held is not None:
                found.append(held)
            queue.extend(self._children(node, held))
        return [held for held in found if id(held.obj) not in self._inside]

    def _held(self, node: Node) -> Held | None:
        kind = kinds.kind_of(node.obj)
        if kind is None or self._known(node.obj):
            return None
        if kind is kinds.MODULE:
            return self._held_module(node)
        if kind is kinds.ITERATOR and node.parent is not None and kinds.kind_of(node.parent.obj) is kinds.ITERATOR:
            return None  # what is to be said about the outer one covers it
        if kind in (kinds.TENSOR, kinds.TENSORS):
            tensors = _values(node.obj) if kind is kinds.TENSORS else [node.obj]
            if all(id(tensor) in self._known_tensors for tensor in tensors):
                return None
        return Held(node, kind)

    def _held_module(self, node: Node) -> Held | None:
        module: torch.nn.Module = node.obj
        everything = list(kinds.module_tensors(module))
        unknown = [tensor for tensor in everything if id(tensor) not in self._known_tensors]
        if len(unknown) == len(everything):
            self._inside.update(id(part) for part in module.modules() if part is not module)
        else:
            own = {id(part) for part in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
            unknown = [tensor for tensor in unknown if id(tensor) in own]
        self._known_tensors |= {id(tensor) for tensor in unknown}
        return Held(node, kinds.MODULE, tuple(unknown)) if unknown else None

    def _children(self, node: Node, held: Held | None) -> Iterator[Node]:
        obj = node.obj
        cls = type(obj)
        if held is not None and held.kind is kinds.TENSORS:
            self._inside.update(id(tensor) for tensor in _values(obj))
        elif held is not None and held.kind is kinds.LOADER:
            self._inside.update(id(part) for part in kinds.loader_parts(obj))
            yield from _of_instance(node)
        elif issubclass(cls, dict):
            for key, value in list(itertools.islice(dict.items(obj), MOST_ENTRIES)):
                yield Node(value, f"{node.path}[{key!r}]" if isinstance(key, (str, int)) else node.path, node)
        elif cls in _SEQUENCES:
            for index, value in enumerate(list(itertools.islice(obj, MOST_ENTRIES))):
                yield Node(value, f"{node.path}[{index}]", node)
        elif issubclass(cls, _BaseDataLoaderIter):
            pass  # its sampler's iterators go along
        elif cls in _WRAPPERS:
            yield from (Node(part, node.path, node) for part in gc.get_referents(obj))
        elif issubclass(cls, GeneratorType):
            if obj.gi_frame is not None and not obj.gi_running:
                yield from (Node(value, f"{node.path}.{name}", node) for name, value in places.variables_of(obj.gi_frame).items())
        elif issubclass(cls, (FunctionType, MethodType, functools.partial)):
            yield from _of_callable(node)
        elif not issubclass(cls, (torch.Tensor, Optimizer, LRScheduler)) and not _is_closed(cls):
            yield from _of_instance(node)


def _of_callable(node: Node) -> Iterator[Node]:
    obj = node.obj
    if isinstance(obj, MethodType):
        yield Node(obj.__self__, node.path.rpartition(".")[0] or node.path, node)
    elif isinstance(obj, functools.partial):
        yield from (Node(part, node.path, node) for part in (obj.func, obj.args, obj.keywords))
    else:
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:
                continue  # not bound yet
            yield Node(value, name, node)


def _of_instance(node: Node) -> Iterator[Node]:
    cls = type(node.obj)
    attributes: dict[str, Any] = {}
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = vars(base).get(name)
            if isinstance(descriptor, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not set
                    attributes[name] = descriptor.__get__(node.obj, cls)
    with contextlib.suppress(AttributeError, TypeError):
        attributes |= object.__getattribute__(node.obj, "__dict__")
    for name, value in attributes.items():
        if name == "_modules" and issubclass(cls, torch.nn.Module):
            yield from (Node(part, f"{node.path}.{path}", node) for path, part in value.items())
        elif name not in ("_parameters", "_buffers") or not issubclass(cls, torch.nn.Module):
            place = functools.partial(places.line_of_attribute, cls, name)
            yield Node(value, f"{node.path}.{name}", node, place)


def _is_closed(cls: type) -> bool:
    module = cls.__module__
    return any(module == name or module.startswith(name + ".") for name in _CLOSED)


def _values(collection: Any) -> list[torch.Tensor]:
    return list(collection.values()) if isinstance(collection, dict) else list(collection)
