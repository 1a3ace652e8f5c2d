"""The daemon's application without its process, where a test has to say who is calling."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tmd.api.app import unix_app
from tmd.api.context import Changes, Context
from tmd.config import load
from tmd.core.daemon import DaemonCore
from tmd.core.instructions import DirectAgent, Persist, RefuseAgent, ReleaseNode, WelcomeAgent
from tmd.core.settings import CoreSettings
from tmd.daemon.admission import Admissions, Tokens
from tmd.daemon.agents import AgentHub
from tmd.daemon.loop import CoreLoop
from tmd.daemon.manual_nodes import ManualNodes
from tmd.daemon.proofs import Proofs
from tmd.daemon.store import RendezvousStores
from tmd.ledger.ledger import Ledger


class Application:
    """`uid` is who calls from now on; `core` may be asked and told directly."""

    def __init__(self, core: DaemonCore, ledger: Ledger, url: str, session: aiohttp.ClientSession) -> None:
        self.core = core
        self.ledger = ledger
        self.uid: int | None = 0
        self.changes = Changes()
        self.url = url
        self.session = session

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.request(method, f"http://tmd{path}", json=body) as answer:
            return answer.status, await answer.json()

    # tmd.daemon.loop.Outlets
    def persisted(self, persist: Persist) -> None:
        self.changes.ring()

    def to_agent(self, instruction: WelcomeAgent | RefuseAgent | DirectAgent) -> None: ...

    def release(self, instruction: ReleaseNode) -> None: ...


@contextlib.asynccontextmanager
async def application(folder: Path, *, operators: frozenset[int]) -> AsyncIterator[Application]:
    """All of the API on a unix socket, over a ledger in `folder`."""
    ledger = await Ledger.open(f"sqlite:///{folder / 'ledger.db'}")
    core = DaemonCore(CoreSettings(), generation=ledger.generation, snapshot=await ledger.load_snapshot())
    stores, tokens = RendezvousStores(ledger), Tokens(folder)
    hub = AgentHub(Admissions(tokens, lambda job_id: None), stores, {}, Proofs())
    with tempfile.TemporaryDirectory(prefix="tmd-") as sockets:
        path = f"{sockets}/tmd.sock"
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session:
            app = Application(core, ledger, path, session)
            loop = CoreLoop(core, ledger, app)
            hub.attach(loop)
            context = Context(
                config=load(environ={}),
                loop=loop,
                ledger=ledger,
                hub=hub,
                manager=ManualNodes(core.nodes, ()),
                tokens=tokens,
                operators=operators,
                changes=app.changes,
                started_s=0.0,
                caller_uid=lambda request: app.uid,
            )
            runner = web.AppRunner(unix_app(context), shutdown_timeout=1.0)
            await runner.setup()
            await web.UnixSite(runner, path).start()
            tasks = [asyncio.create_task(loop.run()), asyncio.create_task(stores.run())]
            try:
                yield app
            finally:
                await runner.cleanup()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await ledger.close()
