"""pyslurm as a client of Slurm, where it is installed and of Slurm's own version (major and minor: its library refuses others).

Contract: tmd.nodes.slurm.client.SlurmClient. pyslurm runs in a process of its own (tmd.nodes.slurm.pyslurm_bridge), which is
asked one thing at a time; one that has not answered by the deadline is killed, and another is started at once. A question that
comes while that one is being loaded waits for it first, at most START_TIMEOUT_S, as slurmctld is not asked before.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from typing import Any, TypeVar

import msgspec

from tmd.nodes.base import QueryFailed, RequestRefused, UnknownNode
from tmd.nodes.slurm.client import checked_job, checked_node, failure, one_line
from tmd.nodes.slurm.commands import command_env
from tmd.nodes.slurm.records import SlurmJob, SlurmNode, SlurmReservation
from tmd.nodes.slurm.settings import SlurmSettings

#: Importing pyslurm loads Slurm's library and reads slurm.conf.
START_TIMEOUT_S = 20.0
#: The answer for tens of thousands of nodes is one line.
LINE_LIMIT_BYTES = 64 << 20
#: Of a line that is too long, no JSON, or not of the form that was asked for.
_SENSELESS = (ValueError, msgspec.MsgspecError)
_COMMANDS = 'ask the commands: client = "commands" in [slurm]'

_Value = TypeVar("_Value")


class PyslurmUnusable(Exception):
    """pyslurm cannot be used here; the text says why."""


class PyslurmClient:
    """Use: `open`, any call from any task, `close`."""

    description: str

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings
        self.description = "pyslurm"
        self._turn = asyncio.Lock()
        #: None: closed.
        self._bridge: asyncio.Task[_Bridge] | None = asyncio.create_task(_start(settings))

    @classmethod
    async def open(cls, settings: SlurmSettings, slurm: tuple[int, int] | None) -> PyslurmClient:
        """`slurm` is the version of Slurm's commands here, None if there are none. Raises PyslurmUnusable."""
        client = cls(settings)
        try:
            version = (await client._loaded()).version
            client.description = f"pyslurm {_written(version)}"
            if slurm is not None and slurm != version:
                raise PyslurmUnusable(f"{client.description} does not match Slurm {_written(slurm)}")
        except BaseException as error:
            await client.close()
            if isinstance(error, QueryFailed):
                raise PyslurmUnusable(str(error)) from None
            raise
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
        names = [checked_node(node) for node in nodes]
        try:
            await self._change("set_job_nodes", checked_job(job_id), names)
        except UnknownNode as error:
            # Slurm's word for each node that a job cannot have or has to keep, too; scontrol adds the job to it.
            raise RequestRefused(str(error)) from None

    async def close(self) -> None:
        """A question under way is cut off: QueryFailed."""
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            await _discard(bridge)

    # ---------------------------------------------------------------- inside

    async def _query(self, kind: type[_Value], call: str, *arguments: Any) -> _Value:
        return await self._ask(self._settings.query_timeout_s, kind, call, *arguments)

    async def _change(self, call: str, *arguments: Any) -> None:
        await self._ask(self._settings.change_timeout_s, type(None), call, *arguments)

    async def _ask(self, timeout_s: float, kind: type[_Value], call: str, *arguments: Any) -> _Value:
        what = " ".join(map(str, (call, *arguments)))
        try:
            await self._loaded()
            async with asyncio.timeout(timeout_s), self._turn:
                answer = await self._exchange(await self._loaded(), [call, *arguments])
            if "ok" in answer:
                return msgspec.convert(answer["ok"], kind)
        except TimeoutError:
            remedy = "see that slurmctld and munged run (scontrol ping), or raise query_timeout_s or change_timeout_s in [slurm]"
            raise QueryFailed(f"{what}: no answer in {timeout_s:g} s", remedy) from None
        except (EOFError, OSError) as error:
            if self._bridge is None:
                raise QueryFailed(f"{what}: cut off, as tmd stops asking", "ask again once tmd has started again") from None
            raise QueryFailed(f"{what}: {error}", _COMMANDS) from None
        except _SENSELESS as error:
            raise QueryFailed(f"{what}: pyslurm's answer makes no sense: {error}", _COMMANDS) from None
        if "error" in answer:
            raise failure(what, str(answer["error"]))
        raise QueryFailed(f"{what}: pyslurm failed: {answer.get('bug', answer)}", _COMMANDS)

    async def _loaded(self) -> _Bridge:
        """The process to ask, once it can be asked; whoever stops waiting for it does not end it.

        Raises QueryFailed if it cannot be loaded, EOFError if the client is closed.
        """
        if self._bridge is not None and self._bridge.done() and self._bridge.exception() is not None:
            self._bridge = asyncio.create_task(_start(self._settings))
        bridge = self._bridge
        if bridge is not None:
            await asyncio.wait([bridge])
        if bridge is None or bridge.cancelled():
            raise EOFError("the client is closed")
        return bridge.result()

    async def _exchange(self, bridge: _Bridge, question: list[Any]) -> dict[str, Any]:
        """Whatever keeps the answer from coming ends the process: a late one must not be taken for the next one's."""
        answered = False
        try:
            assert bridge.process.stdin is not None
            bridge.process.stdin.write(json.dumps(question).encode() + b"\n")
            answer = await _read(bridge.process)
            answered = True
            return answer
        finally:
            if not answered:
                if self._bridge is not None:
                    self._bridge = asyncio.create_task(_start(self._settings))
                await _end(bridge.process)


@dataclasses.dataclass(frozen=True)
class _Bridge:
    """A process that has pyslurm loaded, and of which version."""

    process: asyncio.subprocess.Process
    version: tuple[int, int]


async def _start(settings: SlurmSettings) -> _Bridge:
    """Raises QueryFailed. One that was not loaded leaves no process."""
    process = await asyncio.create_subprocess_exec(
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
                greeting = await _read(process)
        if "ok" in greeting:
            greeting["ok"] = msgspec.convert(greeting["ok"], tuple[int, int])
    except (EOFError, *_SENSELESS) as error:
        greeting = {"error": f"pyslurm cannot be used: {error}"}
    finally:
        if "ok" not in greeting:
            await _end(process)
    if "ok" not in greeting:
        raise QueryFailed(greeting["error"], 'install pyslurm of Slurm\'s own version, or client = "commands" in [slurm]')
    return _Bridge(process, greeting["ok"])


async def _read(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """The next line. Raises EOFError if the process has ended, _SENSELESS."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError("pyslurm's process has ended")
    return msgspec.json.decode(line, type=dict[str, Any])


async def _discard(bridge: asyncio.Task[_Bridge]) -> None:
    """Ends the process, loaded or not."""
    bridge.cancel()
    await asyncio.wait([bridge])
    if not bridge.cancelled() and bridge.exception() is None:
        await _end(bridge.result().process)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _written(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]:02}"
