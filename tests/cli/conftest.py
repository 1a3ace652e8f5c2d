"""A fake daemon and a way to call tmctl against it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.cli.fake_daemon import FakeDaemon
from tmd.cli.main import main

Tmctl = Callable[..., Result]


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    # The path of a unix socket is limited; pytest's own folders can be too deep.
    with tempfile.TemporaryDirectory(prefix="tmd-cli-") as folder, FakeDaemon(Path(folder) / "tmd.sock") as daemon:
        yield daemon


@pytest.fixture
def tmctl(daemon: FakeDaemon) -> Tmctl:
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["--socket", str(daemon.socket), *arguments])

    return call
