"""The way of a report to the daemon: the unix socket, or TCP with munge, or TCP with the reporters' token."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import msgspec

from tmd.cli.client import Client, ClientError
from tmd.cli.remote import BadAddress, RemoteClient, client_for
from tmd.protocol.health import HealthReport

#: The checks have had their time: all together must end within Slurm's 60 s.
TIMEOUT_S = 8.0


class NotReported(Exception):
    """The daemon was not told; the text is why, and what to do."""


class _WithToken(RemoteClient):
    def __init__(self, address: str, token: str) -> None:
        super().__init__(address, timeout_s=TIMEOUT_S)
        self._token = token

    def _proof(self, method: str, target: str, body: bytes) -> dict[str, str]:
        return {"Authorization": f"Token {self._token}"}


class Reporter:
    """Sends reports to one daemon."""

    def __init__(self, address: str, *, token_file: Path | None = None, munge_socket: str = "") -> None:
        """Raises NotReported."""
        self._client = _client(address, token_file, munge_socket)

    def send(self, node: str, report: HealthReport) -> None:
        """Raises NotReported."""
        try:
            self._client.post(f"/v1/nodes/{quote(node, safe='')}/findings", msgspec.to_builtins(report))
        except ClientError as error:
            raise NotReported(f"{error}; {error.remedy}") from None


def _client(address: str, token_file: Path | None, munge_socket: str) -> Client:
    try:
        if token_file is not None and not address.startswith("unix:"):
            return _WithToken(address, token_file.read_text().strip())
        return client_for(address, munge_socket, timeout_s=TIMEOUT_S)
    except (BadAddress, OSError, ValueError) as error:
        raise NotReported(str(error)) from None
