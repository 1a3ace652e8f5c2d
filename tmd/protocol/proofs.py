"""What munge credentials say. Each is for one purpose, which its tag names, so none can stand for another; munge itself adds who
made it and when, and lets it be read once."""

from __future__ import annotations

import hashlib

import msgspec


class AgentProof(msgspec.Struct, frozen=True, kw_only=True, tag="tmd agent"):
    """In `AgentHello.credential`: I bring this agent for this job."""

    job_id: str
    agent_id: str
    node: str


class SealedKey(msgspec.Struct, frozen=True, kw_only=True, tag="tmd job key"):
    """In `AgentWelcome.sealed_key`, which only the agent's user can read: the daemon's answer to one hello."""

    job_id: str
    agent_id: str
    #: `digest` of the hello's credential: an older answer does not fit.
    answers: str
    job_key: bytes


class RequestProof(msgspec.Struct, frozen=True, kw_only=True, tag="tmd request"):
    """In the header `Authorization: Munge …` of a request over TCP: I ask for exactly this."""

    method: str
    #: Path and query, as sent.
    target: str
    #: `digest` of the body.
    body: str


Proof = AgentProof | SealedKey | RequestProof


def digest(content: bytes) -> str:
    """SHA-256 in hex digits."""
    return hashlib.sha256(content).hexdigest()
