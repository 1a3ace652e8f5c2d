"""A node under a daemon: its processes are made what the daemon's newest directive says, and everything seen is reported.

Contract: a named incarnation is started once and never again; one that is not named is killed. Directives pass to the ranks,
statuses and store requests to the daemon. The connection may come and go; only the job's end, a refusal, a stop signal, or
hold_limit_s without daemon and without a living rank end the agent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tmd.protocol.agent import (
    AgentDirective,
    AgentHello,
    AgentRefused,
    AgentStatus,
    AgentWelcome,
    ProcessSpec,
    ProcessStatus,
    StoreReply,
)
from tmd.protocol.codec import FROM_RANK
from tmd.protocol.control import FromRank, RankUpdate
from tmd.protocol.keys import fingerprint
from tmd.protocol.rank import Directive, RankStatus
from tmd.protocol.reasons import in_one_line
from tmd_worker.agent import identity, introduction
from tmd_worker.agent.daemon_link import DaemonLink, DaemonRefusal
from tmd_worker.agent.errands import Errands
from tmd_worker.agent.logs import LogPump
from tmd_worker.agent.processes import Processes, RankProcess, StartFailed, StartOrder
from tmd_worker.agent.rank_channel import RankChannel
from tmd_worker.agent.settings import DirectedSettings
from tmd_worker.agent.stop_signals import STOP_GRACE_S, StopSignals, exit_status

EXIT_REFUSED = 3
#: The job can be tried again: EX_TEMPFAIL, as a rank that held for too long.
EXIT_ABANDONED = 75
#: Exit code of a process that could not be started, as a shell has it.
EXIT_NOT_STARTED = 126
#: From the end of the job until SIGKILL.
OVER_GRACE_S = 10.0
#: hold_limit_s before the first welcome.
FIRST_CONTACT_S = 600.0
#: A rank's status is far below; all of a node's must fit one message.
STATUS_LIMIT_BYTES = 1 << 16
#: Ended processes that are reported although the daemon does not name them any more.
EXITED_KEPT = 64
_ABANDONED_CHECK_S = 0.5
#: What changes in a rank's status with every step: nobody waits to hear of it.
_PROGRESS = ("version", "next_step", "applied_step", "in_step", "commits", "stamps", "counters")


@dataclasses.dataclass(slots=True)
class _Member:
    """One living rank process of this node."""

    spec: ProcessSpec
    process: RankProcess
    channel: RankChannel
    status: RankStatus | None = None

    def report(self) -> ProcessStatus:
        return ProcessStatus(
            incarnation=self.spec.incarnation,
            pid=self.process.pid,
            state=self.process.state,
            exit_code=self.process.exit_code,
            exit_seen_s=self.process.exit_seen_s,
            rank=self.status,
        )

    def ends_orderly(self) -> bool:
        """It said that it would go, so its end is no loss to anybody."""
        return self.status is not None and self.status.phase in ("finished", "failed")


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Why the agent ends, and with which code. `sent` is the signal that the ranks have got already."""

    code: int
    text: str = ""
    grace_s: float = OVER_GRACE_S
    sent: signal.Signals | None = None
    #: The job goes on elsewhere, and with it what was started from here.
    node_only: bool = False


class DirectedNode:
    """The node of one agent; implements LinkOwner."""

    def __init__(self, settings: DirectedSettings, pump: LogPump, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self.agent_id = f"{settings.node}-{os.getpid()}-{secrets.token_hex(6)}"
        self._threads = identity.rank_threads(settings.nproc_per_node, os.environ)
        self.processes = Processes(settings.launch, settings.logs, pump, on_exiting=self._on_exiting, on_exited=self._on_exited)
        self._hello = introduction.first_hello(settings, self.agent_id, self._threads)
        self.link = DaemonLink(settings.daemon, self, say, settings.proof)
        self.errands = Errands(settings.step, pump, say, lambda: self.link.status_changed(urgent=True))
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._welcome: AgentWelcome | None = None
        self._newest: AgentDirective | None = None
        self._orders: dict[str, Directive] = {}
        self._members: dict[str, _Member] = {}
        self._exited: dict[str, ProcessStatus] = {}
        self._version = 0

    @property
    def hold_limit_s(self) -> float:
        return self._welcome.hold_limit_s if self._welcome is not None else FIRST_CONTACT_S

    def decide(self, outcome: Outcome) -> None:
        """The first reason to end counts; nothing is started any more."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    # ---------------------------------------------------------------- LinkOwner

    def status(self) -> AgentStatus:
        self._version += 1
        living = [member.report() for member in self._members.values()]
        return AgentStatus(
            agent_id=self.agent_id,
            version=self._version,
            time_s=time.time(),
            processes=(*living, *self._exited.values()),
            orders=self.errands.statuses(),
        )

    def hello(self) -> AgentHello:
        ours = self._ours()
        if ours is None:
            return self._hello
        return msgspec.structs.replace(self._hello, key_fingerprint=fingerprint(ours.job_key), generation=ours.generation)

    def objection(self, answer: AgentWelcome | AgentRefused) -> str | None:
        ours = self._ours()
        if ours is None:
            return None
        key = answer.key_fingerprint if isinstance(answer, AgentRefused) else fingerprint(answer.job_key)
        if key != fingerprint(ours.job_key):
            what = "has another key for the job" if key else "does not know the job's key"
        elif answer.generation < ours.generation:
            what = f"is an older one (life {answer.generation} of the daemon; here life {ours.generation} is known)"
        else:
            return None
        return (
            f"its ledger {what}, so that of the processes here was lost or replaced. They go on, but nobody can be replaced: "
            "bring the old ledger back (this agent tries again until then), or end the job and submit it again"
        )

    def _ours(self) -> AgentWelcome | None:
        """The last welcome of the daemon that the processes here belong to; None before any was started."""
        return self._welcome if self._members or self._exited else None

    def on_welcome(self, welcome: AgentWelcome) -> None:
        self._welcome = welcome

    def on_directive(self, directive: AgentDirective) -> None:
        newest = self._newest
        if newest is not None and (directive.generation, directive.sequence) <= (newest.generation, newest.sequence):
            return
        self._newest = directive
        if self.outcome.done():
            return
        if directive.job_over is not None:
            code = exit_status(directive.job_over.exit_code)
            reason = in_one_line(directive.job_over.reason)  # a traceback is in the log of the node where it happened
            text = f"job {self._settings.job_id} is over here with code {code}: {reason}"
            self.decide(Outcome(code, text, node_only=directive.job_over.node_only))
            return
        self.errands.match(directive.orders, directive.withdrawn)
        self._match_processes(directive)
        for order in directive.ranks:
            self._orders[order.incarnation] = order
            if (member := self._members.get(order.incarnation)) is not None:
                member.channel.order(order)

    def on_store_reply(self, reply: StoreReply) -> None:
        if (member := self._members.get(reply.incarnation)) is not None:
            member.channel.reply(reply)

    # ---------------------------------------------------------------- processes

    def _match_processes(self, directive: AgentDirective) -> None:
        named = {spec.incarnation: spec for spec in directive.processes}
        for incarnation, member in self._members.items():
            if incarnation not in named and member.process.state != "exiting":
                self._say(f"{member.process.label.text} (incarnation {incarnation}) is not wanted any more: killed")
                member.process.send_signal(signal.SIGKILL)
        self._orders = {incarnation: order for incarnation, order in self._orders.items() if incarnation in named}
        unnamed = [incarnation for incarnation in self._exited if incarnation not in named]
        for incarnation in unnamed[:-EXITED_KEPT]:
            del self._exited[incarnation]
        # The order may have come before the process: note it first, so that the new rank finds it.
        self._orders.update({order.incarnation: order for order in directive.ranks})
        for spec in directive.processes:
            if spec.incarnation not in self._members and spec.incarnation not in self._exited:
                self._start(spec)

    def _start(self, spec: ProcessSpec) -> None:
        welcome, settings = self._welcome, self._settings
        assert welcome is not None  # the link lets no directive pass before a welcome
        ours, theirs = socket.socketpair()
        label = f"rank{spec.rank}" if spec.rank is not None else f"standby {settings.node}/{spec.local_rank}"
        order = StartOrder(
            name=spec.incarnation,
            label=label,
            local_rank=spec.local_rank,
            standby=spec.rank is None,
            environment=introduction.environment(settings, self._threads, spec, theirs.fileno()),
            control_fd=theirs.fileno(),
        )
        try:
            process = self.processes.start(order)
        except StartFailed as error:
            self._say(f"[{label}] {error}; the daemon is told")
            ours.close()
            failed = ProcessStatus(incarnation=spec.incarnation, pid=0, state="exited", exit_code=EXIT_NOT_STARTED)
            self._exited[spec.incarnation] = msgspec.structs.replace(failed, exit_seen_s=time.time())
            self.link.status_changed(urgent=True)
            return
        finally:
            theirs.close()
        channel = RankChannel(
            ours,
            spec.incarnation,
            on_message=lambda message: self._on_message(member, message),
            on_bad=lambda what: self._on_bad(member, what),
        )
        member = _Member(spec, process, channel)
        self._members[spec.incarnation] = member
        channel.welcome(introduction.rank_welcome(settings, spec, welcome))
        if (known := self._orders.get(spec.incarnation)) is not None:
            channel.order(known)
        self.link.status_changed(urgent=True)

    def _on_exiting(self, process: RankProcess) -> None:
        member = self._members[process.name]
        member.channel.read_rest()
        if not member.ends_orderly():
            for other in self._members.values():
                if other is not member and other.process.state != "exited":
                    other.channel.peer_exiting(process.name)
        self.link.status_changed(urgent=True)

    def _on_exited(self, process: RankProcess) -> None:
        member = self._members.pop(process.name)
        member.channel.read_rest()
        member.channel.close()
        self._exited[process.name] = member.report()
        self.link.forget_requests(process.name)
        code = process.exit_code or 0
        if code and not (self.outcome.done() and code in (-signal.SIGTERM, -signal.SIGKILL)):  # those were sent from here
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self._say(f"[{process.label.text}] (pid {process.pid}, incarnation {process.name}) {how}")
        self.link.status_changed(urgent=True)

    # ---------------------------------------------------------------- ranks

    def _on_message(self, member: _Member, message: FromRank) -> None:
        if not isinstance(message, RankUpdate):
            refused = self.link.request(message)
            if refused is not None:
                member.channel.reply(
                    StoreReply(request_id=message.request_id, incarnation=message.incarnation, found=False, error=refused)
                )
            return
        status, before = message.status, member.status
        if len(FROM_RANK.encode(message)) > STATUS_LIMIT_BYTES:
            self._on_bad(member, f"sent a status of more than {STATUS_LIMIT_BYTES} bytes")
            return
        if status.job_id != self._settings.job_id:
            self._on_bad(member, f"spoke for job {status.job_id!r}")
            return
        if before is not None and status.version <= before.version:
            return
        member.status = status
        if member.process.state == "starting":
            member.process.state = "running"
        if status.rank is not None and (before is None or before.rank != status.rank):
            member.process.label.set(f"rank{status.rank}")
        self.link.status_changed(urgent=before is None or _matters(before, status))

    def _on_bad(self, member: _Member, what: str) -> None:
        """A rank that breaks the protocol cannot be trusted with the job's state."""
        self._say(f"[{member.process.label.text}] (incarnation {member.spec.incarnation}) {what}: killed")
        member.channel.close()
        member.process.send_signal(signal.SIGKILL)


def _matters(before: RankStatus, after: RankStatus) -> bool:
    """Whether anybody waits for this change: anything but mere progress."""
    progress = {name: getattr(after, name) for name in _PROGRESS}
    return msgspec.structs.replace(before, **progress) != after


async def run(settings: DirectedSettings, pump: LogPump, say: Callable[[str], None]) -> int:
    """The agent's life; returns its exit code."""
    node = DirectedNode(settings, pump, say)
    signals = StopSignals(node.processes.signal_all, say)
    link = asyncio.create_task(node.link.run(), name="link")
    watch = asyncio.create_task(_abandoned(node), name="abandoned")
    reasons: set[asyncio.Future[Any]] = {link, watch, node.outcome, signals.stopped}
    try:
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        if link.done():
            node.decide(_refusal(link, settings))
        if signals.stopped.done():
            signum = signals.stopped.result()
            node.decide(Outcome(128 + signum, sent=signum, grace_s=STOP_GRACE_S))
        outcome = await node.outcome
        if outcome.text:
            say(outcome.text)
        await node.processes.end_all(outcome.grace_s, signum=None if outcome.sent else signal.SIGTERM)
        await node.errands.close(outcome.grace_s, leave=outcome.node_only)
        if not link.done():
            await node.link.flush(0.5)
        return outcome.code
    finally:
        for task in (link, watch):
            task.cancel()
        await asyncio.gather(link, watch, return_exceptions=True)
        node.processes.signal_all(signal.SIGKILL)
        node.processes.close()
        signals.ignore_from_now()


def _refusal(link: asyncio.Task[None], settings: DirectedSettings) -> Outcome:
    try:
        link.result()
    except DaemonRefusal as refusal:
        return Outcome(EXIT_REFUSED, f"the daemon at {settings.daemon.text} does not serve this agent: {refusal}")
    raise AssertionError("the link ends by refusal or cancellation alone")


async def _abandoned(node: DirectedNode) -> None:
    """Ends the agent when neither a daemon nor a rank is left to wait for."""
    while not node.outcome.done():
        await asyncio.sleep(_ABANDONED_CHECK_S)
        away_s = node.link.away_s()
        if away_s >= node.hold_limit_s and not node.processes.any_alive():
            text = (
                f"no daemon for {away_s:.0f} s and no rank running on this node: nothing is left to wait for; "
                f"leaving with code {EXIT_ABANDONED} so that the job can be requeued"
            )
            node.decide(Outcome(EXIT_ABANDONED, text))
