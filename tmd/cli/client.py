"""A small synchronous client of the daemon's HTTP interface, over its unix socket or, with munge, over TCP.

Contract: JSON in, JSON out; everything that goes wrong is a ClientError that says where it looked, what happened and what to
do. One connection per request, so a client can be kept for as long as one likes.
"""

from __future__ import annotations

import errno
import grp
import http.client
import json
import os
import socket
from pathlib import Path
from typing import Any

#: Exit codes of tmctl.
EXIT_REFUSED = 1
EXIT_UNREACHABLE = 2
#: Answers come at once; killing a node and waiting for one that is given back may take some seconds.
TIMEOUT_S = 30.0


class ClientError(Exception):
    """The daemon could not be asked, or said no. `status` is the HTTP status, 0 if there was no answer; `absent`: nobody was
    there, so nothing was asked."""

    def __init__(self, message: str, remedy: str = "", *, status: int = 0, absent: bool = False) -> None:
        super().__init__(message)
        self.remedy = remedy
        self.status = status
        self.absent = absent

    @property
    def exit_code(self) -> int:
        return EXIT_REFUSED if self.status else EXIT_UNREACHABLE


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("tmd", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Client:
    """Speaks to the daemon that listens on `path`."""

    _elsewhere = "name another socket with --socket or TMD_SOCKET"

    def __init__(self, path: str | Path, *, timeout_s: float = TIMEOUT_S) -> None:
        self.place = str(path)
        self._path = Path(path)
        self._timeout_s = timeout_s

    def get(self, target: str) -> Any:
        """Raises ClientError."""
        return self._ask("GET", target, None)

    def post(self, target: str, body: Any = None) -> Any:
        """Raises ClientError."""
        return self._ask("POST", target, {} if body is None else body)

    def _ask(self, method: str, target: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        headers |= self._proof(method, target, data or b"")
        connection = self._connection()
        try:
            connection.request(method, target, data, headers)
            answer = connection.getresponse()
            content = answer.read()
        except OSError as error:
            raise self._unreachable(error) from None
        except http.client.HTTPException as error:
            raise ClientError(f"{self.place} does not speak HTTP ({error!r})", "is this the address of a tmd daemon?") from None
        finally:
            connection.close()
        return self._read(method, target, answer.status, content)

    def _connection(self) -> http.client.HTTPConnection:
        return _UnixConnection(self._path, self._timeout_s)

    def _proof(self, method: str, target: str, body: bytes) -> dict[str, str]:
        """Headers that say who asks. On a unix socket the kernel says it. Raises ClientError."""
        return {}

    def _read(self, method: str, target: str, status: int, content: bytes) -> Any:
        try:
            value = json.loads(content)
        except ValueError:
            value = None
        if status < 400 and value is not None:
            return value
        if isinstance(value, dict) and "error" in value:
            raise ClientError(str(value["error"]), str(value.get("remedy", "")), status=status)
        text = content[:200].decode(errors="replace").strip()
        raise ClientError(
            f"{method} {target}: the daemon at {self.place} answered {status}: {text}",
            "tmctl and the daemon should be of the same version; the daemon's log may say more",
            status=status,
        )

    def _unreachable(self, error: OSError) -> ClientError:
        if isinstance(error, TimeoutError):
            remedy = "it may be stopped or overloaded: look at its process and its log"
            return ClientError(f"the daemon at {self.place} did not answer within {self._timeout_s:.0f} s", remedy)
        if error.errno in (errno.EACCES, errno.EPERM):
            return ClientError(f"no permission to use {self.place} as user {os.geteuid()}", self._who_may())
        if error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR, errno.ENOTSOCK):
            what = "there is no such socket" if error.errno in (errno.ENOENT, errno.ENOTDIR) else "nobody listens there"
            return ClientError(
                f"no daemon at {self.place}: {what}; the job, if one runs, is not affected",
                f"start it (systemctl start tmd, or: tmd serve), or {self._elsewhere}",
                absent=True,
            )
        return ClientError(f"talking to the daemon at {self.place} failed: {error}", "try again; its log may say more")

    def _who_may(self) -> str:
        for place in (self._path, self._path.parent):
            try:
                group = place.stat().st_gid
            except OSError:
                continue
            try:
                name = grp.getgrgid(group).gr_name
            except KeyError:
                name = str(group)
            return f"become a member of group {name}, or run tmctl as the daemon's user or root"
        return "run tmctl as the daemon's user or root"
