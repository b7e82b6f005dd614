"""How much the tests of the judge, the plan and the supervisor notice: one small thing of their code is changed at a time,
and some test must fail.

    make mutate                                     # a sample of all the files
    .venv/bin/python -m tests.mutate plan           # all of what makes the plan
    .venv/bin/python -m tests.mutate fleet/judge/evaluate.py

No file is touched. pytest collects the tests once; for each mutant a process is forked, whose functions get the changed code,
and in which the tests run that pass through the changed line, the quickest first, until one fails. A program that a test starts
has the code as it is: what runs only there is not changed.

The supervisor ends processes, and a changed one may take any for its own: each of its mutants has a PID namespace to itself,
which takes root. Nothing beyond it can be ended, and what a mutant leaves running ends with it.

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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Room:
    """Code that decides one thing, and its tests."""

    targets: tuple[str, ...]
    """Files, or `FILE:FUNCTION`."""
    tests: tuple[str, ...]
    """Files of tests/unit, without `.py`: the quick ones. What starts real launches, or judges whole fleets, takes too long."""
    fewest: float
    """Noticed of all."""
    ends_processes: bool = False

    def chosen(self, name: str, wanted: list[str]) -> list[str]:
        """The places of this room that are wanted: all by its name, or files of it, or functions of those."""
        files = {target.partition(":")[0] for target in self.targets}
        return (
            list(self.targets) if name in wanted else [target for target in wanted if target.partition(":")[0] in files]
        )


ROOMS = {
    "judge": Room(
        targets=(
            *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "fleet" / "judge").rglob("*.py"))),
            *("fleet/report/hosts.py:decide", "fleet/report/causes.py"),
            *("fleet/report/summary.py:reasons", "fleet/report/summary.py:status_of"),
        ),
        tests=(
            "fleet/judge/test_edges", "fleet/judge/test_paths", "fleet/judge/test_evidence", "fleet/judge/test_baseline",
            "fleet/judge/test_digest_edges", "fleet/judge/test_straggler_edges", "fleet/judge/test_drift",
            "fleet/judge/test_packs", "fleet/criteria_lint/test_lint", "fleet/judge/localization/test_gang_launches",
            "fleet/judge/test_power_edges", "fleet/judge/test_manifest_edges", "fleet/judge/localization/test_localization",
            "fleet/judge/test_culprits", "fleet/judge/test_passes", "fleet/judge/test_tally", "fleet/judge/test_waivers",
            "fleet/judge/test_severity", "fleet/judge/test_outliers", "fleet/judge/test_uniformity",
            "fleet/judge/test_power", "fleet/judge/test_manifest", "fleet/judge/test_criteria", "collectors/test_xid",
        ),
        fewest=0.90,
    ),
    "plan": Room(
        targets=("fleet/planning/plan.py", "fleet/inventory/ansible.py", "schemas/plans.py"),
        tests=(
            "fleet/planning/test_plan", "fleet/planning/test_plan_edges", "fleet/judge/test_manifest",
            "fleet/scaling/test_scaling", "agent/soak/test_soak",
        ),
        fewest=0.85,
    ),
    "supervisor": Room(
        targets=(
            "agent/launch/supervise.py", "agent/gang/heartbeat.py", "agent/gang/heartbeat_receiver.py",
            "agent/gang/monitor.py", "agent/gang/culprit.py", "agent/gang/peer_channel.py", "agent/gang/transport.py",
            "agent/launch/guard.py", "agent/sampling/snapshot_sampler.py",
            "agent/launch/process_tree.py", "agent/run/work_directory.py",
        ),
        tests=(
            "agent/launch/test_supervise", "agent/launch/test_supervise_edges", "agent/launch/test_guard",
            "agent/gang/test_heartbeat", "agent/gang/test_rank_state", "agent/gang/test_peer_channel",
            "agent/gang/test_culprit", "agent/sampling/test_oom", "agent/exporter/test_live",
        ),
        fewest=0.85,
        ends_processes=True,
    ),
}  # fmt: skip
LONGEST_TEST_S = 2.0
"""A test that takes longer, with its lines counted, is left out: it would run for every mutant that the others do not notice."""
LONGEST_WAIT_S = 4.0
"""The same of a test that mostly waits."""
LONGEST_S = 15.0
"""A mutant that runs so much longer than its tests has been noticed: it goes round in circles."""
LONGEST_FILE_S = 300.0
"""For all tests of a file, with their lines counted."""
MOST_S, MOST_WAIT_S = 15.0, 45.0
"""So much of tests for a mutant, as long as they take with their lines counted; those of the supervisor mostly wait."""
MOST_CALLS, MOST_LOOKS = 40, 2000
"""Of one function in one test, whose lines are counted; a supervisor looks again and again until something is so."""
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


def mutants(target: str) -> list[Mutant]:
    """Every mutant of a file, or of one function of it (`FILE:NAME`)."""
    file, _, name = target.partition(":")
    tree = ast.parse((ROOT / file).read_text())
    within = [
        (node.lineno, node.end_lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    if name and not within:
        raise SystemExit(f"{file} has no function {name}: it was moved, and nothing of it would be changed")
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
    changes: list[Any] = []
    swapped = node.ops[0] if isinstance(node, ast.Compare) and len(node.ops) == 1 else getattr(node, "op", None)
    if type(swapped) in SWAPS:
        changes.append(_swap_op)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        changes.append(lambda node, parent: _put(parent, node, node.operand))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        changes.append(lambda node, parent: _set(node, not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        changes.append(lambda node, parent: _set(node, node.value + 1))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        changes.append(lambda node, parent: _set(node, f"{node.value}x"))
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        changes.append(lambda node, parent: _put(parent, node, ast.Return(value=ast.Constant(value=None))))
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        changes.append(_rename)
    elif isinstance(node, ast.Expr | ast.Continue | ast.Break) and not isinstance(
        getattr(node, "value", None), ast.Yield
    ):
        changes.append(lambda node, parent: _put(parent, node, ast.Pass()))
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
        function = vars(owner).get(part.co_name)
        if isinstance(function, type):
            _implant(part, function)
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
        else:  # without its `super()`
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            closure = tuple(cells[name] for name in part.co_freevars)
            made = types.FunctionType(part, function.__globals__, part.co_name, function.__defaults__, closure)
            setattr(owner, part.co_name, made)


class Trial:
    """Takes the place of pytest's loop over the tests."""

    def __init__(self, chosen: list[Mutant], jobs: int, apart: bool) -> None:
        self.chosen, self.jobs, self.apart = chosen, jobs, apart
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
                durations = dict(test for line in lines for test in passing.get(line, ()))
                items = [everything[name] for name in durations]
                tasks.append((mutant, pool.submit(self._noticed, mutant, items, sum(durations.values()))))
            for mutant, task in tasks:
                done += 1
                if not task.result():
                    self.survived.append(mutant)
                    print(f"survived {mutant.file}:{mutant.line}: {mutant.made()[1]}", flush=True)
                if done % 100 == 0:
                    print(f"… {done} of {len(tasks)} mutants, {time.monotonic() - began:.0f} s", flush=True)
        return True

    def _lines(self, items: list[pytest.Item], pool: ThreadPoolExecutor) -> dict[str, list[tuple[str, float]]]:
        """`file:line` -> the tests that pass through it and the seconds they take, the quickest first."""
        files: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            files[str(item.path)].append(item)
        through: dict[str, list[tuple[float, str]]] = defaultdict(list)
        with tempfile.TemporaryDirectory() as directory:
            line_files = {name: Path(directory) / f"{Path(name).stem}.json" for name in files}
            running = {
                name: pool.submit(self._forked, LONGEST_FILE_S, self._write_lines, line_files[name], files[name])
                for name in files
            }
            for name, ended in running.items():
                if ended.result():
                    print(f"{name}: its tests took too long, or failed, and are left out", flush=True)
                    continue
                for line, tests in json.loads(line_files[name].read_text()).items():
                    if line:
                        through[line] += tests
                    else:
                        print(
                            *(
                                f"left out, since it takes too long or fails: {test}, {spent:.0f} s"
                                for spent, test in tests
                            ),
                            sep="\n",
                            flush=True,
                        )
        return {line: list(_quickest(tests, MOST_WAIT_S if self.apart else MOST_S)) for line, tests in through.items()}

    def _write_lines(self, path: Path, items: list[pytest.Item]) -> None:
        wanted = {str(ROOT / mutant.file): mutant.file for mutant in self.chosen}
        executed: set[tuple[str, int]] = set()
        calls: Counter[types.CodeType] = Counter()
        log = path.with_suffix(".lines")

        def line(frame: Any, event: str, _: Any) -> Any:
            position = frame.f_code.co_filename, frame.f_lineno
            if event == "line" and position not in executed:
                executed.add(position)
                # A fork of the test writes there too, and may have closed all that was open.
                with log.open("a") as file:
                    file.write(f"{wanted[position[0]]}:{position[1]}\n")
            return line

        def call(frame: Any, _: str, __: Any) -> Any:
            if frame.f_code.co_filename not in wanted:
                return None
            calls[frame.f_code] += 1
            return line if calls[frame.f_code] <= (MOST_LOOKS if self.apart else MOST_CALLS) else None

        through: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for item in items:
            executed.clear()
            calls.clear()
            log.write_text("")
            began = time.monotonic()
            try:
                with _limit(LONGEST_TEST_S):
                    threading.settrace(call)
                    sys.settrace(call)
                    reports = runtestprotocol(item, nextitem=None, log=False)
            except TimeoutError:
                through[""].append((LONGEST_TEST_S, item.nodeid))
                continue
            finally:
                sys.settrace(None)
                threading.settrace(None)
            spent = time.monotonic() - began
            failed = any(report.failed for report in reports)
            if failed or spent > LONGEST_WAIT_S:
                through[""].append((spent, item.nodeid))
            else:
                for position in set(log.read_text().split()):
                    through[position].append((spent, item.nodeid))
        path.write_text(json.dumps(through))

    def _noticed(self, mutant: Mutant, items: list[pytest.Item], spent: float) -> bool:
        """Whether any of the tests, which take so long without it, fails on it."""
        return bool(items) and self._forked(LONGEST_S + spent, self._fail, mutant, items)

    @staticmethod
    def _fail(mutant: Mutant, items: list[pytest.Item]) -> None:
        implant(mutant)
        for item in items:
            if any(report.failed for report in runtestprotocol(item, nextitem=None, log=False)):
                raise AssertionError(item.nodeid)

    def _forked(self, longest_s: float, work: Callable[..., None], *arguments: Any) -> bool:
        """Whether `work`, in a process of its own, raises or takes too long."""
        pid = os.fork()
        if not pid:
            with _alone():
                if self.apart:
                    _go_apart()
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


def _quickest(tests: list[tuple[float, str]], most_s: float) -> Iterator[tuple[str, float]]:
    spent = 0.0
    for seconds, name in sorted(tests):
        spent += seconds
        if spent <= most_s:
            yield name, seconds


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


def _go_apart() -> None:
    """Goes on in a PID namespace, where no process is but those begun from here on; they end with the first of them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | CLONE_NEWPID) or libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "no PID namespace")
    if first := os.fork():
        os._exit(int(os.waitpid(first, 0)[1] != 0))
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    if libc.mount(b"proc", b"/proc", b"proc", 0, None):
        raise OSError(ctypes.get_errno(), "no /proc")
    if second := os.fork():
        while (ended := os.wait())[0] != second:
            continue  # an orphan
        os._exit(int(ended[1] != 0))


def _may_go_apart() -> bool:
    pid = os.fork()
    if not pid:
        with _alone():
            _go_apart()
    return os.waitpid(pid, 0)[1] == 0


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
    """Prints the scores and what no test noticed; 1 where a score is too low, or a room was left out."""
    parser = argparse.ArgumentParser(description=" ".join(__doc__.partition("\n\n")[0].split()))
    parser.add_argument("files", nargs="*", default=list(ROOMS), help=f"or {', '.join(ROOMS)} (default: all)")
    parser.add_argument("--sample", type=int, default=0, help="try so many of each file's mutants (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument(
        "--tests", nargs="+", help="by which (default: the quick ones): files of tests/unit, without .py"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    options = parser.parse_args()
    wanted = {name: room.chosen(name, options.files) for name, room in ROOMS.items()}
    if unknown := set(options.files) - set(ROOMS) - {target for targets in wanted.values() for target in targets}:
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(ROOMS)}")
    low = False
    for name, targets in wanted.items():
        room = ROOMS[name]
        if not targets:
            continue
        if room.ends_processes and not _may_go_apart():
            print(f"{name}: left out: a mutant of it may end any process of yours; as root each has a PID namespace")
            low = True
            continue
        low |= _score(name, room, targets, options) < room.fewest
    return int(low)


def _score(name: str, room: Room, targets: list[str], options: argparse.Namespace) -> float:
    every = {target: mutants(target) for target in targets}
    chosen: list[Mutant] = []
    for target, mutants_ in every.items():
        draw = random.Random(f"{options.seed} {target}")  # noqa: S311 a sample, no secret
        drawn = draw.sample(mutants_, min(options.sample or len(mutants_), len(mutants_)))
        chosen += sorted(drawn, key=lambda mutant: (mutant.line, mutant.number, mutant.kind))
    trial = Trial(chosen, options.jobs, room.ends_processes)
    paths = [str(ROOT / f"tests/unit/{test}.py") for test in options.tests or room.tests]
    pytest.main(["-q", "--no-header", *paths], plugins=[trial])
    for target, mutants_ in every.items():
        own = set(mutants_) & set(chosen)
        left = len(own & set(trial.survived))
        if own:
            share = (len(own) - left) / len(own)
            print(f"{share:6.1%} {target}: {len(own) - left} of {len(own)} mutants noticed, sampled of {len(mutants_)}")
    noticed = len(chosen) - len(trial.survived)
    score = noticed / len(chosen) if chosen else 0.0
    size = f"{options.sample} a file, seed {options.seed}" if options.sample else "all"
    print(f"mutation score of the {name} {score:.1%}: {noticed} of {len(chosen)} noticed ({size})", flush=True)
    return score


if __name__ == "__main__":
    sys.exit(main())
