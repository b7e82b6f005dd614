"""A pack (list of criteria) of the operator can replace a shipped criterion only with the key `replaces`.

Nothing else in a pack of the operator weakens a shipped criterion.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fleet.judge import baseline, digests, manifest
from fleet.judge.criteria import RESERVED_IDS, Criterion, Pack, read_pack, read_packs, shipped_packs
from fleet.judge.figure_consistency import figure_problems
from fleet.judge.host_view import HostView
from fleet.judge.judge import judge, without_looser_floors
from fleet.judge.localization import faults
from fleet.judge.pack_selection import criteria_by_id, resolve
from fleet.report.replaced import replaced_criteria, replaced_lines
from schemas.errors import UsageError
from schemas.records import ERROR, Record
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Replaced, Verdict
from tests.accepted import call, rackproof, report_of, run_directory, slowed
from tests.unit.fleet.judge.small_fleet import criterion, host_evidence, one_figure_plan, pack, reading

MODEL = "h200-sxm"
SHIPPED = {
    "name": "memory.bandwidth", "scope": "gpu", "stage": "benchmark", "where": {"op": "copy"}, "operator": "ge", "unit": "B/s",
    "vs_sku": {"expected": 4.276e12, "fraction": 0.97}, "action": "rma", "basis": "measured", "source": "as shipped",
}  # fmt: skip
"""The criterion `hbm-copy` of the H200, as a pack file contains it, without its id."""
CHANGES: dict[str, dict[str, Any]] = {  # what is changed -> the changed keys of SHIPPED; None omits a key
    "a wider limit": {"vs_sku": {"expected": 4.276e12, "fraction": 0.76}},
    "another kind of limit": {"vs_sku": None, "vs_fleet": {"fraction": 0.95}},
    "only with a baseline": {"vs_sku": None, "vs_baseline": {"fraction": 0.98}},
    "a share of the datasheet": {"vs_sku": None, "vs_datasheet": {"figure": "memory_bandwidth", "fraction": 0.6}},
    "switched off": {"vs_sku": None, "operator": "eq", "same_as_fleet": False},
    "a narrower scope": {"scope": "host"},
    "narrower parameters": {"where": {"op": "copy", "dtype": "none"}},
    "another stage": {"stage": "soak"},
    "another figure": {
        "name": "gpu.count", "vs_sku": None, "value": 0, "where": {}, "unit": "1", "scope": "host", "stage": "preflight",
    },
    "another unit": {"unit": "1"},
    "optional": {"optional": True},
    "the best of the run": {"best_of_run": True},
    "only for new parts": {"new_part": True},
    "no consequence": {"action": "none", "severity": "warning"},
    "nothing": {},
}  # fmt: skip


def write_pack(path: Path, *criteria: dict[str, Any], **fields: Any) -> str:
    """Write a pack of the operator; a key with the value None is omitted. Return its path."""
    items = [{key: value for key, value in item.items() if value is not None} for item in criteria]
    path.write_text(
        yaml.safe_dump({"schema": "rackproof.criteria/1", "summary": "a site's", "criteria": items, **fields})
    )
    return str(path)


def item(criterion_id: str = "hbm-copy", **changes: Any) -> dict[str, Any]:
    """Return SHIPPED, a criterion of a pack file, with this id and these changes."""
    return {"id": criterion_id, **SHIPPED, **changes}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_criterion_with_a_shipped_id_is_refused_without_replaces(changes: dict[str, Any], tmp_path: Path) -> None:
    path = write_pack(tmp_path / "mine.yml", item(**changes))
    with pytest.raises(
        UsageError, match=r"mine: hbm-copy: a criterion of .* already has this id; .*add `replaces: hbm-copy`"
    ):
        read_packs([path])
    read_packs([write_pack(tmp_path / "mine.yml", item(**changes, replaces="hbm-copy"))])


def test_every_shipped_id_is_refused(tmp_path: Path) -> None:
    ids = {one.id for name in shipped_packs() for one in read_pack(name).criteria}
    path = write_pack(tmp_path / "mine.yml", *(item(criterion_id) for criterion_id in sorted(ids)))
    with pytest.raises(UsageError) as refused:
        read_packs([path])
    assert {line.split(": ")[1] for line in str(refused.value).splitlines()[1:]} == ids


@pytest.mark.parametrize(
    ("criteria", "problem"),
    [
        ([item("mine", replaces="hbm-cpoy")], "mine: replaces hbm-cpoy, which no pack has (did you mean hbm-copy?)"),
        ([item("hbm-copy", replaces="hbm-read")], "hbm-copy: a criterion of"),
        ([item("manifest")], "manifest: the id is reserved"),
        ([item("plan", replaces="hbm-copy")], "plan: the id is reserved"),
    ],
)
def test_replacement_with_a_wrong_id_is_refused(criteria: list[dict[str, Any]], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        read_packs([write_pack(tmp_path / "mine.yml", *criteria)])
    assert problem in str(refused.value)


def test_ids_of_verdicts_without_a_criterion_are_reserved() -> None:
    ids = {baseline.CRITERION, digests.CRITERION, faults.CRITERION, manifest.CRITERION, manifest.EXTRA, "plan"}
    assert ids <= RESERVED_IDS
    assert not RESERVED_IDS & {one.id for name in shipped_packs() for one in read_pack(name).criteria}


def test_file_with_the_name_of_a_shipped_pack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rehearsal is the name of a shipped criteria pack; rename the file"):
        read_packs([write_pack(tmp_path / "rehearsal.yml", item("mine"))])
    write_pack(tmp_path / "common.yml", item("mine"))
    with pytest.raises(UsageError, match="common is the name of a shipped criteria pack"):
        read_packs([write_pack(tmp_path / "mine.yml", include=[str(tmp_path / "common.yml")])])


def test_packs_of_the_operator_do_not_replace_each_other_silently(tmp_path: Path) -> None:
    first = write_pack(tmp_path / "first.yml", item("site", vs_sku={"expected": 4.4e12, "fraction": 0.97}))
    second = write_pack(tmp_path / "second.yml", item("site"))
    with pytest.raises(UsageError, match="second: site: a criterion of first already has this id"):
        read_packs([first, second])
    assert [one.name for one in read_packs([first, first]) if one.chosen] == ["first", "first"]


def chosen_criteria(*names: str) -> dict[str, Criterion]:
    """Return the criteria that judge MODEL if the operator chooses these packs."""
    packs = read_packs(names)
    return criteria_by_id([next(one for one in packs if one.name == MODEL), *(one for one in packs if one.chosen)])


def test_only_one_shipped_pack_replaces_criteria_of_the_gpu_model(tmp_path: Path) -> None:
    """The pack `fleet-relative-hosts` replaces optional criteria by criteria that are not optional."""
    of_model, hosts = chosen_criteria(), "fleet-relative-hosts"
    for name in shipped_packs():
        including = write_pack(tmp_path / "mine.yml", include=[name])
        for criteria in (chosen_criteria(name), chosen_criteria(including)):
            kept = {key: value for key, value in criteria.items() if key in of_model and value.origin != hosts}
            assert kept == {key: of_model[key] for key in kept}, name
            assert of_model.keys() <= criteria.keys()
    replaced = {key for key, value in chosen_criteria(hosts).items() if value.origin == hosts}
    assert {of_model[key].optional for key in replaced} == {True}
    assert not any(chosen_criteria(hosts)[key].optional for key in replaced)


def test_replacement_is_traced_through_packs_even_if_two_criteria_replace_the_same_criterion(tmp_path: Path) -> None:
    first = write_pack(tmp_path / "first.yml", item("half", replaces="hbm-copy"))
    parts = [item("quarter", replaces="half"), item("half", replaces="half"), item("other")]
    packs = read_packs([first, write_pack(tmp_path / "second.yml", *parts)])
    selection = resolve([next(one for one in packs if one.name == MODEL), *(one for one in packs if one.chosen)])
    assert "hbm-copy" not in selection.criteria
    assert {key: [old.origin for old in olds] for key, olds in selection.replaced.items()} == {
        "quarter": [MODEL],
        "half": [MODEL],
    }
    assert selection.criteria["half"].origin == "second"


# ---- the report ----


def test_report_lists_replaced_criteria(tmp_path: Path) -> None:
    def slow(record: Record) -> Record:
        for gpu in (0, 1):
            record = slowed("memory.bandwidth", 0.9, host=record.host, scope=f"gpu={gpu}", op="copy")(record)
        return record

    run = run_directory(tmp_path / "r1", change=slow)
    assert call("report", run) == 1
    looser = {"vs_sku": {"expected": 4.276e12, "fraction": 0.76}, "action": "none", "source": "an old <contract>"}
    refused = rackproof("report", run, "--criteria", write_pack(tmp_path / "mine.yml", item(**looser)))
    assert (refused.returncode, refused.stdout) == (64, "")
    assert "add `replaces: hbm-copy`" in refused.stderr
    site = write_pack(tmp_path / "mine.yml", item("site-copy", **looser, replaces="hbm-copy"))
    accepted = rackproof("report", run, "--criteria", site)
    assert accepted.returncode == 0
    (replaced,) = report_of(run)["replaced"]
    old, new = (
        "memory.bandwidth (gpu, op copy) ≥ 4192 GB/s",
        "memory.bandwidth (gpu, op copy, stage benchmark) ≥ 3250 GB/s",
    )
    assert (replaced["criterion"], replaced["pack"], replaced["hosts"]) == ("hbm-copy", MODEL, 2)
    assert (replaced["by"], replaced["by_pack"], replaced["source"]) == ("site-copy", "mine", "an old <contract>")
    assert replaced["old"].startswith(old)
    assert replaced["old"].endswith("[critical, rma]")
    assert replaced["new"] == f"{new} [warning, none]"
    assert {"stage", "fraction", "action", "severity"} <= {*replaced["changed"]}
    for text in (accepted.stdout, (run / "report.md").read_text(), (run / "report.html").read_text()):
        assert re.search(r"Criterion replaced:?\s+hbm-copy of h200-sxm", text)
        assert old in text
        assert new in text
    assert "an old ‹contract›" in (run / "report.md").read_text()
    assert "an old &lt;contract&gt;" in (run / "report.html").read_text()
    page = rackproof("report", run, "--criteria", site, "--host", "h1")
    assert re.search(r"Criterion replaced:?\s+hbm-copy of h200-sxm", page.stdout)
    assert "replaced" not in {*report_of(run)["hosts"][0]}


@pytest.mark.parametrize(
    ("packs", "old", "pack"),
    [
        (("h200-sxm",), "hbm-copy", "h200-sxm"),
        (("common",), "infiniband-link-downed", "link-health"),
        (("rehearsal", "common"), "infiniband-link-downed", "link-health"),  # the rehearsal judges ports with `common`
        (("rehearsal", "common"), "gpu-count", ""),  # of `common`, a rehearsal uses only the criteria on ports
        (("rehearsal",), "infiniband-link-downed", ""),
    ],
)
def test_replaced_criterion_of_any_pack_that_applies_to_a_host_is_listed(
    packs: tuple[str, ...], old: str, pack: str, tmp_path: Path
) -> None:
    """`pack`: the pack that defines the replaced criterion; empty if the criterion does not apply to the host."""
    site = read_packs([write_pack(tmp_path / "mine.yml", item("site", replaces=old))])
    replaced = replaced_criteria(site, [SimpleNamespace(packs=(*packs, "mine"))] * 3)
    assert [(item.criterion, item.pack, item.hosts) for item in replaced] == ([(old, pack, 3)] if pack else [])


def test_doctor_lint_and_alerts_refuse_a_silent_replacement(tmp_path: Path) -> None:
    path = write_pack(tmp_path / "mine.yml", item(**CHANGES["another figure"]))
    for command in (("doctor", "--criteria"), ("criteria", "lint"), ("criteria", "alerts")):
        assert rackproof(*command, path).returncode == 64


def test_only_ten_replaced_criteria_are_listed_and_the_others_counted() -> None:
    items = [
        Replaced(criterion=f"c{index}", pack="common", old="x", by=f"c{index}", by_pack="mine", new="y", hosts=1)
        for index in range(13)
    ]
    lines = [str(line) for line in replaced_lines(items)]
    assert (len(lines), lines[-1]) == (11, "Criteria replaced: 3 more, listed in report.json")
    assert lines[0] == "Criterion replaced: c0 of common: x; replaced by c0 of mine: y (changed: nothing)"


# ---- criteria in addition to the shipped ones ----

PLAN = one_figure_plan()


def host_view(*packs: Pack) -> HostView:
    return HostView(PLAN, PLAN.host("h1"), host_evidence(PLAN), packs)


def test_key_named_lacks_has_no_effect_in_a_pack_of_the_operator() -> None:
    """In a shipped pack, this key lists figures that may be unsupported."""
    (expected,) = PLAN.expected
    lacks = {"memory.bandwidth": {"op": ("copy",)}}
    for chosen in (True, False):  # False: the operator did not choose the pack, so it does not apply to the host
        view = host_view(pack(), pack(name="mine", chosen=chosen, lacks=lacks))
        assert view.lacks(expected) is False
    assert host_view(pack(lacks=lacks)).lacks(expected)


def test_criterion_of_the_operator_does_not_hide_a_refused_reading() -> None:
    refused = reading(name="gpu.temperature", absent=f"{ERROR}: Unknown Error")
    evidence = {"h1": host_evidence(PLAN, "h1", refused)}
    of_operator = criterion("gpu.temperature", id="mine", origin="base", operator="lt", stage="soak", optional=True)
    shipped = criterion("gpu.temperature", id="shipped", origin="h200-sxm", operator="lt", value=90)

    def refusals(*packs: Any) -> list[str]:
        return [one.reason for one in judge(PLAN, evidence, packs) if "driver refuses" in one.reason]

    assert len(refusals(pack())) == 1
    assert len(refusals(pack(), pack(of_operator, name="mine", chosen=True))) == 1
    assert refusals(pack(shipped)) == []


def test_replacing_a_criterion_does_not_make_an_impossible_value_credible() -> None:
    """A value is credible up to 3 times the datasheet figure of the shipped criterion."""
    sheet = {"memory_bandwidth": {"value": 4.8e12}, "nvlink": {"links": 18, "bandwidth": 9e14}}
    common = {"name": "memory.bandwidth", "unit": "B/s", "operator": "ge", "fraction": 0.5}
    shipped = criterion(**common, id="shipped", datasheet="memory_bandwidth")
    raised = criterion(**common, id="mine", datasheet="all_nvlinks", replaces="shipped")
    (record,) = host_evidence(PLAN).records
    fast = replace(record, observations=tuple(replace(one, value=4.8e13) for one in record.observations))
    for criteria in ((), (raised,)):
        view = host_view(pack(shipped, datasheet=sheet), pack(*criteria, name="mine", chosen=True))
        assert [reason for _, _, reason, _ in figure_problems(view, fast.observations) if "datasheet" in reason], (
            criteria
        )


def floor(criterion_id: str, limit: float, *, basis: str = "model", **over: Any) -> Verdict:
    """Return a failure: the value 1.0 is below the lower limit `limit`. `over` replaces fields of the verdict."""
    fields = {
        "host": "h1", "scope": "gpu=0", "name": "a.b", "verdict": FAIL, "value": 1.0, "operator": "ge", "action": "rma",
        "reason": "",
    }  # fmt: skip
    return Verdict(criterion=criterion_id, limit=limit, basis=basis, **{**fields, **over})


def test_failure_of_a_floor_hides_failures_of_looser_floors_unless_it_is_less_severe() -> None:
    def remaining(*verdicts: Verdict) -> list[str]:
        return [one.criterion for one in without_looser_floors(verdicts)]

    shipped, stricter = floor("shipped", 2.0), floor("stricter", 3.0, basis="policy")
    assert remaining(shipped, stricter) == ["stricter"]
    assert remaining(shipped, replace(stricter, severity="warning", action="none")) == ["shipped", "stricter"]
    assert remaining(shipped, replace(stricter, basis="model")) == ["stricter"]
    assert remaining(shipped, replace(stricter, verdict=PASS)) == ["shipped", "stricter"]
    assert remaining(floor("ceiling", 0.5, operator="le"), shipped) == ["ceiling", "shipped"]


@pytest.mark.parametrize(
    "fields",
    [{"name": "a.c"}, {"scope": "gpu=1"}, {"stage": "gang"}, {"params": {"op": "x"}}, {"verdict": INCONCLUSIVE}],
)
def test_floor_on_another_value_or_without_a_failure_hides_no_failure(fields: dict[str, Any]) -> None:
    verdicts = [floor("shipped", 2.0), floor("stricter", 3.0, **fields)]
    assert without_looser_floors(verdicts) == verdicts


def test_first_of_equal_floors_is_kept_and_the_order_of_parameters_makes_no_difference() -> None:
    first = floor("first", 2.0, params={"op": "x", "size": 1})
    assert without_looser_floors([first, floor("second", 2.0, params={"size": 1, "op": "x"})]) == [first]
