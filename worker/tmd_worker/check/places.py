"""Whose code is whose, and at which line a script binds a name."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import site
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import tmd
import tmd_worker

_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for path in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
        *(package.__path__[0] for package in (tmd, tmd_worker)),
    }
)


@functools.cache
def is_users(file: str) -> bool:
    """True for a source file that is neither Python's, an installed package's nor tmd's."""
    return not file.startswith("<") and not os.path.realpath(file).startswith(_LIBRARIES)


def raised_by_user(error: BaseException) -> bool:
    """It was raised in the user's own code, not in what that called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and is_users(trace.tb_frame.f_code.co_filename)


def users_frames(frame: FrameType | None) -> list[FrameType]:
    """The user's frames from `frame` up, outermost first."""
    found = []
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The local variables of a running or suspended function; of a module its globals.

    Up to Python 3.12 a frame keeps the dict that it was asked for, and with it a step's tensors: it is emptied."""
    given = frame.f_locals
    variables = dict(given)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(given, dict) and sys.gettrace() is None:
        given.clear()
    return variables


def users_modules() -> Iterator[ModuleType]:
    """Every module that was imported from a file of the user's."""
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str) and is_users(file):
            yield module


def line_of_local(file: str, first_line: int, name: str) -> str:
    """`file:line` at which the function that begins at `first_line` (0: the module) binds `name` first; "" if it does not."""
    tree = _parsed(file)
    scope: ast.AST | None = tree
    if tree is not None and first_line:
        functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
        scope = next((node for node in functions if _begins(node) == first_line), None)
    return _first_line(file, scope, lambda target: isinstance(target, ast.Name) and target.id == name)


def line_of_attribute(kind: type, name: str) -> str:
    """`file:line` at which the class's methods, or those of a base, bind `self.name` first; "" if they are not the user's."""
    for base in kind.__mro__:
        module = sys.modules.get(base.__module__)
        file = vars(module).get("__file__") if module is not None else None
        if not isinstance(file, str) or not is_users(file):
            continue
        tree = _parsed(file)
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)) if tree is not None else iter(())
        scope = next((node for node in classes if node.name == base.__name__), None)
        line = _first_line(file, scope, lambda target: isinstance(target, ast.Attribute) and target.attr == name)
        if line:
            return line
    return ""


def _first_line(file: str, scope: ast.AST | None, binds: Any) -> str:
    if scope is None:
        return ""
    lines = [target.lineno for node in ast.walk(scope) for target in _targets(node) if binds(target)]
    return place(file, min(lines)) if lines else ""


def _targets(node: ast.AST) -> Iterator[Any]:
    bound: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        bound = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr, ast.For)):
        bound = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        bound = [node.optional_vars]
    for target in bound:
        yield from (part for part in ast.walk(target) if isinstance(part, (ast.Name, ast.Attribute)))


def _begins(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """As co_firstlineno counts: decorators belong to it."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


@functools.cache
def _parsed(file: str) -> ast.Module | None:
    try:
        with tokenize.open(file) as source:
            return ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return None


def place(file: str, line: int) -> str:
    """`file:line`, relative to the working directory where it lies in it."""
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"
