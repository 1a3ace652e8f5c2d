"""The daemon's core under test with real rank cores and nothing else: messages arrive at once, links open and states load as
soon as they can, and a step is trained when the test says so. What a test wants to go wrong it breaks by hand."""

from __future__ import annotations

from typing import Any

from tmd.core.allocation import Allocation
from tmd.core.daemon import DaemonCore
from tmd.core.instructions import DirectAgent, Instruction, Persist, RefuseAgent, ReleaseNode, WelcomeAgent
from tmd.core.pool import Pool
from tmd.core.records import EventRecord, JobRecord, LedgerSnapshot, MigrationRecord, NodeRecord, RankRecord
from tmd.core.settings import CoreSettings
from tmd.protocol.agent import (
    AgentDirective,
    AgentHello,
    AgentStatus,
    JobOver,
    NodeOrder,
    OrderStatus,
    ProcessState,
    ProcessStatus,
)
from tmd.protocol.codec import PROTOCOL
from tmd.protocol.membership import Install, Membership, Plan
from tmd.protocol.rank import RankStatus
from tmd_worker.core.ballot import Ballot
from tmd_worker.core.instructions import (
    CloseLinks,
    DropStaged,
    Exit,
    FetchFromLeaver,
    FetchFromSurvivors,
    OpenLinks,
    SendStatus,
    StageLinks,
)
from tmd_worker.core.rank import RankCore, Turn, Verdict

STEP_S = 0.1
SIGKILL = -9


class Ledger:
    """Rows by key, and every event."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobRecord] = {}
        self.ranks: dict[str, RankRecord] = {}
        self.nodes: dict[tuple[str, str], NodeRecord] = {}
        self.migrations: dict[str, MigrationRecord] = {}
        self.events: list[EventRecord] = []
        self.paused = False

    def write(self, rows: Persist) -> None:
        self.jobs |= {row.job_id: row for row in rows.jobs}
        self.ranks |= {row.incarnation: row for row in rows.ranks}
        self.nodes |= {(row.job_id, row.node): row for row in rows.nodes}
        self.migrations |= {row.migration_id: row for row in rows.migrations}
        self.events += rows.events
        self.paused = self.paused if rows.paused is None else rows.paused

    def snapshot(self) -> LedgerSnapshot:
        return LedgerSnapshot(
            jobs=tuple(self.jobs.values()),
            ranks=tuple(self.ranks.values()),
            nodes=tuple(self.nodes.values()),
            migrations=tuple(self.migrations.values()),
            last_event_id=self.events[-1].event_id if self.events else 0,
            paused=self.paused,
        )


class Rank:
    """One process: its core, and a main thread that trains when the cluster says so."""

    def __init__(self, cluster: Cluster, agent: Agent, incarnation: str, rank: int | None) -> None:
        self.cluster, self.agent = cluster, agent
        self.core = RankCore(job_id=cluster.job_id, incarnation=incarnation, rank=rank, clock=lambda: cluster.now)
        self.initial = rank is not None
        self.state: ProcessState = "running"
        self.exit_code: int | None = None
        self.exit_seen_s = 0.0
        self.status: RankStatus | None = None
        #: It is frozen: neither hears nor says anything.
        self.stopped = False
        #: The step that its main thread is in does not come to its end.
        self.stuck = False
        #: What its main thread is in: "start", "boundary", "step", "blocked", "end".
        self.at = "start"
        self.fetches: list[FetchFromLeaver | FetchFromSurvivors] = []
        self.origin = "exact"
        #: The rank that it dials in vain, -1 for none.
        self.dials = -1
        #: It never comes to an end with opening its links.
        self.waits = False

    @property
    def alive(self) -> bool:
        return self.state == "running"

    def die(self, exit_code: int = SIGKILL) -> None:
        self.state, self.exit_code, self.exit_seen_s = "exited", exit_code, self.cluster.now

    def carry_out(self, out: list[Any]) -> None:
        for instruction in out:
            match instruction:
                case SendStatus(status) if self.status is None or status.version > self.status.version:
                    self.status = status
                case CloseLinks(epoch, _):
                    self.dials = -1
                    self.cluster.links_closed(self, epoch, orderly=True)
                case OpenLinks(membership, rank) if "links" not in self.cluster.held:
                    self._open_links(membership, rank)
                case StageLinks(plan, _) if "staging" not in self.cluster.held:
                    self.carry_out(self.core.staged(plan.plan_id, 1))
                case FetchFromLeaver() | FetchFromSurvivors():
                    self.fetches = [instruction]
                case DropStaged():
                    self.fetches.clear()
                case Exit(code, _):
                    self.die(code)

    def _open_links(self, membership: Membership, rank: int) -> None:
        """Who has the higher rank dials."""
        if self.waits:
            return
        cut = [other for other in membership.members if other < rank and self.cluster.is_cut(self, membership, other)]
        if not cut:
            self.carry_out(self.core.links_ready(membership.epoch, 4))
        elif self.cluster.cuts_are_silent:
            self.dials = cut[0]
        else:
            self.carry_out(self.core.links_failed(membership.epoch, f"no link to rank {cut[0]}: refused", cut[0]))

    def look(self) -> None:
        """The main thread and the fetches go as far as they can."""
        if not self.alive or self.stopped:
            return
        core = self.core
        if self.at == "start":
            self._build()
        if self.at == "step" and core.dead() and not self.stuck:
            core.discarded()
            self.at = "boundary"
        if self.at == "blocked" and core.verdict() is not Verdict.BLOCK:
            core.applied() if core.verdict() is Verdict.APPLY else core.discarded()
            self.at = "boundary"
        if self.at == "boundary":
            turn, out = core.boundary()
            self.carry_out(out)
            self.at = "step" if turn.turn is Turn.RUN else "boundary"
        for fetch in list(self.fetches):
            self._fetch(fetch)

    def _build(self) -> None:
        core = self.core
        if not core.port:
            self.carry_out(core.started(self.agent.node, 1000 + int(core.incarnation.rpartition(".")[2])))
        may_build = core.live_epoch >= 0 if self.initial else self.cluster.directive(core.incarnation).rehearse_from is not None
        if not may_build or "build" in self.cluster.held:
            return
        if core.phase == "starting":
            self.carry_out(core.build_begins())
        if "warm" in self.cluster.held:
            return
        self.carry_out(core.warm_up_begins())
        self.carry_out(core.warm_up_ended())
        self.at = "boundary"

    def _fetch(self, fetch: FetchFromLeaver | FetchFromSurvivors) -> None:
        if "state" in self.cluster.held:
            return
        loaded = self._from_leaver(fetch.plan) if isinstance(fetch, FetchFromLeaver) else self._from_survivors(fetch.install)
        if loaded and fetch in self.fetches:
            self.fetches.remove(fetch)

    def _from_leaver(self, plan: Plan) -> bool:
        assert self.core.rank is not None
        leaver = self.cluster.ranks[plan.leavers[self.core.rank]]
        try:
            if not leaver.alive:
                raise LookupError("the leaver's connection closed")
            step = leaver.core.leaver_step(plan.plan_id)
        except LookupError as error:
            self.carry_out(self.core.state_failed(plan.successor.epoch, str(error)))
            return True
        if step is None:
            return False
        self.carry_out(self.core.state_loaded(plan.successor.epoch, step, "exact"))
        return True

    def _from_survivors(self, install: Install) -> bool:
        assert self.core.rank is not None
        source = install.joining[self.core.rank].replica_rank
        assert source is not None
        replica = self.cluster.ranks[install.membership.members[source].incarnation]
        if not replica.alive or replica.core.may_serve(step=install.target_step) is not True:
            return False
        self.carry_out(self.core.state_loaded(install.membership.epoch, install.target_step, self.origin))  # type: ignore[arg-type]
        return True


class Agent:
    """One `tmd-run`."""

    def __init__(self, cluster: Cluster, hello: AgentHello) -> None:
        self.cluster, self.hello, self.node = cluster, hello, hello.node
        self.connected = False
        self.stopped = False
        self.version = 0
        self.refused = ""
        self.job_over: JobOver | None = None
        self.directive: AgentDirective | None = None
        self.sent: tuple[object, ...] | None = None
        #: What it says of its orders; a test carries them out.
        self.orders: dict[str, OrderStatus] = {}

    @property
    def agent_id(self) -> str:
        return self.hello.agent_id

    def ranks(self) -> list[Rank]:
        return [rank for rank in self.cluster.ranks.values() if rank.agent is self]

    def take(self, directive: AgentDirective) -> None:
        self.directive = directive
        self.job_over = directive.job_over or self.job_over
        named = {spec.incarnation for spec in directive.processes}
        for rank in self.ranks():
            if rank.core.incarnation not in named and rank.alive:
                rank.die()
        for spec in directive.processes:
            if spec.incarnation not in self.cluster.ranks:
                self.cluster.ranks[spec.incarnation] = Rank(self.cluster, self, spec.incarnation, spec.rank)
        for order in directive.ranks:
            rank = self.cluster.ranks[order.incarnation]
            if rank.alive and not rank.stopped:
                rank.carry_out(rank.core.on_directive(order))

    def status(self, *, always: bool = False) -> AgentStatus | None:
        processes = tuple(
            ProcessStatus(
                incarnation=rank.core.incarnation,
                pid=7,
                state=rank.state,
                exit_code=rank.exit_code,
                exit_seen_s=rank.exit_seen_s,
                rank=rank.status,
            )
            for rank in self.ranks()
        )
        orders = tuple(self.orders.values())
        if (processes, orders) == self.sent and not always:
            return None
        self.sent = (processes, orders)
        self.version += 1
        return AgentStatus(
            agent_id=self.agent_id, version=self.version, time_s=self.cluster.now, processes=processes, orders=orders
        )

    def say(self, order: NodeOrder, state: str, reason: str = "") -> None:
        """What has become of an order."""
        self.orders[order.order_id] = OrderStatus(
            order_id=order.order_id,
            kind=order.kind,
            nodes=order.nodes,
            state=state,  # type: ignore[arg-type]
            since_s=self.cluster.now,
            reason=reason,
        )
        self.cluster.settle()


class Cluster:
    """Nodes n0, n1, … of one job. Every public method ends with everything said and heard."""

    job_id = "j"

    def __init__(
        self, nnodes: int = 3, nproc: int = 1, *, standbys: int = 1, start: bool = True, allocated: bool = False, **settings: Any
    ) -> None:
        """`allocated`: agents hold the job's nodes, of which n0 is the batch host; those that stand by have no agent yet."""
        self.now = 1000.0
        self.settings = CoreSettings(**settings)
        self.nnodes, self.nproc = nnodes, nproc
        self.ledger = Ledger()
        self.generation = 1
        self.allocated = allocated
        self.allocation = tuple(f"n{index}" for index in range(nnodes + standbys))
        self.daemon = DaemonCore(self.settings, generation=1, agents_hold_nodes=allocated)
        self.agents: dict[str, Agent] = {}
        self.ranks: dict[str, Rank] = {}
        self.released: list[str] = []
        #: What refusals proved to come from: the key's fingerprint and the life of the daemon.
        self.refusals: list[tuple[str, int]] = []
        #: Everything that the daemon asked for, event by event.
        self.batches: list[list[Instruction]] = []
        #: What does not happen by itself for now: "links", "staging", "state", "build", "warm".
        self.held: set[str] = set()
        #: Pairs of incarnations, or single ones (None with it), between which no link can be opened; and whether a dialer is
        #: told at once or waits in vain.
        self.cuts: set[tuple[str, str | None]] = set()
        self.cuts_are_silent = False
        self.lives = 0
        if start:
            for index in range(nnodes if allocated else nnodes + standbys):
                self.join(f"n{index}")
            if allocated:
                self.allocate()

    # ---------------------------------------------------------------- what a test does

    def join(self, node: str, **changes: Any) -> Agent:
        """An agent starts on this node."""
        self.lives += 1
        values: dict[str, Any] = {
            "protocol": PROTOCOL,
            "tmd_version": "0",
            "job_id": self.job_id,
            "node": node,
            "agent_id": f"a{self.lives}-{node}",
            "host": node,
            "nnodes": self.nnodes,
            "nproc_per_node": self.nproc,
            "command": ("train.py",),
            "script_digest": "d1",
            "versions": {"torch": "2", "cpu_capability": "AVX2"},
            "uid": 1000,
            "launches": self.allocated,
            "grows": self.allocated,
        }
        agent = Agent(self, AgentHello(**{**values, **changes}))
        self.agents[node] = agent
        self.say_hello(agent)
        return agent

    def say_hello(self, agent: Agent) -> None:
        agent.connected = True
        agent.sent = None
        self.do(self.daemon.agent_hello(self.now, agent.hello, b"key"))

    def allocate(self, *nodes: str, **changes: Any) -> None:
        """The resource manager says what the job holds, now these nodes if any are named."""
        self.allocation = nodes or self.allocation
        values: dict[str, Any] = {"state": "running", "nodes": self.allocation, "batch_host": "n0"}
        self.do(self.daemon.allocation(self.now, Allocation(job_id=self.job_id, **{**values, **changes})))

    def pool(self, **changes: Any) -> None:
        """The resource manager says what the pool has: n7 and n8, both free, unless told otherwise."""
        values: dict[str, Any] = {"name": "standby", "way": "expand", "nodes": ("n7", "n8"), "free": ("n7", "n8")}
        self.do(self.daemon.pool(self.now, Pool(**{**values, **changes})))

    def order(self, kind: str) -> tuple[Agent, NodeOrder] | None:
        """The outstanding order of this kind, and who has it."""
        found = [
            (agent, order)
            for agent in self.agents.values()
            if agent.connected and agent.directive is not None
            for order in agent.directive.orders
            if order.kind == kind
        ]
        return found[0] if found else None

    def disconnect(self, node: str) -> None:
        self.agents[node].connected = False
        self.do(self.daemon.agent_gone(self.now, self.agents[node].agent_id))

    def kill_rank(self, rank: int, exit_code: int = SIGKILL) -> str:
        """Its process dies; its agent and its peers see it."""
        process = self.member(rank)
        process.die(exit_code)
        self.links_closed(process, process.core.live_epoch, orderly=False)
        self.settle()
        return process.core.incarnation

    def kill_node(self, node: str) -> None:
        agent = self.agents[node]
        for rank in agent.ranks():
            rank.die()
        for rank in agent.ranks():
            self.links_closed(rank, rank.core.live_epoch, orderly=False)
        self.disconnect(node)

    def stop_node(self, node: str, stopped: bool = True) -> None:
        """SIGSTOP, or SIGCONT, to the agent and its ranks."""
        agent = self.agents[node]
        agent.stopped = stopped
        for rank in agent.ranks():
            rank.stopped = stopped
        self.settle()

    def train(self, steps: int = 1) -> None:
        """All members commit this many steps together, each STEP_S after the one before."""
        for _ in range(steps):
            self.now += STEP_S
            assert self.vote(), f"no step could be committed: {self.sentence()}"

    def vote(self, unknown: tuple[int, ...] = ()) -> bool:
        """The members vote on their step, if all are in the same one. `unknown`: ranks that do not learn the result."""
        voters = {r.core.rank: r for r in self.ranks.values() if r.alive and not r.stopped and r.at == "step"}
        places = {(r.core.run_epoch, r.core.next_step) for r in voters.values() if not r.core.dead()}
        if len(voters) != self.nnodes * self.nproc or len(places) != 1:
            return False
        ballots = [voter.core.vote_begins() for voter in voters.values()]
        result = ballots[0]
        assert result is not None
        for ballot in ballots[1:]:
            assert ballot is not None
            result = result.combine(ballot)
        for rank, voter in voters.items():
            assert rank is not None
            self._end_vote(voter, None if rank in unknown else result)
        self.settle()
        return True

    def _end_vote(self, voter: Rank, result: Ballot | None) -> None:
        if result is None:
            voter.carry_out(voter.core.link_broken(voter.core.run_epoch, 0, orderly=False, reason="broken in the vote"))
        verdict, out = voter.core.vote_ended(result, sent=True)
        voter.carry_out(out)
        if verdict is Verdict.APPLY:
            voter.core.applied()
        voter.at = "boundary" if verdict is Verdict.APPLY else "blocked"

    def finish(self, *ranks: int) -> None:
        """These members' last vote said yes, and they leave with code 0."""
        for rank in ranks:
            process = self.member(rank)
            process.at = "end"
            process.carry_out(process.core.finished())
            process.die(0)
        self.settle()

    def pass_time(self, seconds: float) -> None:
        """Heartbeats come, deadlines are kept."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + self.settings.heartbeat_s)
            for agent in self.agents.values():
                self._speak(agent, always=True)
            self.do(self.daemon.tick(self.now))

    def restart_daemon(self) -> None:
        """kill -9, and a new life with what the ledger holds. The agents come back when the test says so."""
        self.generation += 1
        for agent in self.agents.values():
            agent.connected = False
        self.daemon = DaemonCore(
            self.settings, generation=self.generation, snapshot=self.ledger.snapshot(), agents_hold_nodes=self.allocated
        )

    def reconnect(self, *nodes: str) -> None:
        for node in nodes or tuple(self.agents):
            agent = self.agents[node]
            if not agent.refused and not agent.job_over and not agent.stopped:
                self.say_hello(agent)

    def cut_off(self, rank: int, other: int | None = None) -> str:
        """From now on nobody, or `other` alone, can open a link to this rank. Returns its incarnation."""
        incarnations = self.incarnations()
        self.cuts.add((incarnations[rank], None if other is None else incarnations[other]))
        return incarnations[rank]

    def is_cut(self, dialer: Rank, membership: Membership, other: int) -> bool:
        dialed = membership.members[other].incarnation
        pairs = {(dialer.core.incarnation, dialed), (dialed, dialer.core.incarnation), (dialed, None)}
        return bool(pairs & self.cuts)

    def flap(self, rank: int, peer: int) -> None:
        """A link of the live epoch breaks under two ranks that live."""
        process = self.member(rank)
        process.carry_out(process.core.link_broken(process.core.live_epoch, peer, orderly=False, reason="connection reset"))
        self.settle()

    # ---------------------------------------------------------------- what a test looks at

    @property
    def job(self) -> JobRecord:
        return self.ledger.jobs[self.job_id]

    def sentence(self) -> str:
        return self.daemon.sentences()[self.job_id]

    def member(self, rank: int) -> Rank:
        view = self.daemon.job(self.job_id)
        assert view is not None
        return self.ranks[next(r.record.incarnation for r in view.ranks if r.record.rank == rank)]

    def incarnations(self) -> list[str]:
        view = self.daemon.job(self.job_id)
        assert view is not None
        return [rank.record.incarnation for rank in view.ranks]

    def directive(self, incarnation: str) -> Any:
        """The newest directive of this process."""
        directive = self.ranks[incarnation].agent.directive
        assert directive is not None
        return next(order for order in directive.ranks if order.incarnation == incarnation)

    def migration(self, index: int = -1) -> MigrationRecord:
        return list(self.ledger.migrations.values())[index]

    def standby_on(self, node: str) -> Rank:
        return next(rank for rank in self.agents[node].ranks() if rank.alive and rank.core.rank is None)

    # ---------------------------------------------------------------- how it runs

    def do(self, out: list[Instruction]) -> None:
        self._carry_out(out)
        self.settle()

    def _carry_out(self, out: list[Instruction]) -> None:
        self.batches.append(out)
        agents = {agent.agent_id: agent for agent in self.agents.values()}
        for instruction in out:
            match instruction:
                case Persist():
                    self.ledger.write(instruction)
                case ReleaseNode(job_id, node, _):
                    self.released.append(node if job_id == self.job_id else f"{job_id}:{node}")
                case RefuseAgent(agent_id, reason, key_fingerprint, generation):
                    self.refusals.append((key_fingerprint, generation))
                    agents[agent_id].refused = reason
                    agents[agent_id].connected = False
                    for rank in agents[agent_id].ranks():
                        rank.die()
                case DirectAgent(agent_id, directive) if agents[agent_id].connected and not agents[agent_id].stopped:
                    agents[agent_id].take(directive)
                case WelcomeAgent() | DirectAgent():
                    pass
        self.daemon.validate()

    def settle(self) -> None:
        """Until nobody moves and nobody has anything new to say."""
        for _ in range(200):
            before = self._places()
            for rank in list(self.ranks.values()):
                rank.look()
            moved = self._places() != before
            spoke = [agent.node for agent in list(self.agents.values()) if self._speak(agent)]
            if not spoke and not moved:
                return
        raise AssertionError(f"daemon and ranks never come to rest: {self.sentence()}")

    def _places(self) -> list[tuple[str, str, int]]:
        return [(rank.state, rank.at, len(rank.fetches)) for rank in self.ranks.values()]

    def _speak(self, agent: Agent, *, always: bool = False) -> bool:
        if not agent.connected or agent.stopped:
            return False
        if always:
            for rank in agent.ranks():
                if rank.alive and not rank.stopped:
                    rank.carry_out(rank.core.heartbeat(rank.dials))
        status = agent.status(always=always)
        if status is None:
            return False
        self._carry_out(self.daemon.agent_status(self.now, status))
        return True

    def links_closed(self, process: Rank, epoch: int, *, orderly: bool) -> None:
        """All peers of this process see the links of its epochs close."""
        if process.core.rank is None or epoch < 0:
            return
        for other in self.ranks.values():
            if other is not process and other.alive and not other.stopped and other.core.rank is not None:
                reason = f"link to rank {process.core.rank} closed"
                other.carry_out(other.core.link_broken(epoch, process.core.rank, orderly=orderly, reason=reason))
