"""The folder that a demo or benchmark writes to: emptied before each run, and never a folder of somebody else's."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

#: Lies in every folder that a run has made, so that the next one may empty it.
MARKER = ".made-by-tmd"


class FolderRefused(ValueError):
    """The folder holds what no earlier run has made; nothing was deleted."""


def take(folder: Path) -> None:
    """Leaves the folder empty but for the marker. What is in it is deleted only if an earlier run has left its marker there.

    Raises FolderRefused, OSError.
    """
    if folder.exists() and not folder.is_dir():
        raise FolderRefused(f"{folder} is not a folder: choose another one with --out")
    if folder.is_dir():
        found = sorted(folder.iterdir())
        if found and not (folder / MARKER).is_file():
            raise FolderRefused(
                f"{folder} holds {found[0].name}{' and more' if len(found) > 1 else ''} and was not made by an earlier run: "
                "nothing was deleted; choose another folder with --out, or empty this one yourself"
            )
        for each in found:
            if each.name == MARKER:
                continue
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                with contextlib.suppress(FileNotFoundError):
                    each.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text("python -m tmd.demo or a benchmark made this folder; the next run deletes what is in it\n")
