"""Test the fast reader of records (`schemas.quick`), and tallies (counts of verdicts, `fleet.judge.tally`).

The reader accepts only records that jsonschema accepts. A tally does not depend on the order of its verdicts.
"""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.judge.evidence import Planned
from fleet.judge.tally import Tally
from schemas import documents, quick
from schemas.decode import record_from_json
from schemas.plans import Plan
from schemas.records import Record, to_json
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders, fleets

# The fast reader, compared with jsonschema


def record_text(count: int = 2) -> str:
    plan: Plan = fleets.plan(1, gpu_count=count, gangs=False)
    return fleets.text(fleets.records(plan, plan.hosts[0].name)[0])


TEXT = record_text()
SHORT = json.dumps(
    {
        "schema": "rackproof.record/2", "run_id": "r1", "nonce": builders.NONCE, "host": "h1",
        "began": builders.WHEN, "ended": builders.WHEN,
        "rackproof": "0", "simulated": False, "gpus": [to_json(builders.gpu("h1", 0))],
        "snapshots": [{"stage": "preflight", "phase": "before", "at": builders.WHEN, "duration_s": 0.5, "metrics": [
            {"name": "gpu.count", "unit": "1", "values": {"host": 2}},
            {"name": "gpu.power", "unit": "W", "values": {"gpu=0": 1.5e2}, "absent": {"gpu=1": "error: no: \\u2028 answer"}},
        ]}],
        "observations": [
            {"name": "gemm.throughput", "scope": "gpu=0", "stage": "b", "unit": "1", "status": "measured", "value": 1e-6,
             "params": {"dtype": "bf16"}, "samples": {"n": 3, "min": 1, "p50": 2.0, "max": 3, "cv": 0.1}},
            {"name": "gemm.throughput", "scope": "gpu=1", "stage": "b", "unit": "1", "status": "error", "reason": "no: luck"},
        ],
        "launches": [to_json(builders.launch("benchmark", ("h1",)))],
    },
    indent=1,
)  # fmt: skip
INSERTS = (
    *(
        '"',
        ":",
        ",",
        "{",
        "}",
        "[",
        "]",
        "\\",
        "\\u003a",
        "\\u001c",
        "\\ud800",
        "\n",
        " ",
        "\x00",
        "\x85",
        "é",
        "\ufeff",
    ),
    *("null", "true", "1e999", "NaN", "18446744073709551616", "-0", "1.0", '"value": 1,', '"status": "measured",'),
    *('"x": {"y": {"z": []}},', '"host": "h2",', "measured", "error: \\u001c", "error: \\u0085", "5e-324", "0123"),
)
"""Texts that a test inserts at random positions of a record."""


def read_with_jsonschema(text: bytes) -> Record | None:
    """Return the record in `text`, validated with jsonschema; None if the text is not a valid record."""
    try:
        document = documents.parse(text, source="x")
        documents.validator("record").validate(document)
        return record_from_json(document)
    except (jsonschema.ValidationError, ValueError):
        return None


def is_accepted(text: bytes) -> bool:
    """Return whether `documents.checked` accepts the text as a record.

    Rackproof calls `documents.checked` if the fast reader returns None.
    """
    with contextlib.suppress(ValueError):
        return bool(record_from_json(documents.checked(text, "record", source="x")))
    return False


def test_records_of_version_1_are_read() -> None:
    old, new = TEXT.replace("rackproof.record/2", "rackproof.record/1"), TEXT
    assert old != new
    records = [record_from_json(documents.checked(text.encode(), "record", source="x")) for text in (old, new)]
    assert quick.Reader().record(old.encode()) == records[0]
    assert records[1] == replace(records[0], schema="rackproof.record/2")


@pytest.mark.skipif(not quick.available(), reason="msgspec or jsonschema-rs is not installed")
@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**32))
def test_reader_accepts_nothing_that_jsonschema_refuses(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    text = SHORT
    for _ in range(draw.choice((1, 1, 2, 3))):
        at = draw.randrange(len(text))
        kind = draw.randrange(4)
        if kind == 0:
            text = text[:at] + draw.choice(INSERTS) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + draw.randrange(1, 12) :]
        elif kind == 2:
            text = text[:at] + chr(draw.randrange(32, 127)) + text[at + 1 :]
        else:
            lines = text.split("\n")
            lines.insert(draw.randrange(len(lines)), draw.choice(lines))
            text = "\n".join(lines)
    raw = text.encode("utf-8", "surrogatepass")
    fast, expected = quick.Reader().record(raw), read_with_jsonschema(raw)
    if fast is not None:
        assert fast == expected == quick.Reader().record(raw, is_checked=True)
    assert is_accepted(raw) == (expected is not None)


@pytest.mark.skipif(not quick.available(), reason="msgspec or jsonschema-rs is not installed")
def test_reader_reads_valid_records_and_reuses_equal_metrics() -> None:
    reader = quick.Reader()
    with_digits = SHORT.replace(json.loads(SHORT)["nonce"], "7" * 32)  # a nonce of 32 digits is text, not a number
    assert with_digits != SHORT
    for text in (TEXT, SHORT, with_digits):
        result = reader.record(text.encode())
        assert result is not None
        assert result == read_with_jsonschema(text.encode())
    first, second = (reader.record(TEXT.encode()) for _ in range(2))
    assert first
    assert second
    assert all(
        metric is reused for metric, reused in zip(first.snapshots[0].metrics, second.snapshots[0].metrics, strict=True)
    )


@pytest.mark.skipif(not quick.available(), reason="msgspec or jsonschema-rs is not installed")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"host": "h1"', '"host": "h1", "host": "h1"'),
        ('"host": 2', '"host": 2, "host": 2'),
        ('"n": 3', '"n": 3, "n": 3'),
        ('"n": 3', '"n": 0'),
        ('"cv": 0.1', '"cv": -0.1'),
        ('"dtype": "bf16"', '"dtype": "bf16", "dtype": "fp8"'),
        ('"dtype": "bf16"', '"dtype": ["bf16"]'),
        ('"dtype": "bf16"', f'"dtype": {10**20}'),
        ('"reason": "no: luck"', f'"reason": "{"x" * 4097}"'),
        ('"reason": "no: luck"', '"value": 1'),
        ('"scope": "gpu=1"', '"scope": "gpu 1"'),
        ('"value": 1e-06', f'"value": "{"x" * 1025}"'),
        ('"value": 1e-06', '"value": 1e999'),
        ('"value": 1e-06', '"value": 18446744073709551616'),
        ('"value": 1e-06', '"value": 1e-06, "reason": "none"'),
        ('"status": "measured"', '"status": "measure"'),
        ('"unit": "W"', '"unit": "W", "more": 1'),
        ("error: no: ", "error:"),
        ('"metrics": [', '"metrics": [null, '),
        ('"index": 0', '"index": -1'),
    ],
)
def test_reader_refuses_invalid_records(old: str, new: str) -> None:
    assert old in SHORT
    text = SHORT.replace(old, new, 1).encode()
    assert quick.Reader().record(text) is None
    assert read_with_jsonschema(text) is None


# Tallies


def make_verdict(host: str, value: float, verdict: str = PASS) -> Verdict:
    return Verdict(
        host=host, scope="gpu=0", name="gemm.throughput", stage="benchmark", verdict=verdict, criterion="gemm", reason="",
        value=value, limit=5.0, operator="ge", unit="1", source="ours", action="rma" if verdict == FAIL else "none",
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.sampled_from([PASS, FAIL, INCONCLUSIVE])), min_size=1, max_size=60),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_tally_does_not_depend_on_the_order_of_its_verdicts(
    items: list[tuple[float, str]], parts: int, draw: random.Random
) -> None:
    values = {f"h{at}": at for at in range(len(items))}
    verdicts = [make_verdict(f"h{at}", value, verdict) for at, (value, verdict) in enumerate(items)]
    planned = Planned(builders.plan())
    whole = Tally(planned, values)
    for verdict in verdicts:
        whole.add(verdict)
    tallies = [Tally(planned, values) for _ in range(parts)]
    draw.shuffle(verdicts)
    for verdict in verdicts:
        draw.choice(tallies).add(verdict)
    first, *others = tallies
    for other in others:
        first.update(other)
    assert first.judged() == whole.judged()


def test_tally_row_has_the_distribution_of_its_values() -> None:
    tally = Tally(Planned(builders.plan()), {f"h{at}": at for at in range(5000)})
    for at in range(5000):
        tally.add(make_verdict(f"h{at}", 100 + at / 100, FAIL if at < 3 else PASS))
    (row,) = tally.judged()
    assert (row.passed, row.failed, row.limit, row.action) == (4997, 3, 5.0, "rma")
    assert [far.host for far in row.farthest] == [f"h{at}" for at in range(10)]
    assert row.spread is not None
    assert (row.spread.n, row.spread.min, row.spread.max, sum(row.spread.bins)) == (5000, 100, 149.99, 5000)
    assert row.spread.p50 == pytest.approx(125, rel=2e-4)
    assert row.spread.p05 == pytest.approx(102.5, rel=2e-4)
