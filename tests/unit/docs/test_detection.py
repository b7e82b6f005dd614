"""The generated tables of docs/criteria.md show what `rackproof power` prints for the accepted runs in docs/measurements.

The part `detection` is a line with the names of the runs, and then the output with `--pool --markdown`. The part `planted faults`
is the output with `--planted-faults`.
"""

from __future__ import annotations

import os
import re

import pytest

from fleet.judge.criteria import model_packs, read_packs
from fleet.judge.pack_selection import criteria_by_id
from rackproof.main import main
from tests import ROOT

PAGE, MEASUREMENTS = ROOT / "docs" / "criteria.md", ROOT / "docs" / "measurements"
BEGIN, END = "<!-- detection: generated, do not edit -->\n", "<!-- detection: end -->\n"
ACCEPTED = re.compile(r"^\| \[`(\S+)`\]\(\S+\) \|.*\| accepted \|", re.MULTILINE)


@pytest.fixture(scope="module")
def printed() -> str:
    """Return a line `RUNS: …` with the names of the accepted runs, and below it what the command prints for these runs."""
    runs = ACCEPTED.findall((MEASUREMENTS / "README.md").read_text(encoding="utf-8"))
    assert len(runs) > 5
    with pytest.MonkeyPatch.context() as patch:
        output: list[str] = []
        patch.setattr("builtins.print", lambda text="", end="\n": output.append(f"{text}{end}"))
        assert main(["power", "--pool", "--markdown", *(str(MEASUREMENTS / run) for run in runs)]) == 0
    return f"RUNS: {' '.join(runs)}\n\n" + "".join(output)


def test_tables_are_current(printed: str) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    tables, _, after = rest.partition(END)
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(f"{before}{BEGIN}\n{printed}\n{END}{after}", encoding="utf-8")
        return
    assert tables.strip("\n") == printed.strip("\n"), "run `make golden`"


def test_table_of_planted_faults_is_current() -> None:
    begin, end = "<!-- planted faults: generated, do not edit -->\n", "<!-- planted faults: end -->\n"
    runs = ACCEPTED.findall((MEASUREMENTS / "README.md").read_text(encoding="utf-8"))
    output: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda text="", end="\n": output.append(f"{text}{end}"))
        assert main(["power", "--planted-faults", *(str(MEASUREMENTS / run) for run in runs)]) == 0
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    table, _, after = rest.partition(end)
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(f"{before}{begin}\n{''.join(output)}\n{end}{after}", encoding="utf-8")
        return
    assert table.strip("\n") == "".join(output).strip("\n"), "run `make golden`"


def test_every_criterion_of_the_measured_gpu_models_is_in_the_tables(printed: str) -> None:
    packs = {pack.name: pack for pack in read_packs([])}
    models = [name for name in model_packs() if f"| {name} " in printed]
    assert models == ["h100-sxm", "h200-sxm"]
    ids = {name for model in models for name in criteria_by_id([packs[model]])}
    assert [name for name in sorted(ids) if f"`{name}`" not in printed] == []
