"""A machine without RDMA, as most are: no error, but a reason, and a loud one where RDMA was asked for."""

from __future__ import annotations

import importlib.util
import socket
from typing import Any

import pytest

from tmd_worker.handoff import rdma_ports, verbs
from tmd_worker.handoff.rdma import Rdma
from tmd_worker.handoff.rdma_ports import Gid, Port
from tmd_worker.handoff.transfer import TransferFailed

PORT = Port("rxe0", 1, "ACTIVE", "Ethernet", 1.0, -1, "", (Gid(0, "fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2 IPv6"),))


def not_dialed(fields: dict[str, Any], timeout_s: float) -> socket.socket:
    raise AssertionError("RDMA needs no connection of sockets")


def test_without_a_device_a_probe_gives_the_reason_and_using_it_fails_with_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_ports, "ports", lambda: [])
    rdma = Rdma()
    assert "no RDMA device" in rdma.probe()
    for end in (rdma.source(), rdma.joiner(not_dialed)):
        with pytest.raises(TransferFailed) as failure:
            end.prepare([])
        assert str(failure.value) == f"rdma: {rdma.probe()}"
        end.close()
        end.close()


def test_with_a_device_and_without_pyverbs_the_probe_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_ports, "ports", lambda: [PORT])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(verbs, "load", lambda: verbs.load_from(()))
    assert Rdma().probe() == (
        "rxe0/1 is up, but pyverbs is not installed: install the distribution's python3-pyverbs (44 or later)"
    )


def test_a_status_that_nobody_has_explained_is_named_by_its_number() -> None:
    assert "key" in verbs.completion_reason(verbs.WC_REM_ACCESS_ERR)
    assert "status 77" in verbs.completion_reason(77)
