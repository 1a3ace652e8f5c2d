"""Credentials of a real munged: who made them, who may read them, and what is said when they prove nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from tests.munge.munged import ALICE, BOB, DEADLINE_S, Munged, credential_of, python_as, run_as
from tmd.munge import deadline, statements
from tmd.munge.deadline import call, call_aside
from tmd.munge.library import CREDENTIAL_LIMIT_BYTES, CredentialRefused, Decoded, Munge, MungeDown
from tmd.protocol.proofs import AgentProof, RequestProof, SealedKey

ENCODE = "import sys; from tmd.munge.library import Munge; print(Munge(sys.argv[1]).encode(b'word'))"
DECODE = "import sys; from tmd.munge.library import Munge; print(Munge(sys.argv[1]).decode(sys.argv[2]).payload.decode())"


def refusal(munged: Munged, credential: str) -> CredentialRefused:
    with pytest.raises(CredentialRefused) as refused:
        munged.munge.decode(credential)
    assert refused.value.remedy
    return refused.value


def test_a_credential_says_who_made_it(munged: Munged) -> None:
    assert munged.munge.decode(munged.munge.encode(b"\0any\xff")) == Decoded(b"\0any\xff", os.geteuid(), os.getegid())
    for uid in (ALICE, BOB):
        assert munged.munge.decode(python_as(uid, ENCODE, munged.socket)) == Decoded(b"word", uid, uid)


def test_only_the_user_whom_it_is_for_can_read_it(munged: Munged) -> None:
    """Not even root."""
    assert refusal(munged, munged.munge.encode(b"secret", for_uid=ALICE)).kind == "wrong uid"
    for_alice = [munged.munge.encode(b"secret", for_uid=ALICE) for _ in range(2)]
    others = run_as(BOB, sys.executable, "-c", DECODE, munged.socket, for_alice[0])
    assert others.returncode != 0
    assert "for another user's eyes" in others.stderr
    assert python_as(ALICE, DECODE, munged.socket, for_alice[1]) == "secret"
    assert "secret" not in for_alice[1]


def test_a_credential_is_good_for_one_use(munged: Munged) -> None:
    credential = munged.munge.encode(b"x")
    munged.munge.decode(credential)
    assert refusal(munged, credential).kind == "replayed"


def test_a_credential_gets_too_old(munged: Munged) -> None:
    credential = munged.munge.encode(b"x", ttl_s=1)
    made_s = time.time()
    while time.time() < made_s + 2.5:  # munge counts whole seconds
        time.sleep(0.1)
    expired = refusal(munged, credential)
    assert (expired.kind, "clocks" in expired.remedy) == ("expired", True)


def test_a_credential_of_another_cluster_is_known_as_such(munged: Munged, make_munged: Callable[[], Munged]) -> None:
    foreign = refusal(munged, make_munged().munge.encode(b"x"))
    assert (foreign.kind, "munge.key" in foreign.remedy) == ("foreign", True)


@pytest.mark.parametrize("rubbish", ["", "rubbish", "MUNGE:AAAA:", "MUNGE:\0:", "é", "x" * (CREDENTIAL_LIMIT_BYTES + 1)])
def test_rubbish_is_no_credential(munged: Munged, rubbish: str) -> None:
    assert refusal(munged, rubbish).kind == "malformed"


def test_a_munged_that_is_not_there_is_said_with_its_place(munged: Munged) -> None:
    munged.kill()
    for attempt in (lambda: munged.munge.encode(b"x"), lambda: munged.munge.decode("MUNGE:AwQ:")):
        with pytest.raises(MungeDown, match=f"munged at {munged.socket} does not answer") as down:
            attempt()
        assert "systemctl start munge" in down.value.remedy


async def test_a_munged_that_hangs_holds_nobody_up_for_longer_than_the_deadline(munged: Munged) -> None:
    munged.send_signal(signal.SIGSTOP)
    try:
        asking = asyncio.create_task(call_aside(lambda: munged.munge.encode(b"x"), timeout_s=0.2))
        turns = 0
        while not asking.done():
            turns += 1
            await asyncio.sleep(0.01)
        assert turns > 2, "the event loop went on meanwhile"
        with pytest.raises(MungeDown, match=r"within 0\.2 s"):
            asking.result()
        with pytest.raises(MungeDown, match=r"within 0\.1 s"):
            call(lambda: munged.munge.encode(b"x"), timeout_s=0.1)
    finally:
        munged.send_signal(signal.SIGCONT)
    assert await call_aside(lambda: munged.munge.encode(b"x"))


def test_calls_that_hang_are_counted(munged: Munged, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a munged that hangs costs a bounded number of threads."""
    taken = 0
    while deadline._free_calls.acquire(blocking=False):
        taken += 1
    try:
        with pytest.raises(MungeDown, match="without an answer"):
            call(lambda: munged.munge.encode(b"x"))
    finally:
        for _ in range(taken):
            deadline._free_calls.release()
    assert call(lambda: munged.munge.encode(b"x"), timeout_s=DEADLINE_S)


def test_a_statement_is_good_for_its_own_purpose_alone(munged: Munged) -> None:
    statement = "AgentProof(job_id='j', agent_id='a', node='n')"
    agent, uid = statements.read(munged.munge, credential_of(ALICE, munged, statement), AgentProof)
    assert (agent, uid) == (AgentProof(job_id="j", agent_id="a", node="n"), ALICE)
    for other in (SealedKey, RequestProof):
        with pytest.raises(CredentialRefused, match="made for another purpose") as refused:
            statements.read(munged.munge, credential_of(ALICE, munged, statement), other)
        assert refused.value.kind == "wrong purpose"
    for no_statement in (b"", b"\xc1", b"\x80"):
        with pytest.raises(CredentialRefused, match="another purpose"):
            statements.read(munged.munge, munged.munge.encode(no_statement), AgentProof)


def test_libmunge_may_be_missing_where_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import ctypes, ctypes.util\n"
        "def absent(*_): raise OSError\n"
        "ctypes.CDLL = absent; ctypes.util.find_library = lambda _: None\n"
        "from tmd.munge.library import Munge, MungeAbsent\n"
        "try: Munge()\nexcept MungeAbsent as error: print(error.whole())"
    )
    assert "libmunge is not installed" in python_as(ALICE, code)


def test_the_socket_is_libmunges_own_if_none_is_named(munged: Munged) -> None:
    """The default is where a machine's own munged listens; here there need not be one."""
    try:
        said = Munge().encode(b"x")
    except MungeDown as down:
        said = str(down)
    assert said.startswith(("MUNGE:", "munged at /run/munge/munge.socket.2 does not answer"))
