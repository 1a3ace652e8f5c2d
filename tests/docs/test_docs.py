"""The documents name what exists: files, headings, commands with their options, make targets, configuration keys, messages."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from tmd.cli.main import main as tmctl
from tmd.config import Config
from tmd.daemon.main import main as tmd
from tmd.protocol import agent, control, handoff, health, membership, proofs, rank
from tmd_worker.agent.main import tmd_run

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS: dict[str, click.Command] = {"tmctl": tmctl, "tmd": tmd, "tmd-run": tmd_run}
PROTOCOL_MODULES = (agent, control, handoff, health, membership, proofs, rank)

_LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(?:tmd|worker|tests|docs|etc|examples|bench|scripts|migrations|plugins)/[\w./-]*")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_END_OF_COMMAND = {"&", "&&", "|", "||", ";", "(", ")", ">", ">>", "<"}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


documents = pytest.mark.parametrize("document", DOCUMENTS, ids=named)


# -------------------------------------------------------------------- links and paths


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in _HEADING.findall(text)}


@documents
def test_every_link_leads_somewhere(document: Path) -> None:
    dead = []
    for target in _LINK.findall(_FENCE.sub("", document.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            dead.append(target)
    assert not dead


@documents
def test_every_file_that_is_named_exists(document: Path) -> None:
    words = [word for text in _INLINE.findall(_FENCE.sub("", document.read_text())) for word in text.split()]
    paths = [word for word in words if _PATH.fullmatch(word)]
    assert not [path for path in paths if not (ROOT / path).exists()]


# -------------------------------------------------------------------- commands


def fenced(document: Path, *languages: str) -> Iterator[str]:
    for indentation, language, text in _FENCE.findall(document.read_text()):
        if language in languages:
            yield textwrap.dedent(text) if indentation else text


def command_lines(document: Path) -> Iterator[str]:
    """What a reader would type: all lines of a `sh` block, and those after a prompt in a `console` block."""
    for block in fenced(document, "sh"):
        yield from block.replace("\\\n", " ").splitlines()
    for block in fenced(document, "console"):
        yield from (line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ "))


def simple_commands(line: str) -> Iterator[list[str]]:
    """The words of each command in a line of shell, without redirections."""
    tokens = shlex.shlex(line, posix=True, punctuation_chars=True)
    tokens.whitespace_split = True
    words: list[str] = []
    redirected = False
    for token in [*tokens, ";"]:
        if token in _END_OF_COMMAND or set(token) <= set(";&|()<>"):
            if words and not redirected:
                yield words
            words, redirected = [], token[:1] in "<>"
        else:
            words.append(token)


def check_usage(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """Parses without running anything. Raises click.UsageError."""
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=command.name, parent=parent)
        _, rest, _ = command.make_parser(context).parse_args(list(words))
        if rest:
            _, subcommand, rest = command.resolve_command(context, rest)
            assert subcommand is not None
            check_usage(subcommand, rest, context)
    else:
        command.make_context(command.name, list(words), parent=parent).close()


@documents
def test_every_command_can_be_typed_as_it_stands(document: Path) -> None:
    wrong = []
    for line in command_lines(document):
        for words in simple_commands(line):
            program = PROGRAMS.get(Path(words[0]).name)
            if program is None:
                continue
            try:
                check_usage(program, words[1:])
            except click.UsageError as error:
                wrong.append(f"{' '.join(words)}: {error.format_message()}")
    assert not wrong


def test_commands_are_found_and_wrong_ones_would_be_noticed() -> None:
    found = [words for document in DOCUMENTS for line in command_lines(document) for words in simple_commands(line)]
    assert {Path(words[0]).name for words in found} >= set(PROGRAMS)
    assert list(simple_commands("(umask 077; tmctl job token j > t) # why")) == [["umask", "077"], ["tmctl", "job", "token", "j"]]
    for wrong in (["drain", "n1"], ["local", "explode", "n1"], ["jobs", "--fast"]):
        with pytest.raises(click.UsageError):
            check_usage(tmctl, wrong)


@documents
def test_every_make_target_and_python_module_exists(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = set(re.findall(r"`make ([\w-]+)", text)) | {
        words[1] for line in command_lines(document) for words in simple_commands(line) if words[0] == "make" and len(words) > 1
    }
    assert made <= targets
    modules = [module.replace(".", "/") for module in re.findall(r"python -m ((?:tmd|tests|bench)[\w.]*)", text)]
    assert not [name for name in modules if not ((ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file())]


@documents
def test_python_examples_are_python(document: Path) -> None:
    for block in fenced(document, "python"):
        ast.parse(block)


def test_the_script_of_the_readme_is_as_this_project_would_have_it(tmp_path: Path) -> None:
    """A reader saves it in the checkout, where the linter and the formatter may find it."""
    script, *_ = fenced(ROOT / "README.md", "python")
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--stdin-filename", str(ROOT / "train.py"), "-"]
        done = subprocess.run(ruff, input=script, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_lint_looks_at_every_folder_with_python() -> None:
    listed = re.search(r"^PYTHON_CODE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed is not None
    folders = [each for each in ROOT.iterdir() if each.is_dir() and each.name not in ("out", "build", "dist")]
    with_python = {each.name for each in folders if not each.name.startswith(".") and any(each.rglob("*.py"))}
    assert {"setup.py", *with_python} == set(listed[1].split())


# -------------------------------------------------------------------- configuration and messages


def documented_settings() -> dict[str, dict[str, str]]:
    """Section -> key -> default, from the tables of docs/operators.md."""
    text = (ROOT / "docs" / "operators.md").read_text().partition("<!-- config:")[2].partition("\n## ")[0]
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in text.splitlines():
        if match := re.match(r"`\[(\w+)\]`", line):
            section = match[1]
            found[section] = {}
        elif line.startswith("| `"):
            keys, defaults = (cell.strip() for cell in line.split("|")[1:3])
            names = re.findall(r"`(\w+)`", keys)
            values = defaults.split(", ") if len(names) > 1 else [defaults]
            found[section] |= dict(zip(names, values, strict=True))
    return found


def test_every_setting_is_documented_and_nothing_else() -> None:
    real = {name: set(typing.get_type_hints(kind)) for name, kind in typing.get_type_hints(Config).items()}
    assert {section: set(keys) for section, keys in documented_settings().items()} == real


def test_documented_defaults_are_the_defaults() -> None:
    config = Config()
    for section, keys in documented_settings().items():
        for key, told in keys.items():
            default = getattr(getattr(config, section), key)
            if isinstance(default, bool):
                assert told == str(default).lower(), key
            elif isinstance(default, int | float):
                assert told == f"{default:g}", key


def structures(module: types.ModuleType) -> list[type[msgspec.Struct]]:
    return [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    ]


@pytest.mark.parametrize("module", PROTOCOL_MODULES, ids=lambda module: module.__name__)
def test_every_message_and_field_is_in_the_protocol(module: types.ModuleType) -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    missing = []
    for kind in structures(module):
        names = [kind.__name__, *(field.name for field in msgspec.structs.fields(kind))]
        missing += [f"{kind.__name__}: {name}" for name in names if f"`{name}`" not in text]
        tag = kind.__struct_config__.tag
        if tag is not None and f'"{tag}"' not in text:
            missing.append(f"{kind.__name__}: tag {tag}")
    assert structures(module)
    assert not missing
