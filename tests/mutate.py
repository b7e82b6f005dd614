"""Run mutation tests: change one detail of the code (the changed code is a mutant), and check that a test then fails.

The mutated code is that of the judge (compares figures with criteria), of the plan (which host runs what) and of the supervisor
(the agent's process that launches the ranks of a host). SCOPES lists the files.

    make mutate                                     # 100 random mutants of each file
    .venv/bin/python -m tests.mutate plan           # every mutant of the planning code
    .venv/bin/python -m tests.mutate fleet/judge/evaluate.py

No file is modified. pytest collects the tests once. First each test runs with the original code, to record the lines that it
executes. Then, for each mutant, a forked process replaces the functions of the changed file in memory, and runs the tests that
execute the changed line, the fastest first. The mutant is detected if a test fails, or if the tests take MAX_EXTRA_S longer than
with the original code. If a test starts another program, that program runs the original code.

A mutant of the supervisor may kill arbitrary processes. Each of these mutants therefore runs in its own PID namespace, which
needs root: the mutant cannot kill processes outside the namespace, and the processes that it leaves end with the namespace.

Not mutated, because no test needs to detect a change:
- code that runs at import (constants, tables, default arguments): only function bodies are mutated;
- text for people: f-strings, and string constants with a space;
- `<`, `<=`, `>` and `>=` if one side is just `time.monotonic()`: to swap `<` and `<=` matters only if both sides are equal, and
  no test can make them equal;
- the argument `strict=` of `zip`: as long as the code is right, it has no effect;
- `return False`, `return ""` and `return 0` to `return None`: None is false too, and mypy would report the change. Instead, the
  constant is changed, for example to `return True`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from fleet.judge.bounded_cache import BoundedCache

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class MutationScope:
    """Code to mutate, and the tests that must detect the mutants."""

    targets: tuple[str, ...]
    """What to mutate: `FILE` (all its functions) or `FILE:FUNCTION`."""
    tests: tuple[str, ...]
    """Paths of fast test files, relative to tests/unit and without `.py`.

    Files whose tests launch real ranks or judge whole fleets are left out, because they take too long."""
    min_score: float
    """Smallest share of the mutants (0 to 1) that the tests must detect."""
    ends_processes: bool = False
    """Whether a mutant may kill arbitrary processes, so that it needs its own PID namespace."""

    def chosen(self, name: str, wanted: list[str]) -> list[str]:
        """Return all targets of this scope if `wanted` names the scope, else the entries of `wanted` whose file is in the scope.

        Args:
            name: name of this scope.
            wanted: names of scopes, `FILE` and `FILE:FUNCTION` from the command line.
        """
        files = {target.partition(":")[0] for target in self.targets}
        return (
            list(self.targets) if name in wanted else [target for target in wanted if target.partition(":")[0] in files]
        )


def _tests_in(folder: str, without: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the paths of the test files in a folder of tests/unit, relative to tests/unit and without `.py`.

    Files whose names are in `without` are left out, because their tests take too long.
    """
    for path in sorted((ROOT / "tests" / "unit" / folder).rglob("test_*.py")):
        if path.stem not in without:
            yield str(path.relative_to(ROOT / "tests" / "unit").with_suffix(""))


SCOPES = {
    "judge": MutationScope(
        targets=(
            *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "fleet" / "judge").rglob("*.py"))),
            *("fleet/report/hosts.py:decide", "fleet/report/summary.py:status_of", "fleet/diagnosis/diagnose.py"),
        ),
        tests=(
            *_tests_in("fleet/judge", without=("test_alterations", "test_every_reading")), *_tests_in("fleet/diagnosis"),
            "fleet/criteria_lint/test_lint", "collectors/test_xid",
        ),
        min_score=0.92,
    ),
    "plan": MutationScope(
        targets=("fleet/planning/plan.py", "fleet/inventory/ansible.py", "schemas/plans.py"),
        tests=(
            *_tests_in("fleet/planning"), "fleet/judge/test_manifest", "schemas/test_plans",
            "fleet/scaling/test_scaling", "agent/soak/test_soak",
        ),
        min_score=0.92,
    ),
    "supervisor": MutationScope(
        targets=(
            "agent/launch/supervise.py", "agent/gang/heartbeat.py", "agent/gang/heartbeat_receiver.py",
            "agent/gang/monitor.py", "agent/gang/culprit.py", "agent/gang/peer_channel.py", "agent/gang/transport.py",
            "agent/launch/guard.py", "agent/sampling/snapshot_sampler.py",
            "agent/launch/process_tree.py", "agent/run/work_directory.py",
        ),
        tests=(
            *_tests_in("agent/gang"), *_tests_in("agent/launch"), *_tests_in("agent/sampling"), *_tests_in("agent/run"),
            "agent/exporter/test_live",
        ),
        min_score=0.92,
        ends_processes=True,
    ),
}  # fmt: skip
MAX_TEST_CPU_S = 6.0
"""Limit of CPU time for a test while the lines that it executes are traced. A slower test is not used."""
MAX_TEST_WALL_S = 8.0
"""Limit of elapsed time for a test while its lines are traced. A slower test is not used."""
MAX_EXTRA_S = 15.0
"""If the tests take this many seconds longer with a mutant, the mutant probably loops endlessly, so it counts as detected."""
MAX_FILE_S = 400.0
"""Limit of elapsed time for all tests of one test file while their lines are traced. If they take longer, none is used."""
MAX_TESTS_S, MAX_SUPERVISOR_TESTS_S = 30.0, 60.0
"""Limit of the total time, measured while tracing, of the tests that are used for one line. The fastest tests that execute the
line are used. Tests of the supervisor get a higher limit, because they mostly wait."""
MAX_TRACED_CALLS, MAX_SUPERVISOR_TRACED_CALLS = 200, 2000
"""Number of calls of each function that are traced in each test; the lines of later calls are not traced. The supervisor gets a
higher limit, because it calls some functions again and again."""
CLONE_NEWNS, CLONE_NEWPID, MS_REC, MS_PRIVATE, PR_SET_PDEATHSIG = 0x20000, 0x20000000, 0x4000, 0x40000, 1

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
    ast.Continue: ast.Break, ast.Break: ast.Continue,
}  # fmt: skip
NAMES = {"any": "all", "all": "any", "min": "max", "max": "min", "sorted": "list"}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change to a node of the syntax tree of a file."""

    file: str
    line: int
    """First line on which the node executes (see `_line`)."""
    last_line: int
    """Last line of the node or, if the node has a condition, of the condition (see `_last_line`).

    If a condition has several lines, a tracer may report only later lines than the first. So tests that execute any
    line from `line` to `last_line` are used."""
    statement: int
    """First line of the statement that contains the node. For a constant that the compiler folds, a tracer reports only
    this line."""
    number: int
    """Index of the node among those that `_changeable` yields."""
    kind: int
    """Index of the change in the list that `_changes` returns for the node."""

    def apply(self) -> tuple[ast.Module, str]:
        """Return the changed module, and a description of the change."""
        tree = ast.parse((ROOT / self.file).read_text())
        node, parent, _ = list(_changeable(tree))[self.number]
        before = ast.unparse(node).splitlines()[0]
        after = _changes(node)[self.kind](node, parent)
        ast.fix_missing_locations(tree)
        return tree, f"{before} -> {after}"[:160]


def mutants(target: str) -> list[Mutant]:
    """Return every mutant of a file (`FILE`), or of all functions and methods called NAME in it (`FILE:NAME`)."""
    file, _, name = target.partition(":")
    tree = ast.parse((ROOT / file).read_text())
    within = [
        (node.lineno, node.end_lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    if name and not within:
        raise SystemExit(f"{file} has no function {name}; correct SCOPES or the command line")
    return [
        Mutant(file=file, line=line, last_line=_last_line(node), statement=statement, number=number, kind=kind)
        for number, (node, _, statement) in enumerate(_changeable(tree))
        for kind in range(len(_changes(node)))
        if (line := _line(node)) and (not name or any(first <= line <= (last or 0) for first, last in within))
    ]


def _line(node: Any) -> int:
    """Return the first line on which a node executes.

    For a comprehension this is the line of its first condition or, without a condition, of its iterable.
    """
    return int(_line(node.ifs[0] if node.ifs else node.iter) if isinstance(node, ast.comprehension) else node.lineno)


def _last_line(node: Any) -> int:
    """Return the last line of a node; if the node has a condition (such as `if` or `while`), that of the condition.

    For a comprehension this is the last line of its last condition or, without a condition, of its iterable.
    """
    if isinstance(node, ast.comprehension):
        return int((node.ifs or [node.iter])[-1].end_lineno)
    return int(getattr(node, "test", node).end_lineno)


def _changeable(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST, int]]:
    """Yield each changeable node of a function body, with its parent and the first line of its statement.

    Text for people and the argument `strict=` are skipped.
    """

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
    """Return the possible changes of a node: functions (node, parent) that make one change and return the new source text."""
    changes: list[Any] = []
    swapped = node.ops[0] if isinstance(node, ast.Compare) and len(node.ops) == 1 else getattr(node, "op", None)
    if type(swapped) in SWAPS and not _is_comparison_with_monotonic_time(node):
        changes.append(_swap_op)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        changes.append(lambda node, parent: _replace_child(parent, node, node.operand))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        changes.append(lambda node, parent: _set_constant(node, not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        changes.append(lambda node, parent: _set_constant(node, node.value + 1))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        changes.append(lambda node, parent: _set_constant(node, f"{node.value}x"))
    elif isinstance(node, ast.Return) and node.value is not None and not _is_false_constant(node.value):
        changes.append(lambda node, parent: _replace_child(parent, node, ast.Return(value=ast.Constant(value=None))))
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        changes.append(_rename)
    elif isinstance(node, ast.Expr | ast.Continue | ast.Break) and not isinstance(
        getattr(node, "value", None), ast.Yield
    ):
        changes.append(lambda node, parent: _replace_child(parent, node, ast.Pass()))
    if isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        changes.append(_negate)
    if isinstance(node, ast.comprehension) and node.ifs:
        changes.append(lambda node, parent: node.ifs.clear() or "without its if")
    return changes


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
    return ast.unparse(node.test)


def _set_constant(node: ast.Constant, value: Any) -> str:
    node.value = value
    return repr(value)


def _replace_child(parent: ast.AST, old: ast.AST, new: ast.AST) -> str:
    for name, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, name, new)
        elif isinstance(value, list):
            setattr(parent, name, [new if item is old else item for item in value])
    return ast.unparse(ast.fix_missing_locations(new))


def _is_comparison_with_monotonic_time(node: ast.AST) -> bool:
    """Return whether a node compares `time.monotonic()` with another time by `<`, `<=`, `>` or `>=`."""
    is_order = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    return is_order and any(ast.unparse(each) == "time.monotonic()" for each in (node.left, *node.comparators))  # type: ignore[attr-defined]


def _is_false_constant(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def install_mutant(mutant: Mutant) -> None:
    """In this process, replace the code of all functions of the changed module by the code of the mutant."""
    _replace_code(compile(mutant.apply()[0], str(ROOT / mutant.file), "exec"), _module(mutant.file))
    clear_caches([mutant.file])


def _module(file: str) -> types.ModuleType:
    return sys.modules[file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")]


def clear_caches(files: Iterable[str]) -> None:
    """Clear the caches in the modules of `files`. A test that gets a result from a cache does not execute the cached function."""
    for file in files:
        for value in vars(_module(file)).values():
            if isinstance(value, BoundedCache):
                value.clear()
            elif hasattr(value, "cache_clear"):
                value.cache_clear()


def _replace_code(code: types.CodeType, owner: Any) -> None:
    for part in code.co_consts:
        if not isinstance(part, types.CodeType) or part.co_name.startswith("<"):
            continue
        function = vars(owner).get(part.co_name)
        if isinstance(function, type):
            _replace_code(part, function)
            continue
        function = (
            function.fget
            if isinstance(function, property)
            else function.func
            if isinstance(function, cached_property)
            else function
        )
        function = getattr(function, "__wrapped__", getattr(function, "__func__", function))
        if not isinstance(function, types.FunctionType):
            continue
        if function.__code__.co_freevars == part.co_freevars:
            function.__code__ = part
        else:  # the mutant no longer uses a variable of the closure, such as `__class__` of `super()`
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            closure = tuple(cells[name] for name in part.co_freevars)
            replacement = types.FunctionType(part, function.__globals__, part.co_name, function.__defaults__, closure)
            setattr(owner, part.co_name, replacement)


class MutationPlugin:
    """A pytest plugin that replaces the loop over the tests by a loop over the mutants."""

    def __init__(self, chosen: list[Mutant], jobs: int, in_namespace: bool) -> None:
        self.chosen, self.jobs, self.in_namespace = chosen, jobs, in_namespace
        self.detected: set[Mutant] = set()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests of each mutant; return True, so that pytest does not run its own loop."""
        began, done = time.monotonic(), 0
        everything = {item.nodeid: item for item in session.items}
        with ThreadPoolExecutor(self.jobs) as pool:
            tests_by_line = self._tests_by_line(session.items, pool)
            print(f"{len(everything)} tests traced, {time.monotonic() - began:.0f} s", flush=True)
            tasks = []
            for mutant in self.chosen:
                lines = (
                    f"{mutant.file}:{line}" for line in (*range(mutant.line, mutant.last_line + 1), mutant.statement)
                )
                durations = dict(test for line in lines for test in tests_by_line.get(line, ()))
                items = [everything[name] for name in durations]
                tasks.append((mutant, pool.submit(self._is_detected, mutant, items, sum(durations.values()))))
            for mutant, task in tasks:
                done += 1
                if task.result():
                    self.detected.add(mutant)
                else:
                    print(f"survived {mutant.file}:{mutant.line}: {mutant.apply()[1]}", flush=True)
                if done % 100 == 0:
                    print(f"… {done} of {len(tasks)} mutants, {time.monotonic() - began:.0f} s", flush=True)
        return True

    def _tests_by_line(self, items: list[pytest.Item], pool: ThreadPoolExecutor) -> dict[str, list[tuple[str, float]]]:
        """Return `file:line` -> the tests that execute the line, the fastest first, each with its duration in seconds."""
        files: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            files[str(item.path)].append(item)
        tests_by_line: dict[str, list[tuple[float, str]]] = defaultdict(list)
        with tempfile.TemporaryDirectory() as directory:
            line_files = {name: Path(directory) / f"{number}.json" for number, name in enumerate(files)}
            running = {
                name: pool.submit(self._fails_in_fork, MAX_FILE_S, self._write_lines, line_files[name], files[name])
                for name in files
            }
            for name, ended in running.items():
                if ended.result():
                    print(
                        f"{name}: not used, because tracing its tests failed or took longer than {MAX_FILE_S:g} s",
                        flush=True,
                    )
                    continue
                for line, tests in json.loads(line_files[name].read_text()).items():
                    if line:
                        tests_by_line[line] += tests
                    else:
                        print(
                            *(
                                f"not used, because it takes too long or fails: {test}, {spent:.0f} s"
                                for spent, test in tests
                            ),
                            sep="\n",
                            flush=True,
                        )
        return {
            line: list(_fastest(tests, MAX_SUPERVISOR_TESTS_S if self.in_namespace else MAX_TESTS_S))
            for line, tests in tests_by_line.items()
        }

    def _write_lines(self, path: Path, items: list[pytest.Item]) -> None:
        """Run the tests while their lines are traced, and write a JSON object to `path`.

        The object has `file:line` -> [seconds, test] of each test that executes the line. The key "" has the tests that are not
        used, because they fail or take too long.
        """
        wanted = {str(ROOT / mutant.file): mutant.file for mutant in self.chosen}
        executed: set[tuple[str, int]] = set()
        calls: Counter[types.CodeType] = Counter()
        log = path.with_suffix(".lines")

        def line(frame: Any, event: str, _: Any) -> Any:
            position = frame.f_code.co_filename, frame.f_lineno
            if event == "line" and position not in executed:
                executed.add(position)
                # Open the file each time, because this process may be a fork that has closed its inherited descriptors.
                with log.open("a") as file:
                    file.write(f"{wanted[position[0]]}:{position[1]}\n")
            return line

        def call(frame: Any, _: str, __: Any) -> Any:
            if frame.f_code.co_filename not in wanted:
                return None
            calls[frame.f_code] += 1
            return (
                line
                if calls[frame.f_code] <= (MAX_SUPERVISOR_TRACED_CALLS if self.in_namespace else MAX_TRACED_CALLS)
                else None
            )

        tests_by_line: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for item in items:
            executed.clear()
            calls.clear()
            clear_caches(sorted(set(wanted.values())))
            log.write_text("")
            began = time.monotonic()
            try:
                with _limit(MAX_TEST_CPU_S):
                    threading.settrace(call)
                    sys.settrace(call)
                    reports = runtestprotocol(item, nextitem=None, log=False)
            except TimeoutError:
                tests_by_line[""].append((MAX_TEST_CPU_S, item.nodeid))
                continue
            finally:
                sys.settrace(None)
                threading.settrace(None)
            spent = time.monotonic() - began
            failed = any(report.failed for report in reports)
            if failed or spent > MAX_TEST_WALL_S:
                tests_by_line[""].append((spent, item.nodeid))
            else:
                for position in set(log.read_text().split()):
                    tests_by_line[position].append((spent, item.nodeid))
        path.write_text(json.dumps(tests_by_line))

    def _is_detected(self, mutant: Mutant, items: list[pytest.Item], spent: float) -> bool:
        """Return whether a test fails or hangs with the mutant. `spent`: total seconds of the tests with the original code."""
        return bool(items) and self._fails_in_fork(MAX_EXTRA_S + spent, self._fail, mutant, items)

    @staticmethod
    def _fail(mutant: Mutant, items: list[pytest.Item]) -> None:
        install_mutant(mutant)
        for item in items:
            if any(report.failed for report in runtestprotocol(item, nextitem=None, log=False)):
                raise AssertionError(item.nodeid)

    def _fails_in_fork(self, max_s: float, work: Callable[..., None], *arguments: Any) -> bool:
        """Run `work` in a forked process; return whether it raises or takes longer than `max_s` seconds."""
        pid = os.fork()
        if not pid:
            with _forked_process():
                if self.in_namespace:
                    _enter_pid_namespace()
                work(*arguments)
        end = time.monotonic() + max_s
        while time.monotonic() < end:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status != 0
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if isinstance(mutant := arguments[0], Mutant):
            print(f"took too long, counts as detected: {mutant.file}:{mutant.line}", flush=True)
        return True


def _fastest(tests: list[tuple[float, str]], max_s: float) -> Iterator[tuple[str, float]]:
    """Yield name and seconds of the fastest tests, as long as their seconds add up to at most `max_s`."""
    spent = 0.0
    for seconds, name in sorted(tests):
        spent += seconds
        if spent <= max_s:
            yield name, seconds


@contextlib.contextmanager
def _forked_process() -> Iterator[None]:
    """Run the body of a forked process without output and in its own process group; then exit with 0, or 1 if the body raises."""
    try:
        os.setpgid(0, 0)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        yield
    except BaseException:  # noqa: BLE001 a mutant may raise anything
        os._exit(1)
    os._exit(0)


def _enter_pid_namespace() -> None:
    """Continue in a new PID namespace. When the first process of the namespace ends, the kernel kills the others."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | CLONE_NEWPID) or libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "cannot create a PID namespace")
    if first := os.fork():
        os._exit(int(os.waitpid(first, 0)[1] != 0))
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    if libc.mount(b"proc", b"/proc", b"proc", 0, None):
        raise OSError(ctypes.get_errno(), "cannot mount /proc")
    if second := os.fork():
        while (ended := os.wait())[0] != second:
            continue  # reap an orphaned process
        os._exit(int(ended[1] != 0))


def _can_enter_pid_namespace() -> bool:
    pid = os.fork()
    if not pid:
        with _forked_process():
            _enter_pid_namespace()
    return os.waitpid(pid, 0)[1] == 0


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the body uses more than `seconds` of CPU time."""

    def on_alarm(*_: object) -> None:
        raise TimeoutError("the test took too long")

    signal.signal(signal.SIGPROF, on_alarm)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> int:
    """Print the share of detected mutants of each scope and file, and the surviving mutants.

    Return 1 if the share of a scope is below its `min_score`, or if a scope was skipped; otherwise 0.
    """
    parser = argparse.ArgumentParser(description=" ".join(__doc__.partition("\n\n")[0].split()))
    parser.add_argument(
        "files", nargs="*", default=list(SCOPES), help=f"FILE, FILE:FUNCTION, or {', '.join(SCOPES)} (default: all)"
    )
    parser.add_argument(
        "--sample", type=int, default=0, help="number of random mutants per file (default: all mutants)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the random selection")
    parser.add_argument(
        "--tests", nargs="+", help="test files, relative to tests/unit and without .py (default: those of the scope)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of parallel processes")
    options = parser.parse_args()
    wanted = {name: scope.chosen(name, options.files) for name, scope in SCOPES.items()}
    if unknown := set(options.files) - set(SCOPES) - {target for targets in wanted.values() for target in targets}:
        parser.error(
            f"{', '.join(sorted(unknown))}: neither a scope ({', '.join(SCOPES)}) nor a file or function of a scope"
        )
    failed = False
    for name, targets in wanted.items():
        scope = SCOPES[name]
        if not targets:
            continue
        if scope.ends_processes and not _can_enter_pid_namespace():
            print(
                f"{name}: skipped: a mutant may kill any of your processes; run as root to give each mutant its own PID namespace"
            )
            failed = True
            continue
        failed |= _score(name, scope, targets, options) < scope.min_score
    return int(failed)


def _score(name: str, scope: MutationScope, targets: list[str], options: argparse.Namespace) -> float:
    """Test the mutants of one scope; print and return the share that was detected."""
    every = {target: mutants(target) for target in targets}
    chosen: list[Mutant] = []
    for target, mutants_ in every.items():
        rng = random.Random(f"{options.seed} {target}")  # noqa: S311 a sample, not a secret
        sample = rng.sample(mutants_, min(options.sample or len(mutants_), len(mutants_)))
        chosen += sorted(sample, key=lambda mutant: (mutant.line, mutant.number, mutant.kind))
    plugin = MutationPlugin(chosen, options.jobs, scope.ends_processes)
    paths = [str(ROOT / f"tests/unit/{test}.py") for test in options.tests or scope.tests]
    pytest.main(["-q", "--no-header", *paths], plugins=[plugin])
    for target, mutants_ in every.items():
        tried = set(mutants_) & set(chosen)
        detected = len(tried & plugin.detected)
        if tried:
            share = detected / len(tried)
            print(
                f"{share:6.1%} {target}: {detected} of {len(tried)} tried mutants detected; {len(mutants_)} mutants exist"
            )
    detected = len(plugin.detected)
    score = detected / len(chosen) if chosen else 0.0
    size = f"{options.sample} per file, seed {options.seed}" if options.sample else "all"
    print(
        f"mutation score of the {name} {score:.1%}: {detected} of {len(chosen)} mutants detected ({size})", flush=True
    )
    return score


if __name__ == "__main__":
    sys.exit(main())
