"""What a local cluster is made of and what of it is on disk: settings, nodes, jobs and the lives of nodes in them.

Contract: `Book.save` replaces the file as a whole, so a daemon that was killed finds its nodes again; when what is written is
`tmd.nodes.local_record`'s business. One daemon writes it; the daemon's own lock on its state directory sees to that.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

#: Linux gives no program an argument or environment variable that is longer (MAX_ARG_STRLEN, with its final NUL).
WORD_LIMIT_BYTES = (128 << 10) - 1
#: Ended jobs kept for look-ups.
ENDED_JOBS_KEPT = 50


class LocalNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node of a local cluster: its name, its own loopback address and its failure domains."""

    name: str
    address: str
    rack: str = "r1"
    zone: str = "z1"

    @property
    def labels(self) -> dict[str, str]:
        return {"rack": self.rack, "zone": self.zone}


class LocalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[local]`: only with `resource_manager = "local"`."""

    nodes: Annotated[
        int | tuple[LocalNode, ...],
        Meta(
            description="How many nodes: n1, n2, ... at 127.0.0.11, 127.0.0.12, ..., at most 200; or a list of each in full.",
            extra={"example": '[{ name = "n1", address = "127.0.0.11", rack = "r1", zone = "z1" }]'},
        ),
    ] = 6
    racks: Annotated[int, Meta(description="Neighbouring nodes share a rack. Not used where the nodes are given in full.")] = 3
    zones: Annotated[int, Meta(description="Neighbouring racks share a zone. Not used where the nodes are given in full.")] = 1
    poll_s: Annotated[float, Meta(description="How often processes are looked at.")] = 0.1
    notice_s: Annotated[
        float,
        Meta(description="A node that is killed or frozen is called down only after this long, as by a real resource manager."),
    ] = 25.0
    release_grace_s: Annotated[
        float,
        Meta(description="What still runs on a released node, or of a cancelled job, has this long to end by itself."),
    ] = 5.0

    def expand(self) -> tuple[LocalNode, ...]:
        """Every node in full. Raises ValueError naming what is wrong."""
        nodes = self.nodes if isinstance(self.nodes, tuple) else self._counted(self.nodes)
        for attribute in ("name", "address"):
            values = [getattr(node, attribute) for node in nodes]
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise ValueError(f"[local] nodes: {attribute} {', '.join(twice)} is given to more than one node")
        for node in nodes:
            if not node.name or "/" in node.name or not node.address.startswith("127."):
                raise ValueError(f"[local] nodes: {node.name!r} at {node.address!r} needs a plain name and a loopback address")
        return nodes

    def _counted(self, count: int) -> tuple[LocalNode, ...]:
        if not (1 <= self.zones <= self.racks <= count <= 200):
            raise ValueError(
                f"[local] nodes = {count}, racks = {self.racks}, zones = {self.zones}: expected 1 ≤ zones ≤ racks ≤ nodes ≤ 200"
            )
        return tuple(
            LocalNode(
                name=f"n{index + 1}",
                address=f"127.0.0.{index + 11}",
                rack=f"r{index * self.racks // count + 1}",
                zone=f"z{index * self.racks // count * self.zones // self.racks + 1}",
            )
            for index in range(count)
        )


class JobRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job for a local cluster: `command` is what follows the options of tmd-run, the script and its arguments."""

    command: tuple[str, ...]
    nnodes: int = 1
    standby: int = 0
    nproc_per_node: int = 1
    #: The agents' environment; None: the daemon's own.
    env: dict[str, str] | None = None
    cwd: str = ""
    #: Where <node>.log goes; empty: below the state directory.
    log_dir: str = ""

    def problem(self) -> str:
        """What makes this no job at all; empty if nothing does."""
        if not self.command or self.nnodes < 1 or self.standby < 0 or self.nproc_per_node < 1:
            return "it needs a command, at least one node and one process per node, and no negative standby count"
        places = {"cwd": self.cwd, "log_dir": self.log_dir}
        words = {f"command[{index}]": word for index, word in enumerate(self.command)}
        for place, text in (places | words).items():
            if "\0" in text:
                return f"{place} {_shortened(text)} has a NUL character in it"
            if _size_bytes(text) > WORD_LIMIT_BYTES:
                return f"{place} {_shortened(text)} is longer than {WORD_LIMIT_BYTES} bytes"
        for name, value in (self.env or {}).items():
            if not name or "=" in name or "\0" in name:
                return f"{_shortened(name)} is no name for an environment variable: it is empty or has = or NUL in it"
            if "\0" in value:
                return f"environment variable {_shortened(name)} has a NUL character in its value"
            if _size_bytes(f"{name}={value}") > WORD_LIMIT_BYTES:
                return f"environment variable {_shortened(name)} is longer than {WORD_LIMIT_BYTES} bytes"
        return ""


def _size_bytes(text: str) -> int:
    return len(text.encode(errors="surrogateescape"))


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")


class Life(msgspec.Struct, kw_only=True):
    """One life of a node in a job: an agent and all that it started. The mark is in the environment of each of them."""

    mark: str
    node: str
    number: int
    index: int | None
    log: str
    started_s: float
    #: Both 0 until the agent has been started.
    pid: int = 0
    start_ticks: int = 0
    #: As in `subprocess`; None while it runs, and for ever if the daemon was not there when it ended.
    exit_code: int | None = None
    #: Nothing of it runs any more.
    ended_s: float | None = None
    #: The node was given back at this time: the grace runs from here.
    released_s: float | None = None


class LocalJob(msgspec.Struct, kw_only=True):
    job_id: str
    request: JobRequest
    lives: list[Life] = []
    cancelled_s: float | None = None
    created_s: float = 0.0

    def life_on(self, node: str) -> Life | None:
        """The newest life of this node in the job."""
        return next((life for life in reversed(self.lives) if life.node == node), None)

    def runs(self) -> bool:
        return any(life.ended_s is None for life in self.lives)


class NodeMarks(msgspec.Struct, kw_only=True):
    """What was done to a node by hand."""

    #: Reason of the drain, None: not drained.
    drain: str | None = None
    #: Set down by an operator: known at once.
    down: str | None = None
    #: Killed or frozen at this time: known only after `notice_s`.
    killed_s: float | None = None
    frozen_s: float | None = None

    @property
    def off(self) -> bool:
        """Nothing runs on it until it comes back."""
        return self.down is not None or self.killed_s is not None


class Book(msgspec.Struct, kw_only=True):
    """All that a local cluster remembers."""

    job_counter: int = 0
    jobs: dict[str, LocalJob] = {}
    marks: dict[str, NodeMarks] = {}

    @classmethod
    def load(cls, path: Path) -> Book:
        """An empty book if there is no file. Raises ValueError if it cannot be read as one."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is not a local cluster's state: {error}; move it away to start with free nodes") from None

    def save(self, path: Path) -> None:
        """Replaces the file as a whole: a reader sees the old one or the new one. Raises OSError."""
        self._forget()
        fresh = path.with_suffix(".new")
        try:
            fresh.touch(mode=0o600)
            with fresh.open("wb") as file:
                file.write(msgspec.json.encode(self))
                file.flush()
                os.fsync(file.fileno())  # else a loss of power may leave an empty file under the name
            os.replace(fresh, path)
        except OSError:
            # Half a file would take up what little room there is.
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise

    def _forget(self) -> None:
        """Drops the oldest ended jobs, and of the others what no agent will need: the environment may be long and secret."""
        ended = [job for job in self.jobs.values() if not job.runs()]
        for job in ended[:-ENDED_JOBS_KEPT]:
            del self.jobs[job.job_id]
        for job in ended:
            if job.request.env:
                job.request = msgspec.structs.replace(job.request, env={})

    def marks_of(self, node: str) -> NodeMarks:
        return self.marks.setdefault(node, NodeMarks())
