"""The ways in and out of a process: its listener with all that is served there, and the connections it dials itself."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

from tmd.protocol.membership import Member
from tmd_worker.threads import Spawn
from tmd_worker.transport.connection import Connection
from tmd_worker.transport.dialing import LinkError, dial
from tmd_worker.transport.handshake import ASKING, LINK, Hello, Verdict, new_nonce
from tmd_worker.transport.labels import USE, Labels
from tmd_worker.transport.listener import Listener
from tmd_worker.transport.opening import RETRY_FIRST_S, RETRY_MAX_S, Inbox, Opener
from tmd_worker.transport.tables import Tables

Handler = Callable[[socket.socket, dict[str, Any]], None]
#: How ranks of one host reach one another: "shm" (memory for collectives, sockets within the host for the rest), "unix" (these
#: alone) or "tcp" (as between hosts), for measurements and for a search after a fault.
LOCAL_LINKS = "TMD_LOCAL_LINKS"
LOCAL_LINKS_DEFAULT = "shm"
#: Per operation on a served connection, until its handler sets another one.
SERVED_TIMEOUT_S = 60.0


class Ports:
    """Links go to the inbox; every other kind of connection to its handler, in a thread of its own."""

    def __init__(
        self,
        *,
        host: str,
        port_range: tuple[int, int] | None,
        key: bytes,
        incarnation: str,
        tables: Tables,
        labels: Labels,
        spawn: Spawn,
    ) -> None:
        self._key = key
        self._incarnation = incarnation
        self._tables = tables
        self._labels = labels
        self._spawn = spawn
        self._handlers: dict[str, Handler] = {}
        #: Called, in a thread of its own, with the name of a group that was left while a link of it came in.
        self.left_over: Callable[[str], None] = lambda _: None
        self.inbox = Inbox()
        local_links = os.environ.get(LOCAL_LINKS, LOCAL_LINKS_DEFAULT)
        shares = local_links == "shm"
        self.opener = Opener(incarnation, key, self.inbox, labels, host if local_links != "tcp" else None, shares=shares)
        self.listener = Listener(host, port_range, key, self._judge, self._accept, shares=shares)
        spawn("listener", self.listener.run)

    def serve(self, kind: str, handler: Handler) -> None:
        self._handlers[kind] = handler

    def connect(self, member: Member, kind: str, fields: dict[str, Any], timeout_s: float) -> socket.socket:
        """Tries until the peer serves this kind. Raises LinkError."""
        deadline_s = time.monotonic() + timeout_s
        pause_s = RETRY_FIRST_S
        reason = ""
        while True:
            hello = Hello(
                kind=kind,
                incarnation=self._incarnation,
                peer_incarnation=member.incarnation,
                nonce=new_nonce(),
                fields=fields,
            )
            try:
                connection, verdict = dial(member, self._key, hello, deadline_s, lambda _: None)
            except LinkError as error:
                raise LinkError(reason or str(error)) from None
            if verdict.answer == "ok":
                connection.sock.settimeout(timeout_s)
                return connection.sock
            connection.close()
            reason = f"{member.incarnation} on {member.node} refused a {kind} connection: {verdict.reason}"
            if verdict.answer == "refused" or time.monotonic() + pause_s > deadline_s:
                raise LinkError(reason)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    def close(self) -> None:
        self.listener.close()

    def _judge(self, hello: Hello) -> Verdict:
        if hello.peer_incarnation != self._incarnation:
            return Verdict(answer="refused", reason=f"{hello.peer_incarnation} is not here, {self._incarnation} is")
        if hello.kind in (LINK, ASKING):
            return self._judge_link(hello)
        if hello.kind in self._handlers:
            return Verdict(answer="ok")
        return Verdict(answer="retry", reason=f"nothing serves {hello.kind} connections here")

    def _judge_link(self, hello: Hello) -> Verdict:
        verdict = self._tables.judge(hello) if hello.kind == LINK else Verdict(answer="ok")
        by = self._labels.over(hello.group)
        if verdict.answer == "ok" and by is not None:
            return Verdict(answer="gone", reason=f"group {hello.group} is over here", by=by)
        if hello.kind == ASKING:
            return Verdict(answer="retry", reason=f"group {hello.group} is not over here")
        return verdict

    def _accept(self, connection: Connection, hello: Hello) -> None:
        if hello.kind == LINK:
            self.inbox.put(connection, hello)
            if self._labels.over(hello.group) is not None:
                self._spawn("left-over", lambda: self.left_over(hello.group.partition(USE)[0]))
            return
        handler, sock = self._handlers[hello.kind], connection.sock
        sock.settimeout(SERVED_TIMEOUT_S)
        self._spawn(f"serve-{hello.kind}", lambda: _handle(handler, sock, hello))


def _handle(handler: Handler, sock: socket.socket, hello: Hello) -> None:
    try:
        handler(sock, {**hello.fields, "incarnation": hello.incarnation})
    except OSError:
        sock.close()  # the peer went away; what it wanted is of no use any more
