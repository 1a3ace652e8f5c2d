from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agent.agent_rig import Rig, StandInDaemon


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    await rig.close()


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[StandInDaemon]:
    daemon = StandInDaemon(tmp_path / "tmd.sock")
    await daemon.start()
    yield daemon
    await daemon.stop()
