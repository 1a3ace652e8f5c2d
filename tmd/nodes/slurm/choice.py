"""Which way Slurm is asked: pyslurm where it is installed and of Slurm's own version, its commands elsewhere."""

from __future__ import annotations

import logging

from tmd.nodes.base import QueryFailed
from tmd.nodes.slurm.client import SlurmClient
from tmd.nodes.slurm.commands import CommandClient
from tmd.nodes.slurm.pyslurm_client import PyslurmClient, PyslurmUnusable
from tmd.nodes.slurm.settings import SlurmSettings

log = logging.getLogger(__name__)


async def make_client(settings: SlurmSettings) -> SlurmClient:
    """Raises ValueError if the configured one cannot be used here."""
    commands = CommandClient(settings)
    try:
        version = await commands.version()
    except QueryFailed as error:
        if settings.client != "pyslurm":
            raise ValueError(f"Slurm's commands cannot be used: {error}; {error.remedy}") from None
        version = None
    if settings.client == "commands":
        return commands
    try:
        return await PyslurmClient.open(settings, version)
    except PyslurmUnusable as error:
        if settings.client == "pyslurm":
            raise ValueError(f'[slurm] client = "pyslurm", but {error}') from None
        log.info("Slurm is asked through its commands: %s", error)
        return commands
