"""Watching a job on local nodes from its start: until it is whole, or until it has ended.

Contract: nothing here changes the job; Ctrl-C ends the watching alone and says so. A daemon that is being started again is
waited for.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from tmd.cli.client import ClientError
from tmd.cli.output import count, show_json
from tmd.cli.shell import Tmctl
from tmd.protocol.reasons import in_one_line

POLL_S = 0.2
#: As long as ranks may build (core.build_timeout_s): a job that is not whole by then lacks something.
WHOLE_TIMEOUT_S = 600.0
EXIT_INTERRUPTED = 130


def local_address(job_id: str) -> str:
    return f"/v1/local/jobs/{quote(job_id, safe='')}"


@contextlib.contextmanager
def perhaps_starting(tmctl: Tmctl, job_id: str) -> Iterator[None]:
    """For what is asked about a job: the daemon knows one from its first agent on, its local nodes from the command on.

    Raises ClientError; of a job that is being started one that says so.
    """
    try:
        yield
    except ClientError as error:
        if error.status != 404 or _is_known(tmctl, job_id):
            raise
        try:
            local = tmctl.get(local_address(job_id))
        except ClientError:
            raise error from None
        raise _not_there_yet(local) from None


def _is_known(tmctl: Tmctl, job_id: str) -> bool:
    try:
        tmctl.get(f"/v1/jobs/{quote(job_id, safe='')}")
    except ClientError as error:
        return error.status != 404
    return True


def _not_there_yet(local: dict[str, Any]) -> ClientError:
    job_id = local["job_id"]
    if any(agent["running"] for agent in local["agents"]):
        message = f"job {job_id} was started, no agent has reached the daemon yet"
        return ClientError(message, f"ask again in a moment; its processes and logs: tmctl local job {job_id}", status=404)
    return _never_began(local, f"tmctl local job {job_id} names their logs")


def _never_began(local: dict[str, Any], remedy: str) -> ClientError:
    codes = ", ".join(f"{agent['exit_code']} on {agent['node']}" for agent in local["agents"])
    return ClientError(f"job {local['job_id']} never began: its agents ended at once (exit code {codes})", remedy, status=409)


def _failed(record: dict[str, Any]) -> ClientError:
    """With the reason in one line: the log of the rank has the rest."""
    job_id = record["job_id"]
    return ClientError(f"job {job_id} failed: {in_one_line(record['reason'])}", f"tmctl story {job_id}", status=409)


@contextlib.contextmanager
def _interruptible(job_id: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"\n{job_id} goes on; watch it: tmctl job show {job_id}; end it: tmctl job cancel {job_id}", err=True)
        sys.exit(EXIT_INTERRUPTED)


# ---------------------------------------------------------------- until it is whole


def until_whole(tmctl: Tmctl, local: dict[str, Any]) -> None:
    """Tells on stderr what the job waits for, until it trains with every rank and every standby is ready. Raises ClientError if
    it fails before, loses an agent, or is not whole after WHOLE_TIMEOUT_S."""
    job_id = local["job_id"]
    click.echo(f"job {job_id} started; Ctrl-C stops waiting, not the job", err=True)
    with _interruptible(job_id):
        view = _whole(tmctl, local)
    tmctl.answer(view, lambda _: click.echo(_said_of_whole(view)))


def _whole(tmctl: Tmctl, local: dict[str, Any]) -> dict[str, Any]:
    job_id, standbys = local["job_id"], local["standby"] * local["nproc_per_node"]
    deadline, told = time.monotonic() + WHOLE_TIMEOUT_S, ""
    while True:
        local = tmctl.get_patiently(local_address(job_id), job_id)
        view = _view(tmctl, job_id)
        if view is None:
            _require_agents(local)
            missing = "waiting for its agents to reach the daemon"
        else:
            if view["record"]["state"] == "failed":
                raise _failed(view["record"])
            missing = _missing(view, standbys)
            if not missing:
                return view
            _require_every_agent(local)
        if missing != told:
            click.echo(f"{job_id}: {missing}", err=True)
            told = missing
        if time.monotonic() > deadline:
            message = f"job {job_id} goes on, but is not whole after {WHOLE_TIMEOUT_S:.0f} s: {missing}"
            raise ClientError(message, f"tmctl job show {job_id}", status=409)
        time.sleep(POLL_S)


def _view(tmctl: Tmctl, job_id: str) -> dict[str, Any] | None:
    """None as long as no agent has reached the daemon."""
    try:
        view: dict[str, Any] = tmctl.get_patiently(f"/v1/jobs/{quote(job_id, safe='')}", job_id)
    except ClientError as error:
        if error.status == 404:
            return None
        raise
    return view


def _missing(view: dict[str, Any], standbys: int) -> str:
    """What the job still waits for; empty if it is whole, or done. The first committed step counts: a rank that is lost before
    it cannot be replaced."""
    record = view["record"]
    if record["state"] == "done":
        return ""
    trains = record["state"] == "running" and view["next_step"] >= 1
    if not trains or any(rank["phase"] != "running" for rank in view["ranks"]):
        return "running, waiting for the first step" if view["sentence"] == "running" else view["sentence"]
    ready = _ready(view)
    return "" if ready >= standbys else f"trains; {ready} of {count(standbys, 'standby')} ready"


def _ready(view: dict[str, Any]) -> int:
    return sum(standby["phase"] == "ready" for standby in view["standbys"])


def _require_agents(local: dict[str, Any]) -> None:
    if not any(agent["running"] for agent in local["agents"]):
        raise _never_began(local, f"tmctl local job {local['job_id']} names their logs")


def _require_every_agent(local: dict[str, Any]) -> None:
    newest = {agent["node"]: agent for agent in local["agents"]}
    for node, agent in newest.items():
        if not agent["running"]:
            message = f"job {local['job_id']} is not whole and will not be: the agent on {node} ended with {agent['exit_code']}"
            raise ClientError(f"{message}; the job goes on", f"see {agent['log']}; tmctl local up {node}", status=409)


def _said_of_whole(view: dict[str, Any]) -> str:
    record = view["record"]
    if record["state"] == "done":
        return f"job {record['job_id']} is done already: {record['reason']}"
    ready = sorted(standby["record"]["node"] for standby in view["standbys"] if standby["phase"] == "ready")
    standbys = f"{count(_ready(view), 'standby')} ready on {' '.join(dict.fromkeys(ready))}" if ready else "no standbys"
    return f"job {record['job_id']} trains: step {view['next_step']}, {count(record['world_size'], 'rank')}, {standbys}"


# ---------------------------------------------------------------- until it ends


def follow(tmctl: Tmctl, local: dict[str, Any]) -> None:
    """Prints the logs, each line with its node, until every agent has ended. Raises ClientError if the job did not succeed."""
    job_id = local["job_id"]
    tails: dict[str, _Tail] = {}
    click.echo(f"job {job_id} started; Ctrl-C stops watching, not the job", err=True)
    with _interruptible(job_id):
        while True:
            local = tmctl.get_patiently(local_address(job_id), job_id)
            for agent in local["agents"]:
                tails.setdefault(agent["log"], _Tail(agent["node"], Path(agent["log"]))).print_new(err=tmctl.as_json)
            if not any(agent["running"] for agent in local["agents"]):
                break
            time.sleep(POLL_S)
    for tail in tails.values():
        tail.print_new(err=tmctl.as_json, rest=True)
    view = _view(tmctl, job_id)
    if view is None:
        raise _never_began(local, "their output above says why")
    record = view["record"]
    if record["state"] != "done":
        if tmctl.as_json:
            show_json(view)
        raise _failed(record)
    tmctl.answer(view, lambda _: click.echo(f"job {job_id} is done: {record['reason']}", err=True))


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
