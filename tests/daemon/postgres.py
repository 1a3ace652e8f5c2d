"""A real Postgres server of the tests' own: private folder, unix socket, loopback port, ended with the process that starts it.

Postgres refuses to run as root, so a root's tests run it as the user `postgres` that its package makes. If the test process
dies, the kernel ends the server (parent death signal).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

DEADLINE_S = 60.0
#: In every database; the server trusts whoever reaches its socket or loopback port.
USER = "tmd"


def program(name: str) -> str:
    """Debian keeps the server's programs out of PATH. Raises AssertionError with the remedy."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name), reverse=True)
    found = shutil.which(name, path=os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")]))
    assert found is not None, f"these tests need a real Postgres, {name} is missing: run scripts/setup-postgres"
    return found


class Postgres:
    """One server. Use as a context manager; `stop` and `start` in between are what its users call an outage."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tmd-postgres-")
        self.folder = Path(self._folder.name)
        self._log = self.folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = itertools.count(1)
        self._free: list[str] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    def __enter__(self) -> Postgres:
        try:
            if os.geteuid() == 0:
                shutil.chown(self.folder, "postgres", "postgres")
            make = ["initdb", "--no-sync", "--auth=trust", f"--username={USER}", "--pgdata", str(self.folder / "data")]
            done = subprocess.run(self._as_server(*make), capture_output=True, text=True, timeout=DEADLINE_S, cwd="/")
            assert done.returncode == 0, done.stdout + done.stderr
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    def start(self) -> None:
        """Returns once it answers."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.folder),
            "shared_buffers": "16MB",
            "max_connections": "50",
            # What outlives a process outlives these tests: they crash processes, not the machine.
            "fsync": "off",
            "full_page_writes": "off",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = self._as_server("postgres", "-D", str(self.folder / "data"), *options)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/")
        deadline = time.monotonic() + DEADLINE_S
        while self._ask("SELECT 1").returncode != 0:
            assert self._process.poll() is None, f"the server ended:\n{self._log.read_text()}"
            assert time.monotonic() < deadline, f"the server does not answer:\n{self._log.read_text()}"
            time.sleep(0.05)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """At once, as in a crash: whoever is connected loses the connection, what was committed is kept."""
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGQUIT)
            try:
                self._process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(DEADLINE_S)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Connections stay open and nothing is answered, as behind a network that loses everything."""
        assert self._process is not None
        pids = [self._process.pid, *self._children()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def no_file_larger_than(self, size_bytes: int) -> Iterator[None]:
        """As on a disk without room: files cannot grow beyond this. More than the 16 MiB of a log segment, or it panics."""
        self._limit_files(str(size_bytes))
        try:
            yield
        finally:
            self._limit_files("unlimited")

    def _limit_files(self, size: str) -> None:
        """The server's own user may do that; root in a container may not."""
        assert self._process is not None
        for pid in (self._process.pid, *self._children()):
            command = self._as_server("prlimit", f"--pid={pid}", f"--fsize={size}:")
            # A child may have ended since it was looked up.
            subprocess.run(command, capture_output=True, timeout=DEADLINE_S)

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """URL of an empty database, which somebody else gets afterwards: making and removing one takes longer than most tests."""
        url = self._free.pop() if self._free else self.fresh_database()
        name = url.rpartition("/")[2]
        left = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND pid <> pg_backend_pid()"
        clean = "DROP SCHEMA public CASCADE; CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO PUBLIC"
        self.run_sql(f"{left}; {clean}; ALTER DATABASE {name} RESET ALL", name)
        yield url
        # Cleared when it is taken again: daemons of the test may still write to it now.
        self._free.append(url)

    def fresh_database(self) -> str:
        """URL of a new, empty database."""
        name = f"tmd{next(self._databases)}"
        self.run_sql(f"CREATE DATABASE {name}")
        # Else a start after a crash would go through the making of every database since the last checkpoint.
        self.run_sql("CHECKPOINT")
        return self.url(name)

    def url(self, database: str, *, user: str = USER) -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def socket_url(self, database: str) -> str:
        return f"postgresql://{USER}@/{database}?host={self.folder}&port={self.port}"

    def run_sql(self, statement: str, database: str = "postgres") -> str:
        """What psql prints: bare values, one row a line. Raises AssertionError."""
        done = self._ask(statement, database)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def _ask(self, statement: str, database: str = "postgres") -> subprocess.CompletedProcess[str]:
        place = ["--host", str(self.folder), "--port", str(self.port), "--username", USER, "--dbname", database]
        return subprocess.run(
            [program("psql"), "--no-psqlrc", "--tuples-only", "--no-align", *place, "--command", statement],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    def _children(self) -> list[int]:
        assert self._process is not None
        pid = self._process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def _as_server(self, name: str, *arguments: str) -> list[str]:
        change = ["--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
        return ["setpriv", *change, "--pdeathsig", "SIGQUIT", program(name), *arguments]
