"""Read the manifest (the list of ordered parts) from a CSV or YAML file."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from fleet.judge.manifest import identity
from schemas import documents
from schemas.errors import UsageError
from schemas.plans import GPU, NIC, Part

COLUMNS = ("host", "kind", "slot", "serial")
REQUIRED = ("host", "kind", "serial")
MAX_BYTES = 16_000_000

Row = tuple[int, Mapping[str, str]]
"""Line number, and values by column."""

_ROUNDED_NUMBER = re.compile(r"\d+(?:[.,]\d+)?[eE]\+?\d+")
_GPU_SERIAL = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PCI_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?")
_GPU_INDEX = re.compile(r"(?:gpu\s*=?\s*)?(\d{1,3})")
_NIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,31}")


def read_manifest(name: str, hosts: Iterable[str]) -> tuple[Part, ...]:
    """Return the parts in a manifest file.

    Raises:
        UsageError: unreadable, not a manifest, or a line is invalid, for example if its host is not one of `hosts`; the message
            names file, line, value and remedy.
    """
    path, known = Path(name), list(hosts)
    text = _text(path)
    rows = _yaml_rows(path, text) if name.endswith((".yml", ".yaml")) else _csv_rows(path, text)
    parts = tuple(_part(f"{path.name} line {line}", row, known) for line, row in rows)
    if not parts:
        raise UsageError(f"{path}: lists no part: give a line for each, with {', '.join(REQUIRED)}")
    _refuse_duplicates(parts)
    return parts


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"rackproof_manifest {path}: {error.strerror} in {Path.cwd()}: give an absolute path, or "
            '"{{ inventory_dir }}/NAME" in an inventory that a playbook reads'
        ) from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: {len(content)} bytes; a manifest may have at most {MAX_BYTES}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at offset {error.start}: save it as `CSV UTF-8`") from None


def _csv_rows(path: Path, text: str) -> list[Row]:
    """Return the lines of a CSV file; spreadsheets may separate columns with semicolons or tabs."""
    if "\0" in text:
        raise UsageError(f"{path}: contains a NUL character: save it as `CSV UTF-8`")
    header = next((line for line in text.splitlines() if line.strip()), "")
    separator = max(",;\t", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    names: list[str] = []
    rows: list[Row] = []
    try:
        for cells in reader:
            values = [cell.strip() for cell in cells]
            if not any(values):
                continue
            if not names:
                names = [value.lower() for value in values]
                _check_columns(f"{path.name} line {reader.line_num}", names)
                continue
            _check_cells(f"{path.name} line {reader.line_num}", values, names)
            rows.append((reader.line_num, {name: value for name, value in zip(names, values, strict=False) if name}))
    except csv.Error as error:
        raise UsageError(f"{path.name} line {reader.line_num}: not CSV: {error}") from None
    return rows


def _check_columns(where: str, names: list[str]) -> None:
    columns = [name for name in names if name]
    for name in columns:
        if name not in COLUMNS:
            raise UsageError(
                f"{where}: unknown column {name}{documents.nearest(name, COLUMNS)}: choose from {', '.join(COLUMNS)}"
            )
        if columns.count(name) > 1:
            raise UsageError(f"{where}: duplicate column {name}")
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise UsageError(
            f"{where}: no column {', '.join(missing)}: the first line names the columns {', '.join(COLUMNS)}"
        )


def _check_cells(where: str, values: list[str], names: list[str]) -> None:
    surplus = [value for value in values[len(names) :] if value]
    unnamed = [value for name, value in zip(names, values, strict=False) if value and not name]
    if extra := [*surplus, *unnamed]:
        raise UsageError(f"{where}: {extra[0]!r} is outside the columns: quote values that contain the separator")


def _yaml_rows(path: Path, text: str) -> list[Row]:
    """Return the items of a YAML list with every value as text: YAML would turn serials and addresses into numbers."""
    try:
        document = yaml.compose(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(document, yaml.SequenceNode):
        raise UsageError(f"{path}: not a list of parts: begin each with `- host:`")
    return [(item.start_mark.line + 1, _yaml_row(path, item)) for item in document.value]


def _yaml_row(path: Path, item: yaml.Node) -> dict[str, str]:
    where = f"{path.name} line {item.start_mark.line + 1}"
    if not isinstance(item, yaml.MappingNode):
        raise UsageError(f"{where}: not a part: write {{host: NAME, kind: gpu, serial: NUMBER}}")
    row: dict[str, str] = {}
    for key, value in item.value:
        if not isinstance(key, yaml.ScalarNode) or not isinstance(value, yaml.ScalarNode):
            raise UsageError(
                f"{path.name} line {key.start_mark.line + 1}: expected one value for each of {', '.join(COLUMNS)}"
            )
        if key.value in row:
            raise UsageError(f"{path.name} line {key.start_mark.line + 1}: duplicate key {key.value!r}")
        row[key.value] = value.value.strip()
    _check_columns(where, list(row))
    return row


def _part(where: str, row: Mapping[str, str], hosts: list[str]) -> Part:
    for name in REQUIRED:
        if not row.get(name):
            raise UsageError(f"{where}: {name} is empty: every part needs {', '.join(REQUIRED)}")
    host, kind = row["host"], row["kind"].lower()
    if host not in hosts:
        raise UsageError(
            f"{where}: host {host} is not in the inventory{documents.nearest(host, hosts)}: "
            "correct the name, or leave out the parts of other racks"
        )
    if kind not in (GPU, NIC):
        raise UsageError(f"{where}: kind {row['kind']}{documents.nearest(kind, (GPU, NIC))}: choose {GPU} or {NIC}")
    return Part(
        host=host,
        kind=kind,
        serial=_serial(where, kind, row["serial"]),
        slot=_slot(where, kind, row.get("slot", "")),
        origin=where,
    )


def _serial(where: str, kind: str, serial: str) -> str:
    if _ROUNDED_NUMBER.fullmatch(serial) and (kind == GPU or "+" in serial):
        raise UsageError(
            f"{where}: serial {serial} was rounded by a spreadsheet, and its digits are lost: "
            "format the column as text, enter the serials again, and export again"
        )
    if kind == GPU:
        if not _GPU_SERIAL.fullmatch(serial) or not identity(kind, serial):
            raise UsageError(
                f"{where}: {serial!r} is not a valid GPU serial: give letters and digits, as nvidia-smi -q shows it"
            )
        return serial
    if not re.fullmatch(r"[0-9a-f]{12}|[0-9a-f]{16}", identity(kind, serial)):
        raise UsageError(
            f"{where}: {serial!r} is not a valid NIC serial: give its node GUID (16 hexadecimal digits) or MAC address (12)"
        )
    return serial


def _slot(where: str, kind: str, slot: str) -> str:
    """Return the slot in the judge's form: a PCI address as in sysfs, an index, or the name of a NIC."""
    if not slot:
        return ""
    if pci := _PCI_ADDRESS.fullmatch(slot.lower()):
        domain, bus, device, function = pci.groups()
        return f"{(domain or '0000')[-4:]}:{bus}:{device}.{function or '0'}"
    index = _GPU_INDEX.fullmatch(slot.lower())
    if kind == GPU and index:
        return str(int(index.group(1)))
    if kind == NIC and _NIC_NAME.fullmatch(slot):
        return slot
    alternative = "the index of the GPU" if kind == GPU else "the name of the NIC"
    raise UsageError(f"{where}: slot {slot!r}: give a PCI address (0000:1b:00.0), {alternative}, or nothing")


def _refuse_duplicates(parts: Iterable[Part]) -> None:
    """Raise UsageError if two lines name the same part or the same slot."""
    serials: dict[tuple[str, str], Part] = {}
    slots: dict[tuple[str, str, str], Part] = {}
    for part in parts:
        first = serials.setdefault((part.kind, identity(part.kind, part.serial)), part)
        if first is not part:
            raise UsageError(
                f"{part.origin}: serial {part.serial} is listed twice ({first.origin}, for {first.host}): "
                "a part can be in only one slot"
            )
        other = slots.setdefault((part.host, part.kind, part.slot), part) if part.slot else part
        if other is not part:
            raise UsageError(
                f"{part.origin}: slot {part.slot} of {part.host} holds {other.serial} already ({other.origin})"
            )
