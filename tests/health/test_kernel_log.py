"""Lines of kernels and drivers as they write them: what is wrong is found, how bad it is, and where; the rest is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tmd_worker.health import kernel_log

SAMPLES = Path(__file__).with_name("samples")
UPTIME_S = 1010.0


def tree(folder: Path, sample: str, uptime_s: float = UPTIME_S) -> Path:
    """A root directory whose kernel has written that."""
    (folder / "dev").mkdir()
    (folder / "proc").mkdir()
    (folder / "dev" / "kmsg").write_bytes((SAMPLES / f"{sample}.kmsg").read_bytes())
    (folder / "proc" / "uptime").write_text(f"{uptime_s:.2f} 12345.67\n")
    return folder


def found(folder: Path, sample: str, since_s: float = 900.0) -> set[tuple[str, str, str]]:
    return {(each.check, each.part, each.severity) for each in kernel_log.look(tree(folder, sample), since_s)}


def test_a_healthy_log_says_nothing(tmp_path: Path) -> None:
    assert found(tmp_path, "healthy", since_s=1e9) == set()


def test_gpus_by_their_xids(tmp_path: Path) -> None:
    """Xid 31 is the fault of a program, and of no GPU."""
    assert found(tmp_path, "gpu") == {
        ("gpu.xid", "0000:3b:00", "fatal"),
        ("gpu.xid", "0000:b3:00.0", "fatal"),
        ("gpu.xid", "0000:af:00", "error"),
        ("gpu.xid", "0000:d8:00", "fatal"),
        ("gpu.xid", "0000:18:00", "warning"),
    }


def test_memory_by_what_could_be_corrected(tmp_path: Path) -> None:
    assert found(tmp_path, "memory") == {
        ("memory.ecc", "MC0", "warning"),
        ("memory.ecc", "MC1", "fatal"),
        ("memory.ecc", "", "warning"),
        ("memory.poison", "0x123456", "error"),
        ("cpu.machine-check", "CPU4", "error"),
        ("cpu.machine-check", "", "error"),
        ("memory.oom", "", "warning"),
    }


def test_devices(tmp_path: Path) -> None:
    assert found(tmp_path, "devices") == {
        ("pcie.error", "0000:af:00.0", "fatal"),
        ("pcie.error", "0000:16:02.0", "warning"),
        ("nic.firmware", "0000:5e:00.0", "fatal"),
        ("disk.io", "sdb", "error"),
        ("disk.io", "nvme1", "error"),
        ("disk.filesystem", "sda2", "fatal"),
        ("disk.filesystem", "nvme2n1", "fatal"),
        ("thermal.throttle", "CPU12", "warning"),
        ("cpu.stall", "CPU#17", "error"),
    }


def test_the_worst_and_newest_line_stands_for_all_of_a_part(tmp_path: Path) -> None:
    (mc0,) = (each for each in kernel_log.look(tree(tmp_path, "memory"), 900.0) if each.part == "MC0")
    assert mc0.reason.startswith("EDAC MC0: 2 CE memory scrubbing error")
    assert mc0.reason.endswith("(2 in the log)")


def test_what_is_long_ago_counts_no_more(tmp_path: Path) -> None:
    assert found(tmp_path, "gpu", since_s=5.5) == {("gpu.xid", "0000:18:00", "warning"), ("gpu.xid", "0000:d8:00", "fatal")}


@pytest.mark.parametrize("rubbish", ["", "no record", "6,1", "6,1,x,-;text", " KEY=value", "6,1,2,-;" + "x" * 10_000])
def test_what_is_no_record_is_passed_over(rubbish: str) -> None:
    assert [each.text for each in kernel_log.records(rubbish, 1.0)] == ([rubbish[8:]] if rubbish.startswith("6,1,2") else [])


def test_every_rule_has_a_sample() -> None:
    text = "".join(path.read_text() for path in SAMPLES.glob("*.kmsg"))
    messages = [each.text for each in kernel_log.records(text, UPTIME_S)]
    silent = [rule.pattern.pattern for rule in kernel_log.RULES if not any(rule.pattern.search(each) for each in messages)]
    assert silent == []
