"""The messages between the daemon and an agent (`tmd-run`, one per node and job), over one WebSocket.

Order: AgentHello up, AgentWelcome or AgentRefused down, then AgentStatus up and AgentDirective down whenever something
changed and at every heartbeat. Store requests are the one exchange that is not level-triggered.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tmd.protocol.handoff import HandoffTerms
from tmd.protocol.rank import Directive, RankStatus


class AgentHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first message: who the agent is, which job it serves, and what must agree with the job's other nodes."""

    protocol: tuple[int, int]
    tmd_version: str
    job_id: str
    node: str
    #: Unique id of this agent's life; a node that comes back is another one.
    agent_id: str
    #: The address that ranks of this node listen on.
    host: str
    #: Nodes that train; agents beyond that number are standby nodes.
    nnodes: int
    nproc_per_node: int
    #: Position among the job's nodes (SLURM_NODEID), or None: order of arrival.
    node_index: int | None = None
    #: The command that every rank runs, for comparison between nodes.
    command: tuple[str, ...] = ()
    script_digest: str = ""
    #: What must agree between a standby and the others because it decides bits: python, torch, numpy, cpu_capability, threads.
    versions: dict[str, str] = {}
    labels: dict[str, str] = {}
    pid: int = 0
    uid: int = -1
    #: Proof of the job owner where the socket gives no peer credentials.
    token: str = ""
    #: A munge credential, new for each hello, that says AgentProof: proof of the user over TCP (1.2).
    credential: str = ""
    #: Once it has started processes (1.1): which job key they were given (see tmd.protocol.keys), and the last life of a daemon
    #: that it has obeyed. A daemon whose ledger has another key, or is older, must leave them alone.
    key_fingerprint: str = ""
    generation: int = 0
    #: The address of its own end of this connection, empty on a unix socket. Where it is not what the daemon sees, addresses are
    #: translated in between.
    own_end: str = ""
    #: It can start agents on other nodes of its job and give nodes back, with the resource manager's commands (1.2).
    launches: bool = False
    #: It was started by such an agent, not by the job's own script (1.2).
    launched: bool = False
    #: It knows how to take nodes from a reservation, too (1.2).
    grows: bool = False


class AgentWelcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The answer to a hello that fits: `protocol` is what both speak from now on."""

    protocol: tuple[int, int]
    generation: int
    heartbeat_s: float
    hold_limit_s: float
    #: Secret of the job for the mutual authentication of links; kept in memory, handed to ranks by inherited descriptor.
    job_key: bytes
    observe_only: bool = False
    #: To an agent that came by munge over TCP: a munge credential with SealedKey that its user alone can read; `job_key` is empty
    #: then (1.2).
    sealed_key: str = ""
    #: How its ranks hand state over (1.3).
    handoff: HandoffTerms = HandoffTerms()


class AgentRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Final: the agent prints the reason and ends. But one that has started processes only believes a daemon that proves to be
    its job's: by the fingerprint of the job's key, and a generation that is not older (1.1)."""

    reason: str
    key_fingerprint: str = ""
    generation: int = 0


ProcessState = Literal["starting", "running", "exiting", "exited"]


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process that the agent has started."""

    incarnation: str
    pid: int
    state: ProcessState
    #: Exit code as in `subprocess`: negative for a signal; None while it is not known.
    exit_code: int | None = None
    #: When the exit was seen first (PF_EXITING), seconds since the Unix epoch.
    exit_seen_s: float = 0.0
    #: The newest status of the rank, if it has sent one.
    rank: RankStatus | None = None


OrderKind = Literal["launch", "release", "expand", "companion"]


class NodeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Something to be done about nodes of the job with the resource manager's commands, as the job's user (1.2)."""

    #: Unique for ever.
    order_id: str
    #: launch: start an agent like this one on the node. release: make the job's allocation smaller by these nodes. expand: make
    #: it larger by the node. companion: submit a second job there whose agent serves this one. The last two only to who `grows`.
    kind: OrderKind
    nodes: tuple[str, ...]
    #: Which reservation the node is taken from.
    reservation: str = ""


class OrderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an order. A launch is `running` for as long as its command lives, which is as long as the agent that it
    started; a release is `done` once the resource manager has accepted it, a growth once the node is had (1.2)."""

    order_id: str
    kind: OrderKind
    nodes: tuple[str, ...]
    state: Literal["running", "done", "failed"]
    #: When it was begun, seconds since the Unix epoch.
    since_s: float
    #: Why it failed, in the words of the command.
    reason: str = ""


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """The agent's whole state; of two, the one with the higher `version` counts."""

    agent_id: str
    version: int
    time_s: float
    processes: tuple[ProcessStatus, ...] = ()
    #: All that have not come to their end, and the last that have (1.2).
    orders: tuple[OrderStatus, ...] = ()


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process that the daemon wants to be alive on this agent's node. The daemon mints the incarnation."""

    incarnation: str
    local_rank: int
    #: The role it starts with; None starts a standby.
    rank: int | None
    world_size: int


class JobOver(msgspec.Struct, frozen=True, kw_only=True):
    """How the job ended, for every agent of it."""

    exit_code: int
    reason: str
    #: Only this node is given back, the job goes on: what the agent has started on other nodes stays (1.2).
    node_only: bool = False


class AgentDirective(msgspec.Struct, frozen=True, kw_only=True, tag="directive"):
    """All that the daemon wants of this agent; of two, the one with the higher (generation, sequence) counts."""

    generation: int
    sequence: int
    #: Start what is missing, kill (SIGKILL) what runs and is not named. An incarnation that has exited is never started again.
    processes: tuple[ProcessSpec, ...] = ()
    #: Passed on to the ranks.
    ranks: tuple[Directive, ...] = ()
    #: The job has ended: end all that still runs and leave with this code.
    job_over: JobOver | None = None
    #: To be carried out once each (1.2).
    orders: tuple[NodeOrder, ...] = ()
    #: Ids of orders whose commands are to be ended: nobody waits for what comes of them (1.2).
    withdrawn: tuple[str, ...] = ()


class StoreRequest(msgspec.Struct, frozen=True, kw_only=True, tag="store_request"):
    """A rank's call of the rendezvous store. Asked again with the same id (after a lost connection), it gets the same reply."""

    request_id: int
    incarnation: str
    operation: Literal["set", "get", "add", "compare_set", "delete", "check", "num_keys"]
    key: str = ""
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0
    #: Keys of `check`.
    keys: tuple[str, ...] = ()


class StoreReply(msgspec.Struct, frozen=True, kw_only=True, tag="store_reply"):
    """`number`: of `add` and `num_keys`. `found` is False if a key that it is about is not there."""

    request_id: int
    incarnation: str
    found: bool = True
    value: bytes = b""
    number: int = 0
    error: str = ""


FromAgent = AgentHello | AgentStatus | StoreRequest
ToAgent = AgentWelcome | AgentRefused | AgentDirective | StoreReply
