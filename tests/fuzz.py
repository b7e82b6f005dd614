"""Run directories that somebody broke or forged, a million at a time: no crash, no wrong acceptance, no write outside.

    make fuzz                                             # 1 000 000 mutations
    .venv/bin/python -m tests.fuzz --mutations 100000 --jobs 2

Each mutation changes bytes or the JSON of a record (sometimes of the plan or of the journal of events) of a small run that is in
order, and the run is read as `rackproof report` reads it. Where a changed record is still believed, the run is judged; where it
is accepted, `wrong` says by itself, from the bytes alone, whether it might be. Now and then everything is written, too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet.errors import RunError
from fleet.judge.criteria import Criterion, Pack, read_packs
from fleet.report.load import Records, load
from fleet.report.merge import merge
from schemas import documents, quick
from schemas.plans import Plan
from schemas.records import Record, to_json
from schemas.reports import FleetReport
from tests import accepted, builders

PACKS = read_packs([])
WHOLE = next(pack for pack in PACKS if pack.name == "h200-sxm")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
WORDS = 10
"""Of so many of a short run one is refused in words, by jsonschema; the others by the fast validator of the same schemas."""
FULL = 200
"""Of so many mutations one is of a run with all that a host tells and every criterion; the others are of a short one."""
COMMAND = 20
"""Of so many of those one is put through the whole command, which writes its files."""
PART = 5_000
KEPT = ("memory", "digest")
TOLD = ("gpu.ecc.enabled", "gpu.ecc.uncorrectable_volatile", "gpu.pcie.width", "gpu.count", "gpu.remapped_rows.failed")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.0, -0.0, 1e-300, 1e300, 2**53 + 1, 2**63, 2**64, -(2**70), float("nan"), float("inf"),
    "", "0", "NaN", "measured", "error", "skipped", "unsupported", "error: ", "gpu=0", "gpu=1", "host", "finished", "failed",
    "../../x", "/etc/passwd", "a\x00b", "a\nb", "<script>alert(1)</script>", "=1+1", "\x1b[31m", "\u202e", "\ud800", "x" * 5000,
    [], {}, [[]], {"a": {}}, [{}], "h2", "r0", "f" * 32, "preflight", "benchmark", "after", "before", "simulated", "9" * 40,
)  # fmt: skip
TOKENS = (
    b'"', b":", b",", b"{", b"}", b"[", b"]", b"\\", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\ud800",
    b"NaN", b"1e999", b"-Infinity", b"[" * 3000, b'{"a":' * 40, b"0", b"-", b"e9", b"null", b"true", b'"host": "h2",',
    b'"status": "measured",', b'"value": 0,', b'"simulated": true,', b'"gang": "x",', b"\r\n", b"\xc2\x85", b"\xe2\x80\xa8",
)  # fmt: skip


def short(record: Record) -> Record:
    """A record with few readings."""
    taken = tuple(
        replace(
            snapshot,
            metrics=tuple(metric for metric in snapshot.metrics if metric.name.startswith(TOLD) and metric.values),
        )
        for snapshot in record.snapshots
    )
    return replace(record, snapshots=taken)


def short_pack() -> Pack:
    """The criteria that speak of what a short record holds."""
    names = {metric for metric in builders.HEALTHY if metric.startswith(TOLD)} | {
        "gpu.count",
        "memory.bandwidth",
        "digest.mismatches",
    }
    return replace(WHOLE, criteria=tuple(item for item in WHOLE.criteria if item.name in names))


def small_run(directory: Path, full: bool = False) -> Plan:
    """Two hosts with a GPU each, and few figures."""
    plan = builders.plan("h1", "h2", profile="smoke", gpu_count=1, rackproof_gang="none")
    kept = [item for item in plan.expected if item.name.split(".")[0] in KEPT]
    plan = replace(
        plan, expected=tuple(kept if full else [item for item in kept if item.params.get("op") != "triad"][:4])
    )
    documents.write(directory / "plan.json", to_json(plan))
    for host in plan.hosts:
        for record in builders.records(plan, host.name):
            documents.write(directory / "hosts" / f"{host.name}.json", to_json(record if full else short(record)))
    event = {"at": builders.WHEN, "play": "Gang", "what": "passed", "hosts": ["h1", "h2"]}
    (directory / "events.jsonl").write_text(json.dumps(event) + "\n")
    return plan


# The mutations


def mutated(draw: random.Random, whole: bytes) -> bytes:
    """The document, changed in one to three places: by its bytes, or as JSON."""
    if draw.random() < 0.8:
        return _bytes(draw, whole)
    document = json.loads(whole)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        _change(draw, document)
    text = json.dumps(document, indent=draw.choice((None, 1)))
    return text.encode() if draw.random() < 0.95 else _bytes(draw, text.encode())


def _bytes(draw: random.Random, text: bytes) -> bytes:
    at, length = draw.randrange(len(text)), draw.choice((1, 1, 2, 8, 64, 2000))
    kind = draw.randrange(6)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :]
    if kind == 2:
        return text[:at] + text[at + length :]
    if kind == 3:
        return text[:at] + draw.choice(TOKENS) + text[at:]
    if kind == 4:
        return text[:at] + text[at : at + length] + text[at:]
    lines = text.split(b"\n")
    lines.insert(draw.randrange(len(lines)), draw.choice(lines))
    return b"\n".join(lines)


def _change(draw: random.Random, document: Any) -> None:
    """One thing of the JSON: another value, one less, one more, twice, two exchanged."""
    place = _place(draw, document)
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    if not keys:
        return
    key, kind = draw.choice(keys), draw.randrange(6)
    if kind == 0:
        del place[key]
    elif kind == 1:
        other = _place(draw, document)
        others = list(other.values()) if isinstance(other, dict) else other
        place[key] = json.loads(json.dumps(draw.choice(others))) if others else None
    elif kind == 2 and isinstance(place, list):
        place.insert(draw.randrange(len(place) + 1), place[key])
    elif kind == 2:
        place[draw.choice(("value", "reason", "status", "simulated", "gang", "x", "", "gpu=9", "\ud800"))] = place[key]
    elif kind == 3 and isinstance(place[key], int | float):
        place[key] = draw.choice((0, -place[key], place[key] * 0.5, place[key] * 1e6, place[key] + 1, not place[key]))
    elif kind == 3 and isinstance(place[key], str) and place[key]:
        place[key] = place[key][:-1] + draw.choice("0aZ/. \n")
    else:
        place[key] = draw.choice(VALUES)


def _place(draw: random.Random, document: Any) -> Any:
    """An object or a list somewhere in it."""
    place = document
    while True:
        inner = [
            value for value in (place.values() if isinstance(place, dict) else place) if isinstance(value, dict | list)
        ]
        if not inner or draw.random() < 0.15:
            return place
        place = draw.choice(inner)


# Whether it might be accepted, from the bytes alone


def wrong(plan: dict[str, Any], records: dict[str, bytes], criteria: Sequence[Criterion]) -> str:
    """Why a run must not be accepted; empty where nothing speaks against it. Knows nothing of the judge's code.

    Held against: strict JSON, the schema, run, nonce, host, gang; every planned observation measured, the last of it; the last
    launch finished; GPUs that tell another model or another's serial; every absolute criterion, on everything that it is for;
    every counter that rose over the run; no collector's error where a criterion asks.
    """
    parts: dict[tuple[str, int], set[tuple[str, str]]] = {}
    places: dict[str, set[tuple[str, int]]] = {}
    for host in plan["hosts"]:
        try:
            document = json.loads(records[host["name"]].decode(), object_pairs_hook=_once, parse_constant=_never)
            quick.validate(document, "record", source="record")
        except (ValueError, RecursionError) as error:
            return f"{host['name']}: no valid record: {str(error)[:80]}"
        own = [
            document.get(key, default)
            for key, default in (("run_id", 0), ("nonce", 0), ("host", 0), ("gang", ""), ("simulated", False))
        ]
        if own != [plan["run_id"], plan["nonce"], host["name"], "", plan.get("simulated", False)]:
            return f"{host['name']}: a record of {own}"
        for gpu in document.get("gpus", ()):
            place = host["name"], gpu["index"]
            parts.setdefault(place, set()).add((gpu["serial"], gpu["uuid"]))
            for key in ("serial", "uuid"):
                places.setdefault(gpu[key] or str(place), set()).add(place)
        if why := _unsound(plan, host, document, criteria):
            return f"{host['name']}: {why}"
    if any(len(found) > 1 for found in (*parts.values(), *places.values())):
        return "a GPU in two places, or two in one"
    return ""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def _never(word: str) -> float:
    raise ValueError(word)


def _unsound(
    plan: dict[str, Any], host: dict[str, Any], document: dict[str, Any], criteria: Sequence[Criterion]
) -> str:
    seen = document.get("observations", [])
    for item in plan["expected"]:
        for scope in [f"gpu={index}" for index in host["devices"]] if item["scope"] == "device" else ["host"]:
            found = [
                each for each in seen
                if (each["name"], each["stage"], each["scope"]) == (item["name"], item["stage"], scope)
                and item["params"].items() <= each.get("params", {}).items()
            ]  # fmt: skip
            if not found or found[-1]["status"] != "measured":
                return f"{item['name']} {scope} {item['params']} was not measured"
    for launch in document.get("launches", [])[-1:]:
        if launch["outcome"] != "finished":
            return f"the last launch {launch['outcome']}"
    if any(gpu["name"] != "NVIDIA H200" for gpu in document.get("gpus", ())):
        return "a GPU of another model"
    return next((why for criterion in criteria if (why := _broken(criterion, host, document))), "")


def _broken(criterion: Criterion, host: dict[str, Any], document: dict[str, Any]) -> str:
    """Why what the host tells is against a criterion with a limit of its own."""
    if (
        criterion.vs_fleet
        or criterion.baseline
        or criterion.same_as_fleet is not None
        or criterion.variable
        or "*" in criterion.name
    ):
        return ""
    limit = criterion.value if criterion.expected is None else criterion.expected * criterion.fraction
    values, lost = _told(criterion, document)
    for scope, series in values.items():
        if criterion.delta and criterion.operator in ("le", "lt", "eq"):
            kinds = {type(value) in (int, float) for value in series}
            if len(series) > 1 and kinds == {True} and series[-1] - series[0] > float(limit):  # type: ignore[arg-type]
                return f"{criterion.id}: {scope} rose from {series[0]} to {series[-1]}"
        elif not criterion.delta:
            good = [_meets(criterion.operator, value, limit) for value in series]
            if not (any(good) if criterion.best_of_run else all(good)):
                return f"{criterion.id}: {scope} has {series}, wanted {criterion.operator} {limit}"
    if (
        criterion.scope == "gpu"
        and not criterion.optional
        and "." in criterion.name
        and criterion.name.startswith("gpu.")
    ):
        for index in host["devices"]:
            if f"gpu={index}" not in values:
                return f"{criterion.id}: gpu={index} tells nothing"
    if lost and not criterion.best_of_run:
        return f"{criterion.id}: {lost}"
    return ""


def _told(criterion: Criterion, document: dict[str, Any]) -> tuple[dict[str, list[Any]], str]:
    """Scope -> what is told of it, in the order of time; and an error, where one stands in its place."""
    values: dict[str, list[Any]] = {}
    lost = ""
    for taken in sorted(document.get("snapshots", ()), key=lambda taken: str(taken["at"])):
        for metric in taken["metrics"] if criterion.stage in ("", taken["stage"]) else ():
            if metric["name"] == criterion.name:
                for scope, value in metric.get("values", {}).items():
                    if _is_for(criterion, scope, {"phase": taken["phase"]}):
                        values.setdefault(scope, []).append(value)
                for scope, why in metric.get("absent", {}).items():
                    if _is_for(criterion, scope, {"phase": taken["phase"]}) and why.startswith("error:"):
                        lost = f"{scope} {why}"
    for each in document.get("observations", ()):
        hit = each["name"] == criterion.name and criterion.stage in ("", each["stage"]) and each["status"] == "measured"
        if hit and _is_for(criterion, each["scope"], each.get("params", {})):
            values.setdefault(f"{each['scope']} {each.get('params')}", []).append(each["value"])
    return values, lost


def _is_for(criterion: Criterion, scope: str, params: dict[str, Any]) -> bool:
    labels = dict(part.split("=", 1) for part in scope.split(",") if "=" in part)
    kind = scope.split(",")[-1].split("=")[0]
    return criterion.scope in ("", kind) and all(
        params.get(key, labels.get(key)) == value for key, value in criterion.where.items()
    )


def _meets(operator: str, value: Any, limit: Any) -> bool:
    if isinstance(value, bool) != isinstance(limit, bool) or isinstance(value, str) != isinstance(limit, str):
        return False
    if operator == "eq":
        return bool(value == limit)
    if not isinstance(value, int | float):
        return False
    return {"ge": value >= limit, "gt": value > limit, "le": value <= limit, "lt": value < limit}[operator]


# The trial


class Trial:
    """One small run directory, broken again and again, and what came of it."""

    def __init__(self, place: Path, seed: int, full: bool = False) -> None:
        self.directory, self.draw = place / "r1", random.Random(seed)  # noqa: S311
        self.plan, self.full = small_run(self.directory, full), full
        self.packs = PACKS if full else (short_pack(),)
        self.records = Records(self.directory, self.plan, {})
        names = ("plan.json", "events.jsonl", "hosts/h1.json", "hosts/h2.json")
        self.sound = {name: (self.directory / name).read_bytes() for name in names}
        self.broken = ""
        self.counts: Counter[str] = Counter()
        self.told: list[str] = []

    def one(self, number: int) -> None:
        """One mutation."""
        name = self.draw.choices(list(self.sound), (1, 1, 60, 60))[0]
        text = mutated(self.draw, self.sound[name])
        if self.broken not in ("", name):
            (self.directory / self.broken).write_bytes(self.sound[self.broken])
        self.broken = name
        (self.directory / name).write_bytes(text)
        self.counts["mutations"] += 1
        try:
            with contextlib.nullcontext() if self.full or number % WORDS == 0 else _wordless():
                self._read(name, text)
            if self.full and number % COMMAND == 0:
                self._command()
        except Exception:  # noqa: BLE001 whatever it is, it is what is looked for
            self._say("crashes", f"{name}: {traceback.format_exc(limit=-3)}", text)

    def _read(self, name: str, text: bytes) -> None:
        if name.startswith("hosts/"):
            host = self.plan.host(Path(name).stem)
            if not self.records.read(host)[0].records:
                self.counts["refused"] += 1
                return
            if not self.full:
                evidence = {each.name: self.records.read(each)[0] for each in self.plan.hosts}
                self._judged(name, text, merge(self.plan, evidence, self.packs))
                return
        try:
            run = load(self.directory)
        except RunError:
            self.counts["refused"] += 1
            return
        made = merge(run.plan, run.evidence, self.packs, events=run.events, quarantined=run.quarantined)
        self._judged(name, text, made)

    def _judged(self, name: str, text: bytes, report: FleetReport) -> None:
        self.counts[report.decision] += 1
        if report.decision == "accepted" and (why := self._wrong(name, text)):
            self._say("wrong accepts", f"{name}: {why}", text)

    def _wrong(self, name: str, text: bytes) -> str:
        if name == "events.jsonl":
            return _untold(text)
        whole = self.sound | {name: text}
        plan = json.loads(whole["plan.json"].decode(), object_pairs_hook=_once, parse_constant=_never)
        if name == "plan.json":
            documents.validate(plan, "plan", source="plan")
        records = {Path(key).stem: value for key, value in whole.items() if key.startswith("hosts/")}
        return wrong(plan, records, (WHOLE if self.full else self.packs[0]).criteria)

    def _command(self) -> None:
        """The whole of `rackproof report`, which writes; whatever it writes elsewhere is counted."""
        outside: list[str] = []
        told = io.StringIO()
        with (
            _watched(self.directory, outside.append),
            contextlib.redirect_stdout(told),
            contextlib.redirect_stderr(told),
        ):
            code = accepted.call("report", self.directory)
        self.counts["commands"] += 1
        if code not in (0, 1, 2):
            self._say("crashes", f"exit {code}: {told.getvalue()[-600:]}", b"")
        for path in outside:
            self._say("writes outside", path, b"")

    def _say(self, what: str, text: str, document: bytes) -> None:
        self.counts[what] += 1
        if len(self.told) < 5:
            kept = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}-{self.counts['mutations']}.json"
            kept.write_bytes(document)
            self.told.append(f"{what}: {text} ({kept})")


def _untold(text: bytes) -> str:
    for line in text.removesuffix(b"\n").split(b"\n") if text else ():
        try:
            event = json.loads(line.decode(), object_pairs_hook=_once, parse_constant=_never)
            documents.validator("event").validate(event)
        except (ValueError, RecursionError, documents.ValidationError):
            return "a line of the journal that is none"
        if event["what"] != "passed" and event["host"] in ("h1", "h2"):
            return "the journal tells of a failure"
    return ""


@contextlib.contextmanager
def _wordless() -> Iterator[None]:
    """Most of the time of a refusal goes into its words; a test holds the two validators against each other."""
    authority = documents.validate

    def validate(value: Any, schema: str, *, source: str) -> None:
        if not quick.compiled(schema).is_valid(value):
            raise documents.DocumentError(f"{source}: refused")

    if quick.available():
        documents.validate = validate
    try:
        yield
    finally:
        documents.validate = authority


_LOOKING: list[tuple[str, Callable[[str], None]]] = []
_WRITES = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "os.chmod",
    "os.chown",
)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _LOOKING or (event != "open" and event not in _WRITES):
        return
    allowed, say = _LOOKING[-1]
    if event == "open" and not (
        isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    ):
        return
    for path in arguments[:2] if event in ("os.rename", "os.link", "os.symlink") else arguments[:1]:
        if isinstance(path, str | bytes | os.PathLike):
            real = os.path.realpath(os.fsdecode(path))
            if not f"{real}/".startswith(f"{allowed}/") and "__pycache__" not in real and real != os.devnull:
                say(f"{event} {real}")


@contextlib.contextmanager
def _watched(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Tells of everything that is written, made, renamed or removed outside of a directory."""
    if not getattr(sys, "_fuzz_audited", False):
        sys.addaudithook(_audit)
        sys._fuzz_audited = True  # type: ignore[attr-defined]
    beside = sorted(directory.parent.iterdir())
    _LOOKING.append((os.path.realpath(directory), say))
    try:
        yield
    finally:
        _LOOKING.pop()
    if sorted(directory.parent.iterdir()) != beside:
        say("something beside the run directory")


def part(seed: int, count: int) -> tuple[Counter[str], list[str]]:
    """So many mutations in one process."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as place:
        counts: Counter[str] = Counter()
        told: list[str] = []
        for full, many in ((True, count // FULL), (False, count - count // FULL)):
            trial = Trial(Path(place).resolve() / str(full), seed, full)
            for number in range(1, many + 1):
                trial.one(number)
            counts += trial.counts
            told += trial.told
        return counts, told


BAD = ("crashes", "wrong accepts", "writes outside")


def run(mutations: int, jobs: int, seed: int, say: Callable[[str], None] = print) -> tuple[Counter[str], list[str]]:
    """All of them; `say` is told how it goes on."""
    counts: Counter[str] = Counter()
    told: list[str] = []
    began = time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        parts = range(0, mutations, PART)
        tasks = [pool.submit(part, seed + at, min(PART, mutations - at)) for at in parts]
        for done, task in enumerate(as_completed(tasks), 1):
            more, words = task.result()
            counts += more
            told += words
            if done % max(1, len(tasks) // 20) == 0:
                say(f"… {counts['mutations']} mutations, {time.monotonic() - began:.0f} s")
    return counts, told


def main() -> int:
    """Prints the counts; 1 where anything was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutations", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts, told = run(options.mutations, options.jobs, options.seed, lambda text: print(text, flush=True))
    print("\n".join(told[:20]))
    print(
        f"{counts['mutations']} mutations, seed {options.seed}: " + ", ".join(f"{counts[name]} {name}" for name in BAD)
    )
    judged = counts["accepted"] + counts["rejected"] + counts["incomplete"]
    print(
        f"{counts['refused']} refused, {judged} judged ({counts['accepted']} accepted), {counts['commands']} written in full"
    )
    return int(any(counts[name] for name in BAD))


if __name__ == "__main__":
    sys.exit(main())
