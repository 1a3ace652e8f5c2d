"""Slurm's own commands as a client: scontrol and squeue, of any version since 22.05.

Contract: tmd.nodes.slurm.client.SlurmClient. Each call is a process of its own that is killed at its deadline; scontrol by itself
would wait for munged or slurmctld for up to a minute. The text forms are read, as they are the same in all versions and cheap
(`scontrol show nodes --json` takes over a second for 5,000 nodes, and 22.05 has none).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from tmd.nodes.base import QueryFailed, ResourceManagerError, UnknownJob, UnknownNode
from tmd.nodes.slurm import parsing
from tmd.nodes.slurm.client import checked_job, checked_node, failure, one_line
from tmd.nodes.slurm.hostlist import compress
from tmd.nodes.slurm.records import SlurmJob, SlurmNode, SlurmReservation
from tmd.nodes.slurm.settings import SlurmSettings

#: Slurm's commands that run at a time; more wait for their turn within their own deadline.
PARALLEL_COMMANDS = 4
#: Beyond this many bytes an answer is read in a thread of its own, so that the event loop goes on.
LARGE_BYTES = 100_000
#: Variables that change what the commands print or whom they ask.
_DROPPED_PREFIXES = ("SLURM_", "SQUEUE_", "SINFO_", "SCONTROL_")
#: Slurm's words (slurm_strerror) for a reservation that it does not have; squeue lists no jobs then, where it picks them itself.
_NO_RESERVATION = "Requested reservation is invalid"

_Result = TypeVar("_Result")


class CommandClient:
    """Use: any call, from any task. Nothing stays open."""

    description: str

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings
        self._turn = asyncio.Semaphore(PARALLEL_COMMANDS)
        self.description = "Slurm's commands"
        self._last_nodes: dict[str, SlurmNode] = {}

    async def version(self) -> tuple[int, int]:
        """Of the commands, without asking slurmctld. Raises QueryFailed."""
        text = await self._query("scontrol", "--version")
        return self._read(parsing.parse_version, "scontrol --version", text)

    async def nodes(self) -> list[SlurmNode]:
        text = await self._query("scontrol", "--all", "--oneliner", "show", "nodes")
        parse = functools.partial(parsing.parse_changed_nodes, known=self._last_nodes)
        if len(text) < LARGE_BYTES:
            found = self._read(parse, "show nodes", text)
        else:
            found = await asyncio.to_thread(self._read, parse, "show nodes", text)
        self._last_nodes = found
        return list(found.values())

    async def node(self, name: str) -> SlurmNode:
        text = await self._query("scontrol", "--all", "--oneliner", "show", "node", checked_node(name))
        found = self._read(parsing.parse_nodes, f"show node {name}", text)
        if [node.name for node in found] != [name]:
            raise UnknownNode(f"Slurm knows no node {name}", "sinfo --Node")
        return found[0]

    async def jobs(self) -> list[SlurmJob]:
        text = await self._query("squeue", "--all", "--noheader", "--Format", parsing.job_format())
        return self._read(parsing.parse_jobs, "squeue", text)

    async def job(self, job_id: str) -> SlurmJob:
        text = await self._of_job(job_id, parsing.job_format())
        for job in self._read(parsing.parse_jobs, f"squeue of job {job_id}", text):
            if job.job_id == job_id:
                return job
        raise UnknownJob(f"Slurm knows no job {job_id}", "squeue --states=all")

    async def comment(self, job_id: str) -> str:
        return parsing.parse_comment(await self._of_job(job_id, f"Comment:{parsing.FIELD_END}"))

    async def reservations(self) -> list[SlurmReservation]:
        text = await self._query("scontrol", "--all", "--oneliner", "show", "reservation")
        return self._read(parsing.parse_reservations, "show reservation", text)

    async def config(self) -> str:
        """What slurmctld goes by, as text (tmd.nodes.slurm.configuration)."""
        return await self._query("scontrol", "show", "config")

    async def jobs_in(self, reservation: str) -> list[str]:
        """The ids of jobs that wait or run in this reservation; none if there is no reservation of this name.

        Any other failure is QueryFailed, whatever its words: a squeue that was killed has not said that there are no jobs.
        """
        try:
            text = await self._query("squeue", "--all", "--noheader", "--reservation", reservation, "--format", "%A")
        except QueryFailed:
            raise
        except ResourceManagerError as error:
            if _NO_RESERVATION in str(error):
                return []
            raise QueryFailed(str(error), f"see what it says: squeue --all --reservation={reservation}") from None
        return text.split()

    async def cancel(self, job_id: str) -> None:
        """Ends a job, of any user."""
        await self._run(self._settings.change_timeout_s, "scancel", checked_job(job_id))

    async def set_drain(self, node: str, reason: str) -> None:
        await self._change("update", f"NodeName={checked_node(node)}", "State=DRAIN", f"Reason={one_line(reason)}")

    async def set_resume(self, node: str) -> None:
        await self._change("update", f"NodeName={checked_node(node)}", "State=RESUME")

    async def set_job_nodes(self, job_id: str, nodes: tuple[str, ...]) -> None:
        names = compress(checked_node(node) for node in nodes)
        await self._change("update", f"JobId={checked_job(job_id)}", f"NodeList={names}")

    async def close(self) -> None:
        """Nothing is open."""

    # ---------------------------------------------------------------- inside

    async def _of_job(self, job_id: str, fields: str) -> str:
        options = ("--all", "--noheader", "--states=all", "--jobs", checked_job(job_id), "--Format", fields)
        return await self._query("squeue", *options)

    async def _query(self, *argv: str) -> str:
        return await self._run(self._settings.query_timeout_s, *argv)

    async def _change(self, *arguments: str) -> None:
        # After a change of size scontrol leaves scripts for the user in the working directory.
        with tempfile.TemporaryDirectory(prefix="tmd-scontrol-") as folder:
            await self._run(self._settings.change_timeout_s, "scontrol", *arguments, cwd=folder)

    async def _run(self, timeout_s: float, program: str, *arguments: str, cwd: str = "/") -> str:
        """What the command prints. Raises QueryFailed, or what `failure` makes of its error."""
        what = f"{program} {' '.join(argument for argument in arguments if not argument.startswith('--'))}".strip()
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                code, output, error = await self._process(program, arguments, cwd)
        except TimeoutError:
            remedy = "see that slurmctld and munged run (scontrol ping), or raise query_timeout_s or change_timeout_s in [slurm]"
            raise QueryFailed(f"{what}: no answer in {timeout_s:g} s", remedy) from None
        except OSError as problem:
            raise QueryFailed(f"{what}: {problem}", "name the directory of Slurm's commands: bin_dir in [slurm]") from None
        if code != 0:
            raise failure(what, error or output)
        return output

    async def _process(self, program: str, arguments: tuple[str, ...], cwd: str) -> tuple[int, str, str]:
        """Exit status, standard output and error of a command."""
        # The answer goes to memory: in a pipe each 4 KiB that scontrol writes would wake the event loop.
        with os.fdopen(os.memfd_create("slurm-answer"), "w+b") as answer:
            code, error = await self._process_into(answer, program, arguments, cwd)
            answer.seek(0)
            return code, answer.read().decode(errors="replace"), error

    async def _process_into(self, answer: BinaryIO, program: str, arguments: tuple[str, ...], cwd: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            str(Path(self._settings.bin_dir, program)) if self._settings.bin_dir else program,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=answer,
            stderr=asyncio.subprocess.PIPE,
            env=command_env(self._settings),
            cwd=cwd,
        )
        try:
            _, error = await process.communicate()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return process.returncode or 0, error.decode(errors="replace")

    @staticmethod
    def _read(parse: Callable[[str], _Result], what: str, text: str) -> _Result:
        try:
            return parse(text)
        except ValueError as error:
            raise QueryFailed(f"{what}: {error}", "tell the authors of tmd which version of Slurm says so") from None


def command_env(settings: SlurmSettings) -> dict[str, str]:
    """Times as numbers, words in English, and nothing that would change what is shown."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED_PREFIXES)}
    conf = settings.conf or os.environ.get("SLURM_CONF", "")
    return kept | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"} | ({"SLURM_CONF": conf} if conf else {})
