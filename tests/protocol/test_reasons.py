"""A reason with a traceback fits a table and a log line."""

from __future__ import annotations

import pytest

from tmd.protocol.reasons import in_one_line


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("", ""),
        ("the joiner died\n", "the joiner died"),
        (
            "rank 1 failed in the user's script:\nTraceback …\n  x = 1\nValueError: bad\n\n",
            "rank 1 failed in the user's script: ValueError: bad",
        ),
        ("the script changes state\n  scaler", "the script changes state … scaler"),
    ],
)
def test_first_and_last_line(reason: str, line: str) -> None:
    assert in_one_line(reason) == line
