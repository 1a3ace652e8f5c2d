"""Short forms of many names: read as Slurm means them, written so that they are read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmd.nodes.slurm.hostlist import compress, expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("(null)", ()),
        ("n1", ("n1",)),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("n[1-2,7],login", ("n1", "n2", "n7", "login")),
        ("x[08-11]", ("x08", "x09", "x10", "x11")),
        ("x[098-101,7]", ("x098", "x099", "x100", "x101", "x7")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("a[1]b,c-d.example", ("a1b", "c-d.example")),
    ],
)
def test_short_forms_are_read(text: str, names: tuple[str, ...]) -> None:
    assert expand(text) == names


NO_HOSTLISTS = ["n[1-", "n1]", "n[[1]]", "n[a-b]", "n[3-1]", "n[]", "a,,b", "n[1-9999999]", "n[1-2000]x[1-2000]"]


@pytest.mark.parametrize("text", NO_HOSTLISTS)
def test_what_is_no_hostlist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hostlist"):
        expand(text)


def test_neighbours_are_written_as_ranges() -> None:
    assert compress(["n3", "n1", "n2", "n07", "n08", "login", "n5"]) == "n[1-3,5],n[07-08],login"


@given(st.lists(st.from_regex(r"[a-z]{0,3}-?[a-z][0-9]{0,4}", fullmatch=True), max_size=30))
def test_what_is_written_is_read_back(names: list[str]) -> None:
    assert sorted(expand(compress(names))) == sorted(set(names))
