"""Who is lost: exits, silence, closed connections, the resource manager's word. And who only left, or failed by its own fault."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tmd.core import planned
from tmd.core.ending import fail_job
from tmd.core.job import Job
from tmd.core.poison import call_off, note_loss
from tmd.core.processes import Agent, Process
from tmd.protocol.exits import LOST_CODES

#: A job whose steps take long is given this many normal steps before silence counts.
STEPS_OF_PATIENCE = 2
#: A node that is called down is believed to be when its agent has missed this many heartbeats.
BEATS_OF_A_NODE_THAT_IS_DOWN = 2


def note_exits(job: Job, now: float) -> None:
    """Judges every process whose end has been seen."""
    for process in list(job.processes.values()):
        if process.dying and process.active:
            _judge_exit(job, now, process)
        elif process.exited and process.record.state == "lost":
            _judge_late(job, now, process)
        if job.over:
            return


def _judge_exit(job: Job, now: float, process: Process) -> None:
    report, code = process.report, process.exit_code
    if process.record.state == "standby":
        _standby_ended(job, now, process)
    elif process.failed_itself:
        return  # the user's bug: `user_failure` ends the job
    elif code == 0:
        _left(job, now, process)
    elif code is None and (report.phase == "finished" or job.fresh):
        return  # nobody waits for it, and how it ended says whether it is a loss
    elif code is not None and code > 0 and _is_to_blame(process):
        _blame(job, now, process, code)
    else:
        lose(job, now, process, how_it_ended(code) + _last_words(process))


def _last_words(process: Process) -> str:
    """Of one that ended itself: what the library said."""
    words = process.report.error.strip().rpartition("\n")[2]
    return f": {words}" if words and process.exit_code in LOST_CODES else ""


def _judge_late(job: Job, now: float, process: Process) -> None:
    """A loss that was declared at the first sign of dying, before the exit code was known."""
    code, rank = process.exit_code, process.record.rank
    if rank is None or code is None or code < 0 or not process.seen_dying or process.judged:
        return
    process.judged = True
    if code == 0:
        job.left.add(rank)
        job.lost_at_end.pop(rank, None)
    elif job.recovery is not None and rank in job.recovery.lost and _is_to_blame(process):
        _blame(job, now, process, code)


def _is_to_blame(process: Process) -> bool:
    """A positive exit code is the script's own, unless tmd had called its attempt off, it ended itself as one that cannot be
    trusted, or it never had a role of its own yet."""
    return process.exit_code not in LOST_CODES and not process.poisoned and not process.joining


def _blame(job: Job, now: float, process: Process, code: int) -> None:
    step, words = process.report.next_step, process.report.error or process.report.reason or "see its log"
    fail_job(job, now, code, f"{job.name(process)} exited with code {code} at step {step}: {words}")


def how_it_ended(code: int | None) -> str:
    """Exit code as in `subprocess`, in words; None for a process that has begun to exit."""
    if code is None:
        return "its process is dying"
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exited with code {code}"


def _left(job: Job, now: float, process: Process) -> None:
    """Code 0: its main has come to its end."""
    rank = process.record.rank
    job.set_process(now, process, state="exited", reason="exited with code 0")
    job.tell(now, process.incarnation, "exited", f"{job.name(process)} exited with code 0")
    if rank is not None and job.roles.get(rank) == process.incarnation:
        job.left.add(rank)


def _standby_ended(job: Job, now: float, process: Process) -> None:
    """A failing script is not started again; a process that was killed is."""
    agent = job.agents.get(process.record.agent_id)
    code = process.exit_code
    if code is None and not process.exited:
        return
    failed = process.report.phase == "failed" or (code is not None and code >= 0 and code not in LOST_CODES)
    reason = process.report.error.strip().rpartition("\n")[2] or how_it_ended(code)
    if agent is not None and not failed and process.report.phase != "ready":
        slot = process.record.local_rank
        agent.stillborn[slot] = agent.stillborn.get(slot, 0) + 1
    job.set_process(now, process, state="exited" if failed else "lost", reason=reason)
    job.tell(now, process.incarnation, "exited", f"{job.name(process)} ended: {reason}")


def lose(job: Job, now: float, process: Process, reason: str, cause: int | None = None, *, sign_s: float | None = None) -> None:
    """This incarnation is lost: fenced for good, killed if it still runs, its role is vacant. `sign_s`: when the first sign of it
    was there, by default when its exit was seen."""
    rank = process.record.rank
    name = job.name(process)
    process.seen_dying = process.dying
    job.set_process(now, process, state="lost", reason=reason)
    event = job.tell(now, process.incarnation, "lost", f"{name} is lost: {reason}", cause)
    if rank is None or job.roles.get(rank) != process.incarnation:
        return
    if job.record.state == "finishing":
        job.lost_at_end[rank] = f"{name} was lost after the last step ({reason})"
        return
    if job.has_flipped_away(process):
        return  # its joiner has its state, or will say that it cannot get it
    if not job.fresh:
        sign = f"{name} is lost: {reason}"
        call_off(job, now, sign, sign_s=_first_seen(process, now) if sign_s is None else sign_s, cause=event)
        note_loss(job, rank, process, sign, event)
    job.vacate(rank)
    job.attempt = None


def _first_seen(process: Process, now: float) -> float:
    seen = process.status.exit_seen_s if process.status is not None else 0.0
    return seen if 0.0 < seen <= now else now


def lose_agent(job: Job, now: float, agent: Agent, reason: str, cause: int | None = None) -> None:
    """This life of the agent is over for the job, and so are all of its processes. The first sign was its last word."""
    agent.fenced = f"node {agent.node} was given up ({reason}); start tmd-run again to bring it back"
    event = job.tell(now, agent.node, "lost", f"node {agent.node} is lost to the job: {reason}", cause)
    if job.nodes[agent.node].agent_id == agent.agent_id:
        job.set_node(now, agent.node, use="lost", reason=reason)
    for process in job.active():
        if process.record.agent_id == agent.agent_id:
            lose(job, now, process, reason, event, sign_s=min(now, agent.heard_s if agent.connected else agent.gone_s))


def note_silence(job: Job, now: float, suspects_itself: Callable[[], bool]) -> None:
    """Declares agents lost that have been away or silent for too long in a job that stands still."""
    plays = {process.record.agent_id for process in job.holders().values()}
    hopeless_until = _when_all_are_away(job, now, plays)
    for agent in list(job.agents.values()):
        if not agent.serves:
            continue
        if job.node_state(agent.node) == "down" and not job.settings.observe_only:
            _note_down(job, now, agent)
        if agent.fenced:
            continue
        if agent.connected and agent.agent_id not in plays:
            continue
        corroborated = not agent.connected and _peers_name(job, agent)
        deadline, reason = _deadline(job, agent, corroborated=corroborated, standby=agent.agent_id not in plays)
        if not corroborated:
            deadline = max(deadline, hopeless_until)
            if now >= deadline and _doubts(job, now, suspects_itself):
                deadline += job.settings.heartbeat_timeout_s
        if now < deadline:
            job.said_silent.discard(agent.agent_id)
            job.wake_at(deadline)
            continue
        if job.settings.observe_only and not corroborated:
            _only_say(job, now, agent, reason)
            continue
        lose_agent(job, now, agent, reason)


def _only_say(job: Job, now: float, agent: Agent, reason: str) -> None:
    """Observe-only: silence alone would end no job without tmd, so it ends none; what really ends shows itself to the peers."""
    if agent.agent_id not in job.said_silent:
        job.said_silent.add(agent.agent_id)
        job.tell(now, agent.node, "notice", f"{agent.node} would be given up: {reason}; tmd only observes")


def _when_all_are_away(job: Job, now: float, plays: set[str]) -> float:
    """If of several agents with members not one is heard, nobody could be brought to recover: they get as long as survivors
    hold by themselves, and once one is heard again the others get some time, too. Until when that is."""
    settings = job.settings
    agents = [job.agents[agent_id] for agent_id in plays if agent_id in job.agents]  # who never said hello again is away, too
    away = [not agent.connected or now - agent.heard_s >= settings.heartbeat_timeout_s / 2 for agent in agents]
    if len(plays) > 1 and agents and all(away):
        job.all_away_s = now
        job.wake_at(now + settings.heartbeat_s)
        return max(agent.heard_s for agent in agents) + settings.hold_limit_s
    return job.all_away_s + settings.heartbeat_timeout_s


def _note_down(job: Job, now: float, agent: Agent) -> None:
    """The resource manager calls the node down. Its word may be old: an agent that goes on speaking is believed."""
    deadline = agent.heard_s + BEATS_OF_A_NODE_THAT_IS_DOWN * job.settings.heartbeat_s
    if agent.connected and now < deadline:
        job.wake_at(deadline)
        return
    lose_agent(job, now, agent, f"the resource manager says that {agent.node} is down", job.last_about(agent.node))


def _doubts(job: Job, now: float, suspects_itself: Callable[[], bool]) -> bool:
    """Many agents are silent at once, or were until just now: when the daemon's own trouble ends they do not all speak in the
    same moment."""
    if suspects_itself():
        if now - job.doubted_s >= job.settings.heartbeat_timeout_s:
            text = "many agents are silent at once: the fault may be the daemon's, so they get as long again"
            job.tell(now, job.job_id, "notice", text)
        job.doubted_s = now
        job.wake_at(now + job.settings.heartbeat_s)
    return now - job.doubted_s < job.settings.heartbeat_timeout_s


def _deadline(job: Job, agent: Agent, *, corroborated: bool, standby: bool) -> tuple[float, str]:
    """When this agent counts as lost, and why. A rank whose votes commit is alive, whatever the heartbeats say."""
    settings = job.settings
    if agent.connected:
        since, patience_s = agent.heard_s, settings.heartbeat_timeout_s
        reason = f"its agent has been silent for {patience_s:g} s"
    else:
        since, patience_s = agent.gone_s, settings.hold_limit_s if standby else settings.agent_grace_s
        reason = "the connection of its agent closed"
        if corroborated:
            return since, reason + " and its peers lost their links to it"
    deadline = since + patience_s
    if not job.called_off and not job.fresh and not standby:
        normal_s = job.commits.normal_step_s() or 0.0
        deadline = max(deadline, job.progress_s + max(patience_s, STEPS_OF_PATIENCE * normal_s))
    return deadline, reason


def _peers_name(job: Job, agent: Agent) -> bool:
    """Some living member has lost its links to a rank of this agent without an orderly goodbye."""
    if job.fresh:
        return False
    broken: set[int] = set()
    for process in job.holders().values():
        if process.record.agent_id != agent.agent_id and process.poisoned:
            broken.update(process.report.broken_ranks)
    return any(rank in broken for rank, process in job.holders().items() if process.record.agent_id == agent.agent_id)


def note_silent_joiners(job: Job, now: float) -> None:
    """A joiner that says nothing although its agent does: frozen, perhaps. After the flip everybody waits for it."""
    patience_s = job.settings.heartbeat_timeout_s
    for process in planned.joiners(job).values():
        agent = job.agents.get(process.record.agent_id)
        if not process.active or agent is None or not agent.connected or now - agent.heard_s >= patience_s / 2:
            continue
        deadline = max(process.heard_s, agent.connected_s) + patience_s
        if now >= deadline:
            lose(job, now, process, f"it has said nothing for {now - process.heard_s:.1f} s")
        else:
            job.wake_at(deadline)


def silent_rank(job: Job, now: float) -> Process | None:
    """A member that says nothing although its agent does, in a job that stands still: frozen, perhaps."""
    settings = job.settings
    if settings.observe_only:
        return None
    patience_s = max(settings.heartbeat_timeout_s, STEPS_OF_PATIENCE * (job.commits.normal_step_s() or 0.0))
    for process in job.holders().values():
        agent = job.agents.get(process.record.agent_id)
        if process.report.phase not in ("running", "holding") or agent is None or not agent.connected:
            continue
        if now - agent.heard_s >= settings.heartbeat_timeout_s / 2:
            continue  # the agent is what is silent
        deadline = max(process.heard_s, job.progress_s, agent.connected_s) + patience_s
        if now >= deadline:
            return process
        job.wake_at(deadline)
    return None


def user_failure(job: Job) -> Process | None:
    """A member whose script raised while nothing was poisoned."""
    return next((process for process in job.holders().values() if process.failed_itself), None)
