"""The daemon's configuration: defaults, then a TOML file, then the environment, then the command line.

Contract: `load` returns a whole, checked `Config` or raises ConfigError, which names every wrong key, where it was written and
what was expected. A key `K` of `[daemon]` is overridden by TMD_K, a key of another section S by TMD_S_K. Every key is
documented in etc/tmd.toml.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from tmd.core.settings import CoreSettings
from tmd.nodes.local_state import LocalSettings

#: Where the packaged service puts the socket.
SYSTEM_SOCKET = Path("/run/tmd/tmd.sock")
#: The kernel's limit for the path of a unix socket, without the final zero.
SOCKET_PATH_LIMIT_BYTES = 107

_Section = TypeVar("_Section", bound=msgspec.Struct)


class ConfigError(ValueError):
    """The configuration cannot be used; each line of the text names one key, its place and what was expected."""


class DaemonSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[daemon]`: what the daemon listens on, keeps and lets people do."""

    #: Ledger, tokens and lock live here. Empty: the default of this user.
    state_dir: str = ""
    #: Unix socket of the API. Empty: $RUNTIME_DIRECTORY/tmd.sock, else STATE_DIR/run/tmd.sock.
    socket: str = ""
    #: host:port for agents on other machines; empty: none.
    listen: str = ""
    #: SQLAlchemy URL of the ledger; empty: SQLite in STATE_DIR/ledger.db.
    database: str = ""
    resource_manager: Literal["local", "none"] = "local"
    #: Users (names or numbers) who may do all, beside root and the daemon's own user.
    operators: tuple[str, ...] = ()
    log_format: Literal["logfmt", "json"] = "logfmt"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    daemon: DaemonSettings = DaemonSettings()
    core: CoreSettings = CoreSettings()
    local: LocalSettings = LocalSettings()

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
    return SYSTEM_SOCKET if SYSTEM_SOCKET.exists() else _socket_below(default_state_dir())


def _socket_below(state_dir: Path) -> Path:
    runtime_dir = os.environ.get("RUNTIME_DIRECTORY")
    return (Path(runtime_dir.split(":")[0]) if runtime_dir else state_dir / "run") / "tmd.sock"


def split_address(text: str) -> tuple[str, int]:
    """ "host:port", "[v6]:port" or ":port" (all addresses). Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"expected host:port with a port up to 65535, got {text!r}")
    return host.strip("[]") or "::", int(port)


def load(
    file: Path | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    daemon_overrides: Mapping[str, Any] | None = None,
    core_overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Raises ConfigError. The overrides are the command line's; None among their values means "not given"."""
    errors: list[str] = []
    tables = _read(file, errors) if file else {}

    def section(kind: type[_Section], name: str, overrides: Mapping[str, Any] | None) -> _Section:
        values = _from_file(kind, name, tables.pop(name, {}), file, errors)
        values |= _from_environment(kind, name, environ, errors)
        values |= {key: value for key, value in (overrides or {}).items() if value is not None}
        return kind(**values)

    config = Config(
        daemon=section(DaemonSettings, "daemon", daemon_overrides),
        core=section(CoreSettings, "core", core_overrides),
        local=section(LocalSettings, "local", None),
    )
    errors += [f"{file}: {key}: unknown section{_nearest(key, typing.get_type_hints(Config))}" for key in tables]
    errors += _contradictions(config)
    if errors:
        raise ConfigError("\n".join(errors))
    return config


def _read(file: Path, errors: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        errors.append(f"{file}: cannot be read: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        errors.append(f"{file}: not valid TOML: {error}")
    return {}


def _from_file(kind: type[_Section], section: str, table: Any, file: Path | None, errors: list[str]) -> dict[str, Any]:
    if not isinstance(table, dict):
        errors.append(f"{file}: {section}: expected a section ([{section}]), got {type(table).__name__}")
        return {}
    types = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in types:
            errors.append(f"{file}: {section}.{key}: unknown key{_nearest(key, types)}")
            continue
        try:
            values[key] = _convert(value, types[key], strict=True)
        except ValueError as error:
            errors.append(f"{file}: {section}.{key}: {error}")
    return values


def _from_environment(kind: type[_Section], section: str, environ: Mapping[str, str], errors: list[str]) -> dict[str, Any]:
    prefix = "TMD_" if section == "daemon" else f"TMD_{section.upper()}_"
    values: dict[str, Any] = {}
    for key, wanted in typing.get_type_hints(kind).items():
        name = prefix + key.upper()
        if name not in environ:
            continue
        text = environ[name]
        raw: Any = [part.strip() for part in text.split(",") if part.strip()] if typing.get_origin(wanted) is tuple else text
        try:
            values[key] = _convert(raw, wanted, strict=False)
        except ValueError as error:
            errors.append(f"environment variable {name}: {error}")
    return values


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


def _contradictions(config: Config) -> list[str]:
    found = []
    core = config.core
    if core.heartbeat_timeout_s <= 2 * core.heartbeat_s:
        found.append(
            f"core.heartbeat_timeout_s: expected more than twice core.heartbeat_s ({core.heartbeat_s}), got "
            f"{core.heartbeat_timeout_s}: one late heartbeat would count as a lost node"
        )
    if config.daemon.listen:
        try:
            split_address(config.daemon.listen)
        except ValueError as error:
            found.append(f"daemon.listen: {error}")
    if config.daemon.resource_manager == "local":
        try:
            config.local.expand()
        except ValueError as error:
            found.append(str(error))
    if len(os.fsencode(config.socket)) > SOCKET_PATH_LIMIT_BYTES:
        found.append(f"daemon.socket: expected a path of at most {SOCKET_PATH_LIMIT_BYTES} bytes, got {config.socket}")
    return found
