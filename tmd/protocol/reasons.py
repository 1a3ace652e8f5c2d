"""Why something ended, as messages and records carry it: one line, or a line and the traceback of the user's script."""

from __future__ import annotations


def in_one_line(reason: str) -> str:
    """Of several lines the first and the last: a traceback ends with what went wrong."""
    first, *more = [line.rstrip() for line in reason.splitlines() if line.strip()] or [reason]
    return f"{first}{' ' if first.endswith(':') else ' … '}{more[-1].strip()}" if more else first
