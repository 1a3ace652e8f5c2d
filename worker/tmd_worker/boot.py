"""The first code of every rank: ties its life to the agent's, and its children's to its own, then becomes the user's program.

    python -u -m tmd_worker.boot [--standby] (SCRIPT | -m MODULE | --exec PROGRAM) [ARGUMENTS...]

Contract: the program sees what it would see under plain `python`: `__main__`, `sys.argv`, `sys.path[0]`. Nothing heavy is
imported here. With --standby the guard is armed first, so that a rehearsal as $RANK cannot touch what belongs to the real rank.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys
from collections.abc import Sequence

from tmd_worker import offspring


def die_with_agent() -> None:
    """The kernel kills this process when the agent dies, however it dies."""
    try:
        offspring.end_with_parent(int(os.environ.get("TMD_AGENT_PID", os.getppid())))
    except OSError as error:
        sys.exit(f"tmd: cannot tie this rank to its agent: {error.strerror}")


def keep_control_socket_private() -> None:
    """Programs that the user's code starts must not inherit the control socket."""
    descriptor = os.environ.get("TMD_CONTROL_FD")
    if descriptor is not None:
        os.set_inheritable(int(descriptor), False)


def run_script(script: str, arguments: Sequence[str]) -> None:
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")


def run_module(module: str, arguments: Sequence[str]) -> None:
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(arguments: Sequence[str]) -> None:
    rest = list(arguments)
    standby = rest[:1] == ["--standby"]
    if standby:
        del rest[0]
    die_with_agent()
    if rest[0] == "--exec":
        os.execvp(rest[1], rest[1:])
    keep_control_socket_private()
    offspring.bind_forks()
    faulthandler.enable()
    if standby:
        from tmd_worker import guard

        guard.activate(int(os.environ["RANK"]))
    if rest[0] == "-m":
        run_module(rest[1], rest[2:])
    else:
        run_script(rest[0], rest[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
