"""What is written about the configuration, made from the code: the commented sample (etc/tmd.toml, `tmctl config sample`) and the
tables of docs/operators.md. `python -m tmd.config_reference` prints the tables.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from tmd.config import Config, variable

_WIDTH = 128
_HEAD = (
    "Configuration of the tmd daemon: `tmd serve --config /etc/tmd/tmd.toml`. Everything here is the default or an example; "
    "remove the # to change it. Check a file with `tmctl config check FILE`. The environment overrides a key K of [daemon] by "
    "TMD_K and a key K of another section S by TMD_S_K (TMD_CORE_HEARTBEAT_S=1); the command line overrides both. Names that "
    "end in _s are in seconds."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration, as the code describes it."""

    section: str
    name: str
    default: Any
    description: str
    #: What is taken where the default is nothing, in words; empty where the default itself says it.
    default_in_words: str = ""
    #: As TOML; empty where the default shows how the key is written.
    example: str = ""


def described_keys() -> Iterator[Key]:
    """In the order of the code."""
    for section, kind in typing.get_type_hints(Config).items():
        hints = typing.get_type_hints(kind, include_extras=True)
        for field in msgspec.structs.fields(kind):
            (meta,) = (part for part in typing.get_args(hints[field.name]) if isinstance(part, msgspec.Meta))
            extra = meta.extra or {}
            yield Key(
                section=section,
                name=field.name,
                default=field.default,
                description=f"{meta.description}{_choices(typing.get_args(hints[field.name])[0])}",
                default_in_words=extra.get("default", ""),
                example=extra.get("example", ""),
            )


def _choices(hint: Any) -> str:
    return f" One of {', '.join(typing.get_args(hint))}." if typing.get_origin(hint) is typing.Literal else ""


def explanation(section: str) -> str:
    """What a section is for, without its name."""
    text = " ".join((typing.get_type_hints(Config)[section].__doc__ or "").split())
    return text.partition(": ")[2]


def sample() -> str:
    """A configuration file in which every key is described and switched off."""
    parts = [_comment(_HEAD)]
    section = ""
    for key in described_keys():
        if key.section != section:
            section = key.section
            purpose = explanation(section)
            parts.append(f"[{section}]\n{_comment(purpose[:1].upper() + purpose[1:])}")
        default = f" Default: {key.default_in_words}." if key.default_in_words else ""
        shown = [key.example] if key.default_in_words else [*filter(None, [key.example]), json.dumps(key.default)]
        parts.append("\n".join([_comment(key.description + default), *(f"#{key.name} = {value}" for value in shown)]))
    return "\n\n".join(parts) + "\n"


def tables() -> str:
    """Markdown: one table for each section."""
    lines: list[str] = []
    section = ""
    for key in described_keys():
        if key.section != section:
            section = key.section
            lines += ["", f"`[{section}]`: {explanation(section)}", ""]
            lines += ["| key | default | environment | meaning |", "|---|---|---|---|"]
        lines.append(f"| `{key.name}` | {_default_cell(key)} | `{variable(key.section, key.name)}` | {key.description} |")
    return "\n".join(lines[1:]) + "\n"


def _default_cell(key: Key) -> str:
    match key.default:
        case _ if key.default_in_words:
            return key.default_in_words
        case bool():
            return str(key.default).lower()
        case int() | float():
            return f"{key.default:g}"
        case tuple():
            return f"`{json.dumps(key.default)}`"
    return f"`{key.default}`"


def _comment(text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    print(tables(), end="")
