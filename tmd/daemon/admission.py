"""Who may speak for which job.

Over the unix socket the kernel says who is there; over TCP munge does (tmd.daemon.proofs), or a token: `uid.mac`, made by this
daemon for one job and one owner. The first agent of a job makes its user the job's owner; after that only the owner, root and the
daemon's own user may bring agents. The job key is made here, kept in the ledger, and handed only to an agent that was admitted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from tmd.core.records import JobRecord
from tmd.protocol.agent import AgentHello

#: Names that go into file names, log lines and table keys.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}")
JOB_KEY_BYTES = 32
NODES_LIMIT, PROCESSES_LIMIT = 100_000, 1024


class NotAdmitted(PermissionError):
    """The agent may not speak for this job; the text is for the agent's user."""


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    #: The proven user.
    uid: int
    job_key: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where an agent is: what its node is called, which address its ranks listen on, and which machine it is on (see
    identity.machine)."""

    node: str
    host: str
    machine: str


class Tokens:
    """Proofs of a job's owner for agents that come over TCP."""

    def __init__(self, state_dir: Path) -> None:
        """Raises OSError if the secret can be neither read nor made."""
        self._directory = state_dir / "tokens"
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._secret = _secret(state_dir / "secret")

    def token(self, job_id: str, uid: int) -> str:
        mac = hmac.new(self._secret, f"{job_id}\0{uid}".encode(), hashlib.sha256)
        return f"{uid}.{mac.hexdigest()}"

    def reporter(self) -> str:
        """For the health checks of compute nodes without munge; no job can have it."""
        return f"health.{hmac.new(self._secret, b'health report', hashlib.sha256).hexdigest()}"

    def is_reporter(self, token: str) -> bool:
        return token.isascii() and hmac.compare_digest(self.reporter(), token)

    def owner(self, job_id: str, token: str) -> int | None:
        """The uid that this token was made for, None if it was not made here for this job."""
        uid, _, _ = token.partition(".")
        if not uid.isdigit() or not token.isascii() or len(token) > 100:
            return None
        return int(uid) if hmac.compare_digest(self.token(job_id, int(uid)), token) else None

    def write_file(self, job_id: str, uid: int) -> None:
        """Leaves the token in tokens/JOB, where root can take it from. Raises OSError."""
        _write_private(self._directory / job_id, self.token(job_id, uid).encode())

    def remove_file(self, job_id: str) -> None:
        (self._directory / job_id).unlink(missing_ok=True)


class Admissions:
    """Admits agents. `job` looks up what the core knows, whether it has ended or not."""

    def __init__(
        self, tokens: Tokens, job: Callable[[str], JobRecord | None], *, munge: bool = False, tokens_count: bool = True
    ) -> None:
        """`munge` and `tokens_count`: which proofs are taken over TCP."""
        self._tokens = tokens
        self._munge = munge
        self._tokens_count = tokens_count
        self._job = job
        #: Jobs whose first hello the core has not seen yet.
        self._new: dict[str, Admission] = {}

    def admit(self, hello: AgentHello, known_uid: int | None, seen_from: str = "") -> Admission:
        """`known_uid`: as the kernel or munge says; None: it has to show a token. `seen_from`: where it comes from over TCP.

        Raises NotAdmitted.
        """
        _check_names(hello)
        _check_way(hello, seen_from)
        uid = known_uid
        if uid is None and self._tokens_count:
            uid = self._tokens.owner(hello.job_id, hello.token)
        if uid is None:
            raise NotAdmitted(f"an agent of job {hello.job_id} came over TCP and {self._what_is_missing(hello)}")
        record = self._job(hello.job_id)
        known = Admission(record.owner_uid, record.job_key) if record is not None else self._new.get(hello.job_id)
        if known is None:
            known = self._new[hello.job_id] = Admission(uid, secrets.token_bytes(JOB_KEY_BYTES))
        if uid not in (known.uid, 0, os.geteuid()):
            raise NotAdmitted(
                f"job {hello.job_id} belongs to uid {known.uid}, this agent runs as uid {uid}: start it as the job's owner, or "
                "choose another job id"
            )
        return Admission(uid, known.job_key)

    def _what_is_missing(self, hello: AgentHello) -> str:
        """Of the proofs that would count here, and how to bring one."""
        if not self._tokens_count:
            return "has no munge credential, and nothing else counts here: run tmd-run with --auth munge on a node with munge"
        token = (
            f"on the head node, as the job's owner, run tmctl job token {hello.job_id} > token, bring that file here and run "
            "tmd-run with --token-file token"
        )
        if hello.token:
            return f"its token is not for this job: {token}"
        if self._munge:
            return f"has no munge credential and no token: install munge on that node with the cluster's key, or {token}"
        ignored = " (munge credentials do not count here: libmunge is missing, or tcp_auth is token)" if hello.credential else ""
        return f"has no token{ignored}: {token}"

    def settled(self, job_id: str) -> None:
        """The core has seen the first hello: from here its record counts, or there is no such job."""
        self._new.pop(job_id, None)


def _check_names(hello: AgentHello) -> None:
    for what, name in (("job id", hello.job_id), ("node", hello.node), ("agent id", hello.agent_id)):
        check_name(what, name)
    for what, number, limit in (("nnodes", hello.nnodes, NODES_LIMIT), ("nproc_per_node", hello.nproc_per_node, PROCESSES_LIMIT)):
        if not 1 <= number <= limit:
            raise NotAdmitted(f"{what} is {number}: expected 1 to {limit}")


def _check_way(hello: AgentHello, seen_from: str) -> None:
    """Behind an address translation ranks listen where the others cannot reach them. One whose ranks run is believed."""
    if not hello.own_end or not seen_from or hello.key_fingerprint:
        return
    if _address(hello.own_end) != _address(seen_from):
        raise NotAdmitted(
            f"node {hello.node} calls itself {hello.own_end} on its connection to the daemon, which sees it come from "
            f"{seen_from}: addresses are translated in between (NAT, a container's bridge, a proxy), so other nodes could not "
            "reach its ranks; give it an address of the job's own network (a container: the host's network)"
        )


def check_reach(place: Place, others: Iterable[Place]) -> None:
    """Nobody reaches the loopback address of another machine: the ranks would look for their peers on their own one, and the job
    never begin. `others`: of the same job. Raises NotAdmitted."""
    for other in others:
        if other.node == place.node or other.machine == place.machine:
            continue
        for one, another in ((place, other), (other, place)):
            if _is_loopback(one.host):
                raise NotAdmitted(
                    f"the ranks of node {one.node} listen on {one.host}, which nobody but its own machine reaches, and node "
                    f"{another.node} of the job is another machine: the daemon's name resolves to a loopback address on "
                    f"{one.node} (often a line in /etc/hosts), or --host says so; give tmd-run on {one.node} another address "
                    "with --host or --interface, or correct /etc/hosts there"
                )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(str(_address(host))).is_loopback
    except ValueError:
        return False


def _address(text: str) -> object:
    """IPv4 inside IPv6 is IPv4; what is no address stands for itself."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    return getattr(address, "ipv4_mapped", None) or address


def check_name(what: str, name: str) -> None:
    """Raises NotAdmitted."""
    if not _NAME.fullmatch(name):
        raise NotAdmitted(
            f"{what} {name[:130]!r}: expected letters, digits and ._:@+- only, at most 128, a letter or digit first"
        )


def _secret(path: Path) -> bytes:
    if not path.exists():
        _write_private(path, secrets.token_bytes(32))
    return path.read_bytes()


def _write_private(path: Path, content: bytes) -> None:
    """As a whole or not at all, readable by this user alone."""
    fresh = path.with_name(f".{path.name}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
