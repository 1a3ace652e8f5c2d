"""pyslurm's process: its answers, its silence and its death.

The module that is loaded here stands for pyslurm, which only builds beside Slurm 25.11: it shows what becomes of each kind of
answer, not that pyslurm gives it. That is tests/slurm/test_client.py's, run by `make test-pyslurm`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tmd.nodes.base import QueryFailed, RequestRefused, UnknownJob, UnknownNode
from tmd.nodes.slurm import pyslurm_client
from tmd.nodes.slurm.pyslurm_client import PyslurmClient, PyslurmUnusable
from tmd.nodes.slurm.settings import SlurmSettings

_STAND_IN = """
import os, time, types
__version__ = "25.11.2"
class RPCError(Exception): pass
if os.path.exists("{slow}"): time.sleep(3)
class Nodes:
    def load(): return Nodes()
    def get(self, name):
        if name == "slow":
            open("{slow}.asked", "w").close()
            time.sleep(60)
        if name == "crash": os._exit(11)
        if name == "gone": raise RPCError("Node 'gone' does not exist")
        if name == "silent": raise RPCError("Unable to contact slurm controller (connect failure)")
        if name == "odd": raise KeyError("odd")
        if name == "misfit": name = 7
        # 3: where the answers go
        if name == "unreadable": os.write(3, b"{no json}\\n")
        if name == "endless": os.write(3, b"x" * (1 << 20))
        print("noise on standard output", flush=True)
        os.write(1, b"noise of the library\\n")
        return types.SimpleNamespace(name=name, state="MIXED+DRAIN", address="a", available_features=["gpu"], reason="x",
            reason_user="root", reason_time=7, boot_time=None)
class Job:
    def __init__(self, number): pass
    def load(number): raise RPCError("Invalid job id specified")
    def modify(self, changes): raise RPCError("Invalid node name specified")
class JobSubmitDescription:
    def __init__(self, required_nodes): pass
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    root = Path(__file__).parents[3]

    def write(text: str) -> None:
        (tmp_path / "pyslurm.py").write_text(text.replace("{slow}", str(tmp_path / "slow")))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")

    return write


async def opened(**changes: float) -> PyslurmClient:
    return await PyslurmClient.open(SlurmSettings(**changes), (25, 11))  # type: ignore[arg-type]


async def test_an_answer_is_a_record_whatever_the_library_prints(stand_in: Callable[[str], None]) -> None:
    stand_in(_STAND_IN)
    client = await opened()
    found = await asyncio.gather(*(client.node(f"n{number}") for number in range(5)))
    assert [node.name for node in found] == ["n0", "n1", "n2", "n3", "n4"]
    assert (found[0].state, found[0].reason, found[0].reason_s, found[0].boot_s) == ("MIXED+DRAIN", "x", 7.0, None)
    await client.close()


async def test_slurm_s_words_are_told_apart(stand_in: Callable[[str], None]) -> None:
    stand_in(_STAND_IN)
    client = await opened()
    with pytest.raises(UnknownNode):
        await client.node("gone")
    with pytest.raises(UnknownJob):
        await client.job("7")
    with pytest.raises(QueryFailed, match="connect failure"):
        await client.node("silent")
    with pytest.raises(QueryFailed, match="KeyError: 'odd'"):
        await client.node("odd")
    with pytest.raises(RequestRefused, match="Invalid node name specified"):
        await client.set_job_nodes("7", ("n1",))
    await client.close()


@pytest.mark.parametrize("name", ["misfit", "unreadable", "endless"])
async def test_an_answer_that_makes_no_sense_is_none(
    stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Not of the form of a node; no JSON; longer than a line may be. The next question is answered."""
    monkeypatch.setattr(pyslurm_client, "LINE_LIMIT_BYTES", 1 << 16)
    stand_in(_STAND_IN)
    client = await opened()
    with pytest.raises(QueryFailed, match=f"node {name}: pyslurm's answer makes no sense") as failed:
        await client.node(name)
    assert 'client = "commands"' in failed.value.remedy
    assert (await client.node("n1")).name == "n1"
    await client.close()


async def test_one_that_hangs_or_dies_is_replaced_and_no_answer_is_taken_for_another(stand_in: Callable[[str], None]) -> None:
    stand_in(_STAND_IN)
    client = await opened(query_timeout_s=2.0)
    for name, says in (("slow", "no answer in 2 s"), ("crash", "process has ended")):
        with pytest.raises(QueryFailed, match=says):
            await client.node(name)
        assert (await client.node("n1")).name == "n1"
    await client.close()


async def test_loading_it_again_is_no_part_of_a_question_s_deadline(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    """
    1. It hangs and is replaced, and loading the next one takes longer than a question may.
    2. The next question, and one that is asked beside it, wait for that and are answered.
    """
    stand_in(_STAND_IN)
    client = await opened(query_timeout_s=1.5)
    (tmp_path / "slow").touch()
    with pytest.raises(QueryFailed, match=r"no answer in 1\.5 s"):
        await client.node("slow")
    found = await asyncio.gather(client.node("n1"), client.node("n2"))
    assert [node.name for node in found] == ["n1", "n2"]
    await client.close()


@pytest.mark.parametrize("name", ["slow", "crash"])
async def test_closing_it_cuts_a_question_off_and_leaves_no_process(
    stand_in: Callable[[str], None], tmp_path: Path, name: str
) -> None:
    """While it is asked, and while the one after it is loaded."""
    stand_in(_STAND_IN)
    client = await opened()
    (tmp_path / "slow").touch()
    if name == "crash":
        with pytest.raises(QueryFailed, match="process has ended"):
            await client.node(name)
    question = asyncio.create_task(client.node("slow"))
    async with asyncio.timeout(20):
        while name == "slow" and not (tmp_path / "slow.asked").exists():
            await asyncio.sleep(0.02)
    await client.close()
    with pytest.raises(QueryFailed, match="cut off, as tmd stops asking"):
        await question
    with pytest.raises(QueryFailed, match="cut off, as tmd stops asking"):
        await client.node("n1")
    assert not [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ImportError('libslurm.so.43: no such file')", "pyslurm cannot be used: ImportError: libslurm.so.43"),
        ("__version__ = '24.05.1'", "pyslurm 24.05 does not match Slurm 25.11"),
        ("import os; os._exit(1)", "process has ended"),
        ("import os; os.write(3, b'{no json}\\n')", "pyslurm cannot be used: JSON is malformed"),
    ],
)
async def test_one_that_does_not_fit_is_refused_with_the_reason(stand_in: Callable[[str], None], text: str, says: str) -> None:
    stand_in(text)
    with pytest.raises(PyslurmUnusable, match=says):
        await opened()
