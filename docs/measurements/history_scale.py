"""Measure the history of a large fleet: its size, and the time of each built-in question, on two processors.

    .venv/bin/python docs/measurements/history_scale.py --runs 1000 --hosts 64 --gpus 8

It writes the Parquet files of all runs directly, month by month in the form in which `rackproof history merge` leaves them, with
a few newer runs that are not merged. With the second driver, half of the figures are 1 % higher. Then it starts the command for
each question, as an operator does, and prints its time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from fleet.history import tables  # noqa: E402
from fleet.history.commit import writer  # noqa: E402
from fleet.history.engine import connect  # noqa: E402
from fleet.history.index import home, stored  # noqa: E402
from schemas.baselines import SIMULATED  # noqa: E402

START = datetime(2024, 1, 1)
COMMAND = ROOT / "rackproof"
SERIAL, FIGURE = "1652800000100", "bench.3.throughput"
QUESTIONS: dict[str, list[str]] = {
    "part": ["part", SERIAL],
    "figure": ["figure", FIGURE, "--settings", "dtype=d1", "--value", "4.01e12"],
    "figure, all settings": ["figure", FIGURE],
    "lemons": ["lemons"],
    "drivers": ["drivers"],
    "racks": ["racks"],
    "page": ["page", "{page}"],
    "sql, one host": ["sql", "select name, median(value) from figures where host = 'r01-h003' group by name"],
}
_PARTS = """
create table places as select 'r' || lpad((host // 8)::varchar, 2, '0') as rack,
  'r' || lpad((host // 8)::varchar, 2, '0') || '-h' || lpad(host::varchar, 3, '0') as host,
  case when gpu < 0 then '' else 'gpu=' || gpu end as slot,
  case when gpu < 0 then '' else (1652800000000 + host * {gpus} + gpu)::varchar end as serial
from range({hosts}) h(host), range(-1, {gpus}) g(gpu)"""
_FIGURES = """
create table kinds as select 'bench.' || (i // 4) || '.throughput' as name, 'dtype=d' || (i % 4) as settings, 'FLOP/s' as unit,
  1e12 * (1 + i // 4) as level from range({figures}) t(i)"""
_MONTH = """
create or replace table all_figures as select run, nonce, "began", rack, host, slot, serial, 'NVIDIA H200' as model, driver,
  hash(host, nonce) % 1000 <> 0 as accepted, name, 'benchmark' as stage, '' as within, settings, unit,
  round(level * case when driver >= '580.61' and settings < 'dtype=d2' then 1.01 else 1 end
    * (1 + 0.002 * ((hash(serial, name) % 1000) / 500.0 - 1) + 0.01 * (random() - 0.5)), -6) as value,
  false as duplicate, (0.01 * (random() - 0.5))::float as relative, 'host' as reference
from month_runs, kinds, places where serial <> ''"""
_GROUPS = """
create or replace table all_levels as
select run, nonce, "began", 'host' as level, host as id, any_value(rack) as rack, 'NVIDIA H200' as model,
  any_value(driver) as driver,
  name, 'benchmark' as stage, '' as within, settings, 'FLOP/s' as unit, bool_and(accepted) as accepted, avg(value) as value,
  (0.004 * (random() - 0.5))::float as relative, 'rack' as reference
from all_figures group by run, nonce, "began", host, name, settings
union all by name
select run, nonce, "began", 'rack' as level, rack as id, rack, 'NVIDIA H200' as model, any_value(driver) as driver,
  name, 'benchmark' as stage, '' as within, settings, 'FLOP/s' as unit, bool_and(accepted) as accepted, avg(value) as value,
  (0.004 * (random() - 0.5))::float as relative, 'run' as reference
from all_figures group by run, nonce, "began", rack, name, settings"""
_OTHERS = """
create or replace table all_parts as select run, nonce, "began", rack, host, slot, serial,
  case when slot = '' then 'host' else 'gpu' end as part, 'NVIDIA H200' as model, driver, 'accepted' as decision,
  false as duplicate
from month_runs, places;
create or replace table all_tests as select run, nonce, "began", host, 'benchmark' as stage, 'bench.' || i as benchmark,
  true as measured, false as failed, 20.0 as seconds
from month_runs, places, range(20) t(i) where slot = '';
create or replace table all_causes as select run, nonce, "began", rack, host, slot, serial, 'gpu-memory' as problem,
  'GPU memory' as title, 'rma' as action, 'critical' as severity, 'certain' as confidence, false as waived
from month_runs, places where serial <> '' and hash(serial, nonce) % 2000 = 0"""


def main() -> int:
    """Write the history, or use that of an earlier call, and print a row for each question."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    for name, default in (
        ("runs", 1000),
        ("hosts", 64),
        ("gpus", 8),
        ("figures", 100),
        ("unmerged", 16),
        ("processors", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--where", type=Path, help="directory of the history, which is kept (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.where or Path(temporary) / "history"
        if not home(directory, SIMULATED).exists():
            began = time.monotonic()
            write(directory, options)
            print(f"written in {time.monotonic() - began:.0f} s")
        files = list(home(directory, SIMULATED).glob("*/*.parquet"))
        rows = options.runs * options.hosts * options.gpus * options.figures
        size = sum(path.stat().st_size for path in files)
        shape = f"{options.runs} runs x {options.hosts} hosts x {options.gpus} GPUs x {options.figures} figures"
        print(f"{shape}: {rows / 1e6:.1f} M values, {size / 1e6:.0f} MB in {len(files)} files, {size / rows:.1f} bytes a value; "
              f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")  # fmt: skip
        for name, question in QUESTIONS.items():
            print(f"{name:22} {ask(directory, question, options.processors)}", flush=True)
    return 0


def ask(directory: Path, question: list[str], processors: int) -> str:
    """Return the time of the command for a question."""
    chosen = set(sorted(os.sched_getaffinity(0))[:processors])
    page = str(directory.parent / "history_scale.html")
    words = [word.format(page=page) for word in question]
    command = [sys.executable, str(COMMAND), "history", *words, "--history", str(directory), "--kind", SIMULATED]
    began, before = time.monotonic(), os.times()
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, chosen))
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr.strip()}"
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return f"{time.monotonic() - began:5.2f} s, {cpu:5.2f} s of CPU, {len(done.stdout.splitlines())} lines"


def write(directory: Path, options: argparse.Namespace) -> None:
    """Write one file for the runs of each month, and one for each of the last runs."""
    place = home(directory, SIMULATED)
    with connect() as database, writer(directory, SIMULATED) as index:
        database.execute(_PARTS.format(hosts=options.hosts, gpus=options.gpus))
        database.execute(_FIGURES.format(figures=options.figures))
        months: dict[str, list[int]] = {}
        for number in range(options.runs):
            unmerged = number >= options.runs - options.unmerged
            months.setdefault(f"unmerged {number}" if unmerged else f"{began_of(number, options):%Y-%m}", []).append(
                number
            )
        for month, numbers in months.items():
            make_tables(database, index, numbers, options)
            nonces = [nonce_of(number) for number in numbers]
            write_files(database, index, place, "" if month.startswith("unmerged") else month, nonces)


def began_of(number: int, options: argparse.Namespace) -> datetime:
    """Return when a run began: all runs within two years."""
    return START + timedelta(days=730 * number / options.runs)


def nonce_of(number: int) -> str:
    """Return the nonce of a run."""
    return f"{number:032x}"


def make_tables(database: Any, index: Any, numbers: list[int], options: argparse.Namespace) -> None:
    """Make the tables of some runs in memory. The figures are random, but as expensive to read as real ones."""
    database.execute(
        'create or replace table month_runs (run varchar, nonce varchar, "began" timestamp, driver varchar)'
    )
    for number in numbers:
        began, nonce = f"{began_of(number, options):%Y-%m-%d %H:%M:%S}", nonce_of(number)
        index.runs[nonce] = {
            "run": f"run-{number:05}", "began": began, "ended": began, "profile": "standard", "decision": "accepted",
            "rackproof": "2.0.0", "hosts": options.hosts, "gpus": options.hosts * options.gpus, "notes": [],
        }  # fmt: skip
        driver = f"580.{60 + 3 * number // options.runs}.05"
        database.execute("insert into month_runs values (?, ?, ?, ?)", (f"run-{number:05}", nonce, began, driver))
    for statement in (_MONTH, _GROUPS, _OTHERS):
        database.execute(statement)


def write_files(database: Any, index: Any, place: Path, month: str, nonces: list[str]) -> None:
    """Write the Parquet files of one month, or of one run."""
    for table in ("figures", "levels", "parts", "causes", "tests", *(["trends", "spreads"] if month else [])):
        path = place / table / f"{month or nonces[0]}-00.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        derived = {"trends": tables.trend_sums("all_figures", "all_levels"), "spreads": tables.spreads("all_figures")}
        query = derived.get(table, f"from all_{table}")
        database.execute(tables.copy(f"select * from ({query})", table, path, merged=bool(month)))
        index.files.append(stored(place, path, table, tuple(nonces), month))


if __name__ == "__main__":
    sys.exit(main())
