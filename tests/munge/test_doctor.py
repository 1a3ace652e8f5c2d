"""What `tmctl doctor` says of munge, with a real munged."""

from __future__ import annotations

import signal

from tests.munge.munged import Munged
from tmd.config import Config, DaemonSettings
from tmd.doctor.facts import Facts, SlurmFacts
from tmd.doctor.munge import check_munge
from tmd.munge.library import DEFAULT_SOCKET


def facts(socket: str, *, manager: str = "slurm", auth_info: str | None = None, **daemon: str) -> Facts:
    settings = DaemonSettings(munge_socket=socket, resource_manager=manager, **daemon)  # type: ignore[arg-type]
    slurm = None if auth_info is None else SlurmFacts({"AuthInfo": auth_info}, "")
    return Facts(Config(daemon=settings), slurm=slurm)


def test_a_credential_goes_there_and_back(munged: Munged) -> None:
    (finding,) = check_munge(facts(munged.socket))
    assert (finding.level, munged.socket in finding.seen) == ("ok", True)


def test_a_munged_that_is_gone_or_hangs_is_a_fault_with_a_remedy(munged: Munged) -> None:
    munged.send_signal(signal.SIGSTOP)
    (hangs,) = check_munge(facts(munged.socket))
    assert (hangs.level, "did not answer within 5 s" in hangs.seen) == ("fault", True)
    munged.kill()
    (gone,) = check_munge(facts(munged.socket))
    assert (gone.level, gone.remedy) == ("fault", "start it there: systemctl start munge")


def test_that_slurm_speaks_to_another_munged_is_told(munged: Munged) -> None:
    same = check_munge(facts(munged.socket, auth_info=f"cred_expire=60,socket={munged.socket}"))
    assert [finding.level for finding in same] == ["ok"]
    for auth_info, place in (("socket=/opt/munge.socket", "/opt/munge.socket"), ("", DEFAULT_SOCKET)):
        _, finding = check_munge(facts(munged.socket, auth_info=auth_info))
        assert finding.level == "warning"
        assert f'munge_socket = "{place}"' in finding.remedy


def test_where_nobody_needs_munge_it_is_left_out() -> None:
    for manager, daemon in (("local", {}), ("none", {"listen": ":7070", "tcp_auth": "token"})):
        (finding,) = check_munge(facts("/nonexistent", manager=manager, **daemon))
        assert finding.level == "skipped"
    (finding,) = check_munge(facts("/nonexistent", manager="none", listen=":7070"))
    assert finding.level == "fault"
