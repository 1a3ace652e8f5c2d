"""The sandbox's audit hook: while a process rehearses, what its user's code does must stay inside it.

Refused: writing, deleting or renaming files outside scratch (temporary and compile-cache directories, __pycache__, /dev/null,
/dev/shm), network connections, new programs. Reading, and memory, are free. It keeps an honest script honest; it is no jail.
Importing this module does nothing; the hook is installed by the first `activate` and costs one comparison when inactive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class SandboxRefused(PermissionError):
    """The user's code tried to reach the outside from a shadow step or a standby's build."""


def activate(role: int) -> None:
    """From now on this process rehearses as rank `role`."""


def deactivate() -> None:
    """The process is live: everything is allowed."""


@contextlib.contextmanager
def exempt() -> Iterator[None]:
    """What this thread does inside is tmd's own and allowed; threads that it starts inside are exempt for good."""
    yield
