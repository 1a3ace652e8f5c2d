"""The native core combines to the same bits as torch's operations do in the Python transport."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from tmd_worker.native import library
from tmd_worker.transport import native
from tmd_worker.transport.tensors import Reduction, combine, finish

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
INFINITE = float("inf")
#: Of every kind that floating point has: zeros, subnormal, halfway cases, large, infinite, no number.
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    2.0**-24,
    -(2.0**-24),
    6e-8,
    2.0**-149,
    1 / 3,
    1000.4,
    65504.0,
    -65519.9,
    3e38,
    INFINITE,
    -INFINITE,
]
MEMBERS = 7


@pytest.fixture(scope="module")
def core() -> ctypes.CDLL:
    loaded = library.core()
    assert loaded.library is not None, f"this test needs the native core: {loaded.description}"
    return loaded.library


def natively(core: ctypes.CDLL, kind: Reduction, into: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """into (op) other by the native core; divided by MEMBERS if it is an average."""
    total = into.clone()
    numbers = native.numbers(into.dtype, kind)
    assert numbers is not None
    divisor = MEMBERS if kind is Reduction.AVG else 1
    assert core.tmd_combine_once(*numbers, total.data_ptr(), other.data_ptr(), total.numel(), divisor) == 1
    return total


def by_torch(kind: Reduction, into: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    total = into.clone()
    combine(kind, total, other)
    finish(kind, total, MEMBERS)
    return total


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Which NaN a NaN is differs between processors, also within torch: all count as one."""
    if tensor.dtype.is_floating_point:
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return tensor.view(torch.uint8)


def samples(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every special value against every other one, then random bits."""
    generator = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 256, (2, 80_000), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        return raw[0] % 2 == 1, raw[1] % 2 == 1
    left, right = raw[0].view(dtype), raw[1].view(dtype)
    if not dtype.is_floating_point:
        return left, right
    pairs = torch.tensor(list(itertools.product([*SPECIAL, torch.nan], repeat=2)), dtype=torch.float64).to(dtype)
    return torch.cat([pairs[:, 0], left]), torch.cat([pairs[:, 1], right])


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("kind", list(Reduction), ids=lambda kind: kind.name)
def test_every_reduction_of_every_type(core: ctypes.CDLL, kind: Reduction, dtype: torch.dtype) -> None:
    if native.numbers(dtype, kind) is None:
        with pytest.raises((RuntimeError, NotImplementedError)):
            combine(kind, *samples(dtype))
        return
    into, other = samples(dtype)
    if kind is Reduction.AVG and not dtype.is_floating_point:
        assert core.tmd_combine_once(*native.numbers(dtype, Reduction.SUM), into.data_ptr(), other.data_ptr(), 1, 1)  # type: ignore[misc]
        return
    assert torch.equal(bits(natively(core, kind, into, other)), bits(by_torch(kind, into, other)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("other", [0.0, 1.0, -1.0, 2.0**-24, 0.1, 2049.0, 65504.0, -65504.0])
def test_every_number_of_sixteen_bits(core: ctypes.CDLL, dtype: torch.dtype, other: float) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    added = torch.full_like(every, other)
    for kind in (Reduction.SUM, Reduction.AVG, Reduction.MIN, Reduction.MAX, Reduction.PRODUCT):
        assert torch.equal(bits(natively(core, kind, every, added)), bits(by_torch(kind, every, added))), kind


def test_a_reduction_that_the_core_does_not_know_is_left_to_torch() -> None:
    assert native.numbers(torch.complex64, Reduction.SUM) is None
    assert native.numbers(torch.float8_e4m3fn, Reduction.SUM) is None
