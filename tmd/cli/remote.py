"""The client over TCP: munge says who asks, with a credential of its own for each request."""

from __future__ import annotations

import http.client
import urllib.parse

from tmd.cli.client import TIMEOUT_S, Client, ClientError
from tmd.munge import statements
from tmd.munge.deadline import call
from tmd.munge.library import Munge, MungeError
from tmd.protocol.proofs import RequestProof, digest


class BadAddress(ValueError):
    """Neither unix:/path nor http://host:port."""


class RemoteClient(Client):
    """Speaks to the daemon at http://host:port."""

    _elsewhere = "name another address with --daemon or TMD_DAEMON"

    def __init__(self, address: str, munge_socket: str = "", *, timeout_s: float = TIMEOUT_S) -> None:
        """Raises BadAddress."""
        super().__init__(address, timeout_s=timeout_s)
        self._host, self._port = _split(address)
        self._munge_socket = munge_socket

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)

    def _proof(self, method: str, target: str, body: bytes) -> dict[str, str]:
        statement = RequestProof(method=method, target=target, body=digest(body))
        try:
            munge = Munge(self._munge_socket)
            credential = call(lambda: statements.state(munge, statement))
        except MungeError as error:
            raise ClientError(f"nothing was asked of {self.place}: {error}", error.remedy) from None
        return {"Authorization": f"Munge {credential}"}


def client_for(address: str, munge_socket: str, *, timeout_s: float = TIMEOUT_S) -> Client:
    """By an address as tmd-run takes it: unix:/path or http://host:port. Raises BadAddress."""
    if address.startswith("unix:/"):
        return Client(address.removeprefix("unix:"), timeout_s=timeout_s)
    return RemoteClient(address, munge_socket, timeout_s=timeout_s)


def _split(address: str) -> tuple[str, int]:
    try:
        parts = urllib.parse.urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.scheme != "http" or parts.path not in ("", "/"):
        raise BadAddress(f"{address!r} is no daemon's address; say http://head:7070 or unix:/run/tmd/tmd.sock")
    return host, port
