"""`make demo` and `make soak`: an undisturbed run of a small GPT, then the same run with a drained and a killed node."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import click

from tmd.cli.client import ClientError
from tmd.demo.ending import end_as_on_ctrl_c
from tmd.demo.losses import compare, median_step_s
from tmd.demo.outputs import FolderRefused, take
from tmd.demo.report import document, shortcomings, show
from tmd.demo.run import Disturbance, Run, RunFailed, Shape, run
from tmd.demo.stack import Stack, StackError

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt" / "train.py"


def say(line: str) -> None:
    """One line of progress; the line that is rewritten in place on a terminal is ended first."""
    prefix = "\r\x1b[2K" if sys.stderr.isatty() else ""
    print(f"{prefix}[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/demo"), show_default=True)
@click.option("--steps", type=click.IntRange(min=20), default=60, show_default=True, help="Steps of each run.")
@click.option("--nodes", type=click.IntRange(min=2), default=4, show_default=True, help="Nodes that train, one rank each.")
@click.option("--standbys", type=click.IntRange(min=1), default=2, show_default=True, help="Standby nodes.")
@click.option("--soak", type=click.IntRange(min=1), default=None, metavar="N", help="N runs with random moments instead of one.")
@click.option("--seed", type=int, default=None, help="Seed of the random moments; printed if it was not given.")
@click.option("--script", type=click.Path(dir_okay=False, exists=True, path_type=Path), default=EXAMPLE, show_default=True)
def main(out: Path, steps: int, nodes: int, standbys: int, soak: int | None, seed: int | None, script: Path) -> None:
    """A training run outlives a drained node and a killed node, bit for bit.

    \b
    Writes OUT/report.json and, for each run, losses, final digests and the logs of every node. What an earlier run left in
    OUT is deleted; a folder with anything else in it is refused.
    Exit code 0 only if every run was bit-identical to the undisturbed one and no other rank restarted.

    \b
    Examples:
      python -m tmd.demo
      python -m tmd.demo --soak 20 --seed 7
    """
    end_as_on_ctrl_c()
    try:
        take(out)
    except (FolderRefused, OSError) as error:
        raise click.UsageError(str(error)) from None
    shape = Shape(nodes=nodes, standbys=standbys, steps=steps, script=script.resolve())
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    try:
        with Stack(out / "stack", nodes=nodes + standbys) as stack:
            failures = _demo(stack, shape, out) if soak is None else _soak(stack, shape, out, soak, seed)
    except (RunFailed, StackError, ClientError, ValueError) as error:
        say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        say(f"interrupted; everything that ran has been ended, logs are in {out}")
        sys.exit(130)
    sys.exit(1 if failures else 0)


def _reference(stack: Stack, shape: Shape, out: Path) -> Run:
    say(f"reference: {shape.steps} steps on {shape.nodes} nodes, undisturbed")
    undisturbed = Shape(nodes=shape.nodes, standbys=0, steps=shape.steps, script=shape.script, arguments=shape.arguments)
    return run(stack, undisturbed, out / "reference", (), say)


def _judge(reference: Run, disturbed: Run, out: Path) -> bool:
    """Writes and shows the report; True if all is as it should be."""
    kills = len(disturbed.killed_ranks)
    verdict = compare(reference.result, disturbed.result, killed_ranks=set(disturbed.killed_ranks), kills=kills)
    report = document(disturbed, verdict, median_step_s(reference.result))
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    show(report)
    print(f"report: {out / 'report.json'}")
    faults = shortcomings(report)
    for fault in faults:
        say(fault)
    return not faults


def _demo(stack: Stack, shape: Shape, out: Path) -> int:
    reference = _reference(stack, shape, out)
    say(f"the same again with {shape.standbys} standbys: one node is drained, another one killed")
    disturbances = (Disturbance(shape.steps // 4, "drain", 1), Disturbance(shape.steps * 5 // 8, "kill", 2))
    disturbed = run(stack, shape, out / "disturbed", disturbances, say)
    return 0 if _judge(reference, disturbed, out) else 1


def _soak(stack: Stack, shape: Shape, out: Path, runs: int, seed: int) -> int:
    say(f"soak: {runs} runs, seed {seed}")
    reference = _reference(stack, shape, out)
    chance, bad = random.Random(seed), []
    for number in range(1, runs + 1):
        drained, killed = chance.sample(range(shape.nodes), 2)
        # Not before the first step is committed: until then a loss starts the job from nothing, which replaces nobody.
        moments = [chance.randrange(1, shape.steps - 20) for _ in range(2)]
        disturbances = (Disturbance(moments[0], "drain", drained), Disturbance(moments[1], "kill", killed))
        folder = out / f"run{number}"
        say(f"run {number}/{runs}: drain rank {drained} at step {moments[0]}, kill rank {killed} at step {moments[1]}")
        try:
            good = _judge(reference, run(stack, shape, folder, disturbances, say), folder)
        except (RunFailed, ValueError) as error:
            say(str(error))
            good = False
        if not good:
            bad.append(number)
        _tidy(stack)
    print(f"{runs - len(bad)} passed, {len(bad)} failed")
    if bad:
        say(f"not identical: runs {bad}; repeat with --soak {runs} --seed {seed}")
    return len(bad)


def _tidy(stack: Stack) -> None:
    """Every node is whole again before the next run."""
    for node in stack.client.get("/v1/nodes")["nodes"]:
        if "DRAIN" in node["manager_state"]:
            stack.client.post(f"/v1/nodes/{node['name']}/resume", {})
        if "DOWN" in node["manager_state"]:
            stack.client.post(f"/v1/local/nodes/{node['name']}/up", {})


if __name__ == "__main__":
    main()
