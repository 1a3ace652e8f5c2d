"""Where the ranks of a node listen: by address, name, interface and range of ports; what cannot work is refused with what can."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from click.testing import CliRunner

from tests.agent.agent_rig import Rig, StandInDaemon, spec
from tmd_worker.agent import main as command_line
from tmd_worker.agent.addresses import interfaces, resolve_host, resolve_port_range
from tmd_worker.agent.settings import DaemonAddress, DirectedSettings, SettingsRefused

LOCAL = DaemonAddress.parse("unix:/run/tmd/tmd.sock")
#: Of the blocks that are set aside for documentation, so no machine's.
FOREIGN = "203.0.113.9"
FOREIGN_V6 = "2001:db8::9"


class RemoteDaemon(DaemonAddress):
    """As if the daemon were on another machine: what the kernel would say of the way there."""

    def own_address(self) -> str:
        return "198.51.100.7"


def resolved_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """No real resolver can be made to lie here, so the answer is made up."""

    def answer(name: str, port: None, **options: Any) -> list[Any]:
        return [
            (socket.AF_INET6, None, 0, "", (address, 0, 0, 0)) if ":" in address else (socket.AF_INET, None, 0, "", (address, 0))
            for address in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def refusal(given: str | None, interface: str | None = None, daemon: DaemonAddress = LOCAL) -> str:
    with pytest.raises(SettingsRefused) as refused:
        resolve_host(given, interface, daemon)
    return str(refused.value)


# -------------------------------------------------------------------- address and name


def test_numbers_are_taken_if_they_are_this_machines() -> None:
    assert resolve_host("127.0.0.21", None, LOCAL) == "127.0.0.21"
    assert resolve_host("[::1]", None, LOCAL) == resolve_host("0:0:0:0:0:0:0:1", None, LOCAL) == "::1"
    assert resolve_host(None, None, LOCAL) == "127.0.0.1"
    assert resolve_host(None, None, DaemonAddress.parse("http://[::1]:7070")) == "::1"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (FOREIGN, f"--host {FOREIGN} is no address of this machine, which has lo (127.0.0.1"),
        (FOREIGN_V6, "is no address of this machine"),
        ("0.0.0.0", "is every address, and peers must be told one"),
        ("::", "is every address"),
        ("fe80::1", "is valid on one link only"),
        ("no-such-host.invalid", "--host 'no-such-host.invalid' cannot be resolved ("),
        ("a" * 70 + ".example", "cannot be resolved"),
    ],
)
def test_what_peers_could_not_reach_is_refused(given: str, says: str) -> None:
    assert says in refusal(given)


def test_a_name_becomes_the_address_that_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_host("localhost", None, LOCAL) in ("127.0.0.1", "::1")
    resolved_to(monkeypatch, FOREIGN, "::1", "127.0.0.22")
    assert resolve_host("n1", None, LOCAL) == "127.0.0.22"


def test_a_name_that_means_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved_to(monkeypatch, FOREIGN, FOREIGN_V6)
    assert f"--host 'n1' resolves to {FOREIGN}, {FOREIGN_V6}, which this machine does not have" in refusal("n1")


def test_a_name_that_only_this_machine_can_reach_is_refused_if_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a line "127.0.1.1 n1" in /etc/hosts."""
    resolved_to(monkeypatch, "127.0.1.1")
    assert resolve_host("n1", None, LOCAL) == "127.0.1.1"
    assert "which no other machine can reach" in refusal("n1", daemon=RemoteDaemon("http://head:7070", None, "http://head:7070"))


def test_a_daemon_whose_name_cannot_be_resolved_is_refused_unless_the_address_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this node's ranks listen is found on the way to the daemon. No name server is asked: some know every name."""

    def unresolved(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    unknown = DaemonAddress.parse("http://no-such-host.invalid:7070")
    says = "no address for this node's ranks: the daemon's host 'no-such-host.invalid' cannot be resolved or reached ("
    assert says in refusal(None, daemon=unknown)
    assert refusal(None, daemon=unknown).endswith("); give --host")
    assert resolve_host("127.0.0.1", None, unknown) == "127.0.0.1"


# -------------------------------------------------------------------- interface


def test_an_interface_stands_for_its_first_address() -> None:
    assert interfaces()["lo"][0] == "127.0.0.1"
    assert resolve_host(None, "lo", LOCAL) == "127.0.0.1"


def test_an_interface_without_ipv4_stands_for_its_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmd_worker.agent.addresses._ipv4", lambda name: [])
    assert resolve_host(None, "lo", LOCAL) == "::1"


def test_interfaces_that_cannot_be_used_are_refused_with_those_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--interface ib7: this machine has none of that name, but lo (127.0.0.1" in refusal(None, "ib7")
    assert "leave one of them out" in refusal("127.0.0.1", "lo")
    monkeypatch.setattr("tmd_worker.agent.addresses._ipv4", lambda name: [])
    monkeypatch.setattr("tmd_worker.agent.addresses._ipv6", list)
    assert "--interface lo has no address that peers could reach; this machine has no interface with" in refusal(None, "lo")


# -------------------------------------------------------------------- ports


def test_a_range_of_ports() -> None:
    assert resolve_port_range(None, 8) is None
    assert resolve_port_range("41000-41007", 8) == (41000, 41007)
    assert resolve_port_range("41000-41000", 1) == (41000, 41000)


@pytest.mark.parametrize("given", ["41000", "41000:41007", "41007-41000", "0-10", "65000-65536", "a-b", ""])
def test_what_is_no_range_is_refused(given: str) -> None:
    with pytest.raises(SettingsRefused, match="say FIRST-LAST"):
        resolve_port_range(given, 1)


def test_a_range_that_is_too_small_for_the_node_is_refused() -> None:
    with pytest.raises(SettingsRefused, match="has 4 ports for 8 ranks"):
        resolve_port_range("41000-41003", 8)


# -------------------------------------------------------------------- command line


def chosen(monkeypatch: pytest.MonkeyPatch, *options: str, **environment: str) -> DirectedSettings | str:
    """What the command line would start with, or what it says when it refuses."""
    for name in [name for name in os.environ if name.startswith(("TMD_", "SLURM"))]:
        monkeypatch.delenv(name)
    taken: list[DirectedSettings] = []
    monkeypatch.setattr(command_line, "_run", lambda settings, max_restarts: taken.append(settings) or 0)
    arguments = ["--daemon", "unix:/a", "--job-id", "1", *options, __file__]
    result = CliRunner().invoke(command_line.tmd_run, arguments, env=environment)
    return taken[0] if taken else " ".join(result.output.split())


def test_options_and_environment_choose_address_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = chosen(monkeypatch, "--interface", "lo", "--port-range", "41000-41003")
    assert isinstance(typed, DirectedSettings)
    assert (typed.host, typed.port_range) == ("127.0.0.1", (41000, 41003))
    set_for_all = chosen(monkeypatch, TMD_INTERFACE="lo", TMD_PORT_RANGE="41000-41003")
    assert isinstance(set_for_all, DirectedSettings)
    assert (set_for_all.host, set_for_all.port_range) == ("127.0.0.1", (41000, 41003))


def test_what_is_typed_beats_the_environment_and_two_of_a_kind_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    by_host = chosen(monkeypatch, "--host", "127.0.0.5", TMD_INTERFACE="lo")
    by_interface = chosen(monkeypatch, "--interface", "lo", TMD_HOST="127.0.0.5")
    assert isinstance(by_host, DirectedSettings)
    assert isinstance(by_interface, DirectedSettings)
    assert (by_host.host, by_interface.host) == ("127.0.0.5", "127.0.0.1")
    excluded = "--host 127.0.0.5 and --interface lo both choose an address; leave one of them out"
    assert excluded in chosen(monkeypatch, "--host", "127.0.0.5", "--interface", "lo")
    assert excluded in chosen(monkeypatch, TMD_HOST="127.0.0.5", TMD_INTERFACE="lo")


async def test_every_rank_of_the_node_is_told(rig: Rig, daemon: StandInDaemon) -> None:
    await rig.directed(daemon, options=("--host", "::1", "--port-range", "41000-41003"))
    assert (await daemon.connected()).host == "::1"
    await daemon.direct(spec("i-a", 0), spec("i-s", None, local_rank=1))
    for incarnation in ("i-a", "i-s"):
        welcome = await rig.heard_kind(incarnation, "rank_welcome")
        assert (welcome["host"], welcome["port_range"]) == ("::1", [41000, 41003])
