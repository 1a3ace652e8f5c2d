"""pyslurm as a client of Slurm, where it is installed and of Slurm's own version (major and minor: its library refuses others).

Contract: tmd.nodes.slurm.client.SlurmClient. pyslurm runs in a process of its own (tmd.nodes.slurm.pyslurm_bridge), which is
asked one thing at a time; one that has not answered by the deadline is killed, and the next question starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any, TypeVar

import msgspec

from tmd.nodes.base import QueryFailed
from tmd.nodes.slurm.client import checked_job, checked_node, failure, one_line
from tmd.nodes.slurm.commands import command_env
from tmd.nodes.slurm.records import SlurmJob, SlurmNode, SlurmReservation
from tmd.nodes.slurm.settings import SlurmSettings

#: Importing pyslurm loads Slurm's library and reads slurm.conf.
START_TIMEOUT_S = 20.0
#: The answer for tens of thousands of nodes is one line.
LINE_LIMIT_BYTES = 64 << 20

_Value = TypeVar("_Value")


class PyslurmUnusable(Exception):
    """pyslurm cannot be used here; the text says why."""


class PyslurmClient:
    """Use: `open`, any call from any task, `close`."""

    description: str

    def __init__(self, settings: SlurmSettings, version: tuple[int, int]) -> None:
        self._settings = settings
        self.description = f"pyslurm {version[0]}.{version[1]:02}"
        self._turn = asyncio.Lock()
        self._bridge: asyncio.subprocess.Process | None = None

    @classmethod
    async def open(cls, settings: SlurmSettings, slurm: tuple[int, int] | None) -> PyslurmClient:
        """`slurm` is the version of Slurm's commands here, None if there are none. Raises PyslurmUnusable."""
        try:
            bridge, version = await _start(settings)
        except QueryFailed as error:
            raise PyslurmUnusable(str(error)) from None
        client = cls(settings, version)
        client._bridge = bridge
        if slurm not in (None, version):
            await client.close()
            raise PyslurmUnusable(f"{client.description} does not match Slurm {slurm[0]}.{slurm[1]:02}" if slurm else "")
        return client

    async def nodes(self) -> list[SlurmNode]:
        return await self._query(list[SlurmNode], "nodes")

    async def node(self, name: str) -> SlurmNode:
        return await self._query(SlurmNode, "node", checked_node(name))

    async def jobs(self) -> list[SlurmJob]:
        return await self._query(list[SlurmJob], "jobs")

    async def job(self, job_id: str) -> SlurmJob:
        return await self._query(SlurmJob, "job", checked_job(job_id))

    async def comment(self, job_id: str) -> str:
        return await self._query(str, "comment", checked_job(job_id))

    async def reservations(self) -> list[SlurmReservation]:
        return await self._query(list[SlurmReservation], "reservations")

    async def set_drain(self, node: str, reason: str) -> None:
        await self._change("set_drain", checked_node(node), one_line(reason))

    async def set_resume(self, node: str) -> None:
        await self._change("set_resume", checked_node(node))

    async def set_job_nodes(self, job_id: str, nodes: tuple[str, ...]) -> None:
        await self._change("set_job_nodes", checked_job(job_id), [checked_node(node) for node in nodes])

    async def close(self) -> None:
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            await _end(bridge)

    # ---------------------------------------------------------------- inside

    async def _query(self, kind: type[_Value], call: str, *arguments: Any) -> _Value:
        return await self._ask(self._settings.query_timeout_s, kind, call, *arguments)

    async def _change(self, call: str, *arguments: Any) -> None:
        await self._ask(self._settings.change_timeout_s, type(None), call, *arguments)

    async def _ask(self, timeout_s: float, kind: type[_Value], call: str, *arguments: Any) -> _Value:
        what = " ".join(map(str, (call, *arguments)))
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                answer = await self._exchange([call, *arguments])
        except TimeoutError:
            remedy = "see that slurmctld and munged run (scontrol ping), or raise query_timeout_s or change_timeout_s in [slurm]"
            raise QueryFailed(f"{what}: no answer in {timeout_s:g} s", remedy) from None
        except (EOFError, OSError) as error:
            raise QueryFailed(f"{what}: {error}", 'ask the commands: client = "commands" in [slurm]') from None
        if "error" in answer:
            raise failure(what, answer["error"])
        if "ok" not in answer:
            raise QueryFailed(f"{what}: pyslurm failed: {answer.get('bug', answer)}", 'ask the commands: client = "commands"')
        return msgspec.convert(answer["ok"], kind)

    async def _exchange(self, question: list[Any]) -> dict[str, Any]:
        """Whatever keeps the answer from coming ends the process: a late one must not be taken for the next one's."""
        if self._bridge is None:
            self._bridge, _ = await _start(self._settings)
        bridge = self._bridge
        answered = False
        try:
            assert bridge.stdin is not None
            bridge.stdin.write(json.dumps(question).encode() + b"\n")
            answer = await _read(bridge)
            answered = True
            return answer
        finally:
            if not answered:
                self._bridge = None
                await _end(bridge)


async def _start(settings: SlurmSettings) -> tuple[asyncio.subprocess.Process, tuple[int, int]]:
    """A process that has pyslurm loaded, and of which version. Raises QueryFailed."""
    bridge = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tmd.nodes.slurm.pyslurm_bridge",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=command_env(settings),
        limit=LINE_LIMIT_BYTES,
    )
    greeting: dict[str, Any] = {"error": f"pyslurm cannot be used: it was not loaded in {START_TIMEOUT_S:g} s"}
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                greeting = await _read(bridge)
    except EOFError as error:
        greeting = {"error": f"pyslurm cannot be used: {error}"}
    finally:
        if "ok" not in greeting:
            await _end(bridge)
    if "ok" not in greeting:
        raise QueryFailed(greeting["error"], 'install pyslurm of Slurm\'s own version, or client = "commands" in [slurm]')
    return bridge, msgspec.convert(greeting["ok"], tuple[int, int])


async def _read(bridge: asyncio.subprocess.Process) -> dict[str, Any]:
    """The next line. Raises EOFError if the process has ended."""
    assert bridge.stdout is not None
    line = await bridge.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError("pyslurm's process has ended")
    return msgspec.json.decode(line, type=dict[str, Any])


async def _end(bridge: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        bridge.kill()
    await bridge.wait()
    if bridge.stdin is not None:
        bridge.stdin.close()
