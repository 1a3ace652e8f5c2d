"""A TOML file with the places of what is written in it.

The standard library's parser keeps no lines. They are found by its own help: of the text's beginnings that are TOML, each shows
which keys its last statement has added. That is exact for whatever TOML allows, and quick enough for a configuration.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

#: More is no configuration: a log, a disk image or a device that was named by mistake.
LIMIT_BYTES = 128 << 10
_LINE_IN_MESSAGE = re.compile(r" \(at line (\d+), column \d+\)| \(at end of document\)")


class UnreadableFile(ValueError):
    """The file cannot be read, or is no TOML; the text begins with its place."""


class ConfigFile:
    """One file, read and parsed. Raises UnreadableFile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._text = _text(path)
        except OSError as error:
            raise UnreadableFile(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UnreadableFile(f"{path}: not valid TOML: byte {error.start} is not UTF-8") from None
        try:
            self.table: dict[str, Any] = tomllib.loads(self._text)
        except tomllib.TOMLDecodeError as error:
            raise UnreadableFile(self._not_toml(str(error))) from None
        except RecursionError:
            raise UnreadableFile(f"{path}: not valid TOML: nested too deeply") from None

    def place(self, *path: str) -> str:
        """ "file:line" of a section, or of a key in it."""
        return f"{self.path}:{self._lines[path]}"

    @cached_property
    def _lines(self) -> dict[tuple[str, ...], int]:
        """Where each section and each of its keys begins, counted from 1."""
        found: dict[tuple[str, ...], int] = {}
        lines = self._text.split("\n")
        begin = 1
        for number in range(1, len(lines) + 1):
            try:
                table = tomllib.loads("\n".join(lines[:number]))
            except tomllib.TOMLDecodeError:
                continue  # in the middle of a statement
            for path in _paths(table):
                found.setdefault(path, begin)
            begin = number + 1
        return found

    def _not_toml(self, message: str) -> str:
        told = _LINE_IN_MESSAGE.search(message)
        line = told[1] if told and told[1] else str(len(self._text.splitlines()) or 1)
        return f"{self.path}:{line}: not valid TOML: {_LINE_IN_MESSAGE.sub('', message)}"


def _text(path: Path) -> str:
    """Raises OSError, UnicodeDecodeError, UnreadableFile."""
    with path.open("rb") as file:
        data = file.read(LIMIT_BYTES + 1)
    if len(data) > LIMIT_BYTES:
        raise UnreadableFile(f"{path}: larger than {LIMIT_BYTES >> 10} KiB, which no configuration is: is it another file?")
    return data.decode("utf-8").replace("\r\n", "\n")


def _paths(table: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for section, keys in table.items():
        yield (section,)
        if isinstance(keys, dict):
            yield from ((section, key) for key in keys)
