"""Small programs that stand for a site's own."""

from __future__ import annotations

from pathlib import Path


def program(folder: Path, text: str, name: str = "program") -> str:
    """A shell script; its path."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)
