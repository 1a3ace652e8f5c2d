"""What processes hold while a test goes on, and whether it grows."""

from __future__ import annotations

import statistics
from pathlib import Path


class Usage:
    """What one process holds, sampled now and then."""

    def __init__(self, pid: int) -> None:
        self._proc = Path(f"/proc/{pid}")
        self.descriptors: list[int] = []
        self.threads: list[int] = []
        self.resident_bytes: list[int] = []

    def sample(self) -> None:
        status = dict(line.split(":", 1) for line in (self._proc / "status").read_text().splitlines())
        self.threads.append(int(status["Threads"]))
        self.resident_bytes.append(int(status["VmRSS"].split()[0]) << 10)
        self.descriptors.append(len(list((self._proc / "fd").iterdir())))


def growth(samples: list[int]) -> float:
    """Over all samples together, by the slope of the line through them."""
    return statistics.linear_regression(range(len(samples)), samples).slope * len(samples)
