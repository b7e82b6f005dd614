"""How much the tests of the judge notice: one small thing of its code is changed at a time, and some test must fail.

    make mutate                                     # a sample of all the files
    .venv/bin/python -m tests.mutate --all fleet/judge/held.py

No file is touched. pytest collects the tests once; for each mutant a process is forked, whose functions get the changed code,
and in which the tests run that pass through the changed line, the quickest first, until one fails. What runs when a module is
imported (constants, tables, defaults) is not changed: only bodies of functions are.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import signal
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parents[1]
FILES = ("held", "expected", "verdict", "evidence", "change", "outliers", "uniform", "waivers", "baseline", "digests", "paths")
JUDGE = [*(f"fleet/judge/{name}.py" for name in FILES), "fleet/report/merge.py"]
TESTS = [
    f"tests/unit/test_{name}.py"
    for name in """judge verdicts judge_edges outliers uniformity waivers digests power severity faults rejudge manifest localise
        stragglers soak gangs report render baseline diff simulate""".split()
]
LONGEST_S = 60.0
"""A mutant that runs longer has been noticed: it goes round in circles."""
FEWEST = 0.90

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
    ast.Continue: ast.Break, ast.Break: ast.Continue,
}  # fmt: skip
NAMES = {"any": "all", "all": "any", "min": "max", "max": "min", "sorted": "list"}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change: `place` is the path of indices to the changed node among the nodes of the tree."""

    file: str
    line: int
    number: int
    what: str
    tree: ast.Module


def mutants(file: str) -> Iterator[Mutant]:
    """Every mutant of a file."""
    tree = ast.parse((ROOT / file).read_text())
    for number, (node, _) in enumerate(_changeable(tree)):
        for kind, change in enumerate(_changes(node)):
            other = copy.deepcopy(tree)
            twin, parent = list(_changeable(other))[number]
            before = ast.unparse(twin)
            after = list(_changes(twin))[kind](twin, parent)
            ast.fix_missing_locations(other)
            line = getattr(node, "lineno", 0)
            yield Mutant(file=file, line=line, number=number, what=f"{before} -> {after}"[:150], tree=other)
            del change


def _changeable(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Nodes within bodies of functions, each with its parent; texts for people (f-strings) and annotations are none."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[ast.AST, ast.AST]]:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
                continue
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                    continue
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    continue  # a docstring
                if inside:
                    yield child, node
                yield from walk(child, inside or isinstance(child, ast.FunctionDef))

    return walk(tree, False)


def _changes(node: ast.AST) -> list[Any]:
    """What can be done to a node: functions of it and its parent that do it and say what it is then."""
    found: list[Any] = []
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        found.append(_swap_op)
    elif isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(node.op) in SWAPS:
        found.append(_swap_op)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        found.append(lambda node, parent: _put(parent, node, node.operand))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        found.append(lambda node, parent: _set(node, not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        found.append(lambda node, parent: _set(node, node.value + 1))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.append(lambda node, parent: _set(node, f"{node.value}x"))
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        found.append(lambda node, parent: _put(parent, node, ast.Return(value=ast.Constant(value=None))))
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        found.append(_rename)
    elif isinstance(node, ast.Expr) or isinstance(node, ast.Continue | ast.Break):
        found.append(lambda node, parent: _put(parent, node, ast.Pass()))
    if isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        found.append(_negate)
    if isinstance(node, ast.comprehension) and node.ifs:
        found.append(lambda node, parent: node.ifs.clear() or "without its if")
    return found


def _swap_op(node: Any, _: ast.AST) -> str:
    if isinstance(node, ast.Compare):
        node.ops = [SWAPS[type(node.ops[0])]()]  # type: ignore[list-item]
    else:
        node.op = SWAPS[type(node.op)]()
    return ast.unparse(node)


def _rename(node: ast.Name, _: ast.AST) -> str:
    node.id = NAMES[node.id]
    return node.id


def _negate(node: Any, _: ast.AST) -> str:
    node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
    return "not so"


def _set(node: ast.Constant, value: Any) -> str:
    node.value = value
    return repr(value)


def _put(parent: ast.AST, old: ast.AST, new: ast.AST) -> str:
    for name, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, name, new)
        elif isinstance(value, list):
            setattr(parent, name, [new if item is old else item for item in value])
    return ast.unparse(ast.fix_missing_locations(new))


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def implant(mutant: Mutant) -> None:
    """Gives the functions of the module, where they are, the changed code."""
    module = sys.modules[mutant.file.removesuffix(".py").replace("/", ".")]
    _implant(compile(mutant.tree, str(ROOT / mutant.file), "exec"), vars(module))


def _implant(code: types.CodeType, names: Any) -> None:
    for part in code.co_consts:
        if not isinstance(part, types.CodeType) or part.co_name.startswith("<"):
            continue
        found = names.get(part.co_name)
        if isinstance(found, type):
            _implant(part, vars(found))
            continue
        found = found.fget if isinstance(found, property) else found.func if isinstance(found, cached_property) else found
        found = getattr(found, "__wrapped__", getattr(found, "__func__", found))
        if isinstance(found, types.FunctionType) and found.__code__.co_freevars == part.co_freevars:
            found.__code__ = part


class Trial:
    """Takes the place of pytest's loop over the tests."""

    def __init__(self, chosen: list[Mutant], jobs: int) -> None:
        self.chosen, self.jobs = chosen, jobs
        self.survived: list[Mutant] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Tries each mutant."""
        passing = self._lines(session.items)
        began, done = time.monotonic(), 0
        everything = {item.nodeid: item for item in session.items}
        with ThreadPoolExecutor(self.jobs) as pool:
            tasks = []
            for mutant in self.chosen:
                items = [everything[name] for name in passing.get(f"{mutant.file}:{mutant.line}", ())]
                tasks.append((mutant, pool.submit(self._noticed, mutant, items)))
            for mutant, task in tasks:
                done += 1
                if not task.result():
                    self.survived.append(mutant)
                    print(f"survived {mutant.file}:{mutant.line}: {mutant.what}", flush=True)
                if done % 100 == 0:
                    print(f"… {done} of {len(tasks)} mutants, {time.monotonic() - began:.0f} s", flush=True)
        return True

    def _lines(self, items: list[pytest.Item]) -> dict[str, list[str]]:
        """`file:line` -> the tests that pass through it, the quickest first."""
        wanted = {str(ROOT / mutant.file): mutant.file for mutant in self.chosen}
        with tempfile.TemporaryDirectory() as place:
            told = Path(place) / "lines.json"
            if pid := os.fork():
                os.waitpid(pid, 0)
                found: dict[str, list[str]] = json.loads(told.read_text())
                return found
            with _alone():
                through: dict[str, list[tuple[float, str]]] = defaultdict(list)
                for item in items:
                    seen: set[str] = set()

                    def line(frame: Any, event: str, _: Any, seen: set[str] = seen) -> Any:
                        if event == "line":
                            seen.add(f"{wanted[frame.f_code.co_filename]}:{frame.f_lineno}")
                        return line  # noqa: B023

                    def call(frame: Any, event: str, _: Any, line: Any = line) -> Any:
                        return line if frame.f_code.co_filename in wanted else None

                    began = time.monotonic()
                    sys.settrace(call)
                    reports = runtestprotocol(item, nextitem=None, log=False)
                    sys.settrace(None)
                    if not any(report.failed for report in reports):
                        for name in seen:
                            through[name].append((time.monotonic() - began, item.nodeid))
                told.write_text(json.dumps({key: [name for _, name in sorted(tests)] for key, tests in through.items()}))
        raise AssertionError

    def _noticed(self, mutant: Mutant, items: list[pytest.Item]) -> bool:
        """Whether any of the tests fails on it."""
        if not items:
            return False
        pid = os.fork()
        if not pid:
            with _alone():
                implant(mutant)
                for item in items:
                    if any(report.failed for report in runtestprotocol(item, nextitem=None, log=False)):
                        os._exit(1)
        end = time.monotonic() + LONGEST_S
        while time.monotonic() < end:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status != 0
            time.sleep(0.01)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return True
