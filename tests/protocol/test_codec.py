"""The wire format: what fits goes through unchanged, what does not is refused with a reason."""

from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmd.protocol.agent import AgentHello, AgentStatus, ProcessStatus
from tmd.protocol.codec import (
    FROM_AGENT,
    FROM_RANK,
    LENGTH,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    TO_RANK,
    FrameReader,
    MessageRefused,
    check_protocol,
    frame,
)
from tmd.protocol.control import RankOrder, RankUpdate
from tmd.protocol.membership import Install, Member, Membership, Plan, Resolution, Source, buddy_of, ward_of
from tmd.protocol.rank import Commit, Directive, RankStatus


def directive() -> Directive:
    table = Membership(epoch=3, members={0: Member(incarnation="a", node="n1", host="127.0.0.11", port=4000)})
    return Directive(
        job_id="j",
        incarnation="a",
        generation=2,
        sequence=9,
        world_size=1,
        nproc_per_node=1,
        rank=0,
        resolution=Resolution(epoch=2, target_step=7),
        install=Install(membership=table, target_step=7, joining={0: Source(replica_rank=None, record_rank=None)}),
        plan=Plan(plan_id=1, migration_id="m1", base_epoch=2, leavers={0: "b"}, successor=table),
    )


def status() -> RankStatus:
    return RankStatus(
        job_id="j", incarnation="a", version=1, rank=None, commits=(Commit(4, 3, 1.5),), counters={"links_opened": 3}
    )


def test_messages_come_back_as_they_went() -> None:
    order = RankOrder(directive=directive())
    assert TO_RANK.decode(TO_RANK.encode(order)) == order
    update = RankUpdate(status=status())
    assert FROM_RANK.decode(FROM_RANK.encode(update)) == update
    report = AgentStatus(
        agent_id="x", version=1, time_s=2.0, processes=(ProcessStatus(incarnation="a", pid=7, state="running", rank=status()),)
    )
    assert FROM_AGENT.decode(FROM_AGENT.encode(report)) == report


def test_what_is_no_text_arrives_as_an_escape_and_the_rest_unchanged() -> None:
    """A traceback that names a file whose name is not UTF-8: the script's own fault, so it must reach the daemon."""
    name = os.fsdecode(b"caf\xe9")
    sent = RankUpdate(status=RankStatus(job_id="j", incarnation=name, version=1, rank=None, commits=(Commit(4, 3, 1.5),)))
    arrived = FROM_RANK.decode(FROM_RANK.encode(sent))
    assert isinstance(arrived, RankUpdate)
    assert arrived.status.incarnation == r"caf\udce9"
    assert arrived.status.commits == sent.status.commits


def test_an_older_minor_with_fewer_fields_and_a_newer_one_with_more_are_both_understood() -> None:
    raw = msgspec.msgpack.decode(FROM_AGENT.encode(hello()))
    del raw["labels"]
    raw["from_the_future"] = {"x": 1}
    assert FROM_AGENT.decode(msgspec.msgpack.encode(raw)) == hello()
    assert check_protocol((PROTOCOL[0], PROTOCOL[1] + 5)) is None


def test_another_major_is_refused_with_the_remedy() -> None:
    reason = check_protocol((PROTOCOL[0] + 1, 0))
    assert reason is not None
    assert "install the same" in reason


def hello() -> AgentHello:
    return AgentHello(
        protocol=PROTOCOL, tmd_version="0", job_id="j", node="n1", agent_id="x", host="127.0.0.1", nnodes=1, nproc_per_node=1
    )


@pytest.mark.parametrize(
    ("change", "names"),
    [({"nnodes": "four"}, "nnodes"), ({"type": "nonsense"}, "nonsense"), ({"protocol": 1}, "protocol")],
)
def test_a_wrong_type_is_refused_by_name(change: dict[str, object], names: str) -> None:
    raw = msgspec.msgpack.decode(FROM_AGENT.encode(hello()))
    with pytest.raises(MessageRefused, match=names):
        FROM_AGENT.decode(msgspec.msgpack.encode({**raw, **change}))


def test_a_message_over_the_limit_is_refused_on_both_sides() -> None:
    big = RankUpdate(status=msgspec.structs.replace(status(), error="x" * (MAX_MESSAGE_BYTES + 1)))
    with pytest.raises(MessageRefused, match="limit"):
        FROM_RANK.encode(big)
    with pytest.raises(MessageRefused, match="limit"):
        FROM_RANK.decode(b"\0" * (MAX_MESSAGE_BYTES + 1))


def test_a_frame_that_announces_too_much_is_refused_before_it_is_read() -> None:
    with pytest.raises(MessageRefused, match="announces"):
        FrameReader(FROM_RANK).feed(LENGTH.pack(MAX_MESSAGE_BYTES + 1))


@given(st.lists(st.integers(min_value=1, max_value=40), min_size=1, max_size=30))
def test_frames_survive_any_cutting_of_the_stream(cuts: list[int]) -> None:
    sent = [RankUpdate(status=msgspec.structs.replace(status(), version=n)) for n in range(4)]
    stream = b"".join(frame(FROM_RANK.encode(message)) for message in sent)
    reader, got, position = FrameReader(FROM_RANK), [], 0
    for cut in [*cuts, len(stream)]:
        got += reader.feed(stream[position : position + cut])
        position += cut
    assert got == sent


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_never_crashes(data: bytes) -> None:
    with pytest.raises(MessageRefused):
        FROM_AGENT.decode(b"\xc1" + data)


@given(st.integers(1, 8), st.integers(1, 4))
def test_every_rank_has_one_buddy_on_another_node_and_one_ward(nodes: int, nproc: int) -> None:
    world = nodes * nproc
    for rank in range(world):
        buddy = buddy_of(rank, world, nproc)
        assert ward_of(buddy, world, nproc) == rank
        if nodes > 1:
            assert buddy // nproc != rank // nproc
        elif world > 1:
            assert buddy != rank
