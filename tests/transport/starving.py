"""A process that has used up its descriptors, as if its script opened files and never closed them."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
    opened: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
