"""The environment variables that a rank finds, as torchrun sets them."""

from __future__ import annotations


def rank_environment(
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    nproc_per_node: int,
    master_addr: str,
    master_port: int,
    run_id: str,
    threads: str,
) -> dict[str, str]:
    """`threads`: OMP_NUM_THREADS, empty: leave it unset."""
    variables: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": nproc_per_node,
        "GROUP_RANK": rank // nproc_per_node,
        "GROUP_WORLD_SIZE": world_size // nproc_per_node,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    if threads:
        variables["OMP_NUM_THREADS"] = threads
    return {name: str(value) for name, value in variables.items()}
