"""What `tmd` and `tmctl` begin with: an environment that lacks what they need is named, with the remedy."""

from __future__ import annotations

import importlib
import sys


def tmd() -> None:
    _run("tmd", "tmd.daemon.main")


def tmctl() -> None:
    _run("tmctl", "tmd.cli.main")


def _run(program: str, module: str) -> None:
    try:
        importlib.import_module(module).main()  # some commands import what they need themselves
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package.startswith("tmd"):
            raise
        sys.exit(
            f"{program}: {package} is not installed in {sys.prefix}, which has no more than compute nodes need; "
            f"install tmd with its extra `head` (pip install 'tmd[head]'), or run {program} where that is"
        )
