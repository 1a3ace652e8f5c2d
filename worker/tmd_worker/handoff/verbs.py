"""The verbs of RDMA as pyverbs offers them: where it is found, the numbers that are used, and its errors in words for people.

Contract: `load` finds the distribution's package (44 and later), inside a virtual environment as well, which usually does not see
it; without it VerbsMissing says what to install. Numbers are those of the verbs ABI: the module that pyverbs keeps them in
changed its name (`enums`, later `libibverbs_enums`), they themselves cannot change. pyverbs has no types: its objects are Any.
"""

from __future__ import annotations

import errno
import functools
import importlib
import importlib.util
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

QPT_RC = 2
ACCESS_LOCAL_WRITE = 1 << 0
ACCESS_REMOTE_READ = 1 << 2
WR_RDMA_READ = 4
SEND_SIGNALED = 1 << 1
WC_SUCCESS = 0
WC_REM_ACCESS_ERR = 10
WC_RETRY_EXC_ERR = 12

_MODULES = ("device", "pd", "cq", "mr", "qp", "addr", "wr", "pyverbs_error")
_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
#: Where distributions put Python packages that hold compiled modules.
_FOLDERS = ("/usr/lib/python3/dist-packages", f"/usr/lib64/{_VERSION}/site-packages", f"/usr/lib/{_VERSION}/site-packages")

#: Status of a work completion -> what it means.
_COMPLETIONS = {
    1: "a request was longer than the memory it was for",
    2: "the queue pair could not carry out a request",
    4: "memory of this process is not registered (any more) for what was asked",
    5: "the connection had already ended",
    9: "the source refused: it does not allow this kind of request, or fewer at a time",
    WC_REM_ACCESS_ERR: "the source refused: the key is not, or no longer, valid for this memory",
    11: "the source's device could not carry out the request",
    WC_RETRY_EXC_ERR: "the source does not answer: its process has ended, or the network between has",
    13: "the source is not ready to receive",
}

_ERRNOS = {
    errno.EACCES: "not allowed: this user may not open /dev/infiniband",
    errno.EPERM: "not allowed: this user may not open /dev/infiniband, or this memory must not be registered",
    errno.ENODEV: "the device is gone",
    errno.ENETUNREACH: "no route to the peer's address: the two ports are in different networks",
    errno.EHOSTUNREACH: "no route to the peer's address: the two ports are in different networks, or the peer's is down",
    errno.ETIMEDOUT: "the peer's address did not answer: its port is down, or the GID is one that this network does not carry",
    errno.EINVAL: "the device refused the parameters: as a rule a GID that is not, or no longer, this port's",
    errno.EFAULT: "this memory is not mapped, or not writable",
    errno.EOPNOTSUPP: "the device cannot do that",
}


class VerbsMissing(ImportError):
    """RDMA cannot be used from this Python; the text says why and what to install."""


class Verbs(NamedTuple):
    """The modules of pyverbs, and what they all raise."""

    device: Any
    pd: Any
    cq: Any
    mr: Any
    qp: Any
    addr: Any
    wr: Any
    error: type[Exception]


@functools.cache
def load() -> Verbs:
    """Raises VerbsMissing."""
    return load_from(_FOLDERS)


def load_from(folders: Sequence[str]) -> Verbs:
    """What Python finds by itself, else what one of these folders holds. Raises VerbsMissing."""
    try:
        if importlib.util.find_spec("pyverbs") is None and not _adopt(folders):
            raise VerbsMissing("pyverbs is not installed: install the distribution's python3-pyverbs (44 or later)")
        modules = [importlib.import_module(f"pyverbs.{name}") for name in _MODULES]
    except VerbsMissing:
        raise
    except ImportError as error:
        raise VerbsMissing(
            f"pyverbs cannot be imported into {_VERSION} ({error}): the distribution's package is built for the distribution's "
            "own Python version; run the job with that one"
        ) from error
    device, pd, cq, mr, qp, addr, wr, errors = modules
    return Verbs(device, pd, cq, mr, qp, addr, wr, errors.PyverbsError)


def _adopt(folders: Sequence[str]) -> bool:
    """Makes the distribution's pyverbs importable, and nothing else of what lies beside it."""
    for folder in folders:
        start = Path(folder, "pyverbs", "__init__.py")
        if not start.is_file():
            continue
        spec = importlib.util.spec_from_file_location("pyverbs", start, submodule_search_locations=[str(start.parent)])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["pyverbs"] = module
        return True
    return False


def completion_reason(status: int) -> str:
    """What the status of a failed work completion means."""
    return _COMPLETIONS.get(status, f"the device reports status {status} of a work completion")


def error_reason(error: Exception) -> str:
    """What an exception of pyverbs means."""
    number = abs(getattr(error, "error_code", -1) or 1)
    if number == errno.ENOMEM:
        return f"no memory may be locked or the device is out of entries: {memlock_reason()}"
    meaning = _ERRNOS.get(number)
    return f"{error}" if meaning is None else f"{meaning} ({os.strerror(number)}; {error})"


def memlock_reason() -> str:
    """The limit on memory that a process may lock, and who sets it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    return f"the limit on locked memory is {limit} (ulimit -l; for jobs of Slurm LimitMEMLOCK=infinity in slurmd's unit)"
