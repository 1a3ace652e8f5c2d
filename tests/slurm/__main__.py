"""A cluster for people: `python -m tests.slurm up [--nodes N]`, and `down`. `make slurm-up` and `make slurm-down` call it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.slurm.cluster import SlurmCluster
from tests.slurm.files import Options
from tests.slurm.users import ALICE, BOB

ROOT = Path(__file__).parents[2]
STATE = ROOT / "out" / "slurm-up"
#: Written once the cluster is up: the lines that a shell needs to use it.
EXPORTS = STATE / "exports"
LOG = STATE / "log"
PID = STATE / "pid"
DEADLINE_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm", description=__doc__)
    parser.add_argument("what", choices=["up", "down", "serve"])
    parser.add_argument("--nodes", type=int, default=4)
    given = parser.parse_args()
    if given.what == "serve":
        _serve(given.nodes)
    elif given.what == "up":
        _up(given.nodes)
    else:
        _down()


def _up(nodes: int) -> None:
    server = _server()
    if server is None:
        STATE.mkdir(parents=True, exist_ok=True)
        EXPORTS.unlink(missing_ok=True)
        with LOG.open("wb") as log:
            command = [sys.executable, "-m", "tests.slurm", "serve", "--nodes", str(nodes)]
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, start_new_session=True
            )
        server = psutil.Process(started.pid)
        PID.write_text(str(started.pid))
    deadline = time.monotonic() + DEADLINE_S
    while not EXPORTS.exists():
        if server.status() == psutil.STATUS_ZOMBIE or time.monotonic() > deadline:
            sys.exit(f"the cluster has not started:\n{LOG.read_text()}")
        time.sleep(0.05)
    print(EXPORTS.read_text(), end="")


def _down() -> None:
    server = _server()
    if server is None:
        print("no cluster is up")
        return
    server.terminate()
    server.wait(DEADLINE_S)
    EXPORTS.unlink(missing_ok=True)
    PID.unlink(missing_ok=True)
    print("the cluster is down")


def _server() -> psutil.Process | None:
    """The process of `serve`, if it runs: a number in a file may by now be anybody's."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int(PID.read_text()))
        if "serve" in process.cmdline() and process.cwd() == str(ROOT):
            return process
    return None


def _serve(nodes: int) -> None:
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    cluster = SlurmCluster(Options(nodes=nodes))
    with cluster:
        text = f"""# Slurm {".".join(map(str, cluster.version))} with {nodes} nodes is up. In your shell:
export SLURM_CONF={cluster.places.slurm_conf}
export PATH={":".join([*cluster.path, "$PATH"])}
# Then for example:
#   sinfo -N
#   cd {cluster.places.shared} && runuser -u {ALICE} -- sbatch -N2 --wrap 'srun hostname'   # or as {BOB}
#   scontrol update nodename=n2 state=drain reason=test
# Logs: {cluster.places.log}. To end it: make slurm-down
"""
        partial = EXPORTS.with_suffix(".new")
        partial.write_text(text)
        os.replace(partial, EXPORTS)
        signal.sigwait(stop)


if __name__ == "__main__":
    main()
