"""What begins while the ledger is read is shown as the core has it, not as something that only the ledger remembers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.daemon.in_process import application
from tests.daemon.test_admission import hello
from tmd.core.instructions import Persist


async def test_a_job_whose_first_agent_comes_while_the_ledger_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with application(tmp_path, operators=frozenset({0})) as app:
        read = app.ledger.job

        async def slowly_read(job_id: str) -> object:
            """1. The core was asked and did not know the job. 2. Its first agent says hello. 3. The ledger has its row."""
            if app.core.job(job_id) is None:
                for part in app.core.agent_hello(time.time(), hello(job_id), b"k" * 32):
                    if isinstance(part, Persist):
                        await app.ledger.write(part)
            return await read(job_id)

        monkeypatch.setattr(app.ledger, "job", slowly_read)
        status, view = await app.ask("GET", "/v1/jobs/fresh")
        assert status == 200
        assert view["next_step"] == 0
        assert [node["node"] for node in view["nodes"]] == [hello().node]
