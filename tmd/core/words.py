"""Numbers in sentences."""

from __future__ import annotations

from collections.abc import Iterable


def ranks(numbers: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0, 1, 2`."""
    named = [str(number) for number in numbers]
    return f"{'rank' if len(named) == 1 else 'ranks'} {', '.join(named)}"


def count(number: int, noun: str) -> str:
    """`1 standby`, `2 standbys`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
