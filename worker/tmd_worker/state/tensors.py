"""What a tensor must be to be handed over bit for bit, and its memory as bytes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tmd_worker.state.errors import TrackRefused

#: Every type that can travel, by the name it travels under.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *(torch.complex128, torch.complex64, torch.complex32),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    )
}

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def dtype_name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for nearly all: nothing else need be asked then."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.dtype in _NAMES
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def refuse_special(name: str, tensor: torch.Tensor) -> None:
    """Raises TrackRefused unless `tensor` is plain: whole, strided and with memory of its own."""
    if _is_plain(tensor):
        return
    what = ""
    if torch.nn.parameter.is_lazy(tensor):
        what = "not initialised yet (a lazy module): run the model once before session.track"
    elif hasattr(tensor, "to_local"):
        what = "sharded (a DTensor): this release replaces ranks of replicated data parallel jobs only"
    elif tensor.is_meta:
        what = "on the meta device and has no data: materialise the model before session.track"
    elif tensor.is_quantized:
        what = "quantized: keep its integers, scale and zero point in buffers of their own"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        what = f"not a plain strided tensor ({'nested' if tensor.is_nested else tensor.layout})"
    elif tensor.is_conj() or tensor.is_neg():
        what = "a lazy conjugate or negation: call resolve_conj() and resolve_neg()"
    elif type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl and type(tensor) is not torch.Tensor:
        what = f"a tensor subclass ({type(tensor).__name__}) whose bytes mean something only to itself"
    elif dtype_name(tensor.dtype) not in DTYPES:
        what = f"of type {dtype_name(tensor.dtype)}, which is not handled"
    if what:
        raise TrackRefused(f"cannot track {name}: it is {what}")


def refuse_unreadable(name: str, tensor: torch.Tensor) -> None:
    """Raises TrackRefused unless the bytes of `tensor` are where it says, at the moment of a hand-over: a script may have moved,
    wrapped or released what was plain when it was tracked. Quick for what is plain."""
    if type(tensor) not in _PLAIN or tensor.is_meta or tensor.layout is not torch.strided:
        refuse_special(name, tensor)
    elif _end_bytes(tensor) > tensor.untyped_storage().nbytes():
        raise TrackRefused(
            f"cannot hand over {name}: its memory was released (offloaded, or resized to nothing); have it in place at the end "
            "of each step"
        )


def _end_bytes(tensor: torch.Tensor) -> int:
    """How much storage it needs."""
    if not tensor.numel():
        return 0
    if tensor.is_contiguous():
        return int(tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill one stretch of memory without gaps or overlaps, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """() if the bytes travel in the order of the indices, else the strides that say how (channels-last and the like)."""
    return () if tensor.is_contiguous() or not is_dense(tensor) else tuple(tensor.stride())


def size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def allocate(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """CPU memory for a tensor of this `memory_order`, not initialised."""
    if order:
        return torch.empty_strided(shape, order, dtype=dtype)
    return torch.empty(shape, dtype=dtype)


@torch.no_grad()
def write_into(target: torch.Tensor, value: torch.Tensor) -> None:
    """`target` keeps its identity and gets the content of `value` (copied), even if it is an expanded view or was resized."""
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True))
    if overlaps or target.shape != value.shape:
        target.data = value.detach().to(target.device, copy=True)
    else:
        target.copy_(value)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its bytes can be read where they lie (dense, on the CPU), else a copy for which this holds."""
    tensor = tensor.detach()
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


def memory_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of dense CPU memory, writable, without a copy; keeps the memory alive."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    array: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array


def to_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of the elements in the order of the indices."""
    return memory_of(tensor.detach().cpu().contiguous()).tobytes()


def from_bytes(data: bytes | memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A new CPU tensor. Raises ValueError if size and type do not fit the data."""
    tensor = torch.empty(shape, dtype=DTYPES[dtype])
    if size_bytes(tensor) != len(data):
        raise ValueError(f"{len(data)} bytes for a {dtype} tensor of shape {tuple(shape)}")
    if data:
        memory_of(tensor)[:] = np.frombuffer(data, dtype=np.uint8)
    return tensor
