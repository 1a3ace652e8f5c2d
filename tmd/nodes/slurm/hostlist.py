"""Slurm's short form of many node names: "n[1-3,07],login" is n1, n2, n3, n07, login. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

#: More names than this in one expression are a mistake, or an attack.
NAME_LIMIT = 1_000_000

#: A range of numbers, whose leading zeros count.
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TRAILING_NUMBER = re.compile(r"(.*?)(\d+)")


def expand(text: str) -> tuple[str, ...]:
    """In the order of the text. Raises ValueError on what is no hostlist."""
    if text in ("", "(null)", "None"):
        return ()
    names: list[str] = []
    for word in _words(text):
        names.extend(_expand_word(word))
        if len(names) > NAME_LIMIT:
            raise ValueError(f"a hostlist of more than {NAME_LIMIT} names: {text[:60]!r}…")
    return tuple(names)


def compress(names: Iterable[str]) -> str:
    """The short form, which `expand` turns back into the same names; their order may differ."""
    numbered: dict[tuple[str, int], list[int]] = {}
    others: list[str] = []
    for name in dict.fromkeys(names):
        found = _TRAILING_NUMBER.fullmatch(name)
        if found is None:
            others.append(name)
        else:
            numbered.setdefault((found[1], len(found[2])), []).append(int(found[2]))
    words = [_compress_group(prefix, width, sorted(numbers)) for (prefix, width), numbers in numbered.items()]
    return ",".join(words + others)


def _compress_group(prefix: str, width: int, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{prefix}{numbers[0]:0{width}}"
    ranges = []
    # Neighbours differ from their place in the list by the same amount.
    for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        ranges.append(f"{run[0]:0{width}}" if len(run) == 1 else f"{run[0]:0{width}}-{run[-1]:0{width}}")
    return f"{prefix}[{','.join(ranges)}]"


def _words(text: str) -> Iterable[str]:
    """The parts between the commas that are outside of brackets."""
    depth = start = 0
    for place, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError(f"not a hostlist, its brackets do not match: {text[:200]!r}")
        if character == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    if depth:
        raise ValueError(f"not a hostlist, its brackets do not match: {text[:200]!r}")
    yield text[start:]


def _expand_word(word: str) -> Iterable[str]:
    """Several brackets in one name are a product: rack[1-2]n[1-2]."""
    if not word:
        raise ValueError("not a hostlist: an empty name")
    pieces = re.split(r"\[([^\[\]]*)\]", word)
    choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    size = 1
    for choice in choices:
        size *= len(choice)
    if size > NAME_LIMIT:
        raise ValueError(f"a hostlist of more than {NAME_LIMIT} names: {word[:60]!r}…")
    return map("".join, itertools.product(*choices))


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"not a hostlist: [{text[:200]}]")
        first, last = found[1], found[2] or found[1]
        if not 0 <= int(last) - int(first) < NAME_LIMIT:
            raise ValueError(f"not a hostlist, a range that is empty or too long: [{part[:60]}]")
        numbers.extend(f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
    return numbers
