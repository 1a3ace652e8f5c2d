"""Who may speak for a node of a job: the checks on an agent's hello, and its place in the job."""

from __future__ import annotations

from tmd.core.job import Job
from tmd.core.processes import Agent
from tmd.core.records import JobRecord
from tmd.protocol.agent import AgentHello
from tmd.protocol.codec import check_protocol
from tmd.protocol.keys import fingerprint


def misfit(hello: AgentHello) -> str | None:
    """Why this agent cannot be served at all, or None."""
    reason = check_protocol(hello.protocol)
    if reason is not None:
        return reason
    if hello.nnodes < 1 or hello.nproc_per_node < 1:
        return f"--nnodes {hello.nnodes} --nproc-per-node {hello.nproc_per_node}: both must be at least 1"
    if not hello.job_id or not hello.node or not hello.agent_id:
        return "the hello names no job, no node or no agent: start tmd-run with --job-id and --node, or inside a Slurm job"
    return None


def other_ledger(job: Job | None, hello: AgentHello, generation: int) -> str | None:
    """Why the processes of this agent were started under another ledger than this one, or None. Whatever this daemon believes, it
    must neither end nor replace them."""
    if not hello.key_fingerprint:
        return None
    if job is None:
        why = "this one does not know it"
    elif fingerprint(job.record.job_key) != hello.key_fingerprint:
        why = "this one has another key for it"
    elif hello.generation > generation:
        why = f"this one is older (life {generation} of the daemon here, {hello.generation} there)"
    else:
        return None
    return (
        f"job {hello.job_id} runs under another ledger, {why}: its ranks go on without this daemon; bring that ledger back, or "
        "end the job"
    )


def difference(record: JobRecord, hello: AgentHello) -> str | None:
    """What of this agent differs from the first agent of its job, or None. Every item decides results, bit for bit."""
    where = f"node {hello.node} cannot take part in job {record.job_id}"
    if (hello.nnodes, hello.nproc_per_node) != (record.nnodes, record.nproc_per_node):
        return (
            f"{where}: it was started with --nnodes {hello.nnodes} --nproc-per-node {hello.nproc_per_node}, "
            f"the job has --nnodes {record.nnodes} --nproc-per-node {record.nproc_per_node}"
        )
    if hello.uid != record.owner_uid:
        return f"{where}: it runs as uid {hello.uid}, the job belongs to uid {record.owner_uid}"
    if hello.command != record.command:
        return f"{where}: it runs {' '.join(hello.command)!r}, the job runs {' '.join(record.command)!r}"
    if hello.script_digest != record.script_digest:
        return (
            f"{where}: its script has digest {hello.script_digest or '(none)'}, "
            f"the job's has {record.script_digest or '(none)'}: "
            "the file differs between the nodes"
        )
    for name in sorted(record.versions.keys() | hello.versions.keys()):
        here, there = hello.versions.get(name, "missing"), record.versions.get(name, "missing")
        if here != there:
            spoken = "OMP_NUM_THREADS" if name == "threads" else name
            return f"{where}: {spoken} is {here} there and {there} on the job's first node; results would differ"
    return None


def new_job(now: float, hello: AgentHello, job_key: bytes) -> JobRecord:
    """The record of a job that its first agent makes known."""
    return JobRecord(
        job_id=hello.job_id,
        state="forming",
        nnodes=hello.nnodes,
        nproc_per_node=hello.nproc_per_node,
        world_size=hello.nnodes * hello.nproc_per_node,
        owner_uid=hello.uid,
        job_key=job_key,
        versions=dict(hello.versions),
        script_digest=hello.script_digest,
        command=hello.command,
        created_s=now,
        updated_s=now,
    )


def fence_reason(job: Job, hello: AgentHello) -> str | None:
    """Why this life of an agent is over for the job, or None."""
    agent = job.agents.get(hello.agent_id)
    if agent is not None:
        return agent.fenced or None
    if job.over:
        return f"job {job.job_id} has ended ({job.record.state}: {job.record.reason}); submit it under another id"
    if any(process.record.agent_id == hello.agent_id for process in job.processes.values()):
        return f"this agent of node {hello.node} was replaced; start tmd-run again to bring the node back"
    return None


def crowded_out(job: Job, hello: AgentHello, now: float) -> str | None:
    """Why a new agent may not take its node over from the one that is there, or from the resource manager, or None."""
    if hello.agent_id not in job.agents and hello.node in job.leaving_nodes and job.holds(hello.node):
        return f"node {hello.node} is being given back by job {job.job_id}: {job.leaving_nodes[hello.node]}"
    other = job.agent_on(hello.node)
    if other is None or other.agent_id == hello.agent_id:
        return None
    if other.connected and now - other.heard_s < job.settings.heartbeat_timeout_s:
        return (
            f"node {hello.node} already has an agent in job {job.job_id} ({other.agent_id}): end it first; if that is another "
            "machine or container whose host name is the same, give each a name of its own with tmd-run --node"
        )
    return None


def admit(job: Job, now: float, hello: AgentHello) -> Agent:
    """The agent is (again) part of the job."""
    agent = job.agents.get(hello.agent_id)
    if agent is None:
        agent = job.agents[hello.agent_id] = Agent(hello.agent_id, hello.node)
        job.tell(now, hello.node, "agent", f"agent {hello.agent_id} of {hello.node} is here")
    agent.labels = dict(hello.labels)
    agent.launches, agent.launched, agent.grows = hello.launches, hello.launched, hello.grows
    agent.connected = True
    agent.reported = False
    agent.connected_s = agent.heard_s = now
    agent.sent = None
    job.stale = True
    old = job.nodes.get(hello.node)
    if old is not None and old.agent_id == hello.agent_id:
        job.set_node(now, hello.node, labels=agent.labels)
    else:
        job.leaving_nodes.pop(hello.node, None)  # it is used again before it was given back
        job.set_node(now, hello.node, use="standby", labels=agent.labels, agent_id=hello.agent_id, reason="")
    return agent
