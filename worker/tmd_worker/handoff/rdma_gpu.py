"""Memory of an NVIDIA GPU for an RDMA device, by a dma-buf: no copy through the host, no module beside the drivers.

**Never run.** No machine with a GPU and an RDMA device was at hand: this is written after the documentation of CUDA's driver
interface (cuMemGetHandleForAddressRange, 11.7) and of ibv_reg_dmabuf_mr. What has been run is that memory of the host is told
apart where no driver of a GPU is loaded.

Contract: nothing here loads CUDA. Only a process that has it loaded can have memory on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

from tmd_worker.handoff.transfer import Memory
from tmd_worker.handoff.verbs import Verbs

_LIBRARY = "libcuda.so.1"
_POINTER_MEMORY_TYPE = 2
_MEMORY_TYPE_DEVICE = 2
_HANDLE_DMA_BUF = 1
#: A dma-buf covers whole pages of the host.
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def is_on_gpu(memory: Memory) -> bool:
    """Whether the address is one of a GPU's."""
    cuda = _loaded()
    if cuda is None:
        return False
    kind = ctypes.c_uint(0)
    failed = cuda.cuPointerGetAttribute(ctypes.byref(kind), _POINTER_MEMORY_TYPE, ctypes.c_uint64(memory.address))
    return not failed and kind.value == _MEMORY_TYPE_DEVICE


def register(verbs: Verbs, domain: Any, memory: Memory, access: int) -> tuple[Any, int]:
    """Its registration, and what makes the device's addresses from its own. Raises OSError, and what pyverbs raises."""
    cuda = _loaded()
    assert cuda is not None
    start = memory.address // _PAGE_BYTES * _PAGE_BYTES
    end = -(-(memory.address + memory.size_bytes) // _PAGE_BYTES) * _PAGE_BYTES
    descriptor = ctypes.c_int(-1)
    failed = cuda.cuMemGetHandleForAddressRange(
        ctypes.byref(descriptor), ctypes.c_uint64(start), ctypes.c_size_t(end - start), _HANDLE_DMA_BUF, ctypes.c_ulonglong(0)
    )
    if failed:
        raise OSError(
            f"the GPU's driver gives no dma-buf (CUDA error {failed}); it needs its open kernel modules, CUDA 11.7 and Linux 5.12"
        )
    try:
        offset = memory.address - start
        # pyverbs lets the device's addresses begin at the offset in the dma-buf, not at the process's address.
        return verbs.mr.DmaBufMR(domain, memory.size_bytes, access, dmabuf=descriptor.value, offset=offset), -start
    finally:
        os.close(descriptor.value)  # the registration holds the memory itself


def _loaded() -> Any:
    """The driver's library if this process uses it; None otherwise."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD)
    return None
