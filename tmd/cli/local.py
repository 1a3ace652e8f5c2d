"""tmctl local: run jobs on nodes that are groups of processes of this machine, and do to these nodes what fate does."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from tmd.cli.client import ClientError
from tmd.cli.output import Listing, age, lines, show
from tmd.cli.shell import Tmctl, command, is_text, shown_bytes, with_exit_codes

POLL_S = 0.2
EXIT_INTERRUPTED = 130


@click.group()
def local() -> None:
    """Nodes on this machine: run a job on them, kill, freeze and bring them back.

    \b
    Examples:
      tmctl local run --nodes 4 --standby 2 --follow -- train.py --steps 100
      tmctl local kill n2                         as if its power had failed
      tmctl local up n2                           it boots again, as a new standby
    """


@local.command("run")
@click.option("--nodes", "nnodes", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes that train.")
@click.option("--standby", type=click.IntRange(min=0), default=0, show_default=True, help="Nodes that wait.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks on each node.")
@click.option("--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Where NODE.log goes.")
@click.option("--follow", is_flag=True, help="Print the logs until the job has ended.")
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED)
@command
def local_run(
    tmctl: Tmctl,
    nnodes: int,
    standby: int,
    nproc_per_node: int,
    log_dir: Path | None,
    follow: bool,
    script: tuple[str, ...],
) -> None:
    """Start SCRIPT with its arguments on free nodes, in this directory and with this environment.

    \b
    Examples:
      tmctl local run --nodes 4 --standby 2 -- examples/gpt/train.py --steps 200 --out out
      tmctl local run --nodes 2 --nproc-per-node 2 --follow -- -m mypackage.train
    """
    here = _here()
    _check_readable(script[0])
    request = {
        "command": list(script),
        "nnodes": nnodes,
        "standby": standby,
        "nproc_per_node": nproc_per_node,
        "env": _environment(),
        "cwd": here,
        "log_dir": str(log_dir.absolute()) if log_dir else "",
    }
    job = tmctl.post("/v1/local/jobs", request)
    if follow:
        _follow(tmctl, job)
    else:
        tmctl.answer(job, _show_started)


def _here() -> str:
    """The directory in which the job is to run. Raises click.UsageError."""
    try:
        here = os.getcwd()
    except OSError as error:
        raise click.UsageError(f"a job runs in the directory it is started in, and there is none: {error.strerror}") from None
    if not is_text(here):
        raise click.UsageError(f"this directory's name {shown_bytes(here)} is not UTF-8: start the job from another one")
    return here


def _environment() -> dict[str, str]:
    """This environment, as far as it is text; what is left out is named."""
    chosen = {name: value for name, value in os.environ.items() if is_text(name) and is_text(value)}
    left_out = sorted(os.environ.keys() - chosen.keys())
    if left_out:
        names = ", ".join(name if is_text(name) else shown_bytes(name) for name in left_out)
        click.echo(f"warning: not UTF-8, so not in the job's environment: {names}", err=True)
    return chosen


def _check_readable(script: str) -> None:
    """What begins with a dash is an option of tmd-run, for example -m."""
    if script.startswith("-"):
        return
    try:
        with open(script, "rb"):
            pass
    except OSError as error:
        raise click.UsageError(f"script {script} cannot be read: {error.strerror} (in {os.getcwd()})") from None


@local.command("job")
@click.argument("job_id", metavar="JOB")
@command
def local_job(tmctl: Tmctl, job_id: str) -> None:
    """The agents of a job: their processes, exit codes and logs."""
    tmctl.answer(tmctl.get(_job_address(job_id)), _show_job)


@local.command("cancel")
@click.argument("job_id", metavar="JOB")
@command
def local_cancel(tmctl: Tmctl, job_id: str) -> None:
    """SIGTERM to a job's agents, SIGKILL to what does not end. For a job that `tmctl job cancel` cannot reach."""
    tmctl.answer(tmctl.post(f"{_job_address(job_id)}/cancel"), _show_job)


def _node_command(name: str, done: str, explanation: str) -> None:
    @local.command(name, help=with_exit_codes(explanation))
    @click.argument("node")
    @click.option("--reason", default="", hidden=name != "down", help="Why, for whoever finds the node down.")
    @command
    def act(tmctl: Tmctl, node: str, reason: str) -> None:
        answer = tmctl.post(f"/v1/local/nodes/{quote(node, safe='')}/{name}", {"reason": reason} if reason else {})
        tmctl.answer(answer, lambda seen: click.echo(f"node {seen['node']} {done}; the resource manager says {seen['state']}"))


_node_command("kill", "has lost power", "SIGKILL to everything on a node at once, without a word to anybody: a power failure.")
_node_command("freeze", "is frozen", "SIGSTOP to everything on a node: it is there, and silent.")
_node_command("thaw", "goes on", "SIGCONT to everything on a frozen node.")
_node_command("down", "is down", "Set a node down: the resource manager says so at once, and everything on it is killed.")
_node_command("up", "is back", "Boot a node that is off: a new life, a standby for the job that ran there if it still runs.")


def _job_address(job_id: str) -> str:
    return f"/v1/local/jobs/{quote(job_id, safe='')}"


def _show_started(job: dict[str, Any]) -> None:
    nodes = " ".join(agent["node"] for agent in job["agents"])
    click.echo(f"job {job['job_id']} started on {nodes}; watch it: tmctl job show {job['job_id']}")
    click.echo(f"logs: {Path(job['agents'][0]['log']).parent}")


def _show_job(job: dict[str, Any]) -> None:
    shape = f"{job['nnodes']} nodes and {job['standby']} standby, {job['nproc_per_node']} ranks each"
    lines(
        [
            ("job", job["job_id"]),
            ("shape", shape),
            ("command", " ".join(job["command"])),
            ("started", f"{age(job['created_s'])} ago"),
        ]
    )
    click.echo()
    rows = [
        (agent["node"], agent["life"], agent["pid"], "running" if agent["running"] else "ended", agent["exit_code"], agent["log"])
        for agent in job["agents"]
    ]
    show(Listing(("node", "life", "pid", "agent", "exit code", "log"), rows))


def _follow(tmctl: Tmctl, job: dict[str, Any]) -> None:
    """Prints the logs, each line with its node, until every agent has ended. Exit code 1 if the job did not succeed."""
    job_id = job["job_id"]
    tails: dict[str, _Tail] = {}
    click.echo(f"job {job_id} started; Ctrl-C stops watching, not the job", err=True)
    try:
        while True:
            job = tmctl.get_patiently(_job_address(job_id), job_id)
            for agent in job["agents"]:
                tails.setdefault(agent["log"], _Tail(agent["node"], Path(agent["log"]))).print_new(err=tmctl.as_json)
            if not any(agent["running"] for agent in job["agents"]):
                break
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        click.echo(f"\n{job_id} goes on; watch it: tmctl job show {job_id}; end it: tmctl job cancel {job_id}", err=True)
        sys.exit(EXIT_INTERRUPTED)
    for tail in tails.values():
        tail.print_new(err=tmctl.as_json, rest=True)
    view = _final_view(tmctl, job)
    record = view["record"]
    tmctl.answer(view, lambda _: click.echo(f"job {job_id} is {record['state']} {record['reason']}".rstrip(), err=True))
    if record["state"] != "done":
        raise ClientError(f"job {job_id} is {record['state']}: {record['reason']}", f"tmctl story {job_id}", status=409)


def _final_view(tmctl: Tmctl, job: dict[str, Any]) -> dict[str, Any]:
    """Raises ClientError, also for a job of which no agent got as far as the daemon."""
    try:
        view: dict[str, Any] = tmctl.get_patiently(f"/v1/jobs/{job['job_id']}", job["job_id"])
    except ClientError as error:
        if error.status != 404:
            raise
        codes = ", ".join(f"{agent['exit_code']} on {agent['node']}" for agent in job["agents"])
        message = f"job {job['job_id']} never began: its agents ended at once (exit code {codes})"
        raise ClientError(message, "their output above says why", status=409) from None
    return view


class _Tail:
    """Reads what is new in a log, in whole lines."""

    def __init__(self, node: str, path: Path) -> None:
        self._node = node
        self._path = path
        self._offset = 0

    def print_new(self, *, err: bool, rest: bool = False) -> None:
        """`rest`: also a last line without its end."""
        try:
            with self._path.open("rb") as log:
                log.seek(self._offset)
                fresh = log.read()
        except FileNotFoundError:
            return
        whole = fresh if rest else fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            click.echo(f"{self._node}| {line}", err=err)
