"""Proofs of a user over TCP by munge, on the daemon's side: what comes in is checked, the job key goes out sealed.

Contract: no call blocks the event loop, each has a deadline. That munge does not work says nothing about who asks, so
whoever asks may come again; everything that is wrong with a credential is a refusal.
"""

from __future__ import annotations

import msgspec

from tmd.daemon.admission import NotAdmitted
from tmd.munge import statements
from tmd.munge.deadline import call_aside
from tmd.munge.library import CredentialRefused, Munge, MungeAbsent, MungeError
from tmd.protocol.agent import AgentHello, AgentWelcome
from tmd.protocol.proofs import AgentProof, RequestProof, SealedKey, digest


class Proofs:
    """Which proofs this daemon takes over TCP, and how it checks them."""

    def __init__(self, munge: Munge | None = None, *, tokens: bool = True) -> None:
        self._munge = munge
        self.tokens = tokens

    @classmethod
    def configured(cls, kind: str, socket: str) -> Proofs:
        """`kind`: auto, munge or token. Raises MungeAbsent where munge is wanted and not there."""
        if kind == "token":
            return cls()
        try:
            return cls(Munge(socket), tokens=kind == "auto")
        except MungeAbsent:
            if kind == "munge":
                raise
            return cls()

    @property
    def munge(self) -> bool:
        return self._munge is not None

    async def agent_uid(self, hello: AgentHello) -> int | None:
        """The user who brings this agent, by its credential; None if it has none that is looked at here. Raises NotAdmitted,
        MungeError."""
        munge = self._munge
        if munge is None or not hello.credential:
            return None
        wanted = AgentProof(job_id=hello.job_id, agent_id=hello.agent_id, node=hello.node)
        try:
            proof, uid = await call_aside(lambda: statements.read(munge, hello.credential, AgentProof))
        except CredentialRefused as error:
            raise NotAdmitted(f"the munge credential of {hello.node}'s agent of job {hello.job_id}: {error.whole()}") from None
        if proof != wanted:
            raise NotAdmitted(
                f"uid {uid}'s munge credential is for agent {proof.agent_id} of job {proof.job_id}, not for {hello.agent_id} of "
                f"{hello.job_id}: each hello needs its own"
            )
        return uid

    async def sealed(self, welcome: AgentWelcome, hello: AgentHello, uid: int) -> AgentWelcome:
        """The welcome with its job key for the eyes of `uid` alone, as the answer to this hello. Raises MungeError."""
        munge = self._munge
        assert munge is not None, "only an agent that came by munge is answered so"
        key = SealedKey(
            job_id=hello.job_id,
            agent_id=hello.agent_id,
            answers=digest(hello.credential.encode()),
            job_key=welcome.job_key,
        )
        sealed = await call_aside(lambda: statements.state(munge, key, for_uid=uid))
        return msgspec.structs.replace(welcome, job_key=b"", sealed_key=sealed)

    async def request_uid(self, wanted: RequestProof, credential: str) -> int:
        """Who asks for exactly this. Raises MungeDown, CredentialRefused, MungeError."""
        munge = self._munge
        if munge is None:
            raise MungeError(
                "this daemon takes no munge credentials",
                "on its head node: install libmunge, set tcp_auth to munge or auto, start it again; or use the unix socket there",
            )
        proof, uid = await call_aside(lambda: statements.read(munge, credential, RequestProof))
        if proof != wanted:
            raise CredentialRefused(
                "wrong purpose",
                f"uid {uid}'s credential is for {proof.method} {proof.target}, not for {wanted.method} {wanted.target} with this "
                "body",
                "each request needs its own; tmctl makes them",
            )
        return uid
