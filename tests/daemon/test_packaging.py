"""What is installed is what is in the tree."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_package_of_the_tree_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    expected = set()
    for name, folder in settings["package-dir"].items():
        for module in (ROOT / folder).rglob("*.py"):
            inner = module.parent.relative_to(ROOT / folder).parts
            expected.add(".".join((name, *inner)))
    assert set(settings["packages"]) == expected
