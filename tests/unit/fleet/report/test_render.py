"""Test the rendered report: its content, and that no text from a host acts as HTML, Markdown or a terminal control sequence."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import pytest

from fleet import scope_text
from fleet.diagnosis import handling
from fleet.diagnosis.diagnose import diagnose
from fleet.judge.criteria import Criterion, Pack, read_packs
from fleet.judge.judge import Evidence
from fleet.report import formatting
from fleet.report.criterion_text import wanted_text
from fleet.report.hosts import FULL_HOSTS
from fleet.report.html import pairs, strips
from fleet.report.html.page import render_html
from fleet.report.markdown import render_markdown
from fleet.report.merge import merge
from fleet.report.tables import (
    communication,
    figure,
    gpus,
    headline,
    peers,
    timing,
    verdict_rows,
    workloads,
)
from fleet.report.tables.hosts import gpu_states
from fleet.report.tables.summary_text import RULE, render_screen, render_summary
from schemas.baselines import Change
from schemas.catalogue import BENCHMARKS, Expectation
from schemas.plans import Part, Plan, PlannedHost, Stage
from schemas.readings import READINGS
from schemas.records import ERROR, MEASURED, Gpu, Launch, Metric, Observation, Rank, Record, Samples, Snapshot, Soak
from schemas.reports import (
    EXCEPTIONS,
    FAIL,
    PASS,
    Acceptance,
    FarthestPart,
    FleetReport,
    Judged,
    LineKind,
    NotJudged,
    Quarantined,
    Spread,
    SummaryLine,
    Verdict,
)
from schemas.waivers import Waiver
from tests import ROOT, builders

GOLDEN = ROOT / "tests" / "golden"
SIZES = (8, 65536, 1 << 20, 1 << 30)
GIB = 1 << 30


def gpus_of(host: int, count: int = 2) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(index=i, serial=f"16{host}{i}", uuid=f"GPU-{host}-{i}", name="NVIDIA H200", pci_bus_id=f"0000:{i}9:00.0")
        for i in range(count)
    )


def pack(name: str, scope: str, minimum: float) -> Pack:
    common: dict[str, Any] = {"operator": "ge", "basis": "measured", "source": "measured, 4x H200 SXM"}
    return Pack(
        name=name,
        gpu_names=("NVIDIA H200",) if scope == "gpu" else (),
        criteria=(
            Criterion(
                id="gemm-bf16",
                name="gemm.throughput",
                scope=scope,
                unit="FLOP/s",
                value=minimum,
                action="rma",
                **common,
            ),
            Criterion(
                id="all-reduce",
                name="collective.all_reduce.busbw",
                where={"size_bytes": GIB},
                unit="B/s",
                value=minimum / 2000,
                action="inspect_hardware",
                **common,
            ),
        ),
    )


PACKS = (pack("h200-sxm", "gpu", 7e14), pack("rehearsal", "cpu", 0.0))


def plan(hosts: int = 2, devices: int = 2, rehearsal: bool = False) -> Plan:
    kinds = [("gemm.throughput", "device", {"dtype": "bf16"})]
    kinds += [("collective.all_reduce.busbw", "world", {"size_bytes": size}) for size in SIZES]
    kinds += [(f"training.{kind}", "world", {"network": "convnet"}) for kind in ("throughput", "accuracy")]
    benchmarks: dict[str, dict[str, Any]] = {"gemm": {}, "collective": {}, "training": {}}
    return Plan(
        run_id="rack12-a",
        nonce="0" * 32,
        created="2026-11-14T09:30:02Z",
        profile="standard",
        rehearsal=rehearsal,
        criteria=(),
        stages=(Stage(name="benchmark", deadline_s=600, collective_timeout_s=60, benchmarks=benchmarks),),
        hosts=tuple(
            PlannedHost(
                name=f"gpu-{number:02d}",
                address="",
                rack=f"rack{number // 8}",
                device="cpu" if rehearsal else "gpu",
                devices=tuple(range(devices)),
            )
            for number in range(hosts)
        ),
        expected=tuple(Expectation(stage="benchmark", name=n, scope=s, params=p) for n, s, p in kinds),
    )


def record(plan: Plan, number: int, slow: int = -1, more: Sequence[Observation] = (), **changes: Any) -> Record:
    """Return the record of the host at position `number`.

    Args:
        slow: index of a GPU that is 20 % slower; -1 for none.
        more: additional observations. If there are any, the snapshots also have the links between GPUs.
        changes: fields of the record to replace.
    """
    host = plan.hosts[number]
    world: dict[str, Any] = {"scope": "host", "stage": "benchmark", "status": MEASURED}
    observations = [
        Observation(
            name="gemm.throughput",
            scope=scope,
            stage="benchmark",
            unit="FLOP/s",
            status=MEASURED,
            value=(7.5e14 + 1e12 * index + 1e11 * number) * (0.8 if index == slow else 1),
            params={"dtype": "bf16", "size": 8192},
        )
        for index, scope in enumerate(host.scopes)
    ]
    for size in SIZES:
        params = {"size_bytes": size, "world_size": len(host.devices)}
        value = size / (25e-6 + size / 3.66e11) + number * 1e6
        observations.append(
            Observation(name="collective.all_reduce.busbw", unit="B/s", value=value, params=params, **world)
        )
    training = {"network": "convnet", "data": "synthetic", "world_size": 2, "batch_size": 128}
    observations.append(
        Observation(name="training.throughput", unit="images/s", value=40992.5, params=training, **world)
    )
    observations.append(Observation(name="training.accuracy", unit="1", value=0.8091, params=training, **world))
    observations += more
    launch = Launch(
        stage="benchmark",
        outcome="finished",
        reason="",
        members=(host.name,),
        began="2026-11-14T09:31:07Z",
        duration_s=412.3,
        deadline_s=600,
        ranks=builders.ranks(len(host.devices)),
        log_tail="",
    )
    link = Metric(name="gpu.peer.link", unit="1", values={"gpu=0,peer=1": "NV18", "gpu=1,peer=0": "NV18"})
    metrics = (link,) if more else ()
    moments = (("preflight", "before", "09:30"), ("benchmark", "before", "09:31"), ("benchmark", "after", "09:40"))
    snapshots = tuple(
        Snapshot(stage=stage, phase=phase, at=f"2026-11-14T{at}:00Z", duration_s=0.1, metrics=metrics)
        for stage, phase, at in moments
    )
    default = Record(
        run_id=plan.run_id,
        nonce=plan.nonce,
        host=host.name,
        began=plan.created,
        ended="2026-11-14T10:14:52Z",
        rackproof="2.0.0",
        gpus=() if plan.rehearsal else gpus_of(number, len(host.devices)),
        software={"driver": "580.159.04", **builders.SOFTWARE},
        snapshots=snapshots,
        observations=tuple(observations),
        launches=(launch,),
    )
    return replace(default, **changes)


def measured(name: str, value: Any, unit: str = "1", scope: str = "host", **params: Any) -> Observation:
    """Return a measured observation. It has samples if its unit is FLOP/s or B/s."""
    sampled = unit in ("FLOP/s", "B/s")
    samples = (
        Samples(n=42, min=value, p50=value, max=value, cv=0.0, precision=0.0012, stopped="precision")
        if sampled
        else None
    )
    if name == "memory.bandwidth" and samples:
        samples = replace(samples, precision=0.004, stopped="time")
    return Observation(
        name=name,
        scope=scope,
        stage="benchmark",
        unit=unit,
        status=MEASURED,
        value=value,
        params=params,
        samples=samples,
    )


def other_benchmarks(number: int = 0) -> list[Observation]:
    """Return more observations for `record`, of a host with two GPUs. `number` is the position of the host in the plan."""
    observations = []
    for gpu in ("gpu=0", "gpu=1"):
        offset = 1e9 * number
        observations += [
            measured("memory.bandwidth", 4.27e12 + offset, "B/s", gpu, op="copy"),
            measured(
                "host_copy.bandwidth",
                5.55e10 + offset,
                "B/s",
                gpu,
                direction="host_to_device",
                sharing="alone",
                numa="local",
            ),
            measured("integrity.wrong_words", 7 * number if gpu == "gpu=1" else 0, "1", gpu, pattern="zeros"),
            measured("stress.throughput", 6.9e14 + offset, "FLOP/s", gpu, dtype="bf16"),
            measured("stress.power", 698.2, "W", gpu, dtype="bf16"),
            measured("stress.efficiency", 9.9e11, "FLOP/J", gpu, dtype="bf16"),
            measured("stress.flop_per_cycle", 4.66e5, "FLOP/cycle", gpu, dtype="bf16"),
            measured("stress.clock", 1.485e9, "Hz", gpu, dtype="bf16"),
            measured("stress.temperature", 63, "Cel", gpu, dtype="bf16"),
            measured("stress.throttled_share", 0.38, "1", gpu, dtype="bf16", reason="power_cap"),
            measured("stress.throttled_share", 0.0, "1", gpu, dtype="bf16", reason="hw_thermal"),
        ]
    for pair, speed in (("gpu=0,peer=1", 3.9e11), ("gpu=1,peer=0", 1.9e11)):
        observations += [
            measured("peer_copy.bandwidth", speed, "B/s", pair, direction="one_way"),
            measured("peer_copy.bandwidth", speed * 2, "B/s", pair, direction="both_ways"),
            measured("peer_copy.access", speed > 2e11, "1", pair),
            measured("peer_copy.latency", 2.1e-6, "s", pair),
        ]
    params = {
        "world_size": 2,
        "placement": "out_of_place",
        "size_bytes": GIB,
        "algorithm": "NVLS",
        "protocol": "SIMPLE",
    }
    observations += [
        measured("collective.all_gather.busbw", 3.5e11, "B/s", **params),
        measured(
            "collective.all_gather.busbw", 3.4e11, "B/s", **{**params, "placement": "in_place", "algorithm": "RING"}
        ),
        measured("collective.all_gather.latency", 1.9e-5, "s", world_size=2, placement="out_of_place", size_bytes=8),
        measured("collective.all_gather.graph_latency", 8.1e-6, "s", world_size=2, size_bytes=8),
        measured("collective.transport", "P2P/CUMEM", world_size=2),
        measured("collective.nvls", True, world_size=2),
        measured("collective.channels", 24, world_size=2),
        measured("fashion_mnist.accuracy", 0.9213),
        measured("variants.throughput", 31234.5, "images/s", variant="bf16_channels_last", batch_size=1024),
        measured("checkpoint.identical", True),
        measured("transformer.mfu", 0.4512),
    ]
    seconds = {"gemm": 10.0, "collective": 60.0 + number, "training": 30.0}
    return [
        *observations,
        *(measured("benchmark.duration", duration_s, "s", benchmark=name) for name, duration_s in seconds.items()),
    ]


def judge_records(plan: Plan, records: dict[int, Record], **over: Any) -> FleetReport:
    evidence = {
        host.name: Evidence(records=(records[number],))
        if number in records
        else Evidence(problem="no record: it is missing")
        for number, host in enumerate(plan.hosts)
    }
    return replace(merge(plan, evidence, PACKS, **over), rackproof="2.0.0")


def accepted(hosts: int = 2, devices: int = 2) -> FleetReport:
    fleet_plan = plan(hosts, devices)
    return judge_records(fleet_plan, {number: record(fleet_plan, number) for number in range(hosts)})


def rejected() -> FleetReport:
    fleet_plan = plan()
    return judge_records(fleet_plan, {0: record(fleet_plan, 0), 1: record(fleet_plan, 1, slow=1)})


def incomplete() -> FleetReport:
    fleet_plan = plan()
    return judge_records(
        fleet_plan, {0: record(fleet_plan, 0)}, events={"gpu-01": ["unreachable at preflight: ssh timed out"]}
    )


def rehearsal() -> FleetReport:
    fleet_plan = plan(rehearsal=True)
    return judge_records(fleet_plan, {number: record(fleet_plan, number) for number in range(2)})


RENDERERS = (render_html, render_markdown, render_summary)


class Page(HTMLParser):
    """A parsed page: its elements with their attributes, and its text.

    `inside` has the texts of the elements `style`, `script`, `title` and `h3`, each with the name of its element.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.inside: list[tuple[str, str]] = []
        self._open = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in ("style", "script", "title", "h3"):
            self.inside.append((self._open, data))
        if self._open not in ("style", "script"):
            self.text += data

    def values(self, name: str) -> list[str]:
        return [value for _, attributes in self.elements if (value := attributes.get(name)) is not None]

    @property
    def data(self) -> dict[str, Any]:
        """Return the data from which the script draws the hosts."""
        data: dict[str, Any] = json.loads(next(text for tag, text in self.inside if tag == "script"))
        return data

    @property
    def all_text(self) -> str:
        """Return the text of the page and the texts that the script draws."""
        return "\n".join([self.text, *self.data["texts"]])


@pytest.mark.parametrize(
    ("report", "status"),
    [
        (accepted(), "PASS"),
        (rejected(), "FAIL"),
        (incomplete(), "INCOMPLETE"),
        (rehearsal(), "REHEARSAL PASS"),
    ],
    ids=["accepted", "rejected", "incomplete", "rehearsal"],
)
def test_every_format_shows_the_status(report: FleetReport, status: str) -> None:
    assert f"FINAL ACCEPTANCE: {status}\n" in render_summary(report)
    assert render_markdown(report).startswith(f"# FINAL ACCEPTANCE: {status}\n")
    page = Page(render_html(report))
    assert f"FINAL ACCEPTANCE: {status}" in page.text
    assert ("title", f"{status} – rack12-a – Rackproof") in page.inside


def test_summary_shows_status_and_lines() -> None:
    report = replace(
        accepted(),
        acceptance=Acceptance(
            status="PASS",
            lines=(
                SummaryLine(kind=LineKind.COUNT, title="Hosts", text="2 of 2 accepted (4 GPUs)"),
                SummaryLine(kind=LineKind.CHECK, title="GEMM", text="PASS", verdict=PASS),
            ),
        ),
    )
    assert render_summary(report).splitlines() == [
        "=" * 50,
        "FINAL ACCEPTANCE: PASS",
        "- Hosts: 2 of 2 accepted (4 GPUs)",
        "- GEMM: PASS",
        "=" * 50,
    ]


@pytest.mark.parametrize("wrong_status", [False, True], ids=["status from merge()", "status without REHEARSAL"])
def test_rehearsal_is_never_shown_as_accepted(wrong_status: bool) -> None:
    report = rehearsal()
    if wrong_status:
        report = replace(report, acceptance=replace(report.acceptance, status="PASS"))
    for text in (Page(render_html(report)).text, render_markdown(report), render_summary(report)):
        assert "REHEARSAL" in text
        assert not re.search(r"FINAL ACCEPTANCE: (?!REHEARSAL )", text)
    page = Page(render_html(report))
    assert "No GPU was judged" in page.text
    assert any("REHEARSAL" in text for tag, text in page.inside if tag == "title")
    assert not re.search(r"\baccepted\b", page.text.split("Causes", 1)[1])
    assert headline.REHEARSAL_NOTICE in render_markdown(report)


def test_rejection_names_part_value_and_action() -> None:
    html, markdown = render_html(rejected()), render_markdown(rejected())
    for text in (Page(html).text, markdown, "\n".join(["gpu-01", *Page(html).data["texts"]])):
        for expected in ("gpu-01", "GPU 1", "1611", "gemm.throughput", "600.9 TFLOP/s", "≥ 700 TFLOP/s", "−14.2 %"):
            assert expected in text
        assert "Return the part (RMA)" in text
        assert "measured, 4x H200 SXM" in text
    data = Page(html).data
    assert (data["names"], data["decision"], data["counts"]) == (["gpu-00", "gpu-01"], "01", {"1": [1, 0, 0]})
    assert [data["actions"][number] for number in data["action"]["1"]] == ["Return the part (RMA)"]
    assert data["gpus"] == [["pp", 1], ["pf", 1]]
    assert (
        "GPU 1 of gpu-01 is slow: matrix products (bf16) 600.9 TFLOP/s, the limit is ≥ 700 TFLOP/s (14 % off)"
        in data["texts"]
    )
    command = f"rackproof rma runs/{rejected().run_id} --serial 1611 --zip"
    assert command in data["texts"]
    assert command in Page(html).text


def test_report_without_records_has_no_charts() -> None:
    fleet_plan = plan(hosts=1)
    report = judge_records(fleet_plan, {}, quarantined=[Quarantined(path="hosts/x.json", reason="wrong run")])
    html = render_html(report)
    page = Page(html)
    for expected in (
        "no record: it is missing",
        "No bandwidth of any collective operation was measured.",
        "No figure of a single device was measured",
        "No training was reported.",
        "This host reported no GPU.",
        "hosts/x.json",
    ):
        assert expected in page.all_text
    assert not {"chart", "plot"} & set(page.values("class"))
    assert "pass" not in page.text.split("Reasons")[-1].replace("0 passed", "").replace("never as a pass", "")


def test_report_without_verdicts_is_not_a_pass() -> None:
    report = replace(accepted(), verdicts=(), decision="incomplete")
    assert "No observation was judged" in render_html(report)
    assert "No observation was judged" in render_markdown(report)


def test_large_fleet_without_exceptions_is_a_pass() -> None:
    """The report of a large fleet leaves out passes. If all checks pass, it therefore lists no verdict."""
    report = accepted(hosts=20)
    assert (report.decision, report.verdicts) == ("accepted", ())
    assert headline.sentence(report).endswith(f" and all {report.left_out} checks on 20 hosts passed.")
    for text in (render_html(report), render_markdown(report)):
        assert "No check failed and none was inconclusive" in text
        assert "No observation was judged" not in text


@pytest.mark.parametrize(("hosts", "shown"), [(64, False), (65, True)])
def test_page_states_that_it_omits_figures_of_accepted_hosts(hosts: int, shown: bool) -> None:
    note = "Because of the size of this fleet, only hosts that did not pass are included, at most 64."
    assert (note in render_html(accepted(hosts=hosts, devices=1))) == shown


def test_links_resolve_and_ids_are_unique() -> None:
    page = Page(render_html(rejected()))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    hosts = {f"#host={quote(name, safe='')}" for name in page.data["names"]}
    hrefs = set(page.values("href"))
    assert hosts & hrefs
    assert all(href[1:] in ids for href in hrefs - hosts)
    assert all(label in ids for label in page.values("aria-labelledby"))
    assert len([tag for tag, _ in page.elements if tag == "h1"]) == 1


def test_content_security_policy_allows_only_the_style_and_script_of_the_page() -> None:
    page = Page(render_html(accepted()))
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    # The page has two scripts: data, and a script that runs. Both have the key `script`, so `dict` keeps only the second.
    inline = dict(item for item in page.inside if item[0] in ("style", "script"))
    assert [attributes.get("type") for tag, attributes in page.elements if tag == "script"] == [
        "application/json",
        None,
    ]
    hashes = {tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for tag, text in inline.items()}
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert not page.values("style")
    assert "url(http" not in inline["style"]
    assert "@import" not in inline["style"]


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "javascript:alert(1)",
    "](http://evil.example) [x](javascript:alert(1))",
    "a|b|c `code` ~~~ ``` # head",
    "\x1b[31mred\x1b[0m\x1b]8;;http://evil.example\x07link\x1b]8;;\x07",
    "a\r\n- FINAL ACCEPTANCE: PASS\r\n## head",
    "\u202eSSAP\u202c\u2066\u200b",
    "lone \ud800 surrogate \x00\x9b31m",
    "{{ 7*7 }} {% raw %} ${x}",
    "www.evil.example @everyone #1 user@evil.example",
    "x" * 4000,
]


def report_with_text(word: str) -> FleetReport:
    """Return a report with many sections. In most of them, `word` replaces a text from a host or the inventory."""
    fleet_plan = plan()
    host = record(fleet_plan, 1, slow=1)
    launch = host.launches[0]
    rank = Rank(rank=0, local_rank=0, phase=word, exit_code=1, log_tail=word)
    absent = Observation(
        name="training.loss", scope="host", stage=word, unit=word, status=ERROR, reason=word, params={word: word}
    )
    of_device = Observation(
        name="gemm.other", scope="gpu=0", stage=word, unit=word, status=MEASURED, value=2.0, params={word: word}
    )
    curve = Observation(
        name=f"collective.{word.replace('.', '')}.busbw",
        scope=f"gang={word}",
        stage=word,
        unit=word,
        status=MEASURED,
        value=2e9,
        params={"size_bytes": 8},
    )
    hostile = (
        measured("benchmark.duration", 2.0, word, benchmark=word),
        measured("collective.transport", word, word),
        replace(measured("collective.nvls", True), status=ERROR, value=None, reason=word),
        measured(
            "collective.all_reduce.busbw", 2e9, "B/s", size_bytes=8, placement=word, algorithm=word, protocol=word
        ),
        measured("collective.all_reduce.graph_latency", 2.0, word, size_bytes=8),
        measured("peer_copy.bandwidth", 2e9, "B/s", "gpu=0,peer=1", direction="one_way"),
        measured("variants.throughput", word, word, variant=word, batch_size=word),
        replace(measured("checkpoint.identical", True), status=ERROR, value=None, reason=word),
        measured("stress.throughput", 2e9, word, "gpu=0", dtype=word),
        measured("stress.throttled_share", 0.5, word, "gpu=0", dtype=word, reason=word),
        measured("integrity.wrong_words", 5, word, "gpu=0", pattern=word),
        measured("memory.bandwidth", 2e9, word, "gpu=0", op=word),
    )
    link = {"gpu=0,peer=1": word}
    host = replace(
        host,
        gpus=tuple(replace(gpu, serial=word, uuid=word, name=word, pci_bus_id=word) for gpu in host.gpus),
        software={word: word},
        launches=(replace(launch, stage=word, outcome="failed", reason=word, ranks=(rank,), log_tail=word),),
        observations=(*host.observations, absent, of_device, curve, *hostile),
        snapshots=(replace(host.snapshots[0], metrics=(Metric(name="gpu.peer.link", unit="1", values=link),)),),
    )
    report = judge_records(
        fleet_plan,
        {0: record(fleet_plan, 0), 1: host},
        events={"gpu-01": [word]},
        quarantined=[Quarantined(path=word, reason=word)],
    )
    plain: dict[str, Any] = {
        "reason": word,
        "detail": word,
        "action": word,
        "source": word,
        "basis": word,
        "criterion": word,
        "serial": word,
    }
    verdict = Verdict(
        host=word, scope=f"{word},{word}", name=word, verdict=FAIL, stage=word, unit=word, params={word: word}, **plain
    )
    text = replace(verdict, host="gpu-01", scope="gpu=0", value=word, limit=word, operator="eq")
    return replace(
        report,
        run_id=word,
        profile=word,
        began=word,
        ended=word,
        rackproof=word,
        acceptance=Acceptance(
            status="FAIL",
            lines=(
                SummaryLine(kind=LineKind.MORE, text=word),
                SummaryLine(kind=LineKind.CHECK, title=word, text=word, verdict=PASS),
                SummaryLine(kind=LineKind.CAVEAT, title=word, text=word),
            ),
        ),
        hosts=(replace(report.hosts[0], name=word, rack=word, record=word, packs=(word,)), report.hosts[1]),
        verdicts=(*report.verdicts, verdict, text),
        not_judged=(NotJudged(name=word, stage=word), NotJudged(name=word, stage=word, host=word, scope=word)),
        unknown={word: word},
    )


def structure(html: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(tag, tuple(attributes)) for tag, attributes in Page(html).elements]


@pytest.mark.parametrize("word", HOSTILE, ids=range(len(HOSTILE)))
def test_host_text_is_escaped_in_html(word: str) -> None:
    html = render_html(report_with_text(word))
    assert structure(html) == structure(render_html(report_with_text("word")))
    page = Page(html)
    assert all(href.startswith("#") for href in page.values("href"))
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert formatting.clean(word)[:40].strip() in page.text
    assert any(formatting.clean(word)[:40].strip() in text for text in page.data["texts"])
    assert shape(page.data) == shape(Page(render_html(report_with_text("word"))).data)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", html)
    assert html.encode()


def shape(data: Any) -> Any:
    """Return the structure of the data, without texts and numbers."""
    if isinstance(data, dict):
        return {key: shape(value) for key, value in data.items() if key != "texts"}
    if isinstance(data, list):
        return [shape(value) for value in data]
    return type(data)


@pytest.mark.parametrize("word", HOSTILE, ids=range(len(HOSTILE)))
def test_host_text_is_in_code_spans_in_markdown(word: str) -> None:
    outside = outside_code(render_markdown(report_with_text(word)))
    assert not re.search(r"[`<\[\]@~{}\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]|http|www|xxxxx", outside)
    assert outside == outside_code(render_markdown(report_with_text("word")))


def outside_code(markdown: str) -> str:
    """Return the Markdown without the fenced summary, and with CODE in place of each code span."""
    head, fenced, rest = markdown.split("```")
    assert "FINAL ACCEPTANCE" in fenced
    return re.sub(r"`[^`\n]+`", "CODE", head + rest)


@pytest.mark.parametrize("width", [None, 80])
@pytest.mark.parametrize("word", HOSTILE, ids=range(len(HOSTILE)))
def test_host_text_on_the_screen_cannot_control_the_terminal(word: str, width: int | None) -> None:
    first, status, *lines = render_screen(report_with_text(word), width=width).split("\n")
    assert (first, status) == (RULE, "FINAL ACCEPTANCE: FAIL")
    assert all(line.isprintable() and not line.startswith("FINAL") for line in lines)


def test_screen_has_checks_with_counts_and_a_row_per_cause() -> None:
    text = render_screen(rejected())
    rows = [line for line in text.splitlines() if line.startswith("FAIL ")]
    assert len(rows) == len(rejected().causes)
    assert re.search(r"^GEMM +FAIL +1/\d+ GPUs$", text, re.MULTILINE)
    assert "\x1b" not in text
    assert text == "\n".join(line.rstrip() for line in text.splitlines())
    assert max(len(line) for line in render_screen(rejected(), width=80).splitlines()) <= 80
    colours = render_screen(rejected(), colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", colours).split() == text.split()
    assert "\x1b[1;31mFAIL" in colours


@pytest.mark.parametrize("word", HOSTILE, ids=range(len(HOSTILE)))
def test_host_text_in_the_summary_cannot_control_the_terminal(word: str) -> None:
    first, status, *lines, last = render_summary(report_with_text(word)).split("\n")
    assert (first, status, last) == (RULE, "FINAL ACCEPTANCE: FAIL", RULE)
    assert len(lines) == 4
    assert all(line.startswith("- ") and line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (3.6478e11, "B/s", "364.8 GB/s"),
        (5.714e4, "B/s", "57.14 kB/s"),
        (6.966e14, "FLOP/s", "696.6 TFLOP/s"),
        (2.25e-5, "s", "22.5 µs"),
        (0.0125, "s", "12.5 ms"),
        (40992.4, "images/s", "40\u202f992 images/s"),
        (2164663517184, "B", "1.969 TiB"),
        (8, "B", "8 B"),
        (141, "1", "141"),
        (0.8091, "1", "0.8091"),
        (-3.5, "Cel", "−3.5 °C"),
        (True, "1", "yes"),
        ("NVIDIA H200", "1", "NVIDIA H200"),
        (None, "1", "–"),
        (10**400, "B/s", "not a finite number"),
        (float("nan"), "s", "not a finite number"),
    ],
)
def test_quantity_is_written_with_a_fitting_unit(value: Any, unit: str, text: str) -> None:
    assert formatting.quantity(value, unit) == text


def verdict(value: Any, limit: Any, **fields: Any) -> Verdict:
    common: dict[str, Any] = {
        "host": "h",
        "scope": "gpu=0",
        "name": "gemm.throughput",
        "verdict": PASS,
        "criterion": "c",
        "reason": "",
        "operator": "ge",
        "unit": "FLOP/s",
    }
    return Verdict(**{**common, "value": value, "limit": limit, **fields})


def test_value_just_below_its_limit_is_shown_with_more_digits() -> None:
    assert formatting.value_and_limit(verdict(6.96599e14, 6.966e14)) == ("696.599 TFLOP/s", "≥ 696.6 TFLOP/s")
    assert formatting.value_and_limit(verdict(7e14, 7e14)) == ("700 TFLOP/s", "≥ 700 TFLOP/s")


@pytest.mark.parametrize(
    ("operator", "value", "limit", "text"),
    [
        ("ge", 110, 100, "+10.0 %"),
        ("ge", 90.0, 100, "−10.0 %"),
        ("le", 90, 100, "+10.0 %"),
        ("lt", 300, 100, "−200 %"),
        ("ge", 8, 8, "0 %"),
        ("le", 0, 0, "–"),
        ("eq", 8, 8, "–"),
        ("eq", True, True, "–"),
        ("ge", 10**400, 1, "–"),
    ],
)
def test_margin_is_a_share_of_the_limit_and_negative_if_the_value_fails(
    operator: str, value: Any, limit: Any, text: str
) -> None:
    assert formatting.signed_percent(formatting.margin(verdict(value, limit, operator=operator))) == text


@pytest.mark.parametrize(
    ("scopes", "text"),
    [
        (["gpu=0", "gpu=1", "gpu=2", "gpu=5"], "GPU 0–2, 5"),
        (["gpu=3,link=2"], "GPU 3, link 2"),
        (["gpu=0,reason=hw_thermal", "gpu=1,reason=hw_thermal"], "GPU 0–1, hw thermal"),
        (["cpu=0"], "process 0"),
        (["gang=rack12"], "gang rack12"),
        (["host"], "host"),
        (["gpu=0,peer=1", "gpu=2,peer=1"], "GPU 0, 2 to GPU 1"),
        ([f"gpu={a},peer={b}" for a in range(8) for b in range(8) if a != b], "56 pairs of GPUs"),
        ([f"gpu={gpu},link={link}" for gpu in range(2) for link in range(5)], "10 parts"),
    ],
)
def test_scopes_are_described_in_words(scopes: list[str], text: str) -> None:
    assert scope_text.describe_scopes(scopes) == text


def test_rows_merge_parts_and_sizes_without_losing_values() -> None:
    same = {"name": "collective.all_reduce.wrong_elements", "unit": "1", "operator": "eq", "scope": "host"}
    rows = verdict_rows.merge_verdicts(
        [
            *(
                verdict(7.5e14 + index * 1e12, 7e14, scope=f"gpu={index}", params={"dtype": "bf16"})
                for index in range(3)
            ),
            verdict(6e14, 7e14, scope="gpu=3", params={"dtype": "bf16"}, verdict=FAIL),
            *(verdict(0, 0, params={"size_bytes": size}, **same) for size in SIZES),
        ]
    )
    assert [(row.verdict, row.scope, row.params, row.value, row.margin) for row in rows] == [
        (FAIL, "GPU 3", "bf16", "600 TFLOP/s", "−14.3 %"),
        (PASS, "GPU 0–2", "bf16", "750 · 751 · 752 TFLOP/s", "+7.1 %"),
        (PASS, "host", "8 B … 1 GiB (4 sizes)", "0", "–"),
    ]


def test_many_hosts_are_drawn_as_range_and_histogram() -> None:
    html = render_html(accepted(hosts=20, devices=8))
    assert html.count('<path class="spread"') == 1
    assert "lowest of 20" in html
    assert '<path class="heap"' in html
    assert "Each host</summary>" in html


def test_page_of_a_large_fleet_is_limited_in_size() -> None:
    report = accepted(hosts=2, devices=8)
    names = [f"gpu-{number:03d}" for number in range(200)]
    report = replace(
        report,
        hosts=tuple(replace(report.hosts[0], name=name) for name in names),
        verdicts=tuple(replace(item, host=name) for name in names for item in report.verdicts if item.host == "gpu-00"),
    )
    html = render_html(report)
    print(f"{len(names)} hosts of 8 GPUs: {len(html) / 1e6:.2f} MB of HTML")
    assert len(html) < 4_000_000
    assert len(render_markdown(report)) < 200_000


def test_passes_of_all_collective_operations_share_one_row_for_each_criterion() -> None:
    fleet_plan = builders.plan("h1", "h2", "h3", gpu_count=4, rackproof_gang="none", with_all_ops=True)
    evidence = builders.evidence(fleet_plan)

    def slower(item: Observation) -> Observation:
        return replace(item, value=3.3e11) if item.name == "collective.gather.busbw" else item

    def usual(item: Observation) -> Observation:
        return replace(item, value=3.66e11) if item.name.endswith(".busbw") else item

    evidence = {host: builders.with_observations(of_host, usual) for host, of_host in evidence.items()}
    evidence["h1"] = builders.with_observations(evidence["h1"], slower)
    verdicts = merge(fleet_plan, evidence, read_packs([])).verdicts
    rows = {
        row.criterion: row
        for row in verdict_rows.merge_verdicts(item for item in verdicts if item.host == "h1" and item.verdict == PASS)
    }
    floor, fleet = rows["busbw-4-gpus"], rows["busbw-vs-fleet-8gib"]
    assert (floor.name, floor.scope, floor.count, floor.margin) == ("collective.*.busbw", "host", 17, "+3.2 %")
    assert (floor.value, floor.wanted) == ("330 … 366 GB/s", "≥ 319.9 GB/s")
    assert (fleet.count, fleet.wanted) == (17, "≥ 329.4 GB/s")
    gather = replace(next(item for item in verdicts if item.criterion == "busbw-vs-fleet-8gib"), limit=3.0e11)
    same = [item for item in verdicts if item.criterion == "busbw-vs-fleet-8gib" and item.host == "h1"]
    (row,) = verdict_rows.merge_verdicts([*same, gather])
    assert row.wanted == "≥ 300 … 329.4 GB/s"


def test_page_with_every_benchmark_is_limited_in_size() -> None:
    fleet_plan = builders.plan(
        *(f"gpu-{number:02d}" for number in range(FULL_HOSTS + 1)), gpu_count=8, with_all_ops=True
    )
    report = merge(fleet_plan, builders.evidence(fleet_plan), read_packs([]))
    assert report.decision == "accepted"
    size = len(render_html(report)) / len(report.hosts)
    print(f"{size / 1e3:.1f} kB of HTML per host of 8 GPUs")
    assert size < 31_000
    assert len(render_markdown(report)) < 60_000


def test_huge_numbers_are_rendered() -> None:
    fleet_plan = plan()
    huge = tuple(replace(item, value=10**400) for item in record(fleet_plan, 1).observations)
    report = accepted()
    report = replace(report, hosts=(report.hosts[0], replace(report.hosts[1], measurements=huge)))
    for render in RENDERERS:
        assert render(report)


@pytest.mark.parametrize("render", RENDERERS)
def test_rendering_is_deterministic(render: Any) -> None:
    assert render(rejected()) == render(rejected())


def two_hosts(**over: Any) -> FleetReport:
    """Return the report of two hosts with figures of many benchmarks."""
    fleet_plan = plan()
    return judge_records(
        fleet_plan, {number: record(fleet_plan, number, more=other_benchmarks(number), **over) for number in range(2)}
    )


def twenty_hosts(slow: int = 2) -> FleetReport:
    """Return the report of twenty hosts, too many to be listed one by one. The host at position `slow` has a slow GPU."""
    fleet_plan = plan(hosts=20)
    return judge_records(
        fleet_plan, {n: record(fleet_plan, n, slow=1 if n == slow else -1, more=other_benchmarks(n)) for n in range(20)}
    )


def test_times_are_shown_for_fleet_and_hosts() -> None:
    times = timing.times(two_hosts())
    assert [(row.name, row.median, row.longest, row.slowest_host) for row in times.rows] == [
        ("GEMM", "10 s", "10 s", "gpu-00"),
        ("Collectives", "60.5 s", "61 s", "gpu-01"),
        ("Training", "30 s", "30 s", "gpu-00"),
        ("start and end", "5 min 12 s", "5 min 12 s", "gpu-00"),
    ]
    assert [bar.label for bar in times.bars] == ["median of 2 hosts", "gpu-00", "gpu-01"]
    for bar in times.bars:
        assert sum(float(part.width) for part in bar.segments) == pytest.approx(100, abs=0.5)
    assert timing.summary_line(two_hosts()).startswith(
        "6 min 52 s per host: start and end 5 min 12 s, Collectives 60.5 s"
    )
    assert "- Time: 6 min 52 s per host" in render_summary(two_hosts())


def test_time_of_a_soak_includes_all_its_rounds() -> None:
    """A record has only the median duration of a benchmark over all rounds, and the launches of only some rounds."""
    report = accepted()
    host = report.hosts[0]
    stress = replace(
        host.measurements[0],
        name="benchmark.duration",
        scope="host",
        stage="soak",
        value=50.0,
        params={"benchmark": "stress"},
    )
    launches = tuple(
        replace(host.launches[0], stage="soak", duration_s=60.0, number=number) for number in (1, 98, 99, 100)
    )
    soak = Soak(began="2026-11-14T09:30:02Z", planned_s=6000, soaked_s=6100, finished=100)
    soaked = replace(host, measurements=(stress,), launches=launches, soak=soak)
    times = timing.times(replace(report, hosts=(soaked,)))
    assert [(row.name, row.median) for row in times.rows] == [
        ("Stress", "83 min 20 s"),
        ("start and end", "18 min 20 s"),
    ]
    assert times.total == "101 min 40 s"
    assert timing.times(replace(report, hosts=(replace(soaked, soak=replace(soak, finished=10**400)),))).total


def test_only_the_slowest_of_many_hosts_have_a_bar() -> None:
    report = twenty_hosts()
    report = replace(report, hosts=tuple(replace(host, launches=()) for host in report.hosts))
    times = timing.times(report)
    assert [bar.label for bar in times.bars] == ["median of 20 hosts", *(f"gpu-{n}" for n in (19, 18, 17, 16, 15))]


def test_no_bars_without_durations() -> None:
    assert timing.times(accepted()) == timing.Times(total="")
    assert "No host reported how long" in render_html(accepted())
    assert "Time:" not in render_summary(accepted())


def test_gpu_table_shows_precision_and_failures() -> None:
    fleet_plan = plan()
    hosts = {
        0: record(fleet_plan, 0, more=other_benchmarks()),
        1: record(fleet_plan, 1, slow=1, more=other_benchmarks(1)),
    }
    table = gpus_table(judge_records(fleet_plan, hosts))
    assert table.groups == (("GEMM, TFLOP/s", 1), ("Memory bandwidth, GB/s", 1), ("Host copies, GB/s", 1))
    assert table.columns == ("bf16", "copy", "host to device, alone, local")
    assert [(row.head, row.note) for row in table.rows] == [
        ("gpu-00 GPU 0", "1600"),
        ("gpu-00 GPU 1", "1601"),
        ("gpu-01 GPU 0", "1610"),
        ("gpu-01 GPU 1", "1611"),
    ]
    assert [row.cells[0].css for row in table.rows] == ["", "", "", "fail"]
    assert [cell.whole for cell in table.rows[0].cells] == ["750", "4270 (±0.4 %, 42†)", "55.5 (±0.12 %, 42)"]


def gpus_table(report: FleetReport) -> figure.Table:
    table = gpus.speeds(report)
    assert table
    return table


def test_gpu_table_of_many_hosts_shows_the_range_and_the_gpus_of_rejected_hosts() -> None:
    table = gpus_table(twenty_hosts())
    assert [row.head for row in table.rows] == [
        "lowest of the fleet",
        "median of the fleet",
        "highest of the fleet",
        "gpu-02 GPU 0",
        "gpu-02 GPU 1",
    ]
    assert table.rows[0].cells[0].text == "601"
    assert [matrix.host for matrix in peers.peers(twenty_hosts()).matrices] == ["gpu-02"]


def test_unmeasured_figure_shows_its_status() -> None:
    report = two_hosts()
    first = report.hosts[0]
    with_error = tuple(
        replace(item, status=ERROR, value=None, samples=None, reason="out of memory")
        if (item.name, item.scope) == ("memory.bandwidth", "gpu=1")
        else item
        for item in first.measurements
    )
    table = gpus_table(replace(report, hosts=(replace(first, measurements=with_error), report.hosts[1])))
    assert [(row.cells[1].text, row.cells[1].css) for row in table.rows[:2]] == [
        ("4270", ""),
        ("error", "inconclusive"),
    ]


def test_stress_table_shows_power_clock_and_throttle_reason() -> None:
    table = gpus.stress(two_hosts())
    assert table
    assert table.caption == "Matrix products on all GPUs at once, bf16"
    assert table.columns == ("TFLOP/s", "W", "TFLOP/s/W", "kFLOP/cycle", "MHz", "°C", "throttled by")
    assert [cell.text for cell in table.rows[0].cells] == [
        "690",
        "698.2",
        "0.99",
        "466",
        "1485",
        "63",
        "power cap 38 %",
    ]


def test_error_counter_lists_the_devices_with_errors() -> None:
    [counter] = gpus.error_counters(two_hosts())
    assert (counter.title, counter.readings, counter.devices) == ("Memory integrity: wrong words", 4, 4)
    assert counter.errors == ("gpu-01 GPU 1, zeros: 7",)
    [clean] = gpus.error_counters(replace(two_hosts(), hosts=two_hosts().hosts[:1]))
    assert clean.errors == ()


def test_peer_matrix_shows_rate_link_and_missing_access() -> None:
    measured = peers.peers(two_hosts())
    assert (measured.pairs, measured.range) == (4, "lowest 190 GB/s, median 290 GB/s, highest 390 GB/s")
    matrix = measured.matrices[0]
    assert (matrix.host, matrix.devices) == ("gpu-00", (0, 1))
    fast, slow = matrix.rows[0][1], matrix.rows[1][0]
    assert (fast.text, fast.note, fast.css) == ("390", "NV18, 780 both ways, 2.1 µs", "heat5")
    assert (slow.text, slow.note, slow.css) == ("190", "NV18, no access, 380 both ways, 2.1 µs", "heat3")
    assert matrix.rows[0][0].text == ""


def test_first_four_pairs_without_access_are_named_and_the_others_counted() -> None:
    denied = replace(two_hosts().hosts[0].measurements[0], name="peer.access", value=False)
    readings = {(0, target): {"access": denied} for target in range(1, 7)}
    assert peers._link(readings, {}) == (
        "no access: GPU 0 to GPU 1, GPU 0 to GPU 2, GPU 0 to GPU 3, GPU 0 to GPU 4 and 2 more"
    )


def test_hosts_with_the_same_communication_path_are_in_one_entry() -> None:
    [path] = communication.communication_paths(two_hosts())
    assert (path.used_by, path.transport, path.nvls, path.channels) == ("gpu-00, gpu-01", "P2P/CUMEM", "yes", "24")
    assert path.algorithms == "NVLS/SIMPLE: all_gather; RING/SIMPLE: all_gather"
    report = two_hosts()
    other = tuple(
        replace(item, value="SHM/direct") if item.name == "collective.transport" else item
        for item in report.hosts[1].measurements
    )
    report = replace(report, hosts=(report.hosts[0], replace(report.hosts[1], measurements=other)))
    assert [(item.used_by, item.transport) for item in communication.communication_paths(report)] == [
        ("gpu-00", "P2P/CUMEM"),
        ("gpu-01", "SHM/direct"),
    ]
    [table] = communication.latencies(report)
    assert table.groups == (("8 B", 2),)
    assert [(row.head, [cell.text for cell in row.cells]) for row in table.rows] == [
        ("all gather", ["19 µs", "8.1 µs"])
    ]


def test_in_place_and_out_of_place_have_separate_charts() -> None:
    text = Page(render_html(two_hosts())).text
    assert "all gather, in place" in text
    assert "all gather, out of place" in text


def test_workload_table_has_a_column_per_host_or_the_range_of_many_hosts() -> None:
    few = workloads.workloads(two_hosts())
    assert few
    assert few.columns == ("gpu-00", "gpu-01")
    assert [(row.head, row.note, row.cells[0].text) for row in few.rows] == [
        ("Fashion-MNIST", "accuracy", "92.1 %"),
        ("Training variants", "throughput, bf16 channels last, batch size 1024", "31\u202f234 images/s"),
        ("Checkpoint", "identical", "yes"),
        ("Transformer", "mfu", "45.1 %"),
    ]
    span = workloads.workloads(twenty_hosts())
    assert span
    assert span.columns == ("lowest", "median", "highest", "reported by")
    assert [cell.text for cell in span.rows[0].cells] == ["92.1 %", "92.1 %", "92.1 %", "20 of 20"]


def test_detail_of_a_failed_verdict_is_shown() -> None:
    report = rejected()
    detail = "the ranks communicate over NET/Socket, not InfiniBand: NCCL does not use its fast path"
    verdicts = tuple(replace(item, detail=detail) if item.verdict == FAIL else item for item in report.verdicts)
    report = replace(report, verdicts=verdicts, causes=diagnose(verdicts, {}))
    page = Page(render_html(report))
    assert detail in page.text
    assert detail in page.data["texts"]
    assert detail in render_markdown(report)


def test_equal_passes_share_one_row() -> None:
    same: dict[str, Any] = {"unit": "1", "operator": "eq", "criterion": "zero"}
    rows = verdict_rows.merge_verdicts(
        [
            *(
                verdict(0, 0, name="integrity.wrong_words", scope=f"gpu={n}", params={"pattern": pattern}, **same)
                for n in range(2)
                for pattern in ("zeros", "ones")
            ),
            *(
                verdict(0, 0, name=f"collective.{op}.wrong_elements", scope="host", params={"size_bytes": size}, **same)
                for op in ("reduce", "gather")
                for size in SIZES
            ),
            verdict(3, 0, name="integrity.wrong_words", params={"pattern": "ones"}, **{**same, "verdict": FAIL}),
        ]
    )
    assert [(row.name, row.verdict, row.scope, row.params, row.count) for row in rows] == [
        ("integrity.wrong_words", FAIL, "GPU 0", "ones", 1),
        ("integrity.wrong_words", PASS, "GPU 0–1", "2 patterns", 4),
        ("collective.*.wrong_elements", PASS, "host", "8 B … 1 GiB (4 sizes)", 8),
    ]


def report_with_many_sections() -> FleetReport:
    fleet_plan = plan()
    failed = replace(
        record(fleet_plan, 1).launches[0],
        outcome="deadline",
        reason="not finished after 600 s (rank 1 in collective all_reduce 8 B)",
        ranks=(Rank(rank=1, local_rank=1, phase="collective", exit_code=None, log_tail="NCCL WARN\n  peer is gone"),),
    )
    older = {**builders.SOFTWARE, "driver": "550.90.07"}
    ordered = tuple(
        Part(host=host.name, kind="gpu", serial=gpu.serial, origin=f"order.csv line {line}")
        for line, (host, gpu) in enumerate(
            ((host, gpu) for host in fleet_plan.hosts for gpu in gpus_of(fleet_plan.hosts.index(host))), 2
        )
    )
    fleet_plan = replace(fleet_plan, manifest=(*ordered[:-1], replace(ordered[-1], serial="1699")))
    return judge_records(
        fleet_plan,
        {
            0: record(fleet_plan, 0, more=other_benchmarks()),
            1: record(fleet_plan, 1, slow=1, more=other_benchmarks(1), launches=(failed,), software=older),
        },
        events={"gpu-01": ["failed at benchmark: launch: rc 1"]},
        quarantined=[Quarantined(path="hosts/gpu-99.json", reason="the plan expects no such record")],
    )


@pytest.mark.parametrize(("name", "render"), [("report.md", render_markdown), ("report.html", render_html)])
def test_report_matches_its_golden_file(name: str, render: Any) -> None:
    """With UPDATE_GOLDEN=1 in the environment, the test first writes the golden file anew."""
    text = render(report_with_many_sections())
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text, encoding="utf-8")
    assert (GOLDEN / name).read_text(encoding="utf-8") == text


def pair_rate(a: str, b: str, rail: int, rate: float | None) -> Observation:
    """Return the bandwidth between hosts `a` and `b` on a rail, as host `a` records it; an error if `rate` is None."""
    over: dict[str, Any] = {"status": ERROR, "value": None, "reason": "timed out"} if rate is None else {}
    return replace(measured("pairs.bandwidth", rate or 1.0, "B/s", f"gpu={rail},partner={b}"), stage="gang", **over)


def test_pair_matrix_shows_every_pair() -> None:
    report = accepted(hosts=4)
    names = [host.name for host in report.hosts]
    slow = {(names[0], names[2]), (names[2], names[0])}
    hosts = tuple(
        replace(
            host,
            measurements=tuple(
                pair_rate(host.name, other, rail, 2.4e10 if rail and (host.name, other) in slow else 4.8e10)
                for other in names
                if other != host.name
                for rail in (0, 1)
            ),
        )
        for host in report.hosts
    )
    [matrix] = pairs.pair_matrices(replace(report, hosts=hosts))
    assert (matrix.hosts, matrix.rails, matrix.pairs, matrix.failed, matrix.suspicious) == (tuple(names), 2, 6, 0, True)
    assert dict(matrix.paths)["b1"] == "M2 0h1v1h-1zM0 2h1v1h-1z"
    assert (matrix.slowest[0].rail, matrix.slowest[0].text, matrix.slowest[0].share) == (
        "1",
        "24 GB/s",
        "50 %",
    )
    first = pairs.host_pairs(hosts[0])
    assert (first["partners"], first["rails"]) == (names[1:], ["0", "1"])
    assert (first["bands"], first["rates"][1]) == (["44", "41", "44"], [48.0, 24.0])
    # A pair counts as failed if either of its hosts recorded an error.
    for at, partner in ((0, 1), (3, 0)):
        lost = pair_rate(names[at], names[partner], 0, None)
        host = replace(hosts[at], measurements=(lost, *hosts[at].measurements[1:]))
        [matrix] = pairs.pair_matrices(replace(report, hosts=(*hosts[:at], host, *hosts[at + 1 :])))
        assert matrix.failed == 1
        assert "lost" in dict(matrix.paths)


@pytest.mark.parametrize(
    ("slow", "path"),
    [
        ("nic", "M2 1h1v1h-1z"),
        ("rail", "M0 1h4v1h-4z"),
        ("host", "M2 0h1v1h-1zM2 1h1v1h-1zM2 2h1v1h-1z"),
        ("pair of hosts", ""),
    ],
)
def test_rail_picture_marks_a_slow_nic_rail_or_host(slow: str, path: str) -> None:
    """The picture has a cell for each host and rail. A cell is slow only if all pairs of the host are slow on the rail.

    So a single slow pair of hosts is not marked.
    """
    report = accepted(hosts=4)
    names = [host.name for host in report.hosts]

    def is_slow(ends: tuple[str, str], rail: int) -> bool:
        has_host = names[2] in ends
        return {
            "nic": has_host and rail == 1,
            "rail": rail == 1,
            "host": has_host,
            "pair of hosts": set(ends) == {*names[:2]},
        }[slow]

    hosts = tuple(
        replace(
            host,
            measurements=tuple(
                pair_rate(host.name, other, rail, 2.6e10 if is_slow((host.name, other), rail) else 4.8e10)
                for other in names
                if other != host.name
                for rail in range(3)
            ),
        )
        for host in report.hosts
    )
    [matrix] = pairs.pair_matrices(replace(report, hosts=hosts))
    assert dict(matrix.rail_paths).get("b1", "") == path
    assert matrix.rail_names == ("0", "1", "2")
    assert 'class="rails"' in render_html(replace(report, hosts=hosts))


def test_separate_gangs_have_separate_matrices() -> None:
    report = accepted(hosts=4)
    names = [host.name for host in report.hosts]
    partner = {names[0]: names[1], names[1]: names[0], names[2]: names[3], names[3]: names[2]}
    hosts = tuple(
        replace(host, measurements=(pair_rate(host.name, partner[host.name], 0, 4.8e10),)) for host in report.hosts
    )
    matrices = pairs.pair_matrices(replace(report, hosts=hosts))
    assert [matrix.hosts for matrix in matrices] == [tuple(names[:2]), tuple(names[2:])]
    assert pairs.pair_matrices(report) == []


def test_strip_plot_shows_values_limit_and_worst_part() -> None:
    [gemm] = [group for group in strips.groups(rejected()) if group.title == "GEMM"]
    [strip] = gemm.strips
    assert (strip.label, strip.settings, strip.count, strip.failed) == ("throughput", "bf16", 4, 1)
    assert (strip.wanted, strip.wrong, strip.lowest) == (("≥ 700 TFLOP/s",), ((0.0, strip.limits[0]),), "600.9 TFLOP/s")
    assert [(part.host, part.part, part.margin) for part in strip.worst] == [("gpu-01", "GPU 1", "−14.2 %")]
    failing = [dot for dot in strip.dots if dot.css == FAIL]
    assert len(failing) == 1
    assert failing[0].x < strip.limits[0] < min(dot.x for dot in strip.dots if dot.css == PASS)


@pytest.mark.parametrize(
    ("operator", "wrong"),
    [("ge", ((0.0, 40.0),)), ("lt", ((40.0, 60.0),)), ("eq", ((0.0, 39.0), (41.0, 59.0)))],
)
def test_strip_plot_shades_the_sides_on_which_values_fail(
    operator: str, wrong: tuple[tuple[float, float], ...]
) -> None:
    assert strips.wrong_sides([(operator, 40.0)]) == wrong


@pytest.mark.parametrize(
    ("limits", "lines"),
    [
        ([("ge", 1.0), ("ge", 2.0)], [1.0, 2.0]),
        ([("ge", 2.0), ("ge", 1.0), ("ge", 3.0)], [1.0]),
        ([("le", 1.0), ("lt", 2.0), ("le", 3.0)], [3.0]),
        ([("ge", 1.0), ("ge", 2.0), ("le", 5.0), ("le", 6.0), ("lt", 7.0)], [1.0, 7.0]),
        ([("eq", 1.0), ("eq", 2.0), ("eq", 3.0)], [1.0, 3.0]),
    ],
)
def test_strip_plot_draws_only_some_of_more_than_two_limits(
    limits: list[tuple[str, float]], lines: list[float]
) -> None:
    """If there are more than two limits, the plot draws only the lowest minimum and the highest maximum.

    With the operator `eq`, the plot draws both the lowest and the highest limit.
    """
    assert strips.drawn_limits(limits) == lines


def test_strip_plot_of_a_large_fleet_is_a_histogram() -> None:
    spread = Spread(n=80, min=6e14, p05=7.4e14, p50=7.5e14, p95=7.6e14, max=7.7e14, bins=(1, 0, 0, 79))
    far = FarthestPart(host="gpu-01", scope="gpu=1", value=6e14, serial="1611", verdict=FAIL)
    row = Judged(
        criterion="gemm-bf16",
        name="gemm.throughput",
        stage="benchmark",
        params={"dtype": "bf16"},
        unit="FLOP/s",
        operator="ge",
        limit=7e14,
        passed=79,
        failed=1,
        spread=spread,
        farthest=(far,),
    )
    same = replace(
        row,
        name="gpu.nvlink.active_links",
        unit="1",
        operator="eq",
        limit=18,
        failed=0,
        farthest=(),
        spread=Spread(n=80, min=18, p05=18, p50=18, p95=18, max=18),
    )
    report = replace(rejected(), judged=(row, same), detail=EXCEPTIONS)
    health, gemm = strips.groups(report)
    assert [(item.value, item.wanted, item.count) for item in health.constant] == [("18", "= 18", 80)]
    [strip] = gemm.strips
    assert (strip.count, strip.failed, strip.median, len(strip.dots)) == (80, 1, "750 TFLOP/s", 1)
    assert strip.bars.count("M") == 2
    assert [(part.host, part.margin) for part in strip.worst] == [("gpu-01", "−14.3 %")]


def test_waived_failure_is_shown_with_its_waiver_and_without_an_action() -> None:
    waiver = Waiver(criterion="gemm-bf16", who="A. Kim", why="sent back", until="2026-12-31", host="gpu-01")
    report = rejected()
    verdicts = tuple(replace(v, waiver=waiver) if v.verdict == FAIL else v for v in report.verdicts)
    report = replace(report, verdicts=verdicts, causes=diagnose(verdicts, {}))
    page = Page(render_html(report))
    assert "waived by A. Kim until 2026-12-31: sent back" in page.text
    assert "Return the part" not in page.text
    assert page.data["counts"] == {"1": [0, 0, 1]}
    assert page.data["action"] == {}
    assert page.data["gpus"] == [["pp", 2]]


def test_changes_are_shown_if_the_run_has_a_baseline() -> None:
    slower = Change(
        kind="regressed",
        host="gpu-01",
        scope="gpu=1",
        what="gemm.throughput",
        text="slower",
        unit="FLOP/s",
        old=7.5e14,
        new=6e14,
        share=-0.2,
        noise=0.02,
        serial="1611",
    )
    swapped = Change(kind="replaced", host="gpu-00", scope="gpu=0", what="gpu", text="gpu 1600 was 1699", serial="1600")
    text = Page(render_html(replace(accepted(), baseline="a" * 64, changes=(slower, swapped)))).text
    counts = (
        "2 differences from baseline aaaaaaaaaaaa on 2 hosts; "
        "2 of the differences are changed parts, or figures that are worse"
    )
    for expected in (counts, "750 TFLOP/s", "600 TFLOP/s", "−20.0 %", "gpu 1600 was 1699"):
        assert expected in text
    assert "Changes since acceptance" not in Page(render_html(accepted())).text


def test_log_keeps_its_line_breaks_in_the_page_data() -> None:
    data = Page(render_html(report_with_many_sections())).data
    assert "NCCL WARN\n  peer is gone" in data["texts"]


def test_page_names_the_purchase_order_and_the_part_to_return() -> None:
    report = replace(rejected(), site="Oslo, hall 2", purchase_order="PO-4711", operator="Kari")
    page = Page(render_html(report)).text
    for expected in (
        "Oslo, hall 2",
        "PO-4711",
        "Kari",
        "1 part to return",
        "serial 1611",
        "NVIDIA H200",
        "1 host rejected",
    ):
        assert expected in page
    assert headline.causes_sentence(report) == "1 cause keeps 1 of 2 hosts from acceptance. 1 part must be returned."
    assert "Purchase order" not in Page(render_html(rejected())).text


def test_gpu_is_inconclusive_if_measurements_of_its_host_are_missing() -> None:
    host = rejected().hosts[0]
    gap = replace(host, coverage=replace(host.coverage, expected=host.coverage.measured + 3))
    assert {item.state for item in gpu_states(host, (), passes_left_out=True)} == {PASS}
    assert {item.state for item in gpu_states(gap, (), passes_left_out=True)} == {"inconclusive"}


def test_gpu_without_verdicts_passes_if_the_missing_reading_of_its_host_is_waived() -> None:
    """A report that omits passes has no verdict on the healthy GPU of the rejected host."""
    report = rejected()
    host = next(host for host in report.hosts if host.decision == "rejected")
    failed = next(item for item in report.verdicts if item.host == host.name and item.verdict == "fail")
    waiver = Waiver(host=host.name, criterion="c", absent=True, who="Kari", why="no BMC", until="2099-01-01")
    gap = Verdict(host=host.name, scope="host", name="bmc.readable", verdict="inconclusive", criterion="c", reason="",
                  waiver=waiver)  # fmt: skip
    gpus = tuple(builders.gpu(host.name, index) for index in range(2))
    host = replace(host, gpus=gpus, coverage=replace(host.coverage, expected=host.coverage.measured + 1))
    verdicts = (replace(failed, scope="gpu=0", part=""), gap)
    shown = replace(report, hosts=(host,), verdicts=verdicts, causes=(), detail=EXCEPTIONS)
    data = Page(render_html(shown)).data
    assert data["gpus"] == [["fp", 1]]
    assert [gpu[0] for gpu in data["pages"]["0"]["gpus"]] == ["f", "p"]


def test_texts_of_rackproof_are_not_truncated() -> None:
    """`clean` truncates long texts from hosts. It must not change the texts of packs, readings, benchmarks and causes."""
    handlings = (*handling.HANDLING.values(), *handling.WITHOUT_EVIDENCE.values(), *handling.OF_ACTION.values())
    texts = [text for item in handlings for text in item]
    texts += [text for pack in read_packs([]) for item in pack.criteria for text in (item.source, wanted_text(item))]
    texts += [reading.help for reading in READINGS.values()] + [item.summary for item in BENCHMARKS.values()]
    assert [text for text in texts if formatting.clean(text) != text] == []


def test_margin_far_beyond_a_limit_is_written_as_a_multiple_of_the_limit() -> None:
    assert [formatting.margin_text(share) for share in (-36.5, 12.7, -0.12, 0.5, None)] == [
        "38 times the limit",
        "14 times the limit",
        "−12.0 %",
        "+50.0 %",
        "–",
    ]


@pytest.mark.parametrize(
    ("value", "operator", "limit", "text"),
    [
        (-6.0, "ge", 3.0, "–"), (6.0, "le", -3.0, "–"), (0.0, "ge", 3.0, "−100 %"), (-30.0, "ge", -3.0, "10 times the limit"),
        (30.0, "le", 3.0, "10 times the limit"), (1.5, "ge", 3.0, "−50.0 %"), (-2.0, "ge", -4.0, "+50.0 %"),
    ],
)  # fmt: skip
def test_margin_is_a_dash_if_value_and_limit_have_opposite_signs(
    value: float, operator: str, limit: float, text: str
) -> None:
    """For example, `gpu.temperature_margin` must be at least 3 °C, but is -6 °C."""
    assert formatting.margin_text(formatting.margin_of(value, operator, limit)) == text


def test_time_per_host_ignores_hosts_without_measured_durations() -> None:
    report = rejected()
    with_silent_hosts = replace(
        report, hosts=(*report.hosts, *(replace(report.hosts[0], name=f"q{i}", measurements=()) for i in range(9)))
    )
    assert timing.summary_line(with_silent_hosts) == timing.summary_line(report)


@pytest.mark.parametrize(("lowest", "is_explained"), [(3.4e11, False), (2e11, True)])
def test_orange_line_is_explained_only_if_the_chart_has_an_orange_line(lowest: float, is_explained: bool) -> None:
    fleet_plan = plan(4)
    rates = (3.5e11, 3.5e11, 3.5e11, lowest)
    records = {
        number: record(
            fleet_plan,
            number,
            more=[
                measured("collective.all_gather.busbw", rate, "B/s", world_size=2, size_bytes=size)
                for size, rate in ((GIB // 2, rate), (GIB, rate))
            ],
        )
        for number, rate in enumerate(rates)
    }
    html = "".join(render_html(judge_records(fleet_plan, records)))
    assert ('class="line low"' in html) is is_explained
    assert ("an orange one is far below the median" in Page(html).text) is is_explained
