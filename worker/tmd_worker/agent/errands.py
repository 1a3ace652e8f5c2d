"""What this agent does for its job with Slurm's commands: it starts agents on other nodes, takes nodes and gives nodes back.

Contract: an order is carried out once; its status says what became of it. Every command has a deadline but the srun of an agent
that was started, which lasts as long as that agent and passes its output on; once the agent serves, it outlives its srun and this
process. A command that fails is a reason, never an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable

import msgspec

from tmd.protocol.agent import NodeOrder, OrderStatus
from tmd_worker.agent import growth
from tmd_worker.agent.commands import COMMAND_TIMEOUT_S, CommandFailed, kill, run
from tmd_worker.agent.logs import Label, LineCutter, LogPump, LogStream
from tmd_worker.agent.slurm import SlurmStep

#: Orders that have ended and are still reported.
ENDED_KEPT = 32
#: Of what a command says about its failure.
_LINES_KEPT = 8
_REASON_LIMIT = 500
_CHUNK_BYTES = 1 << 16
#: How srun ends that has lost its watchman (see `_settle`): nothing that anybody need know.
_NO_WATCHMAN = "srun: error: write(shepherd)"


class Errands:
    """The orders of one agent. `step` None: it cannot carry out any."""

    def __init__(self, step: SlurmStep | None, pump: LogPump, say: Callable[[str], None], changed: Callable[[], None]) -> None:
        self._step = step
        self._pump = pump
        self._say = say
        self._changed = changed
        self._statuses: dict[str, OrderStatus] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sruns: dict[str, asyncio.subprocess.Process] = {}
        #: Launches whose agents have come: nobody asks any more how their srun ends.
        self._settled: set[str] = set()

    def statuses(self) -> tuple[OrderStatus, ...]:
        return tuple(self._statuses.values())

    def match(self, orders: Iterable[NodeOrder], withdrawn: Iterable[str]) -> None:
        """Begins what is ordered and was not yet; ends what is withdrawn. A launch that is neither has succeeded."""
        orders, withdrawn = tuple(orders), frozenset(withdrawn)
        for order_id in self._sruns.keys() - {order.order_id for order in orders} - withdrawn:
            self._settle(order_id)
        for order in orders:
            if order.order_id not in self._statuses:
                self._statuses[order.order_id] = OrderStatus(
                    order_id=order.order_id, kind=order.kind, nodes=order.nodes, state="running", since_s=time.time()
                )
                self._tasks[order.order_id] = asyncio.create_task(self._carry_out(order), name=f"order {order.order_id}")
        for order_id in withdrawn:
            if (srun := self._sruns.get(order_id)) is not None:
                self._end_srun(srun)
            elif order_id in self._tasks and self._statuses[order_id].kind in ("expand", "companion"):
                _call_off(self._tasks[order_id])

    async def close(self, within_s: float, *, leave: bool) -> None:
        """The agent ends. `leave`: the job goes on, so the agents that were started here do, too; else they have `within_s` to
        end, as their own orders say."""
        if not leave and self._sruns:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await asyncio.gather(*(srun.wait() for srun in self._sruns.values()))
            for srun in self._sruns.values():
                self._end_srun(srun)
        for order_id in list(self._sruns) if leave else ():
            self._settle(order_id)
        for task in self._tasks.values():
            _call_off(task)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # ---------------------------------------------------------------- orders

    async def _carry_out(self, order: NodeOrder) -> None:
        try:
            if self._step is None:
                raise CommandFailed("srun and scontrol are not to be had here: is tmd-run inside a container without them?")
            if order.kind == "launch":
                await self._launch(self._step, order)
            elif order.kind == "release":
                await self._release(self._step, order)
            else:
                self._say(f"taking {', '.join(order.nodes)} from reservation {order.reservation} ({order.kind})")
                await growth.take(self._step, order, os.environ)
        except asyncio.CancelledError:
            self._end(order.order_id, "failed", "called off")
            raise
        except (CommandFailed, OSError, LookupError) as failure:
            self._end(order.order_id, "failed", str(failure))
        else:
            self._end(order.order_id, "done", "")
        finally:
            self._tasks.pop(order.order_id, None)

    def _end(self, order_id: str, state: str, reason: str) -> None:
        status = msgspec.structs.replace(self._statuses[order_id], state=state, reason=reason[:_REASON_LIMIT])
        self._statuses[order_id] = status
        if reason:
            self._say(f"order {order_id} ({status.kind} {', '.join(status.nodes)}) has failed: {reason}")
        ended = [known.order_id for known in self._statuses.values() if known.state != "running"]
        for old in ended[:-ENDED_KEPT]:
            del self._statuses[old]
        self._changed()

    async def _launch(self, step: SlurmStep, order: NodeOrder) -> None:
        """Lasts as long as the agent that it starts. Raises CommandFailed, OSError."""
        (node,) = order.nodes
        self._say(f"starting an agent on {node}")
        reader, writer = os.pipe2(os.O_CLOEXEC)
        output = LogStream(reader, Label.none(), console=1, file=None)
        self._pump.attach(output)
        try:
            srun = await asyncio.create_subprocess_exec(
                *step.launch(node),
                env=step.environment(os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writer,
                stderr=asyncio.subprocess.PIPE,
            )
        finally:
            os.close(writer)
        self._sruns[order.order_id] = srun
        try:
            words = await self._relay_errors(srun)
            code = await srun.wait()
        finally:
            if srun.returncode is None:
                srun.kill()  # its step goes on
            self._pump.finish(output)
            del self._sruns[order.order_id]
        if code != 0 and order.order_id not in self._settled:
            raise CommandFailed("; ".join(words) or f"srun ended with code {code}")

    def _settle(self, order_id: str) -> None:
        """The agent that was started stands on its own feet. srun has a watchman, a child that ends the step if srun is killed:
        that goes, as whoever takes this node away kills srun."""
        if order_id in self._settled:
            return
        self._settled.add(order_id)
        for pid in _children(self._sruns[order_id].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _relay_errors(self, srun: asyncio.subprocess.Process) -> list[str]:
        """Passes on what comes on its standard error, to the end; returns srun's own last lines."""
        assert srun.stderr is not None, "it is a pipe"
        cutter = LineCutter(Label.none())
        words: list[str] = []
        while data := await srun.stderr.read(_CHUNK_BYTES):
            for line in cutter.feed(data).decode(errors="replace").splitlines():
                if not line.startswith(_NO_WATCHMAN):
                    self._pump.say(line)
                if line.startswith("srun:"):
                    words = [*words, line][-_LINES_KEPT:]
        return words

    def _end_srun(self, srun: asyncio.subprocess.Process) -> None:
        """It takes SIGTERM to its step and is killed if that step does not end."""
        with contextlib.suppress(ProcessLookupError):
            srun.send_signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(COMMAND_TIMEOUT_S / 6, kill, srun)

    async def _release(self, step: SlurmStep, order: NodeOrder) -> None:
        """Raises CommandFailed, OSError, LookupError."""
        nodes, batch_host = step.answer((await run(step.query()))[0])
        held = (await run(step.expand(nodes)))[0].split()
        leaving = [node for node in order.nodes if node in held]
        if not leaving:
            return
        if batch_host in leaving:
            raise CommandFailed(f"{batch_host} is the batch host, which Slurm takes back only with the job")
        keep = [node for node in held if node not in leaving]
        if not keep:
            raise CommandFailed(f"{', '.join(leaving)} would be the last of the job: end the job instead")
        self._say(f"giving {', '.join(leaving)} back to Slurm")
        with tempfile.TemporaryDirectory(prefix="tmd-run-") as folder:  # scontrol leaves scripts of its own there
            await run(step.shrink(keep), cwd=folder)


def _call_off(task: asyncio.Task[None]) -> None:
    """Once: an order is named as withdrawn until it has ended, and a second cancellation would cut its clean-up off."""
    if not task.cancelling():
        task.cancel()


def _children(pid: int) -> list[int]:
    """As the kernel lists them now."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry.name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return found
