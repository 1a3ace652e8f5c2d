"""The daemon's answers as listings: one function for each kind of thing. Answers are those of tmd.api, as decoded JSON."""

from __future__ import annotations

from typing import Any

import click

from tmd.cli.output import NOTHING, Listing, age, clock, count, lines, ms, natural, show, text
from tmd.core.records import PHASES

JOB_ENDED = ("done", "failed")
#: Uses of a node that are not over.
_HELD = ("training", "standby")
#: The order in which a job's objects are told of.
_KINDS = ("job", "migration", "node", "standby")
#: What is run, as the daemon records it: with its kind first.
_KINDS_OF_COMMAND = {"script": (), "module": ("-m",), "program": ("--no-python",)}
#: A chain of causes is indented this deep at most.
_DEEPEST = 8


def show_status(status: dict[str, Any]) -> None:
    ledger = status["ledger"]
    health = "healthy" if ledger["healthy"] else f"NOT WRITABLE for {age(ledger['failing_since_s'])}: {ledger['error']}"
    mode = [name for name in ("paused", "observe_only") if status[name]]
    jobs = ", ".join(f"{count} {state}" for state, count in status["jobs"].items())
    lines(
        [
            ("daemon", f"tmd {status['tmd_version']}, pid {status['pid']}, up {age(status['started_s'], status['now_s'])}"),
            ("life", f"{status['generation']} (times that a daemon has started on this ledger)"),
            ("protocol", ".".join(map(str, status["protocol"]))),
            ("mode", f"{', '.join(mode).replace('_', ' ')}: nothing planned begins" if mode else "active"),
            ("resource manager", status["resource_manager"]),
            ("agents connected", status["agents"]),
            ("ledger", f"{ledger['url']}, {health}"),
            ("ledger writes", f"{ledger['writes']}, median {_ms(ledger['write_median_s'])}, worst {_ms(ledger['write_max_s'])}"),
            ("jobs", jobs),
        ]
    )
    if status["now"]:
        click.echo()
        rows = [(each["job"], each["object"], each["sentence"]) for each in sorted(status["now"], key=_place)]
        show(Listing(("job", "object", "now"), rows))


def _place(each: dict[str, Any]) -> tuple[object, ...]:
    """Job by job: the job itself, then what belongs to it."""
    return natural(each["job"]), _KINDS.index(each["kind"]), natural(each["object"])


def _ms(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds * 1000:.2f} ms"


def show_jobs(views: list[dict[str, Any]]) -> None:
    rows = []
    for view in views:
        record = view["record"]
        ready = sum(standby["phase"] == "ready" for standby in view["standbys"])
        standbys = f"{ready}/{len(view['standbys'])} ready"
        row = (record["job_id"], record["state"], record["world_size"], standbys, record["epoch"], view["next_step"])
        rows.append((*row, ms(view["normal_step_s"]), view["sentence"] or record["reason"]))
    headers = ("job", "state", "ranks", "standbys", "epoch", "next step", "step (ms)", "now")
    show(Listing(headers, rows, empty="no jobs"))


def show_job(view: dict[str, Any]) -> None:
    record = view["record"]
    lines(
        [
            ("job", record["job_id"]),
            ("state", record["state"]),
            ("now", view["sentence"] or record["reason"]),
            ("shape", _shape(record)),
            ("owner uid", record["owner_uid"]),
            ("command", _command(record["command"])),
            ("epoch", record["epoch"]),
            ("next step", view["next_step"]),
            ("normal step (ms)", ms(view["normal_step_s"])),
            ("last commit", f"{age(view['last_commit_s'])} ago" if view["last_commit_s"] else NOTHING),
            ("restarts", record["restarts"]),
            ("exit code", record["exit_code"]),
            ("bit-identical", "as far as is known" if not record["approximations"] else "; ".join(record["approximations"])),
        ]
    )
    click.echo()
    over = record["state"] in JOB_ENDED
    show(_rank_listing("ranks", view["ranks"], over=over))
    click.echo()
    show(_rank_listing("standbys", view["standbys"], over=over))
    click.echo()
    nodes = [
        (node["node"], node["use"], node["state"], _labels(node["labels"]), node["agent_id"], node["reason"])
        for node in sorted(view["nodes"], key=lambda node: natural(node["node"]))
    ]
    show(Listing(("node", "use", "state", "labels", "agent", "reason"), nodes, title="nodes"))
    click.echo()
    show_migrations(view["migrations"], title="migrations under way")


def _shape(record: dict[str, Any]) -> str:
    each = "" if record["nnodes"] == 1 else " each"
    nodes, ranks = count(record["nnodes"], "node"), count(record["nproc_per_node"], "rank")
    return f"{nodes} with {ranks}{each}, {count(record['world_size'], 'rank')} in all"


def _command(recorded: list[str]) -> str:
    """As one would type it: (kind, target, argument…) is how it is recorded."""
    kind, *rest = recorded or ("",)
    return " ".join((*_KINDS_OF_COMMAND[kind], *rest) if kind in _KINDS_OF_COMMAND else recorded)


def _rank_listing(title: str, views: list[dict[str, Any]], *, over: bool) -> Listing:
    """`over`: the job has ended, so nobody runs, whatever was heard last."""
    rows = []
    for view in views:
        record = view["record"]
        phase = "ended" if over else view["phase"] or record["state"]
        host = f"[{view['host']}]" if ":" in view["host"] else view["host"]
        address = f"{host}:{view['port']}" if view["port"] else NOTHING
        heard = age(view["last_heard_s"]) + ("" if over or view["connected"] else " (agent away)")
        row = (record["rank"], record["incarnation"], record["node"], view["pid"] or None, address, phase)
        now = record["reason"] if over else view["sentence"] or record["reason"]
        rows.append((*row, view["run_epoch"], view["next_step"], heard, now))
    headers = ("rank", "incarnation", "node", "pid", "address", "phase", "epoch", "next step", "heard ago", "now")
    return Listing(headers, rows, title=title)


def show_standbys(views: list[dict[str, Any]]) -> None:
    rows = []
    for view in views:
        record = view["record"]
        row = (record["job_id"], record["incarnation"], record["node"], view["pid"] or None, view["phase"] or record["state"])
        rows.append((*row, age(view["last_heard_s"]), view["sentence"] or record["reason"]))
    show(Listing(("job", "incarnation", "node", "pid", "phase", "heard ago", "now"), rows, empty="no standbys"))


def show_nodes(answer: dict[str, Any]) -> None:
    rows = []
    for node in answer["nodes"]:
        uses = [use for use in node["uses"] if use["record"]["use"] in _HELD]
        for use in uses or [None]:
            row = (node["name"], node["state"], node["manager_state"], _labels(node["labels"]), node["address"])
            rows.append((*row, *_use(use), (use or {}).get("sentence") or node["reason"]))
    headers = ("node", "state", "manager says", "labels", "address", "job", "use", "ranks", "standbys ready", "now")
    show(Listing(headers, rows, empty="no nodes"))
    if answer["manager_error"]:
        click.echo(f"the resource manager does not answer, states are unknown: {answer['manager_error']}", err=True)


def _use(use: dict[str, Any] | None) -> tuple[object, ...]:
    if use is None:
        return (None, None, None, None)
    record = use["record"]
    standbys = f"{use['standbys_ready']}/{use['standbys']}" if use["standbys"] else None
    return (record["job_id"], record["use"], use["ranks"], standbys)


def _labels(labels: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def show_migrations(views: list[dict[str, Any]], *, title: str = "") -> None:
    rows = []
    for view in views:
        record = view["record"]
        row = (record["migration_id"], record["job_id"], record["kind"], record["state"], list(record["leavers"]))
        places = (record["from_nodes"], record["to_nodes"])
        phases = tuple(ms(record["phases_s"].get(phase)) for phase in PHASES)
        transports = sorted({handoff["transport"] for handoff in (record.get("handoffs") or {}).values()})
        costs = (ms(record["downtime_s"]), record["downtime_steps"], ms(record["lost_time_s"]), record["steps_redone"])
        rows.append((*row, *places, *phases, *costs, transports, record["reason"] or view["sentence"]))
    headers = ("migration", "job", "kind", "state", "ranks", "from", "to", *(f"{phase} (ms)" for phase in PHASES))
    headers += ("downtime (ms)", "downtime (steps)", "lost time (ms)", "steps redone", "transport", "now")
    show(Listing(headers, rows, title=title, empty="no migrations" if not title else "none"))


def show_migration(view: dict[str, Any]) -> None:
    record = view["record"]
    pairs = [f"rank {rank}: {leaver} → {record['joiners'].get(rank, NOTHING)}" for rank, leaver in record["leavers"].items()]
    lines(
        [
            ("migration", record["migration_id"]),
            ("job", record["job_id"]),
            ("kind", record["kind"]),
            ("state", record["state"]),
            ("now", record["reason"] or view["sentence"]),
            ("asked for by", record["trigger"]),
            ("who", "; ".join(pairs)),
            ("nodes", f"{','.join(record['from_nodes']) or NOTHING} → {','.join(record['to_nodes']) or NOTHING}"),
            ("attempt", record["attempt"]),
            *((f"{phase} (ms)", ms(record["phases_s"].get(phase))) for phase in PHASES),
            ("downtime (ms)", ms(record["downtime_s"])),
            ("downtime (steps)", record["downtime_steps"]),
            ("lost time (ms)", ms(record["lost_time_s"])),
            ("normal step (ms)", ms(record["normal_step_s"])),
            ("steps redone", record["steps_redone"]),
            ("stayer links reopened", record["stayer_links_reopened"]),
            ("moved (bytes)", record["bytes_moved"]),
            ("small state", record["record_origin"]),
            *(line for rank, handoff in (record.get("handoffs") or {}).items() for line in _handoff(rank, handoff)),
        ]
    )


def _handoff(rank: str, handoff: dict[str, Any]) -> list[tuple[str, object]]:
    moved = ", ".join(f"{count} by {transport}" for transport, count in handoff["bytes_by_transport"].items())
    each = handoff.get("sources") or []
    if len(each) > 1:
        moved = ", ".join(f"{one['size_bytes']} by {one['transport']} from rank {one['rank']}" for one in each)
    parts = ", ".join(f"{part} {text(ms(seconds))}" for part, seconds in handoff["parts_s"].items())
    return [
        (f"rank {rank}: state by", f"{handoff['transport']}, from {handoff['source']}"),
        (f"rank {rank}: because", handoff["why"]),
        (f"rank {rank}: bytes", moved or NOTHING),
        (f"rank {rank}: parts (ms)", parts),
    ]


def show_job_cost(answer: dict[str, Any]) -> None:
    rows: list[tuple[object, ...]] = []
    for one in answer["migrations"]:
        rows.append((one["migration_id"], one["kind"], one["state"], *_cost(one["cost"])))
    if rows:
        rows.append(("in all", None, None, *_cost(answer["total"])))
    headers = ("migration", "kind", "state", "pause (ms)", "slowdown (ms)", "lost time (ms)", "lost time of all ranks (s)")
    moved = ("steps redone", "by transport (bytes)", "by source (bytes)")
    show(Listing((*headers, *moved), rows, empty="no migrations: nothing was lost"))
    if answer["unmeasured"]:
        click.echo(f"the costs of {count(answer['unmeasured'], 'migration')} are not known (yet) and not part of the sum")


def _cost(cost: dict[str, Any]) -> tuple[object, ...]:
    moved = [[f"{name}: {number}" for name, number in cost[kind].items()] for kind in ("bytes_by_transport", "bytes_by_source")]
    times = (ms(cost["pause_s"]), ms(cost["slowdown_s"]), ms(cost["lost_time_s"]), cost["lost_rank_s"], cost["steps_redone"])
    return (*times, *moved)


def show_story(answer: dict[str, Any]) -> None:
    """A timeline in which what was caused stands to the right of its cause; a cause that is not the line above is named. It
    counts from the first event about what was asked for; what led to that was before."""
    events = answer["events"]
    if not events:
        click.echo(f"nothing is recorded about {answer['subject']}")
        return
    depths: dict[int, int] = {}
    rows = []
    before = 0
    zero_s = next((event["time_s"] for event in events if event["subject"] == answer["subject"]), events[0]["time_s"])
    for event in events:
        depth = depths.get(event["cause"], -1) + 1
        depths[event["event_id"]] = depth
        because = f" (because of {event['cause']})" if event["cause"] in depths and event["cause"] != before else ""
        before = event["event_id"]
        told = f"{'  ' * min(depth, _DEEPEST)}{event['kind']}: {event['text']}{because}"
        since = (event["time_s"] - zero_s) * 1000
        rows.append((clock(event["time_s"]), f"{since:+.0f}", event["event_id"], event["subject"], told))
    show(Listing(("time", "since (ms)", "event", "about", "what"), rows))
