"""How an agent proves its user to a daemon over TCP, and how it knows that the daemon which answers is one to be obeyed.

By munge: each hello carries a new credential; the welcome brings the job key in a credential that this user alone can read, made
by the daemon's user. By token: the hello carries it, the key comes open. On a unix socket the kernel vouches for both.
"""

from __future__ import annotations

import os
import pwd

import msgspec

from tmd.munge import statements
from tmd.munge.deadline import call_aside
from tmd.munge.library import Munge, MungeAbsent, MungeDown
from tmd.protocol.agent import AgentHello, AgentWelcome
from tmd.protocol.proofs import AgentProof, SealedKey, digest
from tmd_worker.agent.settings import DaemonAddress, SettingsRefused

#: Who the packaged daemon runs as.
DAEMON_USER = "tmd"


class UntrustedAnswer(Exception):
    """A welcome that no daemon of this cluster has made, or not for this agent; the text is why."""


class MungeProof:
    """Credentials for one agent. `daemon_uids`: whose welcomes count."""

    def __init__(self, munge: Munge, daemon_uids: frozenset[int]) -> None:
        self._munge = munge
        self._daemon_uids = daemon_uids

    async def attach(self, hello: AgentHello) -> AgentHello:
        """The hello with a credential; without one if munged is down and there is a token instead. Raises MungeError."""
        proof = AgentProof(job_id=hello.job_id, agent_id=hello.agent_id, node=hello.node)
        try:
            credential = await call_aside(lambda: statements.state(self._munge, proof))
        except MungeDown:
            if hello.token:
                return hello
            raise
        return msgspec.structs.replace(hello, credential=credential)

    async def opened(self, welcome: AgentWelcome, hello: AgentHello) -> AgentWelcome:
        """The welcome with its job key. Raises UntrustedAnswer, MungeError."""
        if not welcome.sealed_key:
            if hello.token:
                return welcome  # it has taken the token
            raise UntrustedAnswer("it sends the job's key open for all to read, and does not prove who it is")
        key, uid = await call_aside(lambda: statements.read(self._munge, welcome.sealed_key, SealedKey))
        if uid not in self._daemon_uids:
            trusted = ", ".join(str(each) for each in sorted(self._daemon_uids))
            raise UntrustedAnswer(
                f"it runs as uid {uid}, and daemons of uid {trusted} alone are obeyed here; if it is the right one, name its "
                "user with --daemon-user"
            )
        if (key.job_id, key.agent_id, key.answers) != (hello.job_id, hello.agent_id, digest(hello.credential.encode())):
            raise UntrustedAnswer("its answer was made for another hello")
        return msgspec.structs.replace(welcome, job_key=key.job_key, sealed_key="")


def resolve_proof(
    auth: str, *, daemon: DaemonAddress, munge_socket: str, daemon_user: str | None, token: str
) -> tuple[MungeProof | None, str]:
    """What is shown to the daemon: credentials, and a token ("" for none). `auth`: auto, munge or token.

    Raises SettingsRefused.
    """
    if daemon.unix_path is not None:
        return None, token
    if auth == "token":
        if not token:
            raise SettingsRefused("--auth token needs the token: give --token-file (it is made by tmctl job token JOB)")
        return None, token
    try:
        proof = MungeProof(Munge(munge_socket), _daemon_uids(daemon_user))
    except MungeAbsent as error:
        if auth == "munge":
            raise SettingsRefused(f"--auth munge: {error.whole()}") from None
        return None, token
    return proof, token if auth == "auto" else ""


def _daemon_uids(name: str | None) -> frozenset[int]:
    """Root, this user, and the daemon's user: the one that is named, else `tmd` if there is one. Raises SettingsRefused."""
    uids = {0, os.geteuid()}
    if name is not None and name.isdigit():
        return frozenset({*uids, int(name)})
    try:
        uids.add(pwd.getpwnam(name or DAEMON_USER).pw_uid)
    except KeyError:
        if name is not None:
            raise SettingsRefused(f"--daemon-user {name!r}: there is no such user on this node; give its number") from None
    return frozenset(uids)
