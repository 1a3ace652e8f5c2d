"""The daemon put together: started, supervised, stopped. Jobs go on whatever happens here."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import signal
import socket
import stat
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

import tmd
from tmd.api.app import tcp_app, unix_app
from tmd.api.context import Changes, Context
from tmd.config import Config
from tmd.core.daemon import DaemonCore
from tmd.core.instructions import DirectAgent, Persist, RefuseAgent, ReleaseNode, WelcomeAgent
from tmd.core.records import JobRecord, LedgerSnapshot
from tmd.daemon.admission import Admissions, Tokens
from tmd.daemon.agents import AgentHub
from tmd.daemon.callers import Callers, half_of_the_descriptors
from tmd.daemon.health_drains import HealthDrains
from tmd.daemon.http_log import quiet_http
from tmd.daemon.identity import operators
from tmd.daemon.job_feed import JobFeed
from tmd.daemon.loop import CoreLoop
from tmd.daemon.maintenance_feed import MaintenanceFeed
from tmd.daemon.manual_nodes import ManualNodes, routes_of_no_cluster
from tmd.daemon.narrator import Narrator
from tmd.daemon.node_feed import NodeFeed, Releases
from tmd.daemon.notify import Notifier
from tmd.daemon.pool_feed import PoolFeed
from tmd.daemon.proofs import Proofs
from tmd.daemon.store import RendezvousStores
from tmd.daemon.supervision import supervised
from tmd.ledger.ledger import Ledger
from tmd.ledger.reading import JOB_ENDED
from tmd.munge.library import MungeAbsent
from tmd.nodes.base import ResourceManager
from tmd.nodes.local import LocalCluster
from tmd.nodes.local_routes import local_routes
from tmd.nodes.slurm.choice import make_client
from tmd.nodes.slurm.nodes import SlurmNodes
from tmd.nodes.slurm.settings import SlurmSettings

log = logging.getLogger("tmd.daemon")

#: Connections that may wait to be taken; the kernel may allow fewer (net.core.somaxconn).
BACKLOG = 1024
#: Of those so many are taken before the first of them is looked at.
TAKEN_AT_ONCE = 32


class CannotStart(RuntimeError):
    """The daemon cannot run here as configured; the text says what is in the way."""


class _Outlets:
    """Where the core's instructions go (tmd.daemon.loop.Outlets)."""

    def __init__(self, hub: AgentHub, stores: RendezvousStores, tokens: Tokens, changes: Changes, narrator: Narrator) -> None:
        self._hub = hub
        self._stores = stores
        self._tokens = tokens
        self._changes = changes
        self._narrator = narrator
        self._with_token: set[str] = set()
        self.releases: Releases | None = None

    def persisted(self, persist: Persist) -> None:
        self._narrator.tell(persist)
        for job in persist.jobs:
            if job.state in JOB_ENDED:
                self._stores.job_ended(job.job_id)
                self._hub.job_ended(job.job_id)
                self._with_token.discard(job.job_id)
                self._tokens.remove_file(job.job_id)
            elif job.job_id not in self._with_token:
                self._with_token.add(job.job_id)
                self._write_token(job)
        self._changes.ring()

    def to_agent(self, instruction: WelcomeAgent | RefuseAgent | DirectAgent) -> None:
        self._hub.to_agent(instruction)

    def release(self, instruction: ReleaseNode) -> None:
        assert self.releases is not None, "set before the loop runs"
        self.releases.add(instruction)

    def _write_token(self, job: JobRecord) -> None:
        try:
            self._tokens.write_file(job.job_id, job.owner_uid)
        except OSError as error:
            log.error("token file not written: %s; tmctl job token %s gives it too", error, job.job_id, extra={"job": job.job_id})


async def serve(config: Config, *, notifier: Notifier) -> None:
    """Until SIGTERM or SIGINT. Raises CannotStart, LedgerTakenOver, PartBroke."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with _locked(config.state_dir):
        ledger = await Ledger.open(config.database_url)
        try:
            async with contextlib.AsyncExitStack() as running:
                failed = await _start(config, ledger, notifier, running)
                notifier.ready()
                await _wait_for(stop, failed)
                notifier.stopping()
                log.info("stopping; jobs go on and are picked up by the next daemon")
        finally:
            await ledger.close()


async def _start(config: Config, ledger: Ledger, notifier: Notifier, running: contextlib.AsyncExitStack) -> asyncio.Future[None]:
    """Everything up and listening; `running` stops it again. The future ends when a part breaks that cannot be done without."""
    snapshot = await ledger.load_snapshot()
    in_slurm = config.daemon.resource_manager == "slurm"
    core = DaemonCore(
        config.core,
        generation=ledger.generation,
        snapshot=snapshot,
        agents_hold_nodes=in_slurm,
        health=config.health,
        handoff=config.handoff.terms(),
    )
    stores, tokens, changes = RendezvousStores(ledger), Tokens(config.state_dir), Changes()
    proofs = _proofs(config)
    admissions = Admissions(tokens, lambda job_id: _record(core, job_id), munge=proofs.munge, tokens_count=proofs.tokens)
    hub = AgentHub(admissions, stores, _agents(snapshot), proofs)
    outlets = _Outlets(hub, stores, tokens, changes, Narrator(snapshot))
    loop = CoreLoop(core, ledger, outlets, paused=snapshot.paused)
    hub.attach(loop)
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    manager, routes = await running.enter_async_context(_resource_manager(config, core, snapshot, failed))
    outlets.releases = Releases(manager, ledger, await ledger.pending_releases())
    context = Context(
        config=config,
        loop=loop,
        ledger=ledger,
        hub=hub,
        manager=manager,
        tokens=tokens,
        operators=operators(config.daemon.operators),
        proofs=proofs,
        changes=changes,
        started_s=time.time(),
    )
    parts: dict[str, Coroutine[Any, Any, None]] = {
        "core": loop.run(),
        "stores": stores.run(),
        "nodes": NodeFeed(manager, loop).run(),
        "health": HealthDrains(manager, loop).run(),
        "releases": outlets.releases.run(),
    }
    if isinstance(manager, SlurmNodes):
        parts["jobs"] = JobFeed(manager, loop).run()
        parts["maintenance"] = MaintenanceFeed(manager, loop).run()
        if manager.pool is not None:
            parts["pool"] = PoolFeed(manager.pool, loop).run()
    if notifier.watchdog_s is not None:
        parts["watchdog"] = notifier.feed_watchdog()
    for name, part in parts.items():
        await running.enter_async_context(supervised(name, part, failed))
    await running.enter_async_context(_listening(unix_app(context, routes), _unix_socket(config.socket)))
    if config.listen is not None:
        await running.enter_async_context(_listening(tcp_app(context), _tcp_socket(*config.listen)))
    running.callback(hub.stop)
    _say_ready(config, ledger, snapshot, notifier)
    return failed


def _proofs(config: Config) -> Proofs:
    """Raises CannotStart."""
    if config.listen is None:
        return Proofs()
    try:
        return Proofs.configured(config.daemon.tcp_auth, config.daemon.munge_socket)
    except MungeAbsent as error:
        raise CannotStart(f"tcp_auth is munge, and {error.whole()}") from None


async def _wait_for(stop: asyncio.Event, failed: asyncio.Future[None]) -> None:
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if failed.done():
        failed.result()


@contextlib.asynccontextmanager
async def _resource_manager(
    config: Config, core: DaemonCore, snapshot: LedgerSnapshot, failed: asyncio.Future[None]
) -> AsyncIterator[tuple[ResourceManager, list[web.AbstractRouteDef]]]:
    if config.daemon.resource_manager == "none":
        manual = ManualNodes(core.nodes, snapshot.nodes)
        yield manual, routes_of_no_cluster("none")
        await manual.close()
        return
    if config.daemon.resource_manager == "slurm":
        async with _slurm_nodes(config.slurm) as slurm:
            yield (
                slurm,
                routes_of_no_cluster("slurm", "jobs are submitted with sbatch, nodes drained with scontrol or tmctl drain"),
            )
        return
    try:
        cluster = LocalCluster(config.local, config.state_dir, daemon_address=f"unix:{config.socket.absolute()}")
        await cluster.start()
    except ValueError as error:
        raise CannotStart(str(error)) from None
    async with supervised("local nodes", cluster.run(), failed):
        try:
            yield cluster, local_routes(cluster)
        finally:
            await cluster.close()


@contextlib.asynccontextmanager
async def _slurm_nodes(settings: SlurmSettings) -> AsyncIterator[SlurmNodes]:
    """Raises CannotStart. slurmctld may be away: its nodes are unknown until it answers."""
    try:
        client = await make_client(settings)
        nodes = SlurmNodes(settings, client)
        await nodes.start()
    except ValueError as error:
        raise CannotStart(str(error)) from None
    except OSError as error:
        await client.close()
        raise CannotStart(f"no hints can be heard on {settings.hint_socket}: {error}; see [slurm] hint_socket") from None
    log.info("nodes are Slurm's, asked through %s", client.description)
    try:
        yield nodes
    finally:
        await nodes.close()


@contextlib.asynccontextmanager
async def _listening(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    callers = Callers(app, None if listener.family == socket.AF_UNIX else half_of_the_descriptors())
    runner = callers.runner
    path = listener.getsockname() if listener.family == socket.AF_UNIX else None
    await runner.setup()
    quiet_http()
    try:
        server = await asyncio.get_running_loop().create_server(callers, sock=listener, backlog=TAKEN_AT_ONCE)
        listener.listen(BACKLOG)  # asyncio means by it how many it takes at once, too
        try:
            yield
        finally:
            if path is not None:
                # While it still listens: later it might be the next daemon's.
                with contextlib.suppress(OSError):
                    os.unlink(path)
            server.close()
    finally:
        await runner.cleanup()


def _unix_socket(path: Path) -> socket.socket:
    """In a directory that only the daemon's user and group may enter. Raises CannotStart."""
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        os.chmod(path, 0o660)
    except OSError as error:
        raise CannotStart(f"cannot listen on {path}: {error.strerror or error}; choose another one with --socket") from None
    return listener


def _remove_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise CannotStart(f"another daemon listens on {path}: stop it first, or choose another --socket and --state-dir")


def _tcp_socket(host: str, port: int) -> socket.socket:
    """Host "::" is every address, of both families where the machine has both. Raises CannotStart."""
    try:
        if host == "::" and not socket.has_dualstack_ipv6():
            return socket.create_server(("", port))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")
    except (OSError, ValueError) as error:
        raise CannotStart(f"cannot listen on {host}:{port}: {error}; choose another address with --listen") from None


@contextlib.contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """One daemon per state directory, for as long as its process lives. Raises CannotStart."""
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CannotStart(
            f"cannot use the state directory {state_dir}: {error.strerror}; choose another with --state-dir"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        raise CannotStart(f"another daemon runs on {state_dir}: stop it first, or choose another --state-dir") from None
    finally:
        os.close(descriptor)


def _record(core: DaemonCore, job_id: str) -> JobRecord | None:
    view = core.job(job_id)
    return view.record if view is not None else None


def _agents(snapshot: LedgerSnapshot) -> dict[str, str]:
    ended = {job.job_id for job in snapshot.jobs if job.state in JOB_ENDED}
    return {node.agent_id: node.job_id for node in snapshot.nodes if node.agent_id and node.job_id not in ended}


def _say_ready(config: Config, ledger: Ledger, snapshot: LedgerSnapshot, notifier: Notifier) -> None:
    live = [job.job_id for job in snapshot.jobs if job.state not in JOB_ENDED]
    notifier.status(f"generation {ledger.generation}, {len(live)} live jobs")
    log.info(
        "ready: tmd %s, generation %d, socket %s%s, ledger %s, resource manager %s, live jobs: %s%s%s",
        tmd.__version__,
        ledger.generation,
        config.socket,
        f" and {config.daemon.listen}" if config.daemon.listen else "",
        ledger.shown_url,
        config.daemon.resource_manager,
        ", ".join(live) or "none",
        "; paused" if snapshot.paused else "",
        "; observe only" if config.core.observe_only else "",
    )
