"""Two ordinary users for jobs, and one as whom tmd's daemon runs. Slurm looks users up by name and number, so a bare number would
not do: scripts/setup-slurm makes them, system users without password or home; `userdel` takes them away again."""

from __future__ import annotations

import dataclasses
import pwd

ALICE = "tmd-alice"
BOB = "tmd-bob"
DAEMON = "tmd-daemon"


@dataclasses.dataclass(frozen=True)
class User:
    name: str
    uid: int
    gid: int

    @property
    def env(self) -> dict[str, str]:
        return {"USER": self.name, "LOGNAME": self.name, "HOME": pwd.getpwuid(self.uid).pw_dir}


def user(who: str | int) -> User:
    """By name or number. Raises AssertionError with the remedy."""
    try:
        entry = pwd.getpwnam(who) if isinstance(who, str) else pwd.getpwuid(who)
    except KeyError:
        raise AssertionError(f"these tests need the user {who}: run scripts/setup-slurm") from None
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid)
