"""Where the members of one group meet to make an inner group: a key-value store on links of their own, in the shape of a star.

Contract: what a member sets, all members can get. Nobody waits for a member that has died: the hub notices the end of its link
and hangs up on everybody, so every wait ends with MeetingBroken at once. Who has everything says so and leaves; the links do not
outlive the making of the group, and no process is needed that is not a member.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from torch._C._distributed_c10d import Store

from tmd.protocol.codec import Codec, FrameReader, MessageRefused, frame
from tmd_worker.threads import Spawn

_READ_BYTES = 1 << 16
_WAIT_S = 60.0


class MeetingBroken(ConnectionError):
    """A member left before it was done, or the attempt was called off."""


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """`set`: this key has this value. `done`: the sender needs nothing more. `gone`: rank `value` has destroyed the group."""

    kind: Literal["set", "done", "gone"]
    key: str = ""
    value: bytes = b""


_WORDS: Codec[_Word] = Codec(_Word, "rendezvous of a group")


def turn_away(sock: socket.socket, by: int) -> None:
    """A member that came to meet for a group that rank `by` has destroyed. Closes the socket."""
    with sock, contextlib.suppress(OSError):
        sock.sendall(frame(_WORDS.encode(_Word("gone", value=str(by).encode()))))


class Rendezvous(Store):
    """`sockets`: at the hub to every other member, elsewhere to the hub. They belong to it.

    Close it when the group is made or given up, and keep a reference for as long as the group: its C++ half does not.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], *, hub: bool, spawn: Spawn) -> None:
        super().__init__()
        self.set_timeout(datetime.timedelta(seconds=_WAIT_S))
        self._hub = hub
        self._sockets = dict(sockets)
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._broken: str | None = None
        self._closing = False
        #: The rank that has destroyed the group, if one has.
        self.gone: int | None = None
        for peer, sock in self._sockets.items():
            sock.settimeout(None)
            spawn(f"rendezvous-{peer}", lambda peer=peer, sock=sock: self._read(peer, sock))  # type: ignore[misc]

    # ---------------------------------------------------------------- what torch calls; all raise MeetingBroken

    def set(self, key: str, value: str | bytes) -> None:
        self._keep(key, value.encode() if isinstance(value, str) else bytes(value), told_by=None)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            self._require_whole()
            return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        limit: datetime.timedelta = timeout or self.timeout  # type: ignore[attr-defined]
        deadline_s = time.monotonic() + limit.total_seconds()
        with self._changed:
            while missing := [key for key in keys if key not in self._values]:
                self._require_whole()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise MeetingBroken(f"no member has set {', '.join(missing)} within {limit.total_seconds():g} s")
                self._changed.wait(left_s)

    def add(self, key: str, amount: int) -> int:
        raise NotImplementedError("counters are not needed to make a group")

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    deleteKey = delete_key

    # ---------------------------------------------------------------- its end

    @property
    def broken(self) -> str | None:
        """Why no more can be had, or None."""
        return self._broken

    def give_up(self, reason: str) -> None:
        """Every wait ends, here and on the other members. From any thread."""
        self._break(reason)

    def call_off(self, by: int) -> None:
        """At the hub: the group is not made, for rank `by` has destroyed it."""
        with self._changed:
            self._closing = True  # whoever has been told hangs up, which must not keep the others from being told
        self._send_all(_Word("gone", value=str(by).encode()), but=None)

    def close(self, *, done: bool) -> None:
        """`done`: this member has made its group; otherwise the others will not make theirs."""
        if done:
            self._send_all(_Word("done"), but=None)
        with self._changed:
            self._closing = True
        self._hang_up()
        for sock in self._sockets.values():
            sock.close()

    # ---------------------------------------------------------------- the star

    def _read(self, peer: int, sock: socket.socket) -> None:
        """Until the peer is done, or gone."""
        reader = FrameReader(_WORDS)
        try:
            while data := sock.recv(_READ_BYTES):
                for word in reader.feed(data):
                    if word.kind == "done":
                        return
                    if word.kind == "gone":
                        self.gone = int(word.value)
                        self._break(f"rank {self.gone} has destroyed the group")
                        return
                    self._keep(word.key, word.value, told_by=peer)
            reason = f"rank {peer} left before the group was made"
        except (OSError, MessageRefused, MeetingBroken) as error:
            reason = f"rank {peer}: {error}"
        self._break(reason)

    def _keep(self, key: str, value: bytes, *, told_by: int | None) -> None:
        with self._changed:
            self._require_whole()
            self._values[key] = value
            self._changed.notify_all()
        if self._hub or told_by is None:
            self._send_all(_Word("set", key, value), but=told_by)

    def _send_all(self, word: _Word, but: int | None) -> None:
        data = frame(_WORDS.encode(word))
        with self._sending:
            for peer, sock in self._sockets.items():
                if peer != but:
                    self._send(sock, data)

    def _send(self, sock: socket.socket, data: bytes) -> None:
        """A member that takes nothing is found out by its link, or by its own silence, not here."""
        try:
            sock.sendall(data)
        except OSError:
            pass  # its reader says why

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise MeetingBroken(self._broken)

    def _break(self, reason: str) -> None:
        with self._changed:
            if self._broken is not None or self._closing:
                return
            self._broken = reason
            self._changed.notify_all()
        self._hang_up()

    def _hang_up(self) -> None:
        for sock in self._sockets.values():
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # gone already
