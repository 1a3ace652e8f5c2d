"""The demo's verdict: it must see every difference, or "bit-identical" means nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tmd.demo.losses import compare, median_step_s, read_run


def write_run(folder: Path, *, ranks: int = 2, steps: int = 5) -> Path:
    folder.mkdir()
    for rank in range(ranks):
        lines = [
            json.dumps({"step": step, "epoch": 0, "loss": float(step + rank / 7).hex(), "time": 10.0 + step / 4})
            for step in range(steps)
        ]
        (folder / f"losses-rank{rank}.jsonl").write_text("".join(line + "\n" for line in lines))
        (folder / f"final-rank{rank}.json").write_text(json.dumps({"digests": {"parameters": "aa", "optimizer": "bb"}, "pid": 1}))
    return folder


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_the_same_run_twice_is_identical(tmp_path: Path) -> None:
    a, b = read_run(write_run(tmp_path / "a"), 2), read_run(write_run(tmp_path / "b"), 2)
    assert compare(a, b, killed_ranks=set(), kills=0).identical
    assert median_step_s(a, skip=0) == pytest.approx(0.25)


def test_the_last_bit_of_one_loss_is_seen(tmp_path: Path) -> None:
    a = read_run(write_run(tmp_path / "a"), 2)
    folder = write_run(tmp_path / "b")
    edit(folder / "losses-rank1.jsonl", float(3 + 1 / 7).hex(), (3 + 1 / 7 + 2**-51).hex())
    verdict = compare(a, read_run(folder, 2), killed_ranks=set(), kills=0)
    assert not verdict.identical
    assert "rank 1 step 3" in verdict.differences[0]


def test_a_different_final_state_is_seen_and_named(tmp_path: Path) -> None:
    a = read_run(write_run(tmp_path / "a"), 2)
    folder = write_run(tmp_path / "b")
    edit(folder / "final-rank0.json", "bb", "bc")
    verdict = compare(a, read_run(folder, 2), killed_ranks=set(), kills=0)
    assert verdict.differences == ("rank 0: final state differs in optimizer",)


def test_a_missing_line_is_forgiven_only_to_a_killed_rank_and_once_a_kill(tmp_path: Path) -> None:
    a = read_run(write_run(tmp_path / "a"), 2)
    folder = write_run(tmp_path / "b")
    log = folder / "losses-rank1.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:2] + lines[3:]))
    run = read_run(folder, 2)
    assert not compare(a, run, killed_ranks={0}, kills=1).identical
    assert compare(a, run, killed_ranks={1}, kills=1).lines_lost == 1
    log.write_text("".join(lines[:2] + lines[4:]))
    assert not compare(a, read_run(folder, 2), killed_ranks={1}, kills=1).identical


def test_two_values_for_one_step_are_a_difference_even_if_the_first_is_right(tmp_path: Path) -> None:
    a = read_run(write_run(tmp_path / "a"), 2)
    folder = write_run(tmp_path / "b")
    with (folder / "losses-rank0.jsonl").open("a") as log:
        log.write(json.dumps({"step": 2, "epoch": 1, "loss": (9.0).hex(), "time": 12.0}) + "\n")
    assert not compare(a, read_run(folder, 2), killed_ranks={0}, kills=1).identical


def test_a_rank_that_did_not_finish_is_an_error_that_names_its_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "final-rank1.json").unlink()
    with pytest.raises(ValueError, match=r"final-rank1\.json: rank 1 did not finish"):
        read_run(folder, 2)
