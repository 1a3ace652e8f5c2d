"""Slurm's side of an installation, judged by what 22.05 has printed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.sample import CONFIG_22_05, FACTS, daemon, slurm
from tmd.config import Config
from tmd.doctor.asking import Output
from tmd.doctor.clock import check_clock, off_by_s
from tmd.doctor.facts import Facts, SlurmFacts, parse_clock
from tmd.doctor.findings import Finding
from tmd.doctor.slurm_parameters import check_parameters
from tmd.doctor.slurm_plugins import SPANK, check_events, check_job_submit, has_option, spank_file
from tmd.doctor.slurm_pool import check_growth, check_pool
from tmd.doctor.slurm_rights import check_rights, judge_level
from tmd.doctor.slurm_version import check_version
from tmd.nodes.slurm.configuration import parse_config
from tmd.nodes.slurm.records import SlurmJob, SlurmReservation
from tmd.nodes.slurm.settings import SlurmSettings


def parameters(**changes: str) -> dict[str, Finding]:
    """By point."""
    return {finding.point: finding for finding in check_parameters(FACTS, slurm(**changes))}


def test_slurm_s_configuration_is_read_without_what_has_no_value() -> None:
    config = parse_config(CONFIG_22_05)
    assert config["SLURM_VERSION"] == "22.05.8"
    assert config["SchedulerParameters"] == "permit_job_expansion,bf_interval=5,sched_interval=5"
    assert config["SlurmctldHost[0]"] == "head(127.0.0.1)"
    assert "PlugStackConfig" not in config
    assert slurm().slurm_user == ("slurm", 64030)
    assert slurm().plugin_dirs == (Path("/usr/lib/x86_64-linux-gnu/slurm-wlm"),)
    assert parse_clock("Configuration data as of 2026-11-30T09:52:04\n") is None


# -------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("told", "level"), [("22.05.8", "ok"), ("25.11.0", "ok"), ("23.02.1", "warning"), ("21.08.3", "fault"), ("", "fault")]
)
def test_versions_are_tried_untried_or_too_old(told: str, level: str) -> None:
    finding, *_ = check_version(FACTS, slurm(SLURM_VERSION=told))
    assert finding.level == level


def test_commands_of_another_version_than_slurmctld_are_told() -> None:
    _, finding = check_version(FACTS, slurm(SLURM_VERSION="25.11.0"))
    assert finding.level == "warning"
    assert "slurm-wlm 22.05.8, slurmctld of 25.11.0" in finding.seen
    assert "bin_dir" in finding.remedy


# -------------------------------------------------------------------- the pool


def pooled(**changes: Any) -> Facts:
    """A configuration that names the reservation `standby`."""
    return Facts(Config(slurm=SlurmSettings(standby_reservation="standby", **changes)))


def test_how_jobs_grow_is_said_with_the_reason() -> None:
    def growth(facts: Facts, **changes: str) -> Finding:
        (finding,) = check_growth(facts, slurm(**changes))
        return finding

    assert "--standby=N gave it" in growth(FACTS).seen
    assert "by expansion: this Slurm permits it" in growth(pooled()).seen
    assert "by companion jobs: SchedulerParameters lacks permit_job_expansion" in (
        growth(pooled(), SchedulerParameters="bf_interval=5").seen
    )
    forced = growth(pooled(growth="expansion"), GresTypes="gpu")
    assert forced.level == "fault"
    assert "GresTypes=gpu" in forced.seen
    assert "companion" in forced.remedy


def reservation(**changes: Any) -> SlurmReservation:
    values: dict[str, Any] = {"name": "standby", "start_s": 0.0, "end_s": 4e9, "nodes": ("n5", "n6"), "flags": ("IGNORE_JOBS",)}
    return SlurmReservation(**{**values, "users": ("alice",), "state": "ACTIVE", **changes})


@pytest.mark.parametrize(
    ("found", "level", "says"),
    [
        ((reservation(),), "ok", "standby has 2 nodes"),
        ((reservation(name="other"),), "fault", "there is no reservation standby"),
        ((reservation(end_s=1.0),), "fault", "has ended"),
        ((reservation(start_s=3.9e9),), "warning", "has not begun"),
        ((reservation(nodes=()),), "fault", "has no node"),
    ],
)
def test_the_reservation_is_looked_at(found: tuple[SlurmReservation, ...], level: str, says: str) -> None:
    finding, *_ = check_pool(pooled(), dataclasses.replace(slurm(), reservations=found))
    assert finding.level == level
    assert says in finding.seen
    assert level == "ok" or "reservation" in finding.remedy


def test_whose_jobs_may_not_use_the_reservation_is_said_by_name() -> None:
    job = SlurmJob(
        job_id="7",
        state="RUNNING",
        uid=1000,
        user="bob",
        restart_count=0,
        end_s=None,
        batch_host="n1",
        nodes=("n1", "n2"),
        reason="",
        admin_comment="tmd:standby=1;nodes=2;pool",
    )
    slurmctld = dataclasses.replace(slurm(), jobs=(job,), reservations=(reservation(),))
    _, finding = check_pool(pooled(), slurmctld)
    assert "is for alice, not for bob (job 7)" in finding.seen
    assert "Users+=bob" in finding.remedy
    by_account = dataclasses.replace(slurmctld, reservations=(reservation(accounts=("lab",)),))
    assert [finding.level for finding in check_pool(pooled(), by_account)] == ["ok"], "Slurm alone knows"
    (finding,) = check_pool(FACTS, slurmctld)
    assert "counts on a pool of nodes" in finding.seen


# -------------------------------------------------------------------- parameters


def test_a_good_configuration_has_nothing_to_complain_of() -> None:
    found = parameters(HealthCheckProgram="/opt/tmd/bin/tmd-health", HealthCheckInterval="60 sec")
    assert {finding.level for finding in found.values()} == {"ok"}


def test_a_missing_parameter_is_added_to_those_that_are_there() -> None:
    finding = parameters(SchedulerParameters="bf_interval=5,disable_job_shrink")["expansion"]
    assert finding.level == "fault"
    assert "SchedulerParameters=bf_interval=5,permit_job_expansion in /etc/slurm/slurm.conf" in finding.remedy


@pytest.mark.parametrize(
    ("point", "level", "changes"),
    [
        ("expansion", "fault", {"SchedulerParameters": ""}),
        ("resizing", "fault", {"SchedulerParameters": "permit_job_expansion,disable_job_shrink"}),
        ("resizing", "warning", {"AccountingStorageType": "accounting_storage/none"}),
        ("resizing", "ok", {"AccountingStorageType": "accounting_storage/none", "SLURM_VERSION": "25.11.0"}),
        ("lost ranks", "ok", {"KillOnBadExit": "1"}),
        ("lost ranks", "warning", {"KillOnBadExit": "1", "JobSubmitPlugins": ""}),
        ("lost nodes", "warning", {"SlurmdTimeout": "0 sec"}),
        ("lost nodes", "warning", {"SlurmdTimeout": "3600 sec"}),
        ("lost nodes", "ok", {"SlurmdTimeout": "300 sec"}),
        ("health", "warning", {}),
        ("health", "warning", {"HealthCheckProgram": "/usr/sbin/nhc", "HealthCheckInterval": "60 sec"}),
        ("health", "warning", {"HealthCheckProgram": "/opt/tmd/bin/tmd-health", "HealthCheckInterval": "0 sec"}),
    ],
)
def test_parameters(point: str, level: str, changes: dict[str, str]) -> None:
    finding = parameters(**changes)[point]
    assert finding.level == level
    assert bool(finding.remedy) == (level != "ok")


# -------------------------------------------------------------------- plugins


@pytest.mark.parametrize(
    ("plugins", "remedy"),
    [("", "JobSubmitPlugins=lua,tmd,"), ("lua", "JobSubmitPlugins=lua,tmd,"), ("site,tmd", "JobSubmitPlugins=site,lua,tmd,")],
)
def test_a_plugin_that_slurmctld_does_not_load_is_named_with_the_line_that_is_wanted(plugins: str, remedy: str) -> None:
    finding, *_ = check_job_submit(FACTS, slurm(JobSubmitPlugins=plugins))
    assert finding.level == "fault"
    assert remedy in finding.remedy


def test_lua_comes_before_tmd() -> None:
    finding, *_ = check_job_submit(FACTS, slurm(JobSubmitPlugins="tmd,lua"))
    assert (finding.level, "before lua" in finding.seen) == ("fault", True)


def test_what_slurmctld_s_plugins_read_is_looked_at(tmp_path: Path) -> None:
    here = slurm(SLURM_CONF=str(tmp_path / "slurm.conf"), PluginDir=str(tmp_path))

    def faults() -> list[str]:
        return [finding.seen for finding in check_job_submit(FACTS, here) if finding.level == "fault"]

    assert [seen.partition(" ")[0] for seen in faults()] == ["job_submit_tmd.so", f"{tmp_path}/job_submit.lua"]
    (tmp_path / "job_submit_tmd.so").touch()
    (tmp_path / "job_submit.lua").write_text("function slurm_job_submit() return slurm.SUCCESS end")
    assert faults() == [f"{tmp_path}/job_submit.lua does not call tmd"]
    (tmp_path / "job_submit.lua").write_text('local tmd = dofile("/etc/slurm/tmd_standby.lua")')
    assert faults() == [f"{tmp_path}/job_submit.lua calls tmd_standby.lua, which is not beside it"]
    (tmp_path / "tmd_standby.lua").touch()
    assert faults() == []


def test_the_spank_plugin_is_found_through_included_files(tmp_path: Path) -> None:
    plugstack, plugins = tmp_path / "plugstack.conf", tmp_path / "plugins"
    plugins.mkdir()
    assert spank_file(plugstack, [plugins]) == f"{plugstack} cannot be read: No such file or directory"
    plugstack.write_text(f"# optional {SPANK}\nrequired other.so x=1\ninclude plugstack.d/*.conf\n")
    assert spank_file(plugstack, [plugins]) == f"{plugstack} does not name {SPANK}: sbatch has no --standby"
    (tmp_path / "plugstack.d").mkdir()
    (tmp_path / "plugstack.d" / "tmd.conf").write_text(f"optional {SPANK}\n")
    assert spank_file(plugstack, [plugins]) == f"{SPANK} is in no directory of PluginDir ({plugins})"
    (plugins / SPANK).touch()
    assert spank_file(plugstack, [tmp_path, plugins]) == plugins / SPANK
    plugstack.write_text(f"include {plugstack}\noptional {plugins / SPANK}\n")
    assert spank_file(plugstack, []) == plugins / SPANK


def test_sbatch_s_help_is_the_proof_that_the_plugin_is_loaded() -> None:
    plugin = Path("/usr/lib/slurm/spank_tmd.so")
    help_text = "Options provided by plugins:\n      --standby=N[:pool]      nodes to stand by\n"
    assert has_option(Output(0, help_text, ""), plugin).level == "ok"
    finding = has_option(Output(0, "      --nice\n", "sbatch: error: undefined symbol: spank_x\n"), plugin)
    assert finding.level == "fault"
    assert "undefined symbol: spank_x" in finding.seen


def test_node_events_that_nobody_hears_are_told() -> None:
    assert [finding.level for finding in check_events(FACTS, slurm())] == ["warning"]
    heard = Facts(Config(slurm=SlurmSettings(hint_socket="/run/tmd/hints.sock")))
    assert list(check_events(heard, slurm())) == []
    assert list(check_events(FACTS, slurm(JobSubmitPlugins="lua"))) == []


# -------------------------------------------------------------------- rights and clock


@pytest.mark.parametrize(
    ("answer", "level", "words"),
    [
        (Output(0, "tmd|Administrator\n", ""), "ok", ""),
        (Output(0, "tmd|Operator\n", ""), "warning", "set adminlevel=Admin"),
        (Output(0, "tmd|None\n", ""), "fault", "sacctmgr modify user tmd set adminlevel=Admin"),
        (Output(0, "", ""), "fault", "sacctmgr add user tmd account=ACCOUNT adminlevel=Admin"),
        (Output(0, "tmd-root|Administrator\n", ""), "fault", "sacctmgr add user tmd"),
        (Output(1, "", "sacctmgr: error: slurmdbd: Connection refused\n"), "fault", "slurmdbd"),
    ],
)
def test_levels(answer: Output, level: str, words: str) -> None:
    finding = judge_level("tmd", answer)
    assert finding.level == level
    assert words in finding.remedy


def test_root_and_slurm_s_user_need_no_level_and_without_slurmdbd_nobody_has_one() -> None:
    def level(uid: int, found: SlurmFacts) -> str:
        (finding,) = check_rights(Facts(Config(), daemon(uid)), found)
        return finding.level

    without = slurm(AccountingStorageType="accounting_storage/none")
    assert level(0, without) == "ok"
    assert level(64030, without) == "ok"
    assert level(4711, without) == "fault"
    (finding,) = check_rights(Facts(Config()), slurm())
    assert finding.level == "skipped"


def test_clocks_are_off_by_what_is_sure() -> None:
    assert off_by_s(100, 100.9, 101.3) == 0
    assert off_by_s(100, 99.9, 100.0) == 0
    assert off_by_s(100, 104.0, 104.1) == pytest.approx(3.0)
    assert off_by_s(100, 90.0, 90.5) == pytest.approx(9.5)
    (finding,) = check_clock(FACTS, slurm())
    assert finding.level == "ok"
    for late_s, level in ((10, "warning"), (40, "fault")):
        (finding,) = check_clock(FACTS, SlurmFacts({}, "", clock_s=1000, asked_s=(1000.0 + late_s, 1000.0 + late_s)))
        assert finding.level == level
    (finding,) = check_clock(FACTS, SlurmFacts({}, ""))
    assert finding.level == "skipped"
