"""What the daemon's user may do in Slurm. It has to change nodes; docs/operators.md says which level is needed for what."""

from __future__ import annotations

from collections.abc import Iterator

from tmd.daemon.identity import user_name
from tmd.doctor.asking import Output, slurm_command
from tmd.doctor.facts import Facts, SlurmFacts
from tmd.doctor.findings import Finding, fault, ok, skipped, warning
from tmd.nodes.base import QueryFailed


def check_rights(facts: Facts, slurm: SlurmFacts) -> Iterator[Finding]:
    if facts.daemon is None:
        yield skipped("rights", "whose process the daemon is is not known, as it does not answer")
        return
    uid = facts.daemon.uid
    slurm_user = slurm.slurm_user
    if uid == 0 or (slurm_user is not None and uid == slurm_user[1]):
        yield ok("rights", f"the daemon runs as {user_name(uid)}, who may do all in Slurm")
        return
    if not _keeps_levels(slurm):
        seen = f"the daemon runs as {user_name(uid)}, and without slurmdbd only root and SlurmUser may change nodes"
        yield fault("rights", seen, "slurmdbd (AccountingStorageType), or run the daemon as SlurmUser")
        return
    name = user_name(uid)
    asked = ("sacctmgr", "--noheader", "--parsable2", "show", "user", f"name={name}", "format=user,adminlevel")
    try:
        yield judge_level(name, slurm_command(facts.config.slurm, *asked))
    except QueryFailed as error:
        yield fault("rights", f"{name}'s are not known: {error}", "see that slurmdbd runs: sacctmgr show cluster")


def _keeps_levels(slurm: SlurmFacts) -> bool:
    return "slurmdbd" in slurm.config.get("AccountingStorageType", "")


def judge_level(name: str, answer: Output) -> Finding:
    """By what `sacctmgr show user` prints: "tmd|Administrator", nothing for a user whom Slurm does not know."""
    if answer.code != 0:
        said = " ".join((answer.errors or answer.text).split())
        return fault("rights", f"{name}'s are not known: {said}", "see that slurmdbd runs: sacctmgr show cluster")
    levels = {line.partition("|")[2].strip() for line in answer.text.splitlines() if line.partition("|")[0] == name}
    if "Administrator" in levels:
        return ok("rights", f"the daemon's user {name} is an administrator of Slurm")
    give = f"sacctmgr modify user {name} set adminlevel=Admin"
    if "Operator" in levels:
        seen = f"the daemon's user {name} is an operator of Slurm, who may not drain or resume nodes"
        return warning("rights", seen, f"{give}, or let an administrator make all drains")
    if levels:
        seen = f"the daemon's user {name} has no rights in Slurm: it can neither drain nor resume nodes"
        return fault("rights", seen, give)
    seen = f"Slurm's accounting does not know the daemon's user {name}: it can neither drain nor resume nodes"
    return fault("rights", seen, f"sacctmgr add user {name} account=ACCOUNT adminlevel=Admin")
