"""The daemon of the demo and the benchmarks is the one in its folder, whatever the caller's shell is set up for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tmd.demo.stack import Stack


def test_the_callers_variables_do_not_reach_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("TMD_SOCKET", str(elsewhere / "tmd.sock"))
    monkeypatch.setenv("TMD_DATABASE", f"sqlite:///{elsewhere / 'ledger.db'}")
    monkeypatch.setenv("TMD_CORE_OBSERVE_ONLY", "true")
    monkeypatch.setenv("TMD_CONFIG", str(elsewhere / "tmd.toml"))
    with Stack(tmp_path / "stack", nodes=3, core={"hold_limit_s": 7.5}) as stack:
        status = stack.client.get("/v1/status")
        inherited = Path(f"/proc/{stack.pid}/environ").read_bytes().split(b"\0")
    assert status["observe_only"] is False
    assert status["ledger"]["url"] == f"sqlite:///{tmp_path / 'stack' / 'state' / 'ledger.db'}"
    assert not [variable for variable in inherited if variable.startswith(b"TMD_")]
    assert not elsewhere.exists()
