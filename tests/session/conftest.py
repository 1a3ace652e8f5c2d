"""One zygote for all tests of real rank processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.session.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as running:
        yield running
