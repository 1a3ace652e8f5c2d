"""What an agent says of its node to the daemon, and to each rank of the job that it belongs to."""

from __future__ import annotations

import os

import tmd
from tmd.protocol.agent import AgentHello, AgentWelcome, ProcessSpec
from tmd.protocol.codec import PROTOCOL
from tmd.protocol.control import RankWelcome
from tmd_worker.agent import identity
from tmd_worker.agent.environment import rank_environment
from tmd_worker.agent.settings import DirectedSettings


def first_hello(settings: DirectedSettings, agent_id: str, threads: str) -> AgentHello:
    """Before any welcome. `threads`: OMP threads of each rank."""
    return AgentHello(
        protocol=PROTOCOL,
        tmd_version=tmd.__version__,
        job_id=settings.job_id,
        node=settings.node,
        agent_id=agent_id,
        host=settings.host,
        nnodes=settings.nnodes,
        nproc_per_node=settings.nproc_per_node,
        node_index=settings.node_index,
        command=(settings.launch.kind, settings.launch.target, *settings.launch.arguments),
        script_digest=settings.launch.digest(),
        versions=identity.own_versions(threads, settings.transport),
        labels=dict(settings.labels),
        pid=os.getpid(),
        uid=os.getuid(),
        token=settings.token,
        launches=settings.step is not None,
        grows=settings.step is not None and settings.step.grows,
        launched=settings.launched,
    )


def rank_welcome(settings: DirectedSettings, spec: ProcessSpec, welcome: AgentWelcome) -> RankWelcome:
    """What a new rank process is told first."""
    return RankWelcome(
        job_id=settings.job_id,
        incarnation=spec.incarnation,
        node=settings.node,
        host=settings.host,
        rank=spec.rank,
        local_rank=spec.local_rank,
        world_size=spec.world_size,
        nproc_per_node=settings.nproc_per_node,
        job_key=welcome.job_key,
        hold_limit_s=welcome.hold_limit_s,
        heartbeat_s=welcome.heartbeat_s,
        port_range=settings.port_range,
        transport=settings.transport,
        handoff=welcome.handoff,
        protocol=PROTOCOL,
    )


def environment(settings: DirectedSettings, threads: str, spec: ProcessSpec, control_fd: int) -> dict[str, str]:
    """Of a new rank process. A standby gets the last rank's number until it has a role."""
    return rank_environment(
        rank=spec.rank if spec.rank is not None else spec.world_size - 1,
        local_rank=spec.local_rank,
        world_size=spec.world_size,
        nproc_per_node=settings.nproc_per_node,
        master_addr=settings.master_addr,
        master_port=settings.master_port,
        run_id=settings.job_id,
        threads=threads,
    ) | {"TMD_INCARNATION": spec.incarnation, "TMD_CONTROL_FD": str(control_fd)}
