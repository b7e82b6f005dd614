"""How much the tests of the judge notice: one small thing of its code is changed at a time, and some test must fail.

    make mutate                                     # a sample of all the files
    .venv/bin/python -m tests.mutate --all fleet/judge/held.py

No file is touched. pytest collects the tests once; for each mutant a process is forked, whose functions get the changed code,
and in which the tests run that pass through the changed line, the quickest first, until one fails.

What is not changed, since no test should have to notice it:
- what runs when a module is imported (constants, tables, defaults of arguments): only bodies of functions are changed;
- texts for people: f-strings, and constants with a space in them (their wording is no behaviour);
- `strict=` of zip, which asserts that the code itself is right;
- `return False` to `return None`, which is no as well (`return True` is tried in its place).
There is no list of exceptions beside these.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parents[1]
DECISIONS = ("decide", "reasons", "status_of")
JUDGE = [
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "fleet" / "judge").rglob("*.py"))),
    *(f"fleet/report/merge.py:{name}" for name in DECISIONS),
]
"""What decides."""
TESTS = (
    "judge_edges", "judge_paths", "judge_evidence", "judge_baseline", "judge_digests", "judge_stragglers", "judge_drift",
    "judge_packs", "judge_lint", "judge_gangs", "judge_power", "judge_manifest", "survey", "tally", "waivers", "severity",
    "outliers", "uniformity", "power", "manifest", "criteria",
)  # fmt: skip
"""The quick ones. What is tested on whole fleets (`test_judge`, `test_scale`) or large ones (`test_localise`) takes too long."""
LONGEST_TEST_S = 2.0
"""A test that takes longer, with its lines counted, is left out: it would run for every mutant that the others do not notice."""
LONGEST_S = 15.0
"""A mutant that runs longer has been noticed: it goes round in circles."""
LONGEST_FILE_S = 300.0
"""For all tests of a file, with their lines counted."""
MOST_S = 15.0
"""So much of tests for a mutant, as long as they take with their lines counted."""
MOST_CALLS = 40
"""Of one function in one test, whose lines are counted."""
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
    """One change: that of `kind` to the node of that number."""

    file: str
    line: int
    statement: int
    """The line on which the statement begins: constants are put together, and then run there."""
    number: int
    kind: int

    def made(self) -> tuple[ast.Module, str]:
        """The changed module, and what was changed."""
        tree = ast.parse((ROOT / self.file).read_text())
        node, parent, _ = list(_changeable(tree))[self.number]
        before = ast.unparse(node).splitlines()[0]
        after = _changes(node)[self.kind](node, parent)
        ast.fix_missing_locations(tree)
        return tree, f"{before} -> {after}"[:160]


def mutants(place: str) -> list[Mutant]:
    """Every mutant of a file, or of one function of it (`FILE:NAME`)."""
    file, _, name = place.partition(":")
    tree = ast.parse((ROOT / file).read_text())
    within = [
        (node.lineno, node.end_lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    return [
        Mutant(file=file, line=line, statement=statement, number=number, kind=kind)
        for number, (node, _, statement) in enumerate(_changeable(tree))
        for kind in range(len(_changes(node)))
        if (line := _line(node)) and (not name or any(first <= line <= (last or 0) for first, last in within))
    ]


def _line(node: Any) -> int:
    """Where it runs."""
    return int(_line(node.ifs[0] if node.ifs else node.iter) if isinstance(node, ast.comprehension) else node.lineno)


def _changeable(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST, int]]:
    """Nodes within bodies of functions, each with its parent and the line of its statement; texts for people are none."""

    def walk(node: ast.AST, inside: bool, statement: int) -> Iterator[tuple[ast.AST, ast.AST, int]]:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
                continue
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                    continue
                if isinstance(child, ast.keyword) and child.arg == "strict":
                    continue
                if not isinstance(child, ast.expr | ast.stmt | ast.comprehension):
                    yield from walk(child, inside, statement)
                    continue
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    continue  # a docstring
                if isinstance(child, ast.Constant) and isinstance(child.value, str) and " " in child.value:
                    continue
                line = child.lineno if isinstance(child, ast.stmt) else statement
                if inside:
                    yield child, node, line
                yield from walk(child, inside or isinstance(child, ast.FunctionDef), line)

    return walk(tree, False, 0)


def _changes(node: ast.AST) -> list[Any]:
    """What can be done to a node: functions of it and its parent that do it and say what it is then."""
    found: list[Any] = []
    swapped = node.ops[0] if isinstance(node, ast.Compare) and len(node.ops) == 1 else getattr(node, "op", None)
    if type(swapped) in SWAPS:
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
    elif isinstance(node, ast.Expr | ast.Continue | ast.Break) and not isinstance(
        getattr(node, "value", None), ast.Yield
    ):
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
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def implant(mutant: Mutant) -> None:
    """Gives the functions of the module, where they are, the changed code."""
    module = sys.modules[mutant.file.removesuffix(".py").replace("/", ".")]
    _implant(compile(mutant.made()[0], str(ROOT / mutant.file), "exec"), module)


def _implant(code: types.CodeType, owner: Any) -> None:
    for part in code.co_consts:
        if not isinstance(part, types.CodeType) or part.co_name.startswith("<"):
            continue
        found = vars(owner).get(part.co_name)
        if isinstance(found, type):
            _implant(part, found)
            continue
        found = (
            found.fget if isinstance(found, property) else found.func if isinstance(found, cached_property) else found
        )
        found = getattr(found, "__wrapped__", getattr(found, "__func__", found))
        if not isinstance(found, types.FunctionType):
            continue
        if found.__code__.co_freevars == part.co_freevars:
            found.__code__ = part
        else:  # without its `super()`
            cells = dict(zip(found.__code__.co_freevars, found.__closure__ or (), strict=True))
            closure = tuple(cells[name] for name in part.co_freevars)
            made = types.FunctionType(part, found.__globals__, part.co_name, found.__defaults__, closure)
            setattr(owner, part.co_name, made)


class Trial:
    """Takes the place of pytest's loop over the tests."""

    def __init__(self, chosen: list[Mutant], jobs: int) -> None:
        self.chosen, self.jobs = chosen, jobs
        self.survived: list[Mutant] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Tries each mutant."""
        began, done = time.monotonic(), 0
        everything = {item.nodeid: item for item in session.items}
        with ThreadPoolExecutor(self.jobs) as pool:
            passing = self._lines(session.items, pool)
            print(f"{len(everything)} tests looked at, {time.monotonic() - began:.0f} s", flush=True)
            tasks = []
            for mutant in self.chosen:
                lines = (f"{mutant.file}:{line}" for line in (mutant.line, mutant.statement))
                items = [
                    everything[name] for name in dict.fromkeys(name for line in lines for name in passing.get(line, ()))
                ]
                tasks.append((mutant, pool.submit(self._noticed, mutant, items)))
            for mutant, task in tasks:
                done += 1
                if not task.result():
                    self.survived.append(mutant)
                    print(f"survived {mutant.file}:{mutant.line}: {mutant.made()[1]}", flush=True)
                if done % 100 == 0:
                    print(f"… {done} of {len(tasks)} mutants, {time.monotonic() - began:.0f} s", flush=True)
        return True

    def _lines(self, items: list[pytest.Item], pool: ThreadPoolExecutor) -> dict[str, list[str]]:
        """`file:line` -> the tests that pass through it, the quickest first."""
        files: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            files[str(item.path)].append(item)
        through: dict[str, list[tuple[float, str]]] = defaultdict(list)
        with tempfile.TemporaryDirectory() as place:
            told = {name: Path(place) / f"{Path(name).stem}.json" for name in files}
            running = {
                name: pool.submit(self._forked, LONGEST_FILE_S, self._write_lines, told[name], files[name])
                for name in files
            }
            for name, ended in running.items():
                if ended.result():
                    print(f"{name}: its tests took too long, or failed, and are left out", flush=True)
                    continue
                for line, tests in json.loads(told[name].read_text()).items():
                    through[line] += tests
        return {line: list(_quickest(tests)) for line, tests in through.items()}

    def _write_lines(self, told: Path, items: list[pytest.Item]) -> None:
        wanted = {str(ROOT / mutant.file): mutant.file for mutant in self.chosen}
        seen: set[tuple[str, int]] = set()
        calls: Counter[types.CodeType] = Counter()

        def line(frame: Any, event: str, _: Any) -> Any:
            if event == "line":
                seen.add((frame.f_code.co_filename, frame.f_lineno))
            return line

        def call(frame: Any, _: str, __: Any) -> Any:
            if frame.f_code.co_filename not in wanted:
                return None
            calls[frame.f_code] += 1
            return line if calls[frame.f_code] <= MOST_CALLS else None

        through: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for item in items:
            seen.clear()
            calls.clear()
            began = time.process_time()
            try:
                with _limit(LONGEST_TEST_S):
                    sys.settrace(call)
                    reports = runtestprotocol(item, nextitem=None, log=False)
            except TimeoutError:
                continue
            finally:
                sys.settrace(None)
            if not any(report.failed for report in reports):
                for file, number in seen:
                    through[f"{wanted[file]}:{number}"].append((time.process_time() - began, item.nodeid))
        told.write_text(json.dumps(through))

    def _noticed(self, mutant: Mutant, items: list[pytest.Item]) -> bool:
        """Whether any of the tests fails on it."""
        return bool(items) and self._forked(LONGEST_S, self._fail, mutant, items)

    @staticmethod
    def _fail(mutant: Mutant, items: list[pytest.Item]) -> None:
        implant(mutant)
        for item in items:
            if any(report.failed for report in runtestprotocol(item, nextitem=None, log=False)):
                raise AssertionError(item.nodeid)

    @staticmethod
    def _forked(longest_s: float, work: Callable[..., None], *arguments: Any) -> bool:
        """Whether `work`, in a process of its own, raises or takes too long."""
        pid = os.fork()
        if not pid:
            with _alone():
                work(*arguments)
        end = time.monotonic() + longest_s
        while time.monotonic() < end:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status != 0
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        print("too long: ended", getattr(arguments[0], "line", arguments[0]), flush=True)
        return True


def _quickest(tests: list[tuple[float, str]]) -> Iterator[str]:
    spent = 0.0
    for seconds, name in sorted(tests):
        spent += seconds
        if spent <= MOST_S:
            yield name


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """In a forked process: silent, a group of its own, and at its end the process ends, with 0 where nothing was raised."""
    try:
        os.setpgid(0, 0)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        yield
    except BaseException:  # noqa: BLE001 what a mutant may raise is anything
        os._exit(1)
    os._exit(0)


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raises where it takes longer."""

    def ring(*_: object) -> None:
        raise TimeoutError("too long a test")

    signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> int:
    """Prints the score and what no test noticed; 1 where the score is too low."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", default=JUDGE, help="of the judge (default: all of it)")
    parser.add_argument("--sample", type=int, default=0, help="try so many of each file's mutants (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument(
        "--tests", nargs="+", default=TESTS, help="by which (default: the quick ones): names of tests/unit/test_NAME.py"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    options = parser.parse_args()
    chosen: list[Mutant] = []
    for file in options.files:
        every = mutants(file)
        drawn = random.Random(f"{options.seed} {file}").sample(every, min(options.sample or len(every), len(every)))  # noqa: S311
        chosen += sorted(drawn, key=lambda mutant: (mutant.line, mutant.number, mutant.kind))
    trial = Trial(chosen, options.jobs)
    paths = [str(ROOT / f"tests/unit/test_{name}.py") for name in options.tests]
    pytest.main(["-q", "--no-header", *paths], plugins=[trial])
    for file in options.files:
        every = mutants(file)
        own = set(every) & set(chosen)
        left = len(own & set(trial.survived))
        if own:
            share = (len(own) - left) / len(own)
            print(f"{share:6.1%} {file}: {len(own) - left} of {len(own)} mutants noticed, sampled of {len(every)}")
    score = 1 - len(trial.survived) / len(chosen)
    size = f"{options.sample} a file, seed {options.seed}" if options.sample else "all"
    print(f"mutation score {score:.1%}: {len(chosen) - len(trial.survived)} of {len(chosen)} noticed ({size})")
    return int(score < FEWEST)


if __name__ == "__main__":
    sys.exit(main())
