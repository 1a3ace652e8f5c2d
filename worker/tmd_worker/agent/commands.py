"""Slurm's commands, run by an agent. Contract: each is killed at its deadline; one that fails is a reason, never an error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

#: slurmctld may be restarting.
COMMAND_TIMEOUT_S = 30.0


class CommandFailed(Exception):
    """A command of Slurm did not do what it was to do; the text is what it said."""


async def run(
    command: Sequence[str],
    *,
    cwd: str | None = None,
    environment: Mapping[str, str] | None = None,
    script: str = "",
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> tuple[str, str]:
    """What it prints, and what it says on standard error. `script` is its standard input. Raises CommandFailed, OSError."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=environment,
        stdin=asyncio.subprocess.PIPE if script else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout_s):
            printed, said = await process.communicate(script.encode() if script else None)
    except TimeoutError:
        raise CommandFailed(f"{command[0]} has not answered for {timeout_s:g} s: are slurmctld and munged up?") from None
    finally:
        kill(process)
    words = said.decode(errors="replace")
    if process.returncode != 0:
        raise CommandFailed(" ".join(words.split()) or f"{command[0]} ended with {process.returncode}")
    return printed.decode(errors="replace"), words


def kill(process: asyncio.subprocess.Process) -> None:
    """If it still runs."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
