"""`tmd` and `tmctl` in an environment for compute nodes say what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(program: str, missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.modules[{missing!r}] = None; from tmd import programs; programs.{program}()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("program", "missing", "arguments"),
    [
        ("tmctl", "rich", ["--help"]),
        ("tmctl", "sqlalchemy", ["ledger", "check", "--database", "sqlite:////nowhere/ledger.db"]),
        ("tmd", "alembic", ["serve", "--state-dir", "DIR", "--socket", "DIR/tmd.sock"]),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(program: str, missing: str, arguments: list[str], tmp_path: Path) -> None:
    ended = run(program, missing, *(argument.replace("DIR", str(tmp_path)) for argument in arguments))
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"{program}: {missing} is not installed in {sys.prefix}")
    assert "tmd[head]" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("program", ["tmctl", "tmd"])
def test_nothing_is_missing(program: str) -> None:
    ended = run(program, "no_such_module", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Usage" in ended.stdout
