"""The daemon's configuration: defaults, then a TOML file, then the environment, then the command line.

Contract: `load` returns a whole, checked `Config` or raises ConfigError, which names every wrong key, where it was written and
what was expected. A key `K` of `[daemon]` is overridden by TMD_K, a key of another section S by TMD_S_K. Every key is described
here and in the two sections' own modules; `tmd.config_reference` makes the sample and the operators' tables of that.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import math
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tmd.config_file import ConfigFile, UnreadableFile
from tmd.core.handoff_settings import HandoffSettings
from tmd.core.health_policy import BadPattern, HealthSettings, Pattern
from tmd.core.settings import CoreSettings
from tmd.nodes.local_state import LocalSettings
from tmd.nodes.slurm.settings import SlurmSettings

#: Where the packaged service puts the socket.
SYSTEM_SOCKET = Path("/run/tmd/tmd.sock")
#: Where the packaged service has its configuration.
SYSTEM_FILE = Path("/etc/tmd/tmd.toml")
#: The kernel's limit for the path of a unix socket, without the final zero.
SOCKET_PATH_LIMIT_BYTES = 107


class ConfigError(ValueError):
    """The configuration cannot be used; each line of the text names one key, its place and what was expected."""


class DaemonSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[daemon]`: what the daemon listens on, keeps and lets people do."""

    state_dir: Annotated[
        str,
        Meta(
            description="Ledger, tokens, lock: for one daemon at a time.",
            extra={
                "default": "$STATE_DIRECTORY (systemd); /var/lib/tmd for root; else ~/.local/state/tmd",
                "example": '"/var/lib/tmd"',
            },
        ),
    ] = ""
    socket: Annotated[
        str,
        Meta(
            description="Unix socket for tmctl and for agents on this machine; a path of at most 107 bytes. Whoever may "
            "enter its directory (made with mode 0750) may connect; what they may do then depends on who they "
            "are.",
            extra={
                "default": "$RUNTIME_DIRECTORY/tmd.sock (systemd), else STATE_DIR/run/tmd.sock",
                "example": '"/run/tmd/tmd.sock"',
            },
        ),
    ] = ""
    listen: Annotated[
        str,
        Meta(
            description="TCP address for other machines, host:port; :port is every address. Whoever comes has to prove who "
            "it is, see tcp_auth; GET /v1/health is answered to anybody. The connection is not encrypted: use a network that "
            "only the cluster reaches.",
            extra={"default": "none", "example": '"head:7070"'},
        ),
    ] = ""
    tcp_auth: Annotated[
        Literal["auto", "munge", "token"],
        Meta(
            description="What counts as a proof over TCP. munge: credentials alone, of agents and of tmctl. token: tokens "
            "alone, of agents. auto: both, and munge only where libmunge is installed."
        ),
    ] = "auto"
    munge_socket: Annotated[
        str,
        Meta(
            description="Socket of this machine's munged.",
            extra={"default": "libmunge's own (/run/munge/munge.socket.2)", "example": '"/run/munge/munge.socket.2"'},
        ),
    ] = ""
    database: Annotated[
        str,
        Meta(
            description="The ledger: sqlite:////path/of/a/file, or postgresql://user@host/database, which needs the extra "
            "`postgres` of this package. A password is better kept in the environment (TMD_DATABASE) or in "
            "~/.pgpass than in a file that others may read.",
            extra={"default": "SQLite in STATE_DIR/ledger.db", "example": '"postgresql://tmd@db/tmd"'},
        ),
    ] = ""
    resource_manager: Annotated[
        Literal["local", "slurm", "none"],
        Meta(
            description="Where nodes come from. local: nodes are groups of processes on this machine, see [local]. slurm: "
            "nodes are Slurm's, see [slurm]. none: nodes are what the agents say, and operators drain them through tmctl."
        ),
    ] = "local"
    operators: Annotated[
        tuple[str, ...],
        Meta(
            description="Users, by name or number, who may do all, beside root, the daemon's own user and Slurm's (SlurmUser "
            "in slurm.conf). Others read and act on their own jobs. In the environment: names with commas between them.",
            extra={"default": "none", "example": '["alice", "bob"]'},
        ),
    ] = ()
    log_format: Annotated[Literal["logfmt", "json"], Meta(description="One line per event on standard error.")] = "logfmt"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="The least that is logged.")] = "info"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    daemon: DaemonSettings = DaemonSettings()
    core: CoreSettings = CoreSettings()
    health: HealthSettings = HealthSettings()
    handoff: HandoffSettings = HandoffSettings()
    local: LocalSettings = LocalSettings()
    slurm: SlurmSettings = SlurmSettings()

    @property
    def state_dir(self) -> Path:
        return Path(self.daemon.state_dir) if self.daemon.state_dir else default_state_dir()

    @property
    def socket(self) -> Path:
        return Path(self.daemon.socket) if self.daemon.socket else _socket_below(self.state_dir)

    @property
    def database_url(self) -> str:
        return self.daemon.database or f"sqlite:///{self.state_dir / 'ledger.db'}"

    @property
    def listen(self) -> tuple[str, int] | None:
        """Host and port of the TCP listener, None for none. Checked by `load`."""
        return split_address(self.daemon.listen) if self.daemon.listen else None


def default_state_dir() -> Path:
    """What systemd gives, /var/lib/tmd for root, the user's own state directory for everybody else."""
    if given := os.environ.get("STATE_DIRECTORY"):
        return Path(given.split(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib/tmd")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tmd"


def default_socket() -> Path:
    """Where a client looks for the daemon when it is not told: $TMD_SOCKET, the system's daemon, this user's daemon."""
    if given := os.environ.get("TMD_SOCKET"):
        return Path(given)
    return SYSTEM_SOCKET if _is_there(SYSTEM_SOCKET) else _socket_below(default_state_dir())


def _is_there(path: Path) -> bool:
    """Also what this user may not look at, so that the client says who may."""
    try:
        return path.exists()
    except PermissionError:
        return True


def default_file() -> Path | None:
    """Which file is meant when none is named: $TMD_CONFIG, the system's if it is there, none."""
    if given := os.environ.get("TMD_CONFIG"):
        return Path(given)
    return SYSTEM_FILE if _is_there(SYSTEM_FILE) else None


def _socket_below(state_dir: Path) -> Path:
    runtime_dir = os.environ.get("RUNTIME_DIRECTORY")
    return (Path(runtime_dir.split(":")[0]) if runtime_dir else state_dir / "run") / "tmd.sock"


_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^\[\]:\s/]*)):(?P<port>[0-9]{1,5})")


def split_address(text: str) -> tuple[str, int]:
    """ "host:port", "[v6]:port" or ":port" (all addresses). Raises ValueError."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535 or (found["v6"] and not _is_ipv6(found["v6"])):
        raise ValueError(f"expected host:port, [IPv6 address]:port or :port, with a port up to 65535, got {text!r}")
    return found["v6"] or found["host"] or "::", int(found["port"])


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


DEFAULT = "default"
COMMAND_LINE = "command line"


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and where each of its values comes from."""

    config: Config
    #: (section, key) -> "FILE:LINE", "environment variable NAME" or "command line"; a key that is not here has its default.
    origins: Mapping[tuple[str, str], str]

    def origin(self, section: str, key: str) -> str:
        return self.origins.get((section, key), DEFAULT)


def load(
    file: Path | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    daemon_overrides: Mapping[str, Any] | None = None,
    core_overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Raises ConfigError. The overrides are the command line's; None among their values means "not given"."""
    return load_with_origins(file, environ=environ, daemon_overrides=daemon_overrides, core_overrides=core_overrides).config


def load_with_origins(
    file: Path | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    daemon_overrides: Mapping[str, Any] | None = None,
    core_overrides: Mapping[str, Any] | None = None,
) -> Loaded:
    """As `load`. Raises ConfigError."""
    reading = _Reading()
    reading.take_file(file)
    reading.take_environment(environ)
    reading.take_command_line("daemon", daemon_overrides)
    reading.take_command_line("core", core_overrides)
    config = Config(
        daemon=DaemonSettings(**reading.values["daemon"]),
        core=CoreSettings(**reading.values["core"]),
        health=HealthSettings(**reading.values["health"]),
        handoff=HandoffSettings(**reading.values["handoff"]),
        local=LocalSettings(**reading.values["local"]),
        slurm=SlurmSettings(**reading.values["slurm"]),
    )
    errors = [*reading.errors, *_contradictions(config, reading.origins), *_no_text(config, reading.origins)]
    if errors:
        raise ConfigError("\n".join(errors))
    return Loaded(config, reading.origins)


def variable(section: str, key: str) -> str:
    """The environment variable that overrides a key."""
    return f"TMD_{key.upper()}" if section == "daemon" else f"TMD_{section.upper()}_{key.upper()}"


def _sections() -> dict[str, type[msgspec.Struct]]:
    return typing.get_type_hints(Config)


class _Reading:
    """Takes one source after the other; what is wrong in any of them is gathered."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, Any]] = {name: {} for name in _sections()}
        self.origins: dict[tuple[str, str], str] = {}
        self.errors: list[str] = []

    def take_file(self, path: Path | None) -> None:
        if path is None:
            return
        try:
            file = ConfigFile(path)
        except UnreadableFile as error:
            self.errors.append(str(error))
            return
        sections = _sections()
        for section, table in file.table.items():
            if section not in sections:
                self.errors.append(f"{file.place(section)}: {section}: unknown section{_nearest(section, sections)}")
            elif not isinstance(table, dict):
                found = type(table).__name__
                self.errors.append(f"{file.place(section)}: {section}: expected a section ([{section}]), got {found}")
            else:
                self._take_section(file, section, table)

    def _take_section(self, file: ConfigFile, section: str, table: dict[str, Any]) -> None:
        types = typing.get_type_hints(_sections()[section])
        for key, value in table.items():
            place = file.place(section, key)
            if key in types:
                self._take(section, key, value, place, strict=True)
            else:
                self.errors.append(f"{place}: {section}.{key}: unknown key{_nearest(key, types)}")

    def take_environment(self, environ: Mapping[str, str]) -> None:
        for section, kind in _sections().items():
            for key, wanted in typing.get_type_hints(kind).items():
                name = variable(section, key)
                if name not in environ:
                    continue
                text = environ[name]
                is_list = typing.get_origin(wanted) is tuple
                raw: Any = [part.strip() for part in text.split(",") if part.strip()] if is_list else text
                self._take(section, key, raw, f"environment variable {name}", strict=False)

    def take_command_line(self, section: str, overrides: Mapping[str, Any] | None) -> None:
        for key, value in (overrides or {}).items():
            if value is not None:
                self.values[section][key] = value
                self.origins[section, key] = COMMAND_LINE

    def _take(self, section: str, key: str, value: Any, origin: str, *, strict: bool) -> None:
        wanted = typing.get_type_hints(_sections()[section])[key]
        try:
            self.values[section][key] = _convert(value, wanted, strict=strict)
            self.origins[section, key] = origin
        except ValueError as error:
            self.errors.append(f"{origin}: {section}.{key}: {error}")


def _convert(value: Any, wanted: Any, *, strict: bool) -> Any:
    """Raises ValueError saying what was expected."""
    try:
        result = msgspec.convert(value, wanted, strict=strict)
    except msgspec.ValidationError as error:
        if typing.get_origin(wanted) is Literal:
            choices = " or ".join(repr(choice) for choice in typing.get_args(wanted))
            raise ValueError(f"expected {choices}, got {value!r}") from None
        text = str(error).replace("`", "").split(" - at ")[0]
        raise ValueError(f"{text[:1].lower()}{text[1:]} ({value!r})") from None
    if isinstance(result, float) and not (math.isfinite(result) and result > 0):
        raise ValueError(f"expected a positive number of seconds, got {value!r}")
    if isinstance(result, int) and not isinstance(result, bool) and result < 0:
        raise ValueError(f"expected a number that is not negative, got {value!r}")
    return result


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(sorted(known))}"


def _no_text(config: Config, origins: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """Paths that agents, ledger and clients could not be told of."""
    for key, path in (("state_dir", str(config.state_dir)), ("socket", config.daemon.socket or "")):
        try:
            path.encode()
        except UnicodeEncodeError:
            yield f"{origins.get(('daemon', key), DEFAULT)}: daemon.{key}: not UTF-8: {os.fsencode(path)!r}"
        if "\0" in path:
            yield f"{origins.get(('daemon', key), DEFAULT)}: daemon.{key}: no path has a NUL character: {path!r}"


def _contradictions(config: Config, origins: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """What only shows in the whole, with the place of the value that is in the way."""

    def at(section: str, *keys: str) -> str:
        given = [origins[section, key] for key in keys if (section, key) in origins]
        return f"{given[0] if given else DEFAULT}: {section}.{keys[0]}"

    core = config.core
    if core.heartbeat_timeout_s <= 2 * core.heartbeat_s:
        yield (
            f"{at('core', 'heartbeat_timeout_s', 'heartbeat_s')}: expected more than twice core.heartbeat_s "
            f"({core.heartbeat_s}), got {core.heartbeat_timeout_s}: one late heartbeat would count as a lost node"
        )
    yield from _bad_patterns(config, at)
    if config.daemon.listen:
        try:
            split_address(config.daemon.listen)
        except ValueError as error:
            yield f"{at('daemon', 'listen')}: {error}"
    if config.daemon.resource_manager == "local":
        try:
            config.local.expand()
        except ValueError as error:
            yield f"{at('local', 'nodes', 'racks', 'zones')}: {error}"
    if problem := config.slurm.problem():
        yield f"{at('slurm', 'poll_min_s', 'poll_max_s')}: {problem}"
    if len(os.fsencode(config.slurm.hint_socket)) > SOCKET_PATH_LIMIT_BYTES:
        yield f"{at('slurm', 'hint_socket')}: expected a path of at most {SOCKET_PATH_LIMIT_BYTES} bytes"
    if len(os.fsencode(config.socket)) > SOCKET_PATH_LIMIT_BYTES:
        yield f"{at('daemon', 'socket')}: expected a path of at most {SOCKET_PATH_LIMIT_BYTES} bytes, got {config.socket}"


def _bad_patterns(config: Config, at: Callable[..., str]) -> Iterator[str]:
    for key in ("migrate", "drain", "trusted"):
        for text in getattr(config.health, key):
            try:
                Pattern.parse(text)
            except BadPattern as error:
                yield f"{at('health', key)}: {error}"
