"""systemd's notification protocol: one datagram per word, no library. Without $NOTIFY_SOCKET nothing is sent."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

log = logging.getLogger("tmd.daemon")


class Notifier:
    """Tells the service manager how the daemon does."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watched = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        text = environ.get("WATCHDOG_USEC", "")
        #: How long the daemon may be silent before it is killed; None: nobody watches.
        self.watchdog_s = int(text) / 1e6 if watched and text.isdigit() and int(text) > 0 else None

    def ready(self) -> None:
        self._send("READY=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={text.splitlines()[0] if text else ''}")

    async def feed_watchdog(self) -> None:
        """Runs on the event loop that owns the core, so a loop that hangs stops feeding. Returns at once if nobody watches."""
        while self.watchdog_s is not None:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 3)

    def _send(self, words: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as datagram:
                datagram.sendto(words.encode(), self._address)
        except OSError as error:
            log.warning("service manager not told %r: %s", words, error)
