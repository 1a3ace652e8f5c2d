"""The head node's own side: the state directory, the sockets and the port, and who may use them."""

from __future__ import annotations

import dataclasses
import grp
import http.client
import os
import pwd
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tmd.daemon.identity import user_name
from tmd.doctor.facts import Facts, SlurmFacts
from tmd.doctor.findings import Finding, fault, ok, skipped, warning

#: Where the plugin in slurmctld sends, if its environment says nothing else.
PLUGIN_S_SOCKET = "/run/tmd/hints.sock"
PORT_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """Of a file: what counts for who may use it."""

    mode: int
    uid: int
    gid: int


def check_state_dir(facts: Facts) -> Iterator[Finding]:
    folder = facts.config.state_dir
    try:
        files = {path: _seen(path) for path in (folder, folder / "secret", folder / "ledger.db") if path.exists()}
    except PermissionError:
        yield skipped("state directory", f"user {user_name(os.geteuid())} may not look into {folder}; run this as root")
        return
    if folder not in files:
        yield fault("state directory", f"there is no {folder}", "start the daemon, or name its directory: state_dir in [daemon]")
        return
    owner = facts.daemon.uid if facts.daemon is not None else None
    yield from judge_state_dir(folder, files, owner)


def judge_state_dir(folder: Path, files: dict[Path, Seen], owner: int | None) -> Iterator[Finding]:
    """`files`: the folder and what is in it; `owner`: the daemon's uid if it is known."""
    good = True
    for path, seen in files.items():
        if owner is not None and seen.uid != owner:
            good = False
            what = f"{path} belongs to {user_name(seen.uid)}, the daemon runs as {user_name(owner)}"
            yield fault("state directory", what, f"chown -R {user_name(owner)} {folder}")
        if seen.mode & 0o077:
            good = False
            what = f"others may use {path} (mode {stat.S_IMODE(seen.mode):04o}): it holds the jobs' keys"
            yield fault("state directory", what, f"chmod {'0700' if stat.S_ISDIR(seen.mode) else '0600'} {path}")
    if good:
        yield ok("state directory", f"{folder}, for {user_name(files[folder].uid)} alone")


def check_socket(facts: Facts, path: Path) -> Iterator[Finding]:
    """The daemon's own socket."""
    try:
        socket_seen, folder_seen = _seen(path), _seen(path.parent)
    except OSError:
        return  # that there is no daemon is said already
    if folder_seen.mode & 0o007 and socket_seen.mode & 0o007:
        seen = f"anybody may connect to {path}"
        yield warning("socket", seen, f"chmod 0750 {path.parent}, chmod 0660 {path}")
    else:
        yield ok("socket", f"{path}, for root, the daemon's user and the group {_group(folder_seen.gid)}")


def check_hint_socket(facts: Facts, slurm: SlurmFacts) -> Iterator[Finding]:
    text = facts.config.slurm.hint_socket
    if not text:
        return
    path = Path(text)
    if facts.daemon is None:
        yield skipped("hints", f"{path} is the daemon's, which does not answer")
        return
    if not _is_heard(path):
        yield fault("hints", f"nobody listens on {path}", "start the daemon again with this configuration")
        return
    writer = slurm.slurm_user
    if writer is None:
        yield skipped("hints", f"{path} is there; who SlurmUser is is not known")
    elif (barrier := in_the_way(path, writer[1], _groups(writer[1]), _seen)) is not None:
        seen = f"SlurmUser {writer[0]} may not write to {path}, because of {barrier}"
        yield fault("hints", seen, f"usermod --append --groups {_group(_seen(path.parent).gid)} {writer[0]}, restart slurmctld")
    else:
        more = "" if text == PLUGIN_S_SOCKET else f"; slurmctld's environment has to say TMD_EVENTS_SOCKET={path}"
        yield ok("hints", f"SlurmUser {writer[0]} may write to {path}{more}")


def _is_heard(path: Path) -> bool:
    """Sends nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except PermissionError:
            return path.is_socket()
        except OSError:
            return False
        return True


def in_the_way(path: Path, uid: int, groups: frozenset[int], look: Callable[[Path], Seen]) -> Path | None:
    """The folder on the way that this user may not enter, or the socket if it may not write to it; None if it may."""
    if uid == 0:
        return None
    for folder in [*reversed(path.parents)]:
        if not _may(look(folder), uid, groups, 0o1):
            return folder
    return None if _may(look(path), uid, groups, 0o2) else path


def check_port(facts: Facts) -> Iterator[Finding]:
    address = facts.config.listen
    manager = facts.config.daemon.resource_manager
    if address is None:
        if manager == "slurm":
            seen = "listen is not set: agents on other machines cannot reach the daemon"
            yield fault("port", seen, 'listen = ":7070" in [daemon]')
        else:
            yield skipped("port", "listen is not set: nobody comes from other machines")
        return
    host, port = address
    if facts.daemon is None:
        yield _free(host, port)
    else:
        yield _answers(facts.config.daemon.listen, host, port, facts.daemon.status["generation"])


def _free(host: str, port: int) -> Finding:
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, ValueError) as error:
        return fault("port", f"nobody can listen on {host}:{port}: {error}", "another address or port: listen in [daemon]")
    return ok("port", f"{host}:{port} is free for the daemon")


def _answers(shown: str, host: str, port: int, generation: int) -> Finding:
    """Whether the daemon that answers on the unix socket answers there, too."""
    place = {"::": "localhost", "0.0.0.0": "127.0.0.1"}.get(host, host)
    connection = http.client.HTTPConnection(place, port, timeout=PORT_TIMEOUT_S)
    try:
        connection.request("GET", "/v1/health")
        found = msgspec.json.decode(connection.getresponse().read())
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        seen = f"the daemon does not answer on {shown}: {error}"
        return fault("port", seen, "start it again with this configuration; is another program on that port?")
    finally:
        connection.close()
    if not isinstance(found, dict) or found.get("generation") != generation:
        return fault("port", f"another daemon answers on {shown}", "stop it, or choose another port: listen in [daemon]")
    return ok("port", f"the daemon answers on {shown}; firewalls between it and the nodes cannot be seen from here")


def _may(seen: Seen, uid: int, groups: frozenset[int], right: int) -> bool:
    """`right`: 1 to enter, 2 to write, as the last digit of a mode."""
    shift = 6 if seen.uid == uid else 3 if seen.gid in groups else 0
    return bool(seen.mode >> shift & right)


def _seen(path: Path) -> Seen:
    """Raises OSError."""
    found = path.stat()
    return Seen(found.st_mode, found.st_uid, found.st_gid)


def _groups(uid: int) -> frozenset[int]:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return frozenset()
    return frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
