"""How tmctl prints: tables for people, aligned plain columns where no terminal is, JSON for programs.

Contract: units are in headers; nothing is cut off or wrapped where the output is not a terminal.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tmd.protocol.reasons import in_one_line

Row = Sequence[object]
#: What is shown for "not known" and "does not apply".
NOTHING = "-"
#: A table's last column holds sentences: narrower than this it is not folded.
_NARROWEST_LAST = 15
_STYLES = {
    "running": "green",
    "done": "green",
    "ready": "green",
    "up": "green",
    "IDLE": "green",
    "ALLOCATED": "green",
    "failed": "bold red",
    "aborted": "red",
    "down": "bold red",
    "lost": "red",
    "draining": "yellow",
    "drained": "yellow",
    "recovering": "yellow",
    "holding": "yellow",
    "unknown": "yellow",
}


@dataclasses.dataclass(frozen=True)
class Listing:
    """A table: headers with their units, rows of values."""

    headers: Sequence[str]
    rows: Sequence[Row]
    title: str = ""
    #: Said instead of an empty table.
    empty: str = "none"


def show_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def show(listing: Listing) -> None:
    rows = [[in_one_line(text(value)) for value in row] for row in listing.rows]
    if not rows:
        click.echo(f"{listing.title}: {listing.empty}" if listing.title else listing.empty)
    elif not sys.stdout.isatty():
        _show_plain(listing, rows)
    elif _table_width(listing, rows) <= (console := Console()).width:
        console.print(_table(listing, rows))
    else:
        _show_records(console, listing, rows)


def _widths(listing: Listing, rows: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(listing.headers, *rows, strict=True)]


def _table_width(listing: Listing, rows: list[list[str]]) -> int:
    """With the space between columns; the last one may be folded."""
    *widths, last = _widths(listing, rows)
    return sum(widths) + min(last, _NARROWEST_LAST) + 2 * len(widths)


def _table(listing: Listing, rows: list[list[str]]) -> Table:
    title = f"{listing.title}:" if listing.title else None
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    last = len(listing.headers) - 1
    for index, header in enumerate(listing.headers):
        numeric = all(_is_number(row[index]) for row in listing.rows)
        table.add_column(header, justify="right" if numeric else "left", overflow="fold", no_wrap=index != last)
    for row in rows:
        table.add_row(*map(_styled, row))
    return table


def _show_records(console: Console, listing: Listing, rows: list[list[str]]) -> None:
    """For what is wider than the terminal: each row as a block of names and values."""
    if listing.title:
        console.print(Text(f"{listing.title}:", style="italic"))
    width = max(map(len, listing.headers))
    for row in rows:
        console.print(Text(f"── {row[0]}", style="bold"))
        for header, cell in zip(listing.headers[1:], row[1:], strict=True):
            console.print(Text(f"  {header.ljust(width)}  ") + _styled(cell))


def _styled(cell: str) -> Text:
    return Text(cell, style=_STYLES.get(cell, ""))


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _show_plain(listing: Listing, rows: list[list[str]]) -> None:
    if listing.title:
        click.echo(f"{listing.title}:")
    widths = _widths(listing, rows)
    for row in (listing.headers, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def text(value: object) -> str:
    """A cell: nothing known is "-", floats have as many digits as mean something."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or NOTHING
    return str(value)


def count(number: int, thing: str) -> str:
    """1 node, 2 nodes."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts n2 before n10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def age(since_s: float | None, now_s: float | None = None) -> str:
    """How long ago, in the two largest units that matter."""
    if not since_s:
        return NOTHING
    seconds = max(0.0, (time.time() if now_s is None else now_s) - since_s)
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def clock(time_s: float) -> str:
    """Local time of day to the millisecond."""
    return time.strftime("%H:%M:%S", time.localtime(time_s)) + f".{int(time_s * 1000) % 1000:03d}"


def lines(values: Iterable[tuple[str, object]]) -> None:
    """Names and values, one a line; a value of several lines is shown whole, below one another."""
    pairs = [(name, text(value)) for name, value in values]
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        click.echo(f"{name.ljust(width)}  " + value.rstrip().replace("\n", "\n" + " " * (width + 2)))
