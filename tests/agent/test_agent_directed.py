"""tmd-run under a daemon: real agents and ranks, a stand-in for the daemon."""

from __future__ import annotations

import hashlib
import os
import signal
import time

import msgspec
import psutil

from tests.agent.agent_rig import KEY, RANK_PROGRAM, Agent, Rig, StandInDaemon, order, spec, stop_again, until
from tmd.protocol.agent import JobOver, ProcessStatus, StoreReply
from tmd.protocol.codec import PROTOCOL
from tmd.protocol.keys import fingerprint


async def two_ranks(rig: Rig, daemon: StandInDaemon, *mode: str) -> Agent:
    """An agent with ranks 0 (i-a) and 1 (i-b), both running."""
    agent = await rig.directed(daemon, *mode)
    await daemon.direct(spec("i-a", 0), spec("i-b", 1, local_rank=1))
    await daemon.state("i-b", "running")
    return agent


# -------------------------------------------------------------------- start and relay


async def test_an_agent_says_who_it_is_and_what_decides_bits(rig: Rig, daemon: StandInDaemon) -> None:
    await rig.directed(daemon, "--lr", "1", options=("--label", "rack=r1", "--node-index", "3"))
    hello = await daemon.connected()
    assert (hello.protocol, hello.job_id, hello.node, hello.nnodes, hello.nproc_per_node) == (PROTOCOL, "j1", "n1", 1, 2)
    assert (hello.node_index, hello.labels) == (3, {"rack": "r1"})
    assert hello.command == ("script", str(RANK_PROGRAM), "--lr", "1")
    assert hello.script_digest == hashlib.sha256(RANK_PROGRAM.read_bytes()).hexdigest()
    assert set(hello.versions) == {"tmd", "python", "torch", "numpy", "cpu_capability", "threads", "transport"}
    assert hello.versions["threads"] == "1"


async def test_named_processes_start_with_their_role_and_the_key(rig: Rig, daemon: StandInDaemon) -> None:
    await two_ranks(rig, daemon)
    welcome = rig.heard("i-b")[0]
    assert welcome["type"] == "rank_welcome"
    assert (welcome["rank"], welcome["local_rank"], welcome["world_size"]) == (1, 1, 2)
    process = daemon.seen("i-b")
    assert process is not None
    assert process.rank is not None
    assert process.rank.phase == "running"
    environment = psutil.Process(process.pid).environ()
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    assert expected.items() <= environment.items()
    assert "k" * 32 not in str(environment)
    assert os.getsid(process.pid) == psutil.Process(process.pid).ppid()


async def test_directives_reach_the_rank_newest_wins_old_ones_do_nothing(rig: Rig, daemon: StandInDaemon) -> None:
    await rig.directed(daemon)
    await daemon.direct(spec("i-a"), orders=(order("i-a", 5, rank=0, poison_epoch=5),))
    assert (await rig.heard_kind("i-a", "rank_order"))["directive"]["poison_epoch"] == 5
    await daemon.direct(spec("i-a"), orders=(order("i-a", 4, rank=0, poison_epoch=4),))
    await daemon.direct(spec("i-a"), orders=(order("i-a", 6, rank=0, poison_epoch=6),))
    await until("the newest arrives", lambda: rig.heard("i-a")[-1].get("directive", {}).get("poison_epoch") == 6)
    assert [message["directive"]["sequence"] for message in rig.heard("i-a")[1:]] == [5, 6]


async def test_store_requests_go_up_and_replies_come_down(rig: Rig, daemon: StandInDaemon) -> None:
    await rig.directed(daemon, "store")
    await daemon.direct(spec("i-a"))
    request = await until("the request", lambda: daemon.requests[0] if daemon.requests else None)
    assert (request.request_id, request.incarnation, request.operation) == (7, "i-a", "add")
    await daemon.send(StoreReply(request_id=7, incarnation="i-a", number=1))
    assert (await rig.heard_kind("i-a", "store_reply"))["number"] == 1


async def test_a_standby_is_named_so_in_the_log_until_it_takes_a_role(rig: Rig, daemon: StandInDaemon) -> None:
    agent = await rig.directed(daemon)
    await daemon.direct(spec("i-s", None))
    process = await daemon.state("i-s", "running")
    assert psutil.Process(process.pid).environ()["RANK"] == "1"
    await daemon.direct(spec("i-s", None), orders=(order("i-s", 1, rank=0),))
    await until("its line under the new name", lambda: "[rank0] i-s took role 0\n" in agent.out)
    assert "[standby n1/0] i-s runs as None" in agent.out


async def test_a_standby_rehearses_under_the_guard_from_its_first_line(rig: Rig, daemon: StandInDaemon) -> None:
    agent = await rig.directed(daemon, "write")
    await daemon.direct(spec("i-a", 0), spec("i-s", None, local_rank=1))
    await until("both have tried", lambda: agent.out.count("write outside") == 2)
    assert "[rank0] write outside: done" in agent.out
    assert "[standby n1/1] write outside: SandboxRefused" in agent.out


# -------------------------------------------------------------------- ends of processes


async def test_an_exit_is_told_before_the_kernel_reports_it(rig: Rig, daemon: StandInDaemon) -> None:
    """With 0.5 GiB to free, the daemon and the other rank hear of it while the process is still dying.

    On a busy machine the agent may get the processor too late for one of them, so up to five have to die.
    """
    await rig.directed(daemon, "big")
    early: list[ProcessStatus] = []
    for name in ("i-0", "i-1", "i-2", "i-3", "i-4"):
        await daemon.direct(spec(name, 0), spec("i-b", 1, local_rank=1))
        process = await daemon.state(name, "running")
        await daemon.state("i-b", "running")
        killed_s = time.time()
        os.kill(process.pid, signal.SIGKILL)
        assert (await daemon.state(name, "exited")).exit_code == -signal.SIGKILL
        early = [seen for seen in daemon.history(name) if seen.state == "exiting"]
        if early:
            break
    assert early
    assert early[0].exit_code is None
    assert killed_s < early[0].exit_seen_s < time.time()
    assert (await rig.heard_kind("i-b", "peer_exiting"))["incarnation"] == "i-0"


async def test_a_rank_that_finished_alarms_nobody(rig: Rig, daemon: StandInDaemon) -> None:
    await rig.directed(daemon, "finish")
    await daemon.direct(spec("i-b", 1, local_rank=1))
    await daemon.state("i-b", "running")
    await daemon.direct(spec("i-a", 0), spec("i-b", 1, local_rank=1))
    exited = await daemon.state("i-a", "exited")
    assert exited.exit_code == 0
    assert exited.rank is not None
    assert exited.rank.phase == "finished"
    await daemon.direct(spec("i-b", 1, local_rank=1), orders=(order("i-b", 1, rank=1),))
    await rig.heard_kind("i-b", "rank_order")
    assert [message["type"] for message in rig.heard("i-b")] == ["rank_welcome", "rank_order"]


async def test_who_is_not_named_is_killed_and_who_has_exited_is_not_started_again(rig: Rig, daemon: StandInDaemon) -> None:
    await two_ranks(rig, daemon)
    kept = daemon.seen("i-b")
    await daemon.direct(spec("i-b", 1, local_rank=1))
    assert (await daemon.state("i-a", "exited")).exit_code == -signal.SIGKILL
    await daemon.direct(spec("i-a", 0), spec("i-b", 1, local_rank=1), spec("i-c", 0))
    await daemon.state("i-c", "running")
    gone, still = daemon.seen("i-a"), daemon.seen("i-b")
    assert gone is not None
    assert gone.state == "exited"
    assert kept is not None
    assert still is not None
    assert still.pid == kept.pid


async def test_the_last_lines_of_a_killed_rank_are_printed(rig: Rig, daemon: StandInDaemon) -> None:
    agent = await rig.directed(daemon, "last words")
    await daemon.direct(spec("i-a"))
    await daemon.state("i-a", "exited")
    await until("the unfinished line", lambda: agent.out.endswith("[rank0] no newline at the end\n"))
    assert "[rank0] line 19999\n" in agent.out
    assert len(agent.out.splitlines()) == 20_002
    assert "was killed by SIGKILL" in agent.err


async def test_a_process_that_cannot_start_is_reported_as_ended(rig: Rig, daemon: StandInDaemon) -> None:
    logs = rig.folder / "logs"
    agent = await rig.directed(daemon, options=("--log-dir", str(logs)))
    await daemon.connected()
    (logs / "j1").rmdir()
    logs.rmdir()
    logs.write_text("a file where the folder was")
    await daemon.direct(spec("i-a"))
    assert (await daemon.state("i-a", "exited")).exit_code == 126
    await until("a message", lambda: "cannot start a process for local rank 0" in agent.err)


# -------------------------------------------------------------------- the daemon comes and goes


async def test_ranks_outlive_the_daemon_and_are_reported_to_the_next_one(rig: Rig, daemon: StandInDaemon) -> None:
    await two_ranks(rig, daemon, "store")
    before = {name: daemon.seen(name) for name in ("i-a", "i-b")}
    hello = await daemon.connected()
    await until("both requests", lambda: len(daemon.requests) == 2)
    await daemon.restart()
    again = await daemon.connected()
    assert again == msgspec.structs.replace(hello, key_fingerprint=fingerprint(KEY), generation=1)
    for name, known in before.items():
        process = await daemon.state(name, "running")
        assert known is not None
        assert process.pid == known.pid
    await until("unanswered requests come again", lambda: len(daemon.requests) == 2)
    await daemon.direct(spec("i-a", 0), spec("i-b", 1, local_rank=1), orders=(order("i-a", 9, rank=0),))
    await rig.heard_kind("i-a", "rank_order")


async def test_rubbish_from_the_daemon_costs_the_connection_and_no_rank(rig: Rig, daemon: StandInDaemon) -> None:
    agent = await two_ranks(rig, daemon)
    known = daemon.seen("i-a")
    await daemon.send_bytes(b"\xc1 no message")
    await until("a second hello", lambda: len(daemon.hellos) == 2)
    await daemon.direct(spec("i-a", 0), spec("i-b", 1, local_rank=1), orders=(order("i-a", 9, rank=0),))
    await rig.heard_kind("i-a", "rank_order")
    process = daemon.seen("i-a")
    assert process is not None
    assert known is not None
    assert process.pid == known.pid
    assert "cannot accept" in agent.err


async def test_an_agent_that_comes_first_waits_for_the_daemon(rig: Rig, daemon: StandInDaemon) -> None:
    await daemon.stop()
    agent = await rig.directed(daemon)
    await until("a word about it", lambda: "no daemon at" in agent.err)
    await daemon.start()
    await daemon.direct(spec("i-a"))
    await daemon.state("i-a", "running")


async def test_with_neither_daemon_nor_rank_left_the_agent_ends(rig: Rig, daemon: StandInDaemon) -> None:
    daemon.hold_limit_s = 0.3
    agent = await rig.directed(daemon)
    await daemon.direct(spec("i-a"))
    process = await daemon.state("i-a", "running")
    await daemon.stop()
    await until("the loss is noticed", lambda: "no daemon at" in agent.err)
    os.kill(process.pid, signal.SIGKILL)
    assert await agent.ended() == 75
    assert "nothing is left to wait for" in agent.err


async def test_a_refused_agent_says_why_and_ends(rig: Rig, daemon: StandInDaemon) -> None:
    daemon.refuse = "job j1 has ended"
    agent = await rig.directed(daemon)
    assert await agent.ended() == 3
    assert "does not serve this agent: job j1 has ended" in agent.err


async def test_the_end_of_the_job_ends_all_ranks_with_its_code(rig: Rig, daemon: StandInDaemon) -> None:
    agent = await two_ranks(rig, daemon)
    reason = "rank 1 on n2 failed in the user's script:\nTraceback …\n  File\nValueError: bad batch\n"
    await daemon.direct(over=JobOver(exit_code=7, reason=reason))
    assert await agent.ended() == 7
    assert "job j1 is over here with code 7: rank 1 on n2 failed in the user's script: ValueError: bad batch\n" in agent.err
    assert "Traceback" not in agent.err


# -------------------------------------------------------------------- signals


async def test_a_killed_agent_takes_its_ranks_along(rig: Rig, daemon: StandInDaemon) -> None:
    agent = await two_ranks(rig, daemon)
    assert len(agent.session()) == 3
    agent.process.kill()
    assert await agent.ended() == -signal.SIGKILL


async def test_an_interrupt_reaches_the_ranks_and_the_daemon_hears_of_their_end(rig: Rig, daemon: StandInDaemon) -> None:
    agent = await two_ranks(rig, daemon)
    # An interrupt in the middle of an import may end an interpreter in other ways.
    await until("both have spoken", lambda: all((seen := daemon.seen(name)) and seen.rank for name in ("i-a", "i-b")))
    agent.process.send_signal(signal.SIGINT)
    assert await agent.ended() == 128 + signal.SIGINT
    assert agent.err.count("KeyboardInterrupt") == 2
    for name in ("i-a", "i-b"):
        assert (await daemon.state(name, "exited")).exit_code == -signal.SIGINT


async def test_a_second_request_to_stop_kills_stubborn_ranks(rig: Rig, daemon: StandInDaemon) -> None:
    agent = await two_ranks(rig, daemon, "stubborn")
    await until("both ignore it", lambda: agent.out.count("ignores SIGTERM") == 2)
    agent.process.terminate()
    await until("the first is passed on", lambda: "SIGTERM: passed on" in agent.err)
    assert len(agent.session()) == 3
    await stop_again(agent)
    assert await agent.ended() == 128 + signal.SIGTERM


# -------------------------------------------------------------------- ranks that break the protocol


async def bad_rank(rig: Rig, daemon: StandInDaemon, mode: str, complaint: str) -> None:
    """Rank 0 is killed with this complaint; rank 1 is not touched."""
    agent = await two_ranks(rig, daemon, mode)
    assert (await daemon.state("i-a", "exited")).exit_code == -signal.SIGKILL
    assert complaint in agent.err
    other = daemon.seen("i-b")
    assert other is not None
    assert other.state == "running"


async def test_a_malformed_message_ends_the_rank(rig: Rig, daemon: StandInDaemon) -> None:
    await bad_rank(rig, daemon, "malformed", "rank to agent refused")


async def test_a_rank_that_speaks_for_another_is_ended(rig: Rig, daemon: StandInDaemon) -> None:
    await bad_rank(rig, daemon, "impersonate", "spoke in the name of incarnation 'i-other'")


async def test_a_rank_that_speaks_for_another_job_is_ended(rig: Rig, daemon: StandInDaemon) -> None:
    await bad_rank(rig, daemon, "other job", "spoke for job 'j2'")


async def test_an_oversized_status_ends_the_rank(rig: Rig, daemon: StandInDaemon) -> None:
    await bad_rank(rig, daemon, "oversize", "sent a status of more than 65536 bytes")


async def test_a_flooding_rank_neither_starves_the_others_nor_floods_the_daemon(rig: Rig, daemon: StandInDaemon) -> None:
    agent = await two_ranks(rig, daemon, "flood")
    first = len(daemon.statuses)
    begin_cpu_s, begin_s = sum(psutil.Process(agent.process.pid).cpu_times()[:2]), time.monotonic()
    await until("ten more statuses", lambda: len(daemon.statuses) >= first + 10)
    await daemon.direct(spec("i-a", 0), spec("i-b", 1, local_rank=1), orders=(order("i-b", 1, rank=1),))
    await rig.heard_kind("i-b", "rank_order")
    elapsed_s = time.monotonic() - begin_s
    used_s = sum(psutil.Process(agent.process.pid).cpu_times()[:2]) - begin_cpu_s
    assert used_s < 0.9 * elapsed_s
    assert len(daemon.statuses) - first < 40 * elapsed_s + 20
