"""The command line of `tmd-run`: torchrun's flags, and where the daemon is."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

import tmd
from tmd_worker.agent import directed, identity, plain
from tmd_worker.agent.addresses import resolve_host, resolve_port_range
from tmd_worker.agent.environment import rank_environment
from tmd_worker.agent.first_process import step_aside
from tmd_worker.agent.logs import LogPump
from tmd_worker.agent.proof import resolve_proof
from tmd_worker.agent.settings import (
    CheckSettings,
    DaemonAddress,
    DirectedSettings,
    LogSettings,
    PlainSettings,
    SettingsRefused,
    StreamChoice,
    default_run_id,
    file_name,
    read_token,
    resolve_job_id,
    resolve_launch,
    resolve_nnodes,
    resolve_node_index,
    resolve_nproc,
    resolve_step,
    resolve_transport,
)
from tmd_worker.agent.slurm import LAUNCHED
from tmd_worker.native import library

#: Where rank 0's store listens if nobody says otherwise, as in torchrun.
DEFAULT_MASTER_PORT = 29500
#: A check speaks of a job whose ranks can replace one another.
LEAST_RANKS_CHECKED = 2
#: The agent itself is broken (EX_SOFTWARE).
EXIT_BROKEN = 70

EXAMPLES = """
\b
Examples:
  tmd-run --standalone --nproc-per-node 4 train.py --lr 0.1
      four ranks on this machine, no daemon
  srun tmd-run --nproc-per-node 8 train.py
      in a job script; the daemon's address comes from TMD_DAEMON
  tmd-run --nnodes 2 --node-rank 0 --master-addr n1 -m my.trainer
      two nodes without a daemon; on the other node --node-rank 1
  tmd-run --check train.py --lr 0.1
      no training: does session.track know of everything that train.py changes?
"""


@click.command(
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "max_content_width": 110,
    },
    epilog=EXAMPLES,
)
@click.option("--nnodes", metavar="N[:M]", help="Nodes that train (of N:M the N is taken). [default: Slurm's count, or 1]")
@click.option("--nproc-per-node", default="1", show_default=True, metavar="N|auto|gpu|cpu", help="Ranks on each node.")
@click.option("--standalone", is_flag=True, help="One node, no daemon, whatever TMD_DAEMON says.")
@click.option("--check", is_flag=True,
              help="Start no job: build, take two steps in one process, and name state that was not tracked.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="With --check: the findings as one JSON object.")
@click.option("--standby", type=click.IntRange(0), default=0, envvar="TMD_STANDBY", metavar="N",
              help="Of the nodes that Slurm gave, how many stand by. [env: TMD_STANDBY]")  # fmt: skip
@click.option("-m", "--module", is_flag=True, help="The script is a module's name, as in python -m.")
@click.option("--no-python", is_flag=True, help="The script is a program, not Python.")
@click.option("--log-dir", metavar="DIR", help="Write each rank's output to files below DIR as well.")
@click.option(
    "-r", "--redirects", metavar="WHAT", help="Only to files: 0 none, 1 stdout, 2 stderr, 3 both; or 0:3,1:1 per local rank."
)
@click.option("-t", "--tee", metavar="WHAT", help="To files and to the terminal; same form as --redirects.")
@click.option("--daemon", envvar="TMD_DAEMON", metavar="ADDRESS",
              help="unix:/path or http://host:port. [env: TMD_DAEMON; without it: a plain launcher]")  # fmt: skip
@click.option("--job-id", envvar="TMD_JOB_ID", metavar="ID", help="[env: TMD_JOB_ID; default: Slurm's job id]")
@click.option(
    "--node", envvar=["TMD_NODE", "SLURMD_NODENAME"], metavar="NAME", help="[env: TMD_NODE; default: Slurm's, the host's name]"
)
@click.option(
    "--node-index", type=click.IntRange(0), envvar="TMD_NODE_INDEX", metavar="I", help="[env: TMD_NODE_INDEX; default: Slurm's]"
)
@click.option("--host", "--local-addr", envvar="TMD_HOST", metavar="ADDR",
              help="Address or name that the ranks listen on. [env: TMD_HOST; default: on the way to the daemon]")  # fmt: skip
@click.option("--interface", envvar="TMD_INTERFACE", metavar="NAME",
              help="Network interface whose address they listen on, instead of --host. [env: TMD_INTERFACE]")  # fmt: skip
@click.option("--port-range", envvar="TMD_PORT_RANGE", metavar="FIRST-LAST",
              help="Ports that they listen on, for firewalls. [env: TMD_PORT_RANGE; default: any free port]")  # fmt: skip
@click.option("--transport", envvar="TMD_TRANSPORT", default="delta", metavar="NAME",
              help="What carries collectives: delta (tmd's own links) or gloo. [env: TMD_TRANSPORT; default: delta]")  # fmt: skip
@click.option(
    "--label",
    multiple=True,
    metavar="KEY=VALUE",
    help="Where this node is: rack=r1. May be repeated. [env: TMD_LABELS, by commas]",
)
@click.option(
    "--token-file", envvar="TMD_TOKEN_FILE", metavar="FILE", help="Proof of the job's owner over TCP. [env: TMD_TOKEN_FILE]"
)
@click.option("--auth", type=click.Choice(["auto", "munge", "token"]), default="auto", envvar="TMD_AUTH",
              help="How to prove the job's owner over TCP; auto: munge where libmunge is, a token as well if one is given. "
              "[env: TMD_AUTH; default: auto]")  # fmt: skip
@click.option("--munge-socket", envvar="TMD_MUNGE_SOCKET", default="", metavar="PATH",
              help="Socket of this node's munged. [env: TMD_MUNGE_SOCKET; default: libmunge's own]")  # fmt: skip
@click.option("--daemon-user", envvar="TMD_DAEMON_USER", metavar="NAME|UID",
              help="Whom to obey by munge, beside root and yourself. [env: TMD_DAEMON_USER; default: tmd]")  # fmt: skip
@click.option("--srun-options", envvar="TMD_SRUN_OPTIONS", default="", metavar="OPTIONS",
              help="Of the srun that starts further agents, a container's for example. [env: TMD_SRUN_OPTIONS]")  # fmt: skip
@click.option(
    "--node-rank", type=click.IntRange(0), metavar="I", help="This node's number, without a daemon. [default: Slurm's, or 0]"
)
@click.option("--master-addr", metavar="ADDR", help="Address of rank 0's node, without a daemon.")
@click.option("--master-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of rank 0's store, without a daemon.")
@click.option("--rdzv-endpoint", metavar="HOST[:PORT]", help="Same as --master-addr and --master-port.")
@click.option("--rdzv-id", metavar="ID", help="Name of the run; with a daemon the job id, if that is not given.")
@click.option("--rdzv-backend", metavar="NAME", help="Accepted; ranks meet through the daemon, or at the master's address.")
@click.option("--max-restarts", type=int, default=0, metavar="N",
              help="Accepted; a lost rank is replaced by a standby, never by a restart of all.")  # fmt: skip
@click.option("--rdzv-conf", "--monitor-interval", "--start-method", "--role", "ignored", hidden=True, multiple=True)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=lambda *given: _show_version(*given),
              help="Show the version, and what moves the bytes of collectives on this machine.")  # fmt: skip
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS...]")
def tmd_run(**options: Any) -> None:
    """Starts this node's ranks of a training job and keeps them what the tmd daemon wants them to be.

    Takes torchrun's flags. Without a daemon it is a plain launcher: the first rank that fails ends the others.
    """
    try:
        settings = _settings(options)
    except SettingsRefused as refused:
        raise click.UsageError(str(refused)) from None
    if isinstance(settings, CheckSettings):
        _become_check(settings)
    sys.exit(_run(settings, max_restarts=options["max_restarts"]))


def main() -> None:
    step_aside()
    tmd_run(prog_name="tmd-run")


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"tmd-run, version {tmd.__version__}, {library.core().description}")
        context.exit()


# -------------------------------------------------------------------- settings


def _settings(options: dict[str, Any]) -> DirectedSettings | PlainSettings | CheckSettings:
    if options["check"]:
        return _check_settings(options)
    if options["as_json"]:
        raise SettingsRefused("--json is the form of what --check says; give --check as well, or leave it out")
    if options["standalone"]:
        return _standalone_settings(options)
    return _directed_settings(options) if options["daemon"] else _plain_settings(options)


def _directed_settings(options: dict[str, Any]) -> DirectedSettings:
    launch = resolve_launch(options["command"], module=options["module"], no_python=options["no_python"])
    daemon = DaemonAddress.parse(options["daemon"])
    job_id = resolve_job_id(options["job_id"] or options["rdzv_id"], os.environ)
    if job_id is None:
        raise SettingsRefused(
            "no job id: outside Slurm the nodes of a job find one another by --job-id (or TMD_JOB_ID); give one"
        )
    nproc_per_node = resolve_nproc(options["nproc_per_node"])
    proof, token = resolve_proof(
        options["auth"],
        daemon=daemon,
        munge_socket=options["munge_socket"],
        daemon_user=options["daemon_user"],
        token=read_token(options["token_file"]),
    )
    host = resolve_host(*_where(options), daemon)
    port_range = resolve_port_range(options["port_range"], nproc_per_node)
    nnodes = resolve_nnodes(options["nnodes"], options["standby"], os.environ)
    return DirectedSettings(
        launch=launch,
        logs=_log_settings(options, job_id),
        daemon=daemon,
        job_id=job_id,
        node=options["node"] or socket.gethostname(),
        node_index=resolve_node_index(options["node_index"], os.environ),
        host=host,
        port_range=port_range,
        transport=resolve_transport(options["transport"], port_range),
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        labels=_labels(options["label"]),
        token=token,
        proof=proof,
        master_addr=options["master_addr"] or host,
        master_port=options["master_port"] or DEFAULT_MASTER_PORT,
        launched=LAUNCHED in os.environ,
        step=resolve_step(nnodes, options["srun_options"], os.environ),
    )


def _where(options: dict[str, Any]) -> tuple[str | None, str | None]:
    """--host and --interface; of the command line's and the environment's word only the command line's, also between the two."""
    source = click.get_current_context().get_parameter_source
    typed = {name for name in ("host", "interface") if source(name) is ParameterSource.COMMANDLINE}
    host, interface = (options[name] if name in typed or not typed else None for name in ("host", "interface"))
    return host, interface


def _check_settings(options: dict[str, Any]) -> CheckSettings:
    launch = resolve_launch(options["command"], module=options["module"], no_python=options["no_python"])
    if launch.kind == "program":
        raise SettingsRefused("--check looks into a Python script; with --no-python there is nothing that it could look into")
    ranks = resolve_nnodes(options["nnodes"], options["standby"], os.environ) * resolve_nproc(options["nproc_per_node"])
    return CheckSettings(launch=launch, world_size=max(ranks, LEAST_RANKS_CHECKED), as_json=options["as_json"])


def _standalone_settings(options: dict[str, Any]) -> PlainSettings:
    if options["nnodes"] not in (None, "1", "1:1"):
        raise SettingsRefused(f"--standalone is one node, --nnodes says {options['nnodes']}; leave one of them out")
    return _plain_settings(
        {**options, "nnodes": "1", "node_rank": 0, "master_addr": None, "rdzv_endpoint": None, "master_port": None}
    )


def _plain_settings(options: dict[str, Any]) -> PlainSettings:
    source = click.get_current_context().get_parameter_source
    for name in ("transport", "port_range", "interface"):
        if source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise SettingsRefused(
                f"{option} is of no use without a daemon: tmd-run is a plain launcher of plain PyTorch then; give --daemon, or "
                f"leave {option} out"
            )
    launch = resolve_launch(options["command"], module=options["module"], no_python=options["no_python"])
    nnodes = resolve_nnodes(options["nnodes"], options["standby"], os.environ)
    if options["standby"] and not options["standalone"]:
        raise SettingsRefused("standby nodes need a daemon that gives them a role; give --daemon, or leave --standby out")
    node_rank = resolve_node_index(options["node_rank"], os.environ)
    address, port = _master(options)
    if nnodes > 1 and (address is None or node_rank is None):
        missing = "--master-addr" if address is None else "--node-rank"
        raise SettingsRefused(
            f"{nnodes} nodes without a daemon cannot find one another: give {missing}, or a daemon with --daemon"
        )
    if node_rank is not None and node_rank >= nnodes:
        raise SettingsRefused(f"--node-rank {node_rank} is beyond the last of {nnodes} nodes; they count from 0")
    run_id = options["rdzv_id"] or default_run_id()
    if port is None:
        port = DEFAULT_MASTER_PORT if nnodes > 1 else plain.free_port()
    return PlainSettings(
        launch=launch,
        logs=_log_settings(options, run_id),
        run_id=run_id,
        nnodes=nnodes,
        nproc_per_node=resolve_nproc(options["nproc_per_node"]),
        node_rank=node_rank or 0,
        master_addr=address or "127.0.0.1",
        master_port=port,
    )


def _master(options: dict[str, Any]) -> tuple[str | None, int | None]:
    address, port = options["master_addr"], options["master_port"]
    endpoint = options["rdzv_endpoint"]
    if endpoint:
        host, _, text = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
        if not host or (text and not text.isdigit()):
            raise SettingsRefused(f"--rdzv-endpoint {endpoint!r} is not understood; say host or host:port")
        address, port = address or host, port or (int(text) if text else None)
    return address, port


def _labels(given: tuple[str, ...]) -> dict[str, str]:
    labels = {}
    for text in [*filter(None, os.environ.get("TMD_LABELS", "").split(",")), *given]:
        key, separator, value = text.partition("=")
        if not key or not separator:
            raise SettingsRefused(f"label {text!r} is not understood; say key=value, for example rack=r1")
        labels[key] = value
    return labels


def _log_settings(options: dict[str, Any], run_id: str) -> LogSettings:
    folder = options["log_dir"]
    redirects = StreamChoice.parse(options["redirects"] or "0", "--redirects")
    tee = StreamChoice.parse(options["tee"] or "0", "--tee")
    if folder is None and not (redirects.any() or tee.any()):
        return LogSettings()
    if folder is None:
        folder = tempfile.mkdtemp(prefix="tmd-run-")
        click.echo(f"tmd-run: the ranks' output goes to files in {folder} (choose with --log-dir)", err=True)
    if options["redirects"] is None and options["tee"] is None:
        tee = StreamChoice(3)
    path = Path(folder) / file_name(run_id)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsRefused(
            f"--log-dir {folder!r} cannot be used: {error.strerror} ({path}); choose a folder you may write"
        ) from None
    return LogSettings(path, redirects, tee)


# -------------------------------------------------------------------- life


def _become_check(settings: CheckSettings) -> NoReturn:
    """The check is one process: this one."""
    variables = rank_environment(
        rank=0,
        local_rank=0,
        world_size=settings.world_size,
        nproc_per_node=settings.world_size,
        master_addr="127.0.0.1",
        master_port=DEFAULT_MASTER_PORT,
        run_id="check",
        threads=identity.rank_threads(1, os.environ),
    )
    os.execve(sys.executable, settings.command(), {**os.environ, **variables})


def _run(settings: DirectedSettings | PlainSettings, *, max_restarts: int) -> int:
    threading.excepthook = _thread_failed
    pump = LogPump()
    say = _sayer(settings, pump)
    if max_restarts:
        say("--max-restarts has no effect: with a daemon a standby replaces a lost rank; all together are never restarted")
    core = library.core()  # compiled here if need be, once for all ranks of the node
    if core.library is None:
        say(core.description)
    node = directed.run(settings, pump, say) if isinstance(settings, DirectedSettings) else plain.run(settings, pump, say)
    try:
        with asyncio.Runner() as runner:
            runner.get_loop().set_exception_handler(_callback_failed)
            return runner.run(node)
    finally:
        pump.close()


def _sayer(settings: DirectedSettings | PlainSettings, pump: LogPump) -> Callable[[str], None]:
    name = f"tmd-run[{settings.node}]" if isinstance(settings, DirectedSettings) else "tmd-run"
    return lambda text: pump.say(f"{name}: {text}")


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_value is not None:
        _fail(failure.exc_value)


def _callback_failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if "handle" in context and context.get("exception") is not None:
        _fail(context["exception"])
    loop.default_exception_handler(context)


def _fail(error: BaseException) -> None:
    """A broken agent would be blind or mute, so it ends; the kernel takes the ranks along, and the daemon recovers."""
    trace = "".join(traceback.format_exception(error))
    os.write(2, f"tmd-run: a part of the agent failed, so it ends with its ranks\n{trace}".encode(errors="replace"))
    os._exit(EXIT_BROKEN)


if __name__ == "__main__":
    main()
