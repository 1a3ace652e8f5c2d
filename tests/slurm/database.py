"""MariaDB for slurmdbd: an empty database is made once per process, and each cluster begins with a copy of its folder."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.slurm.files import DATABASE, DATABASE_PASSWORD, DATABASE_USER

INSTALL_TIMEOUT_S = 120.0

#: Small, on the loopback only, and careless of power cuts: what outlives a process outlives a test.
_OPTIONS = (
    "--no-defaults",
    "--user=root",
    "--bind-address=127.0.0.1",
    "--skip-name-resolve",
    "--innodb-buffer-pool-size=32M",
    "--innodb-log-file-size=8M",
    "--innodb-lock-wait-timeout=900",
    "--innodb-flush-log-at-trx-commit=0",
    "--aria-pagecache-buffer-size=4M",
    "--key-buffer-size=1M",
    "--performance-schema=0",
)

_FIRST_STATEMENTS = f"""CREATE DATABASE IF NOT EXISTS {DATABASE};
CREATE USER IF NOT EXISTS '{DATABASE_USER}'@'127.0.0.1' IDENTIFIED BY '{DATABASE_PASSWORD}';
GRANT ALL ON {DATABASE}.* TO '{DATABASE_USER}'@'127.0.0.1';
"""


def prepare(folder: Path) -> None:
    """Makes what `command` needs."""
    shutil.copytree(_empty_database(), folder / "data")
    (folder / "tmp").mkdir()
    (folder / "first.sql").write_text(_FIRST_STATEMENTS)


def command(folder: Path, port: int) -> list[str]:
    place = [f"--datadir={folder / 'data'}", f"--socket={folder / 'socket'}", f"--pid-file={folder / 'pid'}"]
    # A server that starts deletes every temporary table that it finds, in /tmp those of others, too.
    place.append(f"--tmpdir={folder / 'tmp'}")
    return ["mariadbd", *_OPTIONS, *place, f"--port={port}", f"--init-file={folder / 'first.sql'}"]


@functools.cache
def _empty_database() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tmd-mariadb-"))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    (folder / "tmp").mkdir()
    make = ["mariadb-install-db", "--user=root", "--skip-test-db", "--auth-root-authentication-method=normal"]
    done = subprocess.run(
        [make[0], "--no-defaults", *make[1:], f"--datadir={folder / 'data'}"],
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        env=os.environ | {"TMPDIR": str(folder / "tmp")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "data"
