"""A header is what is expected, or it is refused with the reason."""

from __future__ import annotations

import pytest

from tmd_worker.transport.wire import HEADER, HEADER_BYTES, MAGIC, STOP_FRAME, Desync, Kind, StaleFrame, check_header


def test_the_expected_header_passes() -> None:
    check_header(HEADER.unpack(HEADER.pack(MAGIC, Kind.DATA, 3, 17, 400)), Kind.DATA, 3, 17, 400)


def test_a_header_has_a_fixed_size() -> None:
    assert HEADER_BYTES == len(STOP_FRAME) == 24


@pytest.mark.parametrize(
    ("header", "error", "text"),
    [
        ((MAGIC, Kind.DATA, 2, 17, 400), StaleFrame, "sent a frame of epoch 2 in epoch 3"),
        ((MAGIC, Kind.DATA, 3, 18, 400), Desync, "got DATA frame 18 of 400 bytes, expected DATA frame 17 of 400 bytes"),
        ((MAGIC, Kind.DATA, 3, 17, 401), Desync, "got DATA frame 17 of 401 bytes"),
        ((MAGIC, Kind.BALLOT, 3, 17, 400), Desync, "got BALLOT frame"),
        ((MAGIC, 99, 3, 17, 400), Desync, "got kind 99 frame"),
        ((b"HTTP", Kind.DATA, 3, 17, 400), Desync, "no frame begins with b'HTTP'"),
    ],
)
def test_any_other_header_is_refused(header: tuple[bytes, int, int, int, int], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_header(header, Kind.DATA, 3, 17, 400)
