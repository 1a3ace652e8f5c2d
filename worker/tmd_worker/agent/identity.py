"""What must agree between nodes because it decides bits: versions, CPU capability, threads. Loads neither torch nor numpy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import tmd

#: The CPU features that choose between kernels in torch, oneDNN and MKL; others change no result.
_DECISIVE = frozenset(
    {"sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
    | {"avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"}
    | {"asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2"}
)


def cpu_capability(cpuinfo: str, environment: Mapping[str, str]) -> str:
    """Machine, vendor and decisive features as one comparable text, from the content of /proc/cpuinfo."""
    first: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, separator, value = line.partition(":")
        if separator:
            first.setdefault(name.strip(), value.strip())
    vendor = first.get("vendor_id") or first.get("CPU implementer") or "unknown"
    features = set((first.get("flags") or first.get("Features") or "").split()) & _DECISIVE
    parts = [platform.machine(), vendor, *sorted(features)]
    parts += [f"{name}={environment[name]}" for name in ("ATEN_CPU_CAPABILITY", "MKL_CBWR") if name in environment]
    return " ".join(parts)


def own_versions(threads: str, transport: str) -> dict[str, str]:
    """The `versions` of AgentHello. `threads` is OMP_NUM_THREADS as the ranks get it, empty if it is not set."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = ""
    versions = {
        "tmd": tmd.__version__,
        "python": platform.python_version(),
        "cpu_capability": cpu_capability(cpuinfo, os.environ),
        "threads": threads or "unset",
        "transport": transport,
    }
    for package in ("torch", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions


def rank_threads(nproc_per_node: int, environment: Mapping[str, str]) -> str:
    """OMP_NUM_THREADS of the ranks: the user's, else 1 if several share the node (as torchrun), else unset (empty)."""
    return environment.get("OMP_NUM_THREADS") or ("1" if nproc_per_node > 1 else "")
