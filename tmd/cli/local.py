"""tmctl local: run jobs on nodes that are groups of processes of this machine, and do to these nodes what fate does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from tmd.cli.output import Listing, age, count, lines, show
from tmd.cli.shell import Tmctl, WholeNumber, command, is_text, shown_bytes, with_exit_codes
from tmd.cli.watch import follow as follow_job
from tmd.cli.watch import local_address, until_whole


@click.group()
def local() -> None:
    """Nodes on this machine: run a job on them, kill, freeze and bring them back.

    \b
    Examples:
      tmctl local run --nodes 4 --standby 2 --wait -- train.py --steps 100
      tmctl local kill n2                         as if its power had failed
      tmctl local up n2                           it boots again, as a new standby
    """


@local.command("run")
@click.option("--nodes", "nnodes", type=WholeNumber(min=1), default=1, show_default=True, help="Nodes that train.")
@click.option("--standby", type=WholeNumber(min=0), default=0, show_default=True, help="Nodes that wait.")
@click.option("--nproc-per-node", type=WholeNumber(min=1), default=1, show_default=True, help="Ranks on each node.")
@click.option("--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Where NODE.log goes.")
@click.option("--wait", is_flag=True, help="Return once every rank trains and every standby is ready.")
@click.option("--follow", is_flag=True, help="Print the logs until the job has ended.")
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED)
@command
def local_run(
    tmctl: Tmctl,
    nnodes: int,
    standby: int,
    nproc_per_node: int,
    log_dir: Path | None,
    wait: bool,
    follow: bool,
    script: tuple[str, ...],
) -> None:
    """Start SCRIPT with its arguments on free nodes, in this directory and with this environment.

    OMP_NUM_THREADS is 1 where it is not set, unless the job is a single process: local nodes share the cores of this machine.

    A daemon that is being started is waited for.

    \b
    Examples:
      tmctl local run --nodes 4 --standby 2 --wait -- examples/gpt/train.py --steps 200 --out out
      tmctl local run --nodes 2 --nproc-per-node 2 --follow -- -m mypackage.train
    """
    if wait and follow:
        raise click.UsageError("--wait returns when the job is whole, --follow when it has ended: choose one")
    here = _here()
    _check_readable(script[0])
    request = {
        "command": list(script),
        "nnodes": nnodes,
        "standby": standby,
        "nproc_per_node": nproc_per_node,
        "env": _environment(processes=(nnodes + standby) * nproc_per_node),
        "cwd": here,
        "log_dir": str(log_dir.absolute()) if log_dir else "",
    }
    job = tmctl.post_once_there("/v1/local/jobs", request)
    if wait:
        until_whole(tmctl, job)
    elif follow:
        follow_job(tmctl, job)
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


def _environment(*, processes: int) -> dict[str, str]:
    """This environment, as far as it is text; what is left out is named.

    OMP_NUM_THREADS is 1 if it does not say otherwise and several processes share this machine, as all local nodes do: with a
    thread for each core in every one of them they wait for one another's threads at each operation.
    """
    chosen = {name: value for name, value in os.environ.items() if is_text(name) and is_text(value)}
    left_out = sorted(os.environ.keys() - chosen.keys())
    if left_out:
        names = ", ".join(name if is_text(name) else shown_bytes(name) for name in left_out)
        click.echo(f"warning: not UTF-8, so not in the job's environment: {names}", err=True)
    if processes > 1 and not chosen.get("OMP_NUM_THREADS"):
        chosen["OMP_NUM_THREADS"] = "1"
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
    """The agents of a job: their processes, exit codes and logs.

    \b
    Example:
      tmctl local job local-1
    """
    tmctl.answer(tmctl.get(local_address(job_id)), _show_job)


@local.command("cancel")
@click.argument("job_id", metavar="JOB")
@command
def local_cancel(tmctl: Tmctl, job_id: str) -> None:
    """SIGTERM to a job's agents, SIGKILL to what does not end. For a job that `tmctl job cancel` cannot reach.

    \b
    Example:
      tmctl local cancel local-1
    """
    tmctl.answer(tmctl.post(f"{local_address(job_id)}/cancel"), _show_job)


def _node_command(name: str, done: str, explanation: str, more: str = "") -> None:
    @local.command(name, help=with_exit_codes(f"{explanation}\n\n\b\nExample:\n  tmctl local {name} n2{more}"))
    @click.argument("node")
    @click.option("--reason", default="", hidden=name != "down", help="Why, for whoever finds the node down.")
    @command
    def act(tmctl: Tmctl, node: str, reason: str) -> None:
        answer = tmctl.post(f"/v1/local/nodes/{quote(node, safe='')}/{name}", {"reason": reason} if reason else {})
        tmctl.answer(answer, lambda seen: click.echo(f"node {seen['node']} {done}; the resource manager says {seen['state']}"))


_node_command("kill", "has lost power", "SIGKILL to everything on a node at once, without a word to anybody: a power failure.")
_node_command("freeze", "is frozen", "SIGSTOP to everything on a node: it is there, and silent.")
_node_command("thaw", "goes on", "SIGCONT to everything on a frozen node.")
_node_command(
    "down",
    "is down",
    "Set a node down: the resource manager says so at once, and everything on it is killed.",
    " --reason 'replaced PSU'",
)
_node_command("up", "is back", "Boot a node that is off: a new life, a standby for the job that ran there if it still runs.")


def _show_started(job: dict[str, Any]) -> None:
    nodes = " ".join(agent["node"] for agent in job["agents"])
    click.echo(f"job {job['job_id']} started on {nodes}; watch it: tmctl job show {job['job_id']}")
    click.echo(f"logs: {Path(job['agents'][0]['log']).parent}")


def _show_job(job: dict[str, Any]) -> None:
    nodes = f"{count(job['nnodes'], 'node')} and {job['standby']} standby"
    shape = f"{nodes}, {count(job['nproc_per_node'], 'rank')} on each"
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
