"""The state of the random number generators that a step may draw from: torch (CPU and, once in use, the accelerator that is
current), numpy's global one, Python's, and the user's own that are tracked."""

from __future__ import annotations

import array
import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tmd_worker.state import generators, rng_memory, tree
from tmd_worker.state.errors import StateMismatch

_PYTHON_WORDS = 625
#: The accelerator of the main thread; other threads start with device 0 as theirs.
_device: int | None = None
#: What was captured last, and what the generators looked like then.
_last: tuple[object, RngState] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RngState:
    torch_cpu: torch.Tensor
    #: Of the current device; None while the accelerator is not in use.
    torch_cuda: torch.Tensor | None
    numpy_global: Any
    python: tuple[Any, ...]
    #: Of the user's tracked generators, by name.
    own: dict[str, Any]


def note_device() -> None:
    """Called in the main thread: its current accelerator is the one whose generator counts."""
    global _device
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _device = torch.cuda.current_device()


def capture() -> RngState:
    """The same object as before if nothing has been drawn since: 4 µs. Else about 50 µs, most of it numpy's; more with tracked
    generators, which are always asked, as the accelerator's is."""
    global _last
    torch_cpu = torch.get_rng_state()
    seen = rng_memory.look() if _device is None and not generators.tracked else None
    looks = None if seen is None else (seen, torch_cpu.numpy().tobytes())
    if looks is not None and _last is not None and _last[0] == looks:
        return _last[1]
    cuda = torch.cuda.get_rng_state(_device) if _device is not None else None
    state = RngState(torch_cpu, cuda, np.random.get_state(), random.getstate(), generators.states())
    # Another thread may have drawn meanwhile: then this state is of neither look.
    _last = (looks, state) if looks is not None and rng_memory.look() == looks[0] else None
    return state


def restore(state: RngState) -> None:
    torch.set_rng_state(state.torch_cpu)
    if state.torch_cuda is not None and _device is not None:
        torch.cuda.set_rng_state(state.torch_cuda, _device)
    np.random.set_state(state.numpy_global)
    random.setstate(state.python)
    generators.restore(state.own)


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is drawn inside leaves no trace."""
    before = capture()
    try:
        yield
    finally:
        restore(before)


def encode(state: RngState) -> bytes:
    version, words, gauss = state.python
    python = (version, array.array("I", words).tobytes(), gauss)
    return tree.encode((state.torch_cpu, state.torch_cuda, state.numpy_global, python, state.own), "rng")


def decode(data: bytes) -> RngState:
    """Raises StateMismatch if this is no RNG state."""
    parts = tree.decode(data, "rng")
    try:
        torch_cpu, torch_cuda, numpy_global, (version, raw, gauss), own = parts
        words = array.array("I")
        words.frombytes(raw)
        cuda_fits = torch_cuda is None or (torch_cuda.dtype, torch_cuda.dim()) == (torch.uint8, 1)
        cpu_fits = (torch_cpu.dtype, torch_cpu.shape) == (torch.uint8, torch.get_rng_state().shape)
        if len(words) != _PYTHON_WORDS or not cpu_fits or not cuda_fits:
            raise ValueError("a generator's state has another size here: do both run the same versions?")
        np.random.RandomState().set_state(numpy_global)
        random.Random().setstate((version, tuple(words), gauss))
        generators.check(own)
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:
        raise StateMismatch(f"rng: {error}; nothing was taken from it") from error
    return RngState(torch_cpu, torch_cuda, numpy_global, (version, tuple(words), gauss), own)
