"""A standby that rehearses touches nothing: each case runs in a process of its own, since a hook cannot be taken out."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PRELUDE = """
import os, socket, sqlite3, shutil, subprocess, sys, threading
from pathlib import Path
from tmd_worker import guard
from tmd_worker.guard import SandboxRefused

outside = Path(sys.argv[1])
scratch = Path(sys.argv[2])

def refused(action, *words):
    try:
        action()
    except SandboxRefused as error:
        text = str(error)
        assert all(word in text for word in ("rehearses as rank 3", "session.live", *words)), text
    else:
        raise SystemExit(f"not refused: {words}")
"""


def rehearse(tmp_path: Path, code: str) -> None:
    """Runs `code` with `outside` (not scratch) and `scratch` (the temporary directory)."""
    outside, scratch = tmp_path / "outside", tmp_path / "scratch"
    outside.mkdir()
    scratch.mkdir()
    (outside / "old.txt").write_text("precious")
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + textwrap.dedent(code))
    environment = os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": f"{ROOT}:{ROOT / 'worker'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(outside), str(scratch)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (outside / "old.txt").read_text() == "precious"
    assert os.listdir(outside) == ["old.txt"]


def test_files_outside_scratch_cannot_be_written_deleted_or_renamed(tmp_path: Path) -> None:
    rehearse(
        tmp_path,
        """
        guard.activate(3)
        refused(lambda: open(outside / "new.txt", "w"), "new.txt")
        refused(lambda: open(outside / "old.txt", "a"))
        refused(lambda: open(outside / "old.txt", "r+"))
        refused(lambda: os.open(str(outside / "x"), os.O_CREAT | os.O_WRONLY))
        refused(lambda: (outside / "old.txt").unlink(), "os.remove")
        refused(lambda: (outside / "old.txt").rename(scratch / "y"), "os.rename")
        refused(lambda: os.mkdir(outside / "checkpoints"))
        refused(lambda: os.symlink(scratch, outside / "link"))
        refused(lambda: shutil.rmtree(outside))
        refused(lambda: os.truncate(outside / "old.txt", 0))
        refused(lambda: os.chmod(outside / "old.txt", 0))
        refused(lambda: sqlite3.connect(outside / "runs.db"))
        refused(lambda: shutil.copy(outside / "old.txt", outside / "copy.txt"))
        os.chdir(outside)
        refused(lambda: open("relative.txt", "w"))
        os.chdir(scratch)
        refused(lambda: os.remove("old.txt", dir_fd=os.open(outside, os.O_RDONLY)))
        os.symlink(outside, scratch / "door")
        refused(lambda: open(scratch / "door" / "new.txt", "w"))
        os.makedirs(outside, exist_ok=True)  # it is there: nothing to do
        """,
    )


def test_torch_save_is_refused_although_it_writes_from_c(tmp_path: Path) -> None:
    rehearse(
        tmp_path,
        """
        guard.activate(3)
        import torch, io
        refused(lambda: torch.save({}, outside / "model.pt"), "model.pt")
        refused(lambda: torch.save({}, str(outside / "model.pt")))
        torch.save({}, io.BytesIO())
        torch.save({}, scratch / "model.pt")
        guard.deactivate()
        torch.save({}, outside / "model.pt")
        (outside / "model.pt").unlink()
        """,
    )


def test_every_way_to_write_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    """Written aside and moved into place, by torch, numpy, distributed checkpoints, archives and logs."""
    rehearse(
        tmp_path,
        """
        guard.activate(3)
        import logging, zipfile
        import numpy as np
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.utils.data import DataLoader

        staged = scratch / "staged.pt"
        torch.save({}, staged)
        refused(lambda: os.replace(staged, outside / "model.pt"), "rename or replace", "model.pt")
        refused(lambda: shutil.move(staged, outside / "model.pt"))
        refused(lambda: os.link(staged, outside / "model.pt"), "make the link")
        refused(lambda: os.symlink(staged, outside / "latest"), "make the link", "latest")
        refused(lambda: os.makedirs(outside / "step-10" / "rank-0"), "make the directory", "step-10")
        refused(lambda: os.rmdir(outside), "delete")
        refused(lambda: torch.save({}, f=outside / "model.pt"))
        refused(lambda: torch.save({}, outside / "model.pt", _use_new_zipfile_serialization=False))
        refused(lambda: torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), str(outside / "model.ts")), "model.ts")
        refused(lambda: torch.jit.script(torch.nn.Linear(1, 1)).save(str(outside / "model.ts")))
        refused(lambda: np.savez(outside / "arrays.npz", x=np.ones(1)))
        refused(lambda: zipfile.ZipFile(outside / "all.zip", "w"))
        refused(lambda: logging.FileHandler(outside / "train.log"))
        try:
            dcp.save({"x": torch.ones(1)}, checkpoint_id=outside / "dcp", no_dist=True)
        except (SandboxRefused, dcp.api.CheckpointException) as error:
            assert "rehearses as rank 3" in str(error), error
        else:
            raise SystemExit("a distributed checkpoint was not refused")
        """,
    )


def test_trackers_are_refused_by_name_whatever_they_speak(tmp_path: Path) -> None:
    rehearse(
        tmp_path,
        """
        import asyncio, http.client, logging.handlers, urllib.request
        server = socket.create_server(("127.0.0.1", 0))
        host, port = server.getsockname()
        guard.activate(3)

        def request(action):
            try:
                action()
            except OSError as error:
                raise getattr(error, "reason", error) if isinstance(getattr(error, "reason", error), OSError) else error

        refused(lambda: request(lambda: urllib.request.urlopen(f"http://{host}:{port}/api", timeout=5)), "connect to", str(port))
        refused(lambda: http.client.HTTPConnection(host, port).request("POST", "/api"), "connect to")
        refused(lambda: asyncio.run(asyncio.wait_for(asyncio.open_connection(host, port), 5)), "connect to")
        refused(lambda: logging.handlers.DatagramHandler(host, port).send(b"x"), "send to")
        refused(lambda: socket.socket(type=socket.SOCK_DGRAM).sendmsg([b"x"], [], 0, (host, port)), "send to")
        refused(lambda: socket.socket(socket.AF_INET6).connect(("::1", port)), "connect to")
        refused(lambda: subprocess.Popen(["wandb-service"]), "start the program 'wandb-service'")
        """,
    )


def test_a_process_that_was_forked_in_rehearsal_is_fenced_until_its_parent_is_live(tmp_path: Path) -> None:
    """1. a standby forks the process that writes its checkpoints. 2. it takes a role. 3. that process may write."""
    rehearse(
        tmp_path,
        """
        guard.activate(3)
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            refused(lambda: (outside / "checkpoint.pt").write_text("x"), "checkpoint.pt")
            theirs.sendall(b"refused")
            theirs.recv(1)
            (outside / "checkpoint.pt").write_text("x")
            os._exit(0)
        theirs.close()
        ours.settimeout(30)
        assert ours.recv(16) == b"refused"
        guard.deactivate()
        ours.sendall(b"x")
        assert os.waitpid(pid, 0)[1] == 0
        (outside / "checkpoint.pt").unlink()
        """,
    )


def test_a_check_does_not_call_itself_a_standby(tmp_path: Path) -> None:
    rehearse(
        tmp_path,
        """
        guard.activate(3, "a check")
        refused(lambda: open(outside / "x", "w"), "this process is a check that rehearses as rank 3")
        guard.activate(3)
        refused(lambda: open(outside / "x", "w"), "this process is a standby that rehearses as rank 3")
        """,
    )


def test_reading_scratch_and_memory_are_free(tmp_path: Path) -> None:
    rehearse(
        tmp_path,
        """
        import tempfile
        guard.activate(3)
        assert (outside / "old.txt").read_text() == "precious"
        (scratch / "a").write_text("x")
        (scratch / "a").rename(scratch / "b")
        (scratch / "b").unlink()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "x").write_text("x")
        (scratch / "tree" / "deep").mkdir(parents=True)
        (scratch / "tree" / "deep" / "x").write_text("x")
        os.chdir(outside)
        shutil.rmtree(scratch / "tree")
        os.chdir("/")
        open("/dev/null", "w").write("x")
        sqlite3.connect(":memory:").close()
        os.makedirs(scratch / "p" / "__pycache__")
        a, b = socket.socketpair()
        a.sendall(b"x")
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        """,
    )


def test_the_network_and_new_programs_are_refused(tmp_path: Path) -> None:
    rehearse(
        tmp_path,
        """
        server = socket.create_server(("127.0.0.1", 0))
        local = socket.socket(socket.AF_UNIX)
        local.bind(str(scratch / "s"))
        local.listen()
        guard.activate(3)
        refused(lambda: socket.create_connection(server.getsockname()), "connect to")
        refused(lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", server.getsockname()), "send to")
        socket.socket(socket.AF_UNIX).connect(str(scratch / "s"))
        refused(lambda: socket.socket(socket.AF_UNIX).connect(str(outside / "s")), "connect to")
        refused(lambda: subprocess.run(["true"]), "start the program 'true'")
        refused(lambda: os.system("true"), "start the program 'true'")
        refused(lambda: os.posix_spawn("/bin/true", ["true"], {}))
        refused(lambda: os.execv("/bin/true", ["true"]))
        """,
    )


def test_torch_may_start_its_compilers(tmp_path: Path) -> None:
    rehearse(
        tmp_path,
        """
        guard.activate(3)
        package = type(sys)("torch")
        sys.modules["torch.builds"] = package
        source = "def build():\\n    import subprocess\\n    subprocess.run(['true'], check=True)"
        code = compile(source, "/x/torch/builds.py", "exec")
        namespace = {"__name__": "torch.builds"}
        exec(code, namespace)
        namespace["build"]()
        """,
    )


def test_tmds_own_threads_are_exempt_and_others_are_not(tmp_path: Path) -> None:
    rehearse(
        tmp_path,
        """
        guard.activate(3)
        errors = []

        def exempt():
            with guard.exempt():
                write()

        def write():
            try:
                (outside / "t").write_text("x")
                (outside / "t").unlink()
            except SandboxRefused:
                errors.append(threading.current_thread().name)

        with guard.exempt():
            users = threading.Thread(target=write, name="users")
            users.start()
            users.join(10)
            write()
        own = threading.Thread(target=exempt, name="own")
        own.start()
        own.join(10)
        assert errors == ["users"], errors
        refused(lambda: open(outside / "m", "w"))
        """,
    )


def test_it_does_nothing_before_and_after(tmp_path: Path) -> None:
    rehearse(
        tmp_path,
        """
        assert "torch" not in sys.modules
        (outside / "x").write_text("x")
        guard.activate(3)
        refused(lambda: (outside / "x").unlink())
        guard.deactivate()
        (outside / "x").unlink()
        subprocess.run(["true"], check=True)
        guard.activate(3)
        refused(lambda: open(outside / "x", "w"))
        """,
    )


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_compile_caches_are_scratch(tmp_path: Path, variable: str) -> None:
    rehearse(
        tmp_path,
        f"""
        cache = outside.parent / "cache"
        cache.mkdir()
        os.environ["{variable}"] = str(cache)
        guard.activate(3)
        (cache / "kernel.so").write_text("x")
        """,
    )
