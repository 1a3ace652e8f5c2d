"""A process that has imported everything once and forks rank processes, which then start in milliseconds.

Parent's end: `Zygote`. Protocol on a SEQPACKET pair: the zygote says {"ready": pid}; a JSON request with two descriptors
(control socket, log file) is answered with {"started": pid}; every child's end is told as {"ended": pid, "code": code}. All
children die with the zygote.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_REQUEST_BYTES = 1 << 16
START_TIMEOUT_S = 120.0


class Zygote:
    """Starts and ends with the `with` block."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(START_TIMEOUT_S)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'worker'}",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-m", "tests.session.zygote", str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=environment, cwd=ROOT, pass_fds=(theirs.fileno(),))
        theirs.close()
        self._codes: dict[int, int] = {}
        while "ready" not in self._receive():
            pass

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def fork(self, arguments: Sequence[str], environment: dict[str, str], control_fd: int, log_fd: int) -> int:
        """A process that runs tmd_worker.boot with these arguments; returns its pid."""
        request = json.dumps({"arguments": list(arguments), "environment": environment}).encode()
        descriptors = array.array("i", [control_fd, log_fd])
        self._sock.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        while True:
            answer = self._receive()
            if "started" in answer:
                return answer["started"]

    def exit_code(self, pid: int) -> int | None:
        """As in subprocess, None while it lives."""
        self._sock.setblocking(False)
        try:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._receive()
        finally:
            self._sock.settimeout(START_TIMEOUT_S)
        return self._codes.get(pid)

    def wait(self, pid: int) -> int:
        """Waits for the end of a child that was killed or is about to end."""
        while pid not in self._codes:
            self._receive()
        return self._codes[pid]

    def _receive(self) -> dict[str, int]:
        data = self._sock.recv(_REQUEST_BYTES)
        if not data:
            raise RuntimeError("the zygote has ended")
        answer: dict[str, int] = json.loads(data)
        if "ended" in answer:
            self._codes[answer["ended"]] = answer["code"]
        if "started" in answer:
            self._codes.pop(answer["started"], None)  # on a busy machine a pid comes again within minutes
        return answer


def _warm_imports() -> None:
    """What a rank would import, and what torch imports at the first use of it."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import tmd_worker.member

    assert DistributedDataParallel is not None
    assert tmd_worker.member is not None
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    torch.set_num_threads(1)


def _serve(sock: socket.socket) -> None:
    children: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ, None)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    if not _fork_one(sock, children, selector):
                        return
                else:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _, status = os.waitpid(key.data, 0)
                    del children[key.data]
                    sock.send(json.dumps({"ended": key.data, "code": os.waitstatus_to_exitcode(status)}).encode())


def _fork_one(sock: socket.socket, children: dict[int, int], selector: selectors.BaseSelector) -> bool:
    data, descriptors, _, _ = socket.recv_fds(sock, _REQUEST_BYTES, 2)
    if not data:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        return False
    request = json.loads(data)
    zygote = os.getpid()
    pid = os.fork()
    if pid == 0:
        selector.close()
        sock.close()
        _become(request, zygote, *descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    children[pid] = os.pidfd_open(pid)
    selector.register(children[pid], selectors.EVENT_READ, pid)
    sock.send(json.dumps({"started": pid}).encode())
    return True


def _become(request: dict[str, object], zygote: int, control_fd: int, log_fd: int) -> None:
    """In the child: never returns."""
    from tmd_worker import boot, faults

    code = 1
    try:
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.environ.update({str(k): str(v) for k, v in request["environment"].items()})  # type: ignore[attr-defined]
        os.environ |= {"TMD_CONTROL_FD": str(control_fd), "TMD_AGENT_PID": str(zygote)}
        if "TMD_FAULTS" in os.environ:
            faults.arm(os.environ["TMD_FAULTS"])
        boot.main([str(a) for a in request["arguments"]])  # type: ignore[attr-defined]
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    parent = socket.socket(fileno=int(sys.argv[1]))
    _warm_imports()
    parent.send(json.dumps({"ready": os.getpid()}).encode())
    _serve(parent)
