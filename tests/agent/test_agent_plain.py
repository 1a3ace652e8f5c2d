"""tmd-run without a daemon: a plain launcher of real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.agent.agent_rig import WITHIN_S, Agent, Rig, reap, session_of, stop_again, until

SHOW = """
import __main__, os, sys
role = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
print("|".join(role + [__main__.__name__, __main__.__file__, *sys.argv]))
print(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], sys.path[0], "TMD_CONTROL_FD" in os.environ, file=sys.stderr)
"""
#: Prints its pid, then does what a signal tells it.
WAIT = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print("got USR1", flush=True))
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", os.environ["RANK"], os.getpid(), flush=True)
if "fail" in sys.argv and os.environ["RANK"] == "1":
    sys.exit("rank 1 gives up")
if "crash" in sys.argv and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSEGV)
while True:
    time.sleep(60)
"""


@pytest.fixture
def show(tmp_path: Path) -> str:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "show.py").write_text(SHOW)
    return "scripts/show.py"


@pytest.fixture
def wait(tmp_path: Path) -> str:
    (tmp_path / "wait.py").write_text(WAIT)
    return "wait.py"


async def standalone(rig: Rig, *arguments: str) -> Agent:
    return await rig.run("--standalone", "--nproc-per-node", "2", *arguments)


async def all_up(agent: Agent) -> list[int]:
    """The ranks' pids once both have said that they run."""
    found = await until("both ranks run", lambda: pids if len(pids := re.findall(r"up \d (\d+)", agent.out)) == 2 else None)
    return [int(pid) for pid in found]


async def test_a_script_sees_what_plain_python_would_show_it(rig: Rig, show: str, tmp_path: Path) -> None:
    agent = await standalone(rig, show, "--lr", "0.1", "--nproc-per-node")
    assert await agent.ended() == 0
    arguments = f"{show}|--lr|0.1|--nproc-per-node"
    assert sorted(agent.out.splitlines()) == [
        f"[rank0] 0|0|2|__main__|{show}|{arguments}",
        f"[rank1] 1|1|2|__main__|{show}|{arguments}",
    ]
    assert re.fullmatch(rf"(\[rank\d\] 127.0.0.1 \d+ {tmp_path}/scripts False\n){{2}}", agent.err)


async def test_a_module_runs_like_python_m(rig: Rig, show: str, tmp_path: Path) -> None:
    agent = await standalone(rig, "-m", "scripts.show", "x")
    assert await agent.ended() == 0
    path = tmp_path / "scripts" / "show.py"
    assert f"[rank1] 1|1|2|__main__|{path}|{path}|x\n" in agent.out


async def test_no_python_runs_any_program(rig: Rig) -> None:
    agent = await standalone(rig, "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert await agent.ended() == 0
    assert sorted(agent.out.splitlines()) == ["[rank0] 0 of 2", "[rank1] 1 of 2"]


async def test_a_node_of_several_numbers_its_ranks(rig: Rig, show: str) -> None:
    shape = ("--nnodes=2:2", "--nproc_per_node=1", "--node_rank=1", "--rdzv-backend=c10d", "--rdzv-endpoint=n0:29400")
    agent = await rig.run(*shape, show)
    assert await agent.ended() == 0
    assert agent.out.startswith("[rank1] 1|0|2|")
    assert agent.err.startswith("[rank1] n0 29400 ")


async def test_the_first_failure_ends_the_others_and_is_named(rig: Rig, wait: str) -> None:
    agent = await standalone(rig, wait, "fail")
    assert await agent.ended() == 1
    assert "[rank1] rank 1 gives up\n" in agent.err
    assert re.search(r"rank1 \(local rank 1, pid \d+\) failed: exit code 1; the other ranks are ended", agent.err)


async def test_a_crash_is_named_by_its_signal(rig: Rig, wait: str) -> None:
    agent = await standalone(rig, wait, "crash")
    assert await agent.ended() == 128 + signal.SIGSEGV
    assert "killed by signal 11 (SIGSEGV)" in agent.err
    assert "[rank1] Fatal Python error: Segmentation fault" in agent.err


async def test_an_interrupt_ends_all_ranks(rig: Rig, wait: str) -> None:
    agent = await standalone(rig, wait)
    await all_up(agent)
    agent.process.send_signal(signal.SIGINT)
    assert await agent.ended() == 128 + signal.SIGINT
    assert agent.err.count("KeyboardInterrupt") == 2


async def test_ctrl_c_at_a_terminal_reaches_each_rank_once(rig: Rig, tmp_path: Path) -> None:
    """The kernel signals the whole foreground group; an agent that passed it on would interrupt the ranks' clean-up."""
    lines = ["import signal, time", "signal.signal(signal.SIGINT, lambda *_: print('got INT'))", "print('up')"]
    lines += ["signal.pause()", "time.sleep(0.3)"]
    (tmp_path / "count.py").write_text("\n".join(lines))
    pid, terminal = rig.at_terminal("--standalone", "--nproc-per-node", "2", "count.py")
    shown = ""

    def look(what: str) -> bool:
        nonlocal shown
        with contextlib.suppress(OSError):  # nothing yet, or the last process has closed the terminal
            shown += os.read(terminal, 1 << 16).decode()
        return shown.count(what) >= 2

    await until("both ranks run", lambda: look("up"))
    os.write(terminal, b"\x03")
    await until("both got it", lambda: look("got INT"))
    await until("nothing is left", lambda: not look("never") and not session_of(pid))
    assert shown.count("got INT") == 2
    assert reap(pid) == 128 + signal.SIGINT


async def test_a_second_request_to_stop_kills(rig: Rig, wait: str) -> None:
    agent = await standalone(rig, wait, "stubborn")
    await all_up(agent)
    agent.process.terminate()
    await until("the first is passed on", lambda: "SIGTERM: passed on" in agent.err)
    await stop_again(agent)
    assert await agent.ended() == 128 + signal.SIGTERM


async def test_a_request_that_comes_twice_at_once_is_one(rig: Rig, wait: str) -> None:
    agent = await standalone(rig, wait, "stubborn")
    await all_up(agent)
    agent.process.send_signal(signal.SIGTERM)
    agent.process.send_signal(signal.SIGHUP)  # two of a kind would be merged by the kernel
    await until("the first is passed on", lambda: "passed on" in agent.err)
    agent.process.send_signal(signal.SIGUSR1)
    await until("the ranks still live", lambda: agent.out.count("got USR1") == 2)
    await stop_again(agent)


async def test_user_signals_reach_the_ranks(rig: Rig, wait: str) -> None:
    agent = await standalone(rig, wait)
    await all_up(agent)
    agent.process.send_signal(signal.SIGUSR1)
    await until("both got it", lambda: agent.out.count("got USR1") == 2)


async def test_a_killed_agent_leaves_no_rank(rig: Rig, wait: str) -> None:
    agent = await standalone(rig, wait, "stubborn")
    pids = await all_up(agent)
    agent.process.kill()
    await agent.ended()
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


async def test_a_process_left_behind_does_not_hold_the_agent(rig: Rig, tmp_path: Path) -> None:
    """Another program keeps the rank's pipe open; the agent ends all the same and the last line is there."""
    (tmp_path / "leave.py").write_text("import subprocess\nsubprocess.Popen(['sleep', '60'])\nprint('parent', end='')\n")
    agent = await rig.run("--standalone", "leave.py")
    async with asyncio.timeout(WITHIN_S):
        assert await agent.process.wait() == 0
    assert agent.session()
    assert agent.out == "[rank0] parent\n"


async def test_lines_of_different_ranks_never_mix(rig: Rig, tmp_path: Path) -> None:
    script = "import os, sys\nfor n in range(300):\n    print(os.environ['RANK'] * 5000)\n"
    (tmp_path / "long.py").write_text(script)
    agent = await standalone(rig, "long.py")
    assert await agent.ended() == 0
    lines = agent.out.splitlines()
    assert sorted(set(lines)) == ["[rank0] " + "0" * 5000, "[rank1] " + "1" * 5000]
    assert len(lines) == 600


async def test_output_goes_to_files_as_told(rig: Rig, show: str, tmp_path: Path) -> None:
    agent = await standalone(rig, "--log-dir", "logs", "--rdzv-id", "run 1", "-r", "0:3", "-t", "1:1", show)
    assert await agent.ended() == 0
    folder = tmp_path / "logs" / "run_1"
    assert (folder / "rank0" / "stdout.log").read_text().startswith("0|0|2|")
    assert (folder / "rank0" / "stderr.log").read_text().startswith("127.0.0.1")
    assert (folder / "rank1" / "stdout.log").read_text().startswith("1|1|2|")
    assert not (folder / "rank1" / "stderr.log").exists()
    assert re.match(r"\[rank1\] 1\|1\|2\|", agent.out)
    assert "rank0" not in agent.out + agent.err
    assert agent.err.startswith("[rank1] 127.0.0.1")


async def test_a_closed_standard_output_stops_nobody(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text("for n in range(50_000): print('line', n)\nopen('done', 'w')\n")
    reader, writer = os.pipe()
    os.close(reader)
    agent = await rig.run("--standalone", "talk.py", stdout=writer)
    os.close(writer)
    assert await agent.ended() == 0
    assert (tmp_path / "done").exists()
    assert "standard output cannot be written" in agent.err
