"""Munge: a credential goes to munged and comes back, as those of agents do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from tmd.doctor.facts import Facts
from tmd.doctor.findings import Finding, fault, ok, skipped, warning
from tmd.munge import statements
from tmd.munge.deadline import call
from tmd.munge.library import DEFAULT_SOCKET, Munge, MungeAbsent, MungeError
from tmd.protocol.proofs import RequestProof

_SLURM_SOCKET = re.compile(r"(?:^|,)\s*socket=([^,]+)")


def check_munge(facts: Facts) -> Iterator[Finding]:
    daemon = facts.config.daemon
    wanted = daemon.resource_manager == "slurm" or daemon.tcp_auth == "munge"
    if not wanted and (daemon.tcp_auth == "token" or facts.config.listen is None):
        yield skipped("munge", "not used: nobody comes over TCP with a credential (listen, tcp_auth)")
        return
    place = daemon.munge_socket or DEFAULT_SOCKET
    statement = RequestProof(method="GET", target="/v1/health", body="")
    try:
        munge = Munge(daemon.munge_socket)
        _, uid = call(lambda: statements.read(munge, statements.state(munge, statement), RequestProof))
    except MungeAbsent as error:
        yield fault("munge", str(error), error.remedy) if wanted else skipped("munge", f"{error}: tokens are used")
        return
    except MungeError as error:
        yield fault("munge", str(error), error.remedy)
        return
    if uid != os.geteuid():
        yield fault("munge", f"a credential of uid {os.geteuid()} came back as uid {uid}", "look at munged's log")
        return
    yield ok("munge", f"a credential went to munged at {place} and came back")
    yield from _same_as_slurm_s(facts, place)


def _same_as_slurm_s(facts: Facts, place: str) -> Iterator[Finding]:
    if facts.slurm is None:
        return
    found = _SLURM_SOCKET.search(facts.slurm.config.get("AuthInfo", ""))
    slurm_s = found[1] if found else DEFAULT_SOCKET
    if os.path.realpath(slurm_s) != os.path.realpath(place):
        seen = f"tmd speaks to munged at {place}, Slurm to the one at {slurm_s}"
        yield warning("munge", seen, f'munge_socket = "{slurm_s}" in [daemon], unless both have the same key')
