"""What carries the collectives, for tests that must hold whatever does; docs/transports.md says which run on `delta` alone."""

from __future__ import annotations

import pytest

from tmd.protocol.control import TransportName

TRANSPORTS: tuple[TransportName, ...] = ("delta", "gloo")
BOTH = pytest.mark.parametrize("transport", TRANSPORTS)
#: For whole modules whose tests share a job.
MODULE_ON_BOTH = pytest.mark.parametrize("transport", TRANSPORTS, scope="module")
