"""A real munged with a socket, a key and a log of its own, and programs that run as other users."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tmd.munge.library import Munge, MungeDown

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0
#: Two users that this machine need not know.
ALICE, BOB = 54101, 54102


class Munged:
    """Several lives, one after the other, with the same key."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tmd-munge-")
        self.folder = Path(self._folder.name)
        self.folder.chmod(0o755)  # other users have to reach the socket
        self.socket = str(self.folder / "socket")
        key = self.folder / "key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def munge(self) -> Munge:
        """For calls as this process's user."""
        return Munge(self.socket)

    def start(self) -> Munged:
        """Returns once it answers."""
        files = {name: self.folder / name for name in ("log", "pid", "seed")}
        options = [f"--socket={self.socket}", f"--key-file={self.folder / 'key'}"]
        options += [f"--{name}-file={path}" for name, path in files.items()]
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(["munged", "--foreground", "--force", *options], stdout=output, stderr=output)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(MungeDown):
                self.munge.encode(b"")
                return self
            assert self._process.poll() is None, (self.folder / "output").read_text()
            assert time.monotonic() < deadline, "munged does not answer"

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE_S)
            Path(self.socket).unlink(missing_ok=True)
            self._process = None

    def clean_up(self) -> None:
        self.kill()
        self._folder.cleanup()


def as_user(uid: int, *command: str) -> list[str]:
    """The command as that user, who keeps one right of root's: to open any file. Python and this tree may lie where others may
    not look, such as root's home; munge asks for the uid alone."""
    right = "+dac_override"
    user = ["--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--inh-caps", right, "--ambient-caps", right]
    return ["setpriv", *user, "--", *command]


def environment(**more: str) -> dict[str, str]:
    """For programs of this tree, with nothing of the user who runs the tests."""
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "worker"))), **more}


def run_as(uid: int, *command: str) -> subprocess.CompletedProcess[str]:
    """A program run to its end as that user, from the top of the tree."""
    return subprocess.run(as_user(uid, *command), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)


def python_as(uid: int, code: str, *arguments: str) -> str:
    """What a piece of Python prints as that user."""
    done = run_as(uid, sys.executable, "-c", code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def tmctl_as(uid: int, munged: Munged, port: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """tmctl from afar, as that user."""
    address = ["--daemon", f"http://127.0.0.1:{port}", "--munge-socket", munged.socket]
    return run_as(uid, sys.executable, "-m", "tmd.cli.main", *address, *arguments)


def credential_of(uid: int, munged: Munged, statement: str) -> str:
    """A credential with a statement of tmd.protocol.proofs, given as an expression, made by that user."""
    code = (
        "import sys; from tmd.munge.library import Munge; from tmd.munge.statements import state; "
        "from tmd.protocol.proofs import *; print(state(Munge(sys.argv[1]), eval(sys.argv[2])))"
    )
    return python_as(uid, code, munged.socket, statement)
