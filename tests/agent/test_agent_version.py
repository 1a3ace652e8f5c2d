"""`tmd-run --version` says what moves the bytes of collectives on this machine."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import tmd
from tmd_worker.agent.main import tmd_run
from tmd_worker.native import library


def test_the_version_names_the_transport_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    said = CliRunner().invoke(tmd_run, ["--version"])
    assert said.exit_code == 0
    assert said.output == f"tmd-run, version {tmd.__version__}, {library.core().description}\n"
    monkeypatch.setattr(library, "core", lambda: library.Core(None, "Python transport (TMD_NATIVE=0)"))
    assert CliRunner().invoke(tmd_run, ["--version"]).output.endswith("Python transport (TMD_NATIVE=0)\n")
