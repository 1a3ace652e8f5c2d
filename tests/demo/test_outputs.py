"""A run empties only the folder of an earlier run."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.recovery import main as recovery
from bench.steady import main as steady
from tmd.demo.__main__ import main as demo
from tmd.demo.outputs import MARKER, FolderRefused, take


@pytest.mark.parametrize("exists", [False, True])
def test_a_new_or_empty_folder_is_taken(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "deep" / "out"
    if exists:
        folder.mkdir(parents=True)
    take(folder)
    assert [each.name for each in folder.iterdir()] == [MARKER]


def test_what_an_earlier_run_left_is_deleted_and_nothing_beyond(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").touch()
    folder = tmp_path / "out"
    take(folder)
    (folder / "run").mkdir()
    (folder / "run" / "losses").touch()
    (folder / "report.json").touch()
    (folder / "link").symlink_to(elsewhere)
    take(folder)
    assert [each.name for each in folder.iterdir()] == [MARKER]
    assert (elsewhere / "thesis.txt").exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(FolderRefused, match="is not a folder"):
        take(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("program", [demo, recovery, steady], ids=["demo", "recovery", "steady"])
def test_a_folder_with_something_else_in_it_is_refused_by_name(program: object, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    result = CliRunner().invoke(program, ["--out", str(tmp_path)])  # type: ignore[arg-type]
    assert result.exit_code == 2
    assert "holds thesis.txt and was not made by an earlier run: nothing was deleted" in " ".join(result.stderr.split())
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.txt"]
