"""Test `schemas.documents`: it refuses invalid JSON and documents that do not match their schema, and writes files atomically."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import documents
from schemas.decode import record_from_json
from schemas.records import to_json
from tests import builders

RECORD = to_json(builders.records(builders.plan(gpu_count=1), "h1")[0])
TEXT = json.dumps(RECORD)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": 1e999}', "not finite"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ("[" * 20 + "]" * 20, "nested deeper"),
        ("[" * 100_000, "nested deeper"),
        ('{"a": ', "not JSON at offset 6 of 6"),
        ("", "empty, which is not JSON"),
        (" \n", "empty, which is not JSON"),
        ("1" * 5000, "integer"),
        ('{"a": [1' + "0" * 400 + "]}", "more than 64 bits"),
        (b"\xff\xfe{}", "not"),
    ],
)
def test_invalid_or_ambiguous_json_is_refused(text: Any, message: str) -> None:
    with pytest.raises(documents.DocumentError, match=r"^h1\.json: ") as caught:
        documents.parse(text, source="h1.json")
    assert message in str(caught.value)


def test_oversized_document_is_refused() -> None:
    with pytest.raises(documents.DocumentError, match="12 bytes, more than the allowed 10"):
        documents.parse('{"a": "bcd"}', source="h1.json", max_bytes=10)


def test_written_record_is_read_unchanged(tmp_path: Path) -> None:
    for record in builders.records(builders.plan(), "h1"):
        documents.write(tmp_path / "r.json", to_json(record))
        assert record_from_json(documents.read(tmp_path / "r.json", "record")) == record


def test_truncated_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    content = TEXT.encode()
    for length in range(0, len(content) - 1, 197):
        path.write_bytes(content[:length])
        with pytest.raises(documents.DocumentError):
            documents.read(path, "record")


@settings(max_examples=40)  # `make fuzz` tests many more changes
@given(st.integers(0, len(TEXT) - 1), st.characters(codec="ascii"))
def test_record_with_a_changed_character_is_read_or_raises_a_document_error(position: int, character: str) -> None:
    text = TEXT[:position] + character + TEXT[position + 1 :]
    try:
        document = documents.parse(text, source="r")
        documents.validate(document, "record", source="r")
        record_from_json(document)
    except documents.DocumentError:
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schema": "rackproof.record/3"},
            "schema: 'rackproof.record/3' is of a newer Rackproof: read it with that version",
        ),
        (
            {"schema": "rackproof.record/3", "software": {"new": []}, "later": 1},
            "schema: 'rackproof.record/3' is of a newer Rackproof",
        ),
        (
            {"schema": "rackproof.plan/1"},
            "schema: 'rackproof.plan/1', expected rackproof.record/2 or rackproof.record/1",
        ),
        ({"host": "../../etc/passwd"}, "host: "),
        ({"nonse": "x"}, "unknown nonse (did you mean nonce?)"),
        (
            {"observations": [{"name": "a.b", "scope": "host", "stage": "s", "unit": "1", "status": "measured"}]},
            "'value' is a required",
        ),
        (
            {
                "observations": [
                    {"name": "a.b", "scope": "host", "stage": "s", "unit": "1", "status": "eror", "value": 1}
                ]
            },
            "did you mean error?",
        ),
        (
            {"observations": [{"name": "a.b", "scope": "host", "stage": "s", "unit": "1", "status": "error"}]},
            "'reason' is a required",
        ),
    ],
)
def test_schema_error_explains_the_mistake(change: dict[str, Any], message: str) -> None:
    with pytest.raises(documents.DocumentError) as caught:
        documents.validate({**RECORD, **change}, "record", source="r.json")
    assert message in str(caught.value)


@pytest.mark.parametrize("position", [0, 20_000, 39_999])
def test_duplicate_key_among_forty_thousand_is_named(position: int) -> None:
    keys = [f"{number:x}" for number in range(40_000)]
    text = "{" + ",".join(f'"{key}":0' for key in [*keys, keys[position]]) + "}"
    with pytest.raises(documents.DocumentError, match=f"duplicate key '{keys[position]}'$"):
        documents.parse(text, source="h1.json")


def shortened(value: Any) -> Any:
    """Return the document with only the first element of each list. So it has each kind of value, and is quick to validate."""
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    return [shortened(item) for item in value[:1]] if isinstance(value, list) else value


def locations(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from locations(item, (*path, key))


def replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return the document with another value at `path`."""
    if not path:
        return value
    copy = document.copy()
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


PLAN = to_json(builders.plan(gpu_count=1))
SHORT = {"record": shortened(RECORD), "plan": shortened(PLAN)}
HUGE_VALUES = {
    "a long text": "x" * 100_000,
    "a long number as text": "1" * 100_000,
    "a long URL": "http://" + "x" * 100_000,
    "a list of long texts": ["x" * 1000] * 1000,
    "a list of empty mappings": [{}] * 20_000,
    "a mapping with a long name": {"x" * 100_000: 1},
    "a mapping with many names": {f"/{number}": [] for number in range(20_000)},
}


@pytest.mark.parametrize("kind", HUGE_VALUES)
@pytest.mark.parametrize("schema", SHORT)
def test_message_about_a_huge_value_is_short_and_its_number_of_faults_is_bounded(schema: str, kind: str) -> None:
    result = 0
    assert documents.faults(SHORT[schema], schema) == []
    for path in locations(SHORT[schema]):
        changed = replaced(SHORT[schema], path, HUGE_VALUES[kind])
        errors = documents.faults(changed, schema)
        assert len(errors) < 1000, path
        messages = [documents.explain(error) for error in errors]
        assert all(len(message) < 1000 for message in messages), path
        result += len(errors)
    assert result > 20


def test_wrong_version_is_named_even_if_a_list_has_many_faults() -> None:
    document = {**RECORD, "observations": [{}] * 20_000, "schema": "rackproof.record/9"}
    with pytest.raises(documents.DocumentError, match=r"schema: 'rackproof\.record/9' is of a newer Rackproof"):
        documents.validate(document, "record", source="h1.json")


def test_links_pipes_and_directories_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text(TEXT)
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "directory.json").mkdir()
    for name in ("link", "pipe", "directory", "absent"):
        with pytest.raises(documents.DocumentError, match=f"{name}.json: "):
            documents.read(tmp_path / f"{name}.json", "record")


def test_file_that_grows_is_read_to_one_byte_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "grows"
    path.write_bytes(b"x" * 100)
    status_before = os.stat_result((0o100644, 0, 0, 1, 0, 0, 7, 0, 0, 0))  # a regular file of 7 bytes
    monkeypatch.setattr(os, "fstat", lambda descriptor: status_before)
    assert documents.read_bytes(path) == b"x" * 100
    assert documents.read_bytes(path, max_bytes=50) == b"x" * 51


def test_failed_write_keeps_the_old_file_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    documents.write(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range"):
        documents.write(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.json"]


MODELS = [
    "a100-pcie-40",
    "a100-pcie-80",
    "a100-sxm-40",
    "a100-sxm-80",
    "b200",
    "gb200",
    "gh200",
    "h200-nvl",
    "h200-sxm",
    "l40s",
]


@pytest.mark.parametrize(
    ("word", "suggested"),
    [
        ("h200", "h200-nvl or h200-sxm"),
        ("H200", "h200-nvl or h200-sxm"),
        ("a100", "a100-pcie-40, a100-pcie-80, a100-sxm-40 or a100-sxm-80"),
        ("a100-80", "a100-pcie-80 or a100-sxm-80"),
        ("H200 SXM", "h200-sxm"),
        ("l40", "l40s"),
        ("gh20", "gh200"),
        ("h200-smx", "h200-sxm"),
        ("h200-141", "h200-nvl or h200-sxm"),
        ("NVIDIA H200", "h200-nvl or h200-sxm"),
        ("hgx-h200", "h200-nvl or h200-sxm"),
        ("x", ""),
        ("", ""),
    ],
)
def test_similar_names_are_suggested(word: str, suggested: str) -> None:
    assert documents.nearest(word, MODELS) == (f" (did you mean {suggested}?)" if suggested else "")


def test_suggestions_can_be_limited_to_names_with_the_same_letters() -> None:
    """The letters are those before the first digit: `h` of h2000 and of h200-sxm, but `gh` of gh200."""
    assert documents.nearest("h2000", ["gh200", "baseline"]) == " (did you mean gh200?)"
    assert documents.nearest("h2000", ["gh200", "baseline"], same_letters=True) == ""
    assert documents.nearest("h2000", ["gh200", "h200-sxm"], same_letters=True) == " (did you mean h200-sxm?)"


@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdout", "/dev/new"])
def test_no_file_in_dev_is_written(path: str) -> None:
    """The test does not call `write_text`, which would replace /dev/null if the check were broken and root ran the test."""
    with pytest.raises(OSError, match="not a regular file"):
        documents.refuse_special(Path(path))


def test_pipe_is_not_replaced_by_a_document(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        documents.write_text(pipe, "text")
    assert pipe.is_fifo()


@pytest.mark.parametrize("text", ["1e9", "1E9", "1.5e9", "1e+9", "1e-3", "2.e8"])
def test_suggested_form_of_a_number_is_a_number_in_yaml(text: str) -> None:
    """YAML reads `text` as text, not as a number."""
    assert yaml.safe_load(text) == text
    with pytest.raises(documents.DocumentError) as error:
        documents.validate({"rackproof_fabric_gbps": text}, "inventory", source="hosts.yml")
    written = str(error.value).rpartition("write ")[2]
    assert yaml.safe_load(written) == float(text)


OPERATOR_SCHEMAS = ("inventory", "criteria", "profile", "waivers")
"""Schemas of files that operators write."""


def patterns(node: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield place, pattern and x-form (empty if there is none) of each pattern in a schema."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    if isinstance(node, dict) and isinstance(node.get("pattern"), str):
        yield path, node["pattern"], node.get(documents.FORM, "")
    for key, child in items:
        yield from patterns(child, f"{path}.{key}")


@pytest.mark.parametrize(
    ("place", "pattern", "form"),
    [result for name in OPERATOR_SCHEMAS for result in patterns(documents.part(name), name)],
)
def test_every_pattern_in_files_of_operators_has_a_form_whose_examples_match(
    place: str, pattern: str, form: str
) -> None:
    examples = [text for part in re.findall(r"such as ([^,;]+)", form) for text in part.split(" or ")]
    assert examples, place
    assert all(re.search(pattern, text) for text in examples), (place, examples)


def explained(schema: str, document: dict[str, Any]) -> str:
    with pytest.raises(documents.DocumentError) as caught:
        documents.validate(document, schema, source="file.yml")
    return str(caught.value).removeprefix("file.yml: ")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("rackproof_rack", "Rack 12", "'Rack 12' has the wrong form: write a name of letters, digits, "),
        ("rackproof_verdicts_textfile", ".txt", "'.txt' has the wrong form: write an absolute path that ends in .prom"),
        ("rackproof_prefix", "~/rackproof", "'~/rackproof' has the wrong form: write an absolute path, such as /opt/"),
        ("rackproof_storage_floors", {"local_reads": 6}, "unknown local_reads (did you mean local_read?)"),
        (
            "rackproof_storage_floors",
            "togehter",
            "'togehter' is not together or a mapping of local_read, local_write, ",
        ),
        ("rackproof_storage_floors", 5, "5 is not together or a mapping of local_read, local_write, "),
        ("nvidia_driver_serial", "half", "'half' has the wrong form: write a number of hosts from 1, or a percentage"),
        ("nvidia_driver_serial", 0, "0 is less than the minimum of 1"),
        ("nvidia_driver_serial", [1], "[1] is not a whole number or text"),
        ("rackproof_site", True, "True is not text: write it in quotes"),
        ("rackproof_site", 1, "1 is not text: write it in quotes"),
        (
            "rackproof_notify_link",
            "ftp://me:secret@x",
            "'ftp://***@x' has the wrong form: write a URL, such as https://",
        ),
    ],
)
def test_wrong_value_of_a_variable_is_explained_with_its_remedy(variable: str, value: Any, message: str) -> None:
    assert explained("inventory", {variable: value}).startswith(f"{variable}: {message}")


CRITERION = {
    "id": "a",
    "name": "gemm.throughput",
    "operator": "ge",
    "unit": "1",
    "action": "monitor",
    "source": "measured",
    "value": 4,
}
WAIVER = {"criterion": "a", "host": "h1", "who": "me myself", "why": "known since May", "until": "2027-12-31"}


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        ({"vs_fleet": {"fraction": 0.9}}, "criteria.0: has value and vs_fleet: keep only one of them"),
        (
            {"value": None},
            "criteria.0: has none of value, vs_sku, vs_datasheet, vs_inventory, vs_fleet, vs_baseline, same",
        ),
        (
            {"id": "A B"},
            "criteria.0.id: 'A B' has the wrong form: write an id of small letters, digits and `-`, such as",
        ),
        ({"unit": 1}, "criteria.0.unit: 1 is not text: write it in quotes"),
        ({"within": 0.1}, "criteria.0: 0.1 is not allowed here: remove it"),
    ],
)
def test_wrong_criterion_is_explained_with_its_remedy(criterion: dict[str, Any], message: str) -> None:
    entry = {key: value for key, value in {**CRITERION, **criterion}.items() if value is not None}
    document = {"schema": "rackproof.criteria/1", "summary": "mine", "criteria": [entry]}
    assert explained("criteria", document).startswith(message)


@pytest.mark.parametrize(
    ("waiver", "message"),
    [
        ({"host": None}, "waivers.0: has none of host, serial: add at least one of them"),
        ({"until": "12/31/2027"}, "waivers.0.until: '12/31/2027' has the wrong form: write a date, such as 2026-12-31"),
        ({"host": 1}, "waivers.0.host: 1 is not text: write it in quotes"),
    ],
)
def test_wrong_waiver_is_explained_with_its_remedy(waiver: dict[str, Any], message: str) -> None:
    entry = {key: value for key, value in {**WAIVER, **waiver}.items() if value is not None}
    assert explained("waivers", {"schema": "rackproof.waivers/1", "waivers": [entry]}) == message
