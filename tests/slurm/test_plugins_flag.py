"""`--standby=N`: how it is given, and what is refused with which words."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.files import other_slurm, plugin_dir
from tests.slurm.plugins import fields, finished, make

REFUSED_BY_SUBMISSION = {
    ("--standby=x", "-N1"): "expected the number of standby nodes",
    ("--standby=", "-N1"): "expected the number of standby nodes",
    ("--standby=-1", "-N1"): "expected the number of standby nodes",
    ("--standby=1x", "-N1"): 'expected a number, and ":pool" after it or nothing',
    ("--standby=1:pond", "-N1"): 'the only one is "pool"',
    ("--standby=1025", "-N1"): "more than 1024",
    ("--standby=1",): "give -N, as in -N 2",
    ("--standby=1", "-n4"): "-n alone does not say how many nodes",
    ("--standby=3", "-N2"): "2 nodes and 3 on standby are 5, but partition debug gives a job at most 4",
    ("--standby=1", "-N2", "-psmall"): "2 nodes and 1 on standby are 3, but partition small gives a job at most 2",
    ("--standby=1", "-N4", "-psmall,debug"): "small gives a job at most 2 and partition debug gives a job at most 4",
    ("--standby=1", "-N1-2", "-n4"): "give one number to -N",
    ("--standby=1", "-N1", "-n4", "--ntasks-per-node=2"): "-n is more than --ntasks-per-node times -N",
    ("--standby=1", "-N2", "--gpus=2"): "use --gpus-per-node or --gres",
    ("--standby=1", "-N2", "--gpus-per-node=1", "--ntasks-per-gpu=1"): "use --ntasks-per-node",
    ("--standby=1", "-N1", "--dependency=expand:1"): "a job that expands another one",
    ("--standby=1", "-N1", ":", "-N1"): "heterogeneous jobs",
    ("--comment=tmd:standby=x", "-N1"): "expected a number of nodes",
    ("--comment=tmd:standby=1:pond", "-N1"): "expected a number of nodes",
    ("--comment=tmd:standby=1025", "-N1"): "more than 1024",
    ("--comment=for me, tmd:standby=4", "-N1"): "1 nodes and 4 on standby are 5",
}


@pytest.mark.parametrize("program", ["sbatch", "salloc", "srun"])
def test_help_shows_the_option(standby_cluster: SlurmCluster, program: str) -> None:
    text = standby_cluster.run(program, "--help").stdout
    assert "--standby=N[:pool]" in text
    assert "keep N nodes on standby" in text


@pytest.mark.parametrize("options", REFUSED_BY_SUBMISSION, ids=" ".join)
def test_sbatch_refuses_nonsense_and_says_why(standby_cluster: SlurmCluster, options: tuple[str, ...]) -> None:
    done = standby_cluster.run("sbatch", *options, stdin="#!/bin/bash\ntrue\n", check=False)
    assert done.returncode != 0
    assert REFUSED_BY_SUBMISSION[options] in done.stderr
    assert standby_cluster.run("squeue", "-h").stdout == ""


def test_tasks_that_have_their_nodes_named_are_refused(standby_cluster: SlurmCluster) -> None:
    """By tmd, and on 25.11 by sbatch itself as soon as there is -N."""
    options = ("--standby=1", "-N2", "-n2", "-w", "n1,n2", "-marbitrary")
    done = standby_cluster.run("sbatch", *options, "--wrap=true", check=False)
    assert done.returncode != 0
    assert re.search("names the node of each task|--nodes is incompatible with --distribution=arbitrary", done.stderr)


def test_sbatch_takes_the_flag_from_the_script(standby_cluster: SlurmCluster) -> None:
    job = standby_cluster.run(
        "sbatch", "--parsable", "-o/dev/null", stdin="#!/bin/bash\n#SBATCH -N 2 --standby=1\nsleep 100\n"
    ).stdout.strip()
    assert fields(standby_cluster, job)["AdminComment"] == "tmd:standby=1;nodes=2"


def test_the_command_line_outweighs_the_script_and_0_takes_the_flag_back(standby_cluster: SlurmCluster) -> None:
    script = "#!/bin/bash\n#SBATCH -N 1 --standby=2\nenv\n"
    jobs = {
        count: standby_cluster.run("sbatch", "--parsable", "-H", f"--standby={count}", stdin=script).stdout.strip()
        for count in (0, 1)
    }
    assert fields(standby_cluster, jobs[1])["AdminComment"] == "tmd:standby=1;nodes=1"
    plain = fields(standby_cluster, jobs[0])
    assert "AdminComment" not in plain
    assert plain["NumNodes"] == "1-1"


def test_srun_refuses_the_flag_outside_and_inside_a_job(standby_cluster: SlurmCluster) -> None:
    outside = standby_cluster.run("srun", "--standby=1", "-N1", "true", check=False)
    inside = standby_cluster.run("salloc", "-N1", "srun", "--standby=1", "true", check=False)
    by_comment = standby_cluster.run("srun", "--comment=tmd:standby=1", "-N1", "true", check=False)
    for done in (outside, inside, by_comment):
        assert done.returncode != 0
        assert "sbatch" in done.stderr
        assert "srun would start ranks on" in done.stderr


def test_salloc_says_that_it_shows_all_nodes(standby_cluster: SlurmCluster) -> None:
    done = standby_cluster.run("salloc", "--standby=1", "-N1", "bash", "-c", "env; srun -N1 hostname")
    assert "1 nodes and 1 on standby are allocated, and salloc shows you all of them: give srun -N 1" in done.stderr
    assert "TMD_STANDBY=1\n" in done.stdout
    assert "SLURM_NNODES=2\n" in done.stdout


@pytest.fixture
def without_spank(standby_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The same cluster, as if spank_tmd.so were not installed: steps and commands read plugstack.conf anew."""
    path = standby_cluster.places.etc / "plugstack.conf"
    text = path.read_text()
    path.write_text("")
    yield standby_cluster
    path.write_text(text)


def test_without_the_option_a_comment_does(without_spank: SlurmCluster) -> None:
    """The script sees all nodes, but also how many of them are its own."""
    assert "--standby" not in without_spank.run("sbatch", "--help").stdout
    printed = finished(without_spank, "env; scontrol show job $SLURM_JOB_ID", "-N2", "--comment=tmd:standby=1")
    assert {"TMD_STANDBY=1", "TMD_NNODES=2", "SLURM_NNODES=3"} <= set(printed.splitlines())
    assert "AdminComment=tmd:standby=1;nodes=2" in printed


def test_a_comment_is_as_good_as_the_option(standby_cluster: SlurmCluster) -> None:
    printed = finished(standby_cluster, "env", "-N2", "--comment=tmd:standby=1")
    assert {"TMD_STANDBY=1", "SLURM_NNODES=2", "TMD_ALLOC_NODES=3"} <= set(printed.splitlines())


def test_standby_from_the_pool_adds_no_node(standby_cluster: SlurmCluster) -> None:
    printed = finished(standby_cluster, "env; scontrol show job $SLURM_JOB_ID", "-N2", "--standby=7:pool")
    lines = set(printed.splitlines())
    assert {"TMD_STANDBY_POOL=7", "TMD_NNODES=2", "SLURM_NNODES=2", "SLURM_NO_KILL=set"} <= lines
    assert not [line for line in lines if line.startswith(("TMD_STANDBY=", "TMD_ALLOC_"))]
    assert "AdminComment=tmd:standby=7;nodes=2;pool" in printed


def test_the_size_of_a_waiting_job_stays_as_submitted(standby_cluster: SlurmCluster) -> None:
    job = standby_cluster.sbatch("true", "-H", "-N2", "--standby=1")
    done = standby_cluster.run("scontrol", "update", f"jobid={job}", "NumNodes=4", check=False)
    assert done.returncode != 0
    assert fields(standby_cluster, job)["NumNodes"] == "3-3"
    standby_cluster.run("scontrol", "update", f"jobid={job}", "TimeLimit=5")


def test_a_flag_that_no_lua_has_dealt_with_is_refused(
    standby_cluster: SlurmCluster, write_site_script: Callable[[str], None]
) -> None:
    """Rather than that the job runs without the nodes that it was promised."""
    write_site_script(
        "function slurm_job_submit() return slurm.SUCCESS end\n"
        "function slurm_job_modify() return slurm.SUCCESS end\nreturn slurm.SUCCESS\n"
    )
    refused = standby_cluster.run("sbatch", "-N1", "--standby=1", "--wrap=true", check=False)
    assert refused.returncode != 0
    assert "not supported" in refused.stderr
    assert "no job_submit.lua has dealt with that" in (standby_cluster.places.log / "slurmctld.log").read_text()
    standby_cluster.sbatch("true", "-N1")


def test_a_script_of_the_site_calls_ours(standby_cluster: SlurmCluster, write_site_script: Callable[[str], None]) -> None:
    ours = standby_cluster.places.etc / "tmd_standby.lua"
    write_site_script(
        f"""
        local tmd = dofile("{ours}")
        function slurm_job_submit(job, partitions, uid)
            job.admin_comment = "site was here"
            return tmd.submit(job, partitions, uid)
        end
        function slurm_job_modify(change, job, partitions, uid)
            return tmd.modify(change, job, partitions, uid)
        end
        return slurm.SUCCESS
        """
    )
    flagged, plain = standby_cluster.sbatch("true", "-H", "-N1", "--standby=1"), standby_cluster.sbatch("true", "-H", "-N1")
    text = standby_cluster.run("scontrol", "show", "job", flagged).stdout
    assert re.findall(r"AdminComment=(.*?) *$", text, re.MULTILINE) == ["site was here tmd:standby=1;nodes=1"]
    text = standby_cluster.run("scontrol", "show", "job", plain).stdout
    assert re.findall(r"AdminComment=(.*?) *$", text, re.MULTILINE) == ["site was here"]


def test_the_plugins_load_with_every_symbol_there(plugin_folder: Path) -> None:
    """A symbol that is missing in slurmstepd would end every batch step of the node."""
    make("check", f"BUILD={plugin_folder}")
    ctypes.CDLL(str(plugin_dir(other_slurm()) / "libslurmfull.so"), mode=ctypes.RTLD_GLOBAL)
    for name in ("spank_tmd.so", "job_submit_tmd.so"):
        assert ctypes.CDLL(str(plugin_folder / name)).plugin_name


def test_what_is_read_and_written_as_text_stands_arbitrary_bytes(plugin_folder: Path) -> None:
    assert "nothing wrong" in make("fuzz-check", f"BUILD={plugin_folder}")


def test_install_puts_nothing_in_the_way_of_what_is_there(tmp_path: Path, plugin_folder: Path) -> None:
    make("install", f"BUILD={plugin_folder}", f"DESTDIR={tmp_path}", "CONF_DIR=/etc/slurm")
    slurm = plugin_dir(other_slurm())
    installed = {f"/{path.relative_to(tmp_path)}" for path in tmp_path.rglob("*") if path.is_file()}
    assert installed == {
        f"{slurm}/spank_tmd.so",
        f"{slurm}/job_submit_tmd.so",
        "/etc/slurm/tmd_standby.lua",
        "/etc/slurm/tmd/job_submit.lua",
        "/etc/slurm/tmd/plugstack.conf",
        "/etc/slurm/tmd/slurm.conf",
    }


def test_another_slurm_than_the_system_s_gets_them_into_its_own_folder(tmp_path: Path, plugin_folder: Path) -> None:
    prefix = tmp_path / "slurm"
    (prefix / "lib").mkdir(parents=True)
    (prefix / "include").symlink_to((other_slurm() or Path("/usr")) / "include")
    (prefix / "lib" / "slurm").symlink_to(plugin_dir(other_slurm()))
    make("install", f"BUILD={plugin_folder}", f"SLURM_PREFIX={prefix}", f"DESTDIR={tmp_path / 'image'}", "CONF_DIR=/etc/slurm")
    installed = tmp_path / "image" / (prefix / "lib" / "slurm").relative_to("/")
    assert {path.name for path in installed.iterdir()} == {"spank_tmd.so", "job_submit_tmd.so"}
