"""tmd's plugins in Slurm: what slurmctld has loaded, and whether sbatch on this machine has the option. docs/slurm-plugins.md."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tmd.doctor.asking import Output, slurm_command
from tmd.doctor.facts import Facts, SlurmFacts
from tmd.doctor.findings import Finding, fault, ok, warning

SPANK = "spank_tmd.so"
SUBMIT = "job_submit_tmd.so"
_INSTALL = "make plugins && make install, then see docs/slurm-plugins.md"
#: plugstack.conf may name further files, and these further ones.
_DEPTH = 5


def check_job_submit(_: Facts, slurm: SlurmFacts) -> Iterator[Finding]:
    """What slurmctld uses. A plugin that it could not load would have kept it from starting."""
    loaded = slurm.words("JobSubmitPlugins")
    missing = [name for name in ("lua", "tmd") if name not in loaded]
    if missing:
        seen = f"JobSubmitPlugins={','.join(loaded)} in {slurm.conf} lacks {' and '.join(missing)}: --standby is not carried out"
        wanted = [name for name in loaded if name not in ("lua", "tmd")]
        line = ",".join([*wanted, "lua", "tmd"])
        yield fault("job submit", seen, f"JobSubmitPlugins={line}, then scontrol reconfigure; before that {_INSTALL}")
    elif loaded.index("lua") > loaded.index("tmd"):
        seen = f"JobSubmitPlugins={','.join(loaded)}: tmd looks at jobs before lua has marked them"
        yield fault("job submit", seen, "write lua before tmd, then scontrol reconfigure")
    else:
        yield ok("job submit", f"JobSubmitPlugins={','.join(loaded)}")
    if "tmd" in loaded and _found(SUBMIT, slurm.plugin_dirs) is None:
        seen = f"{SUBMIT} is in no directory of PluginDir on this machine: slurmctld would not start again here"
        yield fault("job submit", seen, f"{_INSTALL}; if slurmctld runs on another machine, look there")
    if "lua" in loaded:
        yield _script(slurm.conf.parent / "job_submit.lua")


def _script(path: Path) -> Finding:
    """What slurmctld's lua plugin reads."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        seen = f"{path} cannot be read: {error.strerror}"
        return fault("job submit", seen, f"copy job_submit.lua of tmd there; if slurmctld runs elsewhere, look there: {_INSTALL}")
    if "tmd_standby" not in text:
        return fault("job submit", f"{path} does not call tmd", "add the two calls of docs/slurm-plugins.md to it")
    if not (path.parent / "tmd_standby.lua").is_file():
        return fault("job submit", f"{path} calls tmd_standby.lua, which is not beside it", _INSTALL)
    return ok("job submit", f"{path} calls tmd")


def check_spank(facts: Facts, slurm: SlurmFacts) -> Iterator[Finding]:
    """The proof that the plugin is found, readable and links is that sbatch has its option."""
    path = plugstack_path(slurm)
    named = spank_file(path, slurm.plugin_dirs)
    if isinstance(named, str):
        yield fault("spank", named, f"the line of etc/plugstack.conf in {path}, on all machines; before that {_INSTALL}")
        return
    yield has_option(slurm_command(facts.config.slurm, "sbatch", "--help"), named)


def plugstack_path(slurm: SlurmFacts) -> Path:
    """Which plugstack.conf Slurm's commands read."""
    return Path(slurm.config.get("PlugStackConfig", slurm.conf.parent / "plugstack.conf"))


def spank_file(plugstack: Path, plugin_dirs: Sequence[Path]) -> Path | str:
    """The plugin that plugstack.conf names, or what is in the way."""
    try:
        name = _named(plugstack)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    if name is None:
        return f"{plugstack} does not name {SPANK}: sbatch has no --standby"
    found = Path(name) if name.startswith("/") else _found(name, plugin_dirs)
    if found is None:
        return f"{name} is in no directory of PluginDir ({':'.join(map(str, plugin_dirs))})"
    if not os.access(found, os.R_OK):
        return f"{found} cannot be read"
    return found


def _named(plugstack: Path, depth: int = 0) -> str | None:
    """How the file, or one that it includes, names the plugin. Raises OSError."""
    for line in plugstack.read_text(errors="replace").splitlines():
        words = line.partition("#")[0].split()
        if len(words) < 2:
            continue
        if words[0] == "include" and depth < _DEPTH:
            for name in sorted(glob.glob(str(plugstack.parent / words[1]))):
                if (found := _named(Path(name), depth + 1)) is not None:
                    return found
        elif words[0] in ("optional", "required") and Path(words[1]).name == SPANK:
            return words[1]
    return None


def has_option(help_of_sbatch: Output, plugin: Path) -> Finding:
    """`help_of_sbatch`: what sbatch --help has printed with that plugin."""
    if re.search(r"^\s+--standby\b", help_of_sbatch.text, re.MULTILINE):
        return ok("spank", f"sbatch on this machine has --standby ({plugin}); compute nodes are not looked at")
    said = " ".join(help_of_sbatch.errors.split())
    seen = f"{plugin} is there and sbatch has no --standby: it cannot be loaded{f' ({said})' if said else ''}"
    return fault("spank", seen, "build it against the Slurm that is installed: make plugins says what does not link")


def check_events(facts: Facts, slurm: SlurmFacts) -> Iterator[Finding]:
    """The socket on which slurmctld's plugin tells of nodes; that it exists and who may write is `machine`'s."""
    if "tmd" in slurm.words("JobSubmitPlugins") and not facts.config.slurm.hint_socket:
        seen = "the plugin in slurmctld tells of nodes, and hint_socket is not set: drains are seen by polling only"
        yield warning("hints", seen, 'hint_socket = "/run/tmd/hints.sock" in [slurm]')


def _found(name: str, plugin_dirs: Sequence[Path]) -> Path | None:
    return next((folder / name for folder in plugin_dirs if (folder / name).is_file()), None)
