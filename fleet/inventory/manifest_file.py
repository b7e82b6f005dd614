"""Read the manifest (the list of the parts and cables that were ordered) from a CSV or YAML file."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from fleet.judge.host_inventory import identity
from fleet.judge.manifest import PARTS
from schemas import documents
from schemas.errors import UsageError
from schemas.plans import GPU, LINK, MODULE, NIC, Part
from schemas.scopes import pci_address

COLUMNS = ("host", "kind", "slot", "serial", "port", "switch", "switch_port")
REQUIRED = ("host", "kind")
OF_PART, OF_LINK = ("serial",), ("port", "switch", "switch_port")
"""Columns that the line of a part (OF_PART) or of a cable (OF_LINK) needs besides REQUIRED. In the line of a cable, OF_PART and
`slot` must be empty. In the line of a part, OF_LINK must be empty."""
LINK_COLUMNS = (*REQUIRED, *OF_LINK)
MODULE_COLUMNS = (*REQUIRED, "slot", *OF_PART)
MAX_BYTES = 16_000_000

Row = tuple[int, Mapping[str, str]]
"""Line number, and values by column."""

_ROUNDED_NUMBER = re.compile(r"\d+(?:[.,]\d+)?[eE]\+?\d+")
_GPU_SERIAL = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PCI_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?")
_GPU_INDEX = re.compile(r"(?:gpu\s*=?\s*)?(\d{1,3})")
_ADAPTER_PORT = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,31}/\d{1,3}")
_MODULE_SERIAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ./_-]{0,63}")
_SWITCH_TEXT = re.compile(r"[^\x00-\x1f\x7f]{1,80}")
_NIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,31}")


def read_manifest(name: str, hosts: Iterable[str]) -> tuple[Part, ...]:
    """Return the parts and the cables in a manifest file.

    Raises:
        UsageError: the file cannot be read or is not a manifest, or a line is invalid, for example because its host is not one of
            `hosts`. The message names file, line, value and remedy.
    """
    path, known = Path(name), list(hosts)
    text = _text(path)
    rows = _yaml_rows(path, text) if name.endswith((".yml", ".yaml")) else _csv_rows(path, text)
    parts = tuple(_part(f"{path.name} line {line}", row, known) for line, row in rows)
    if not parts:
        raise UsageError(f"{path}: lists no part: give a line for each part, with {', '.join((*REQUIRED, *OF_PART))}")
    _refuse_duplicates(parts)
    return parts


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"rackproof_manifest {path}: {why} in {Path.cwd()}: give an absolute path, or "
            '"{{ inventory_dir }}/NAME" in an inventory that a playbook reads'
        ) from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: {len(content)} bytes; a manifest may have at most {MAX_BYTES}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at offset {error.start}: save it as `CSV UTF-8`") from None


def _csv_rows(path: Path, text: str) -> list[Row]:
    """Return the rows below the header of a CSV file. Spreadsheets may separate columns with semicolons or tabs."""
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
    wanted = OF_LINK if {*OF_LINK} & {*columns} and not {*OF_PART} & {*columns} else OF_PART
    missing = [name for name in (*REQUIRED, *wanted) if name not in columns]
    if missing:
        raise UsageError(f"{where}: no column {', '.join(missing)}: give {', '.join((*REQUIRED, *wanted))}")


def _check_cells(where: str, values: list[str], names: list[str]) -> None:
    surplus = [value for value in values[len(names) :] if value]
    unnamed = [value for name, value in zip(names, values, strict=False) if value and not name]
    if extra := [*surplus, *unnamed]:
        raise UsageError(
            f"{where}: {extra[0]!r} is in a column without a name: quote values that contain the separator"
        )


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
    is_link = row.get("kind", "").lower() == LINK
    _check_values(where, row, is_link=is_link)
    host, kind = row["host"], row["kind"].lower()
    if host not in hosts:
        raise UsageError(
            f"{where}: host {host} is not in the inventory{documents.nearest(host, hosts)}: "
            "correct the name, or leave out the parts of other racks"
        )
    if is_link:
        return _cable(where, row)
    if kind not in PARTS:
        nearest = documents.nearest(kind, (*PARTS, LINK))
        raise UsageError(f"{where}: kind {row['kind']}{nearest}: choose {', '.join(PARTS)} or {LINK}")
    slot = row.get("slot", "")
    return Part(
        host=host,
        kind=kind,
        serial=_serial(where, kind, row["serial"]),
        slot=_port(where, slot) if kind == MODULE else _slot(where, kind, slot),
        origin=where,
    )


def _port(where: str, port: str, column: str = "slot") -> str:
    """Return the network port of a module or cable as the judge names it: `mlx5_0/1`, or what `_slot` returns."""
    return port if _ADAPTER_PORT.fullmatch(port) else _slot(where, NIC, port, column)


def is_switch_text(text: str) -> bool:
    """Return whether the text is valid in a manifest as the name of a switch or of a switch port."""
    return bool(_SWITCH_TEXT.fullmatch(text))


def is_module_serial(text: str) -> bool:
    """Return whether the text is valid in a manifest as the serial of an optical module."""
    return bool(_MODULE_SERIAL.fullmatch(text)) and bool(identity(MODULE, text))


def _check_values(where: str, row: Mapping[str, str], *, is_link: bool) -> None:
    """Raise UsageError if a line lacks a value that its kind needs, or has a value that its kind does not have."""
    needed = (*REQUIRED, *(OF_LINK if is_link else OF_PART))
    for name in needed:
        if not row.get(name):
            raise UsageError(f"{where}: {name} is empty: every {LINK if is_link else 'part'} needs {', '.join(needed)}")
    for name in (*OF_PART, "slot") if is_link else OF_LINK:
        if row.get(name):
            raise UsageError(f"{where}: {name} must be empty for a {LINK if is_link else 'part'}")


def _cable(where: str, row: Mapping[str, str]) -> Part:
    """Return the cable that a line of kind `link` describes."""
    port = _port(where, row["port"], "port")
    for name in ("switch", "switch_port"):
        if not is_switch_text(row[name]):
            raise UsageError(f"{where}: {name} {row[name][:100]!r}: give at most 80 printable characters")
    return Part(
        host=row["host"], kind=LINK, slot=port, switch=row["switch"], switch_port=row["switch_port"], origin=where
    )


def _serial(where: str, kind: str, serial: str) -> str:
    # The hexadecimal digits of a NIC (`12e345678901`) may look like a rounded number, but have no plus sign.
    if _ROUNDED_NUMBER.fullmatch(serial) and (kind != NIC or "+" in serial):
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
    if kind == MODULE:
        if not is_module_serial(serial):
            raise UsageError(
                f"{where}: {serial!r} is not a valid serial of a module: give it as ethtool -m or mlxlink shows it"
            )
        return serial
    if not re.fullmatch(r"[0-9a-f]{12}|[0-9a-f]{16}", identity(kind, serial)):
        raise UsageError(
            f"{where}: {serial!r} is not a valid NIC serial: give its node GUID (16 hexadecimal digits) or MAC address (12)"
        )
    return serial


def _slot(where: str, kind: str, slot: str, column: str = "slot") -> str:
    """Return the slot as the judge names it: a PCI address as in sysfs, a GPU index, the name of a NIC, or an empty string."""
    if not slot:
        return ""
    if pci := _PCI_ADDRESS.fullmatch(slot.lower()):
        domain, bus, device, function = pci.groups()
        return pci_address(f"{domain or '0000'}:{bus}:{device}.{function or '0'}")
    index = _GPU_INDEX.fullmatch(slot.lower())
    if kind == GPU and index:
        return str(int(index.group(1)))
    if kind == NIC and _NIC_NAME.fullmatch(slot):
        return slot
    alternative = "the index of the GPU" if kind == GPU else "the name of the NIC"
    last = "or adapter and port (mlx5_0/1)" if column == "port" else "or nothing"  # a slot may be empty, a port may not
    raise UsageError(f"{where}: {column} {slot!r}: give a PCI address (0000:1b:00.0), {alternative}, {last}")


def _refuse_duplicates(parts: Iterable[Part]) -> None:
    """Raise UsageError if two lines name the same part, the same slot, or the same end of a cable.

    The modules at the ends of a splitter cable may have the same serial if the line of each module names its port in `slot`. The
    GPUs of one board may have the same serial if they are in one host and each line names the slot.
    """
    serials: dict[tuple[str, str], Part] = {}
    slots: dict[tuple[str, str, str], Part] = {}
    for part in parts:
        is_link = part.kind == LINK
        # A cable is identified by its switch port.
        label = f"{part.switch} {part.switch_port}".casefold() if is_link else identity(part.kind, part.serial)
        label += f" at {part.host} {part.slot}" if part.kind == MODULE and part.slot else ""
        first = serials.setdefault((part.kind, label), part)
        if first is not part and is_link:
            raise UsageError(f"{part.origin}: {part.switch} {part.switch_port} has a cable already ({first.origin})")
        is_same_board = part.kind == GPU and first.host == part.host and bool(first.slot and part.slot)
        if first is not part and not is_same_board:
            raise UsageError(
                f"{part.origin}: serial {part.serial} is listed twice ({first.origin}, for {first.host}): "
                "a part can be in only one slot"
            )
        other = slots.setdefault((part.host, part.kind, part.slot), part) if part.slot else part
        if other is not part and is_link:
            raise UsageError(f"{part.origin}: port {part.slot} of {part.host} has a cable already ({other.origin})")
        if other is not part:
            raise UsageError(
                f"{part.origin}: slot {part.slot} of {part.host} already holds serial {other.serial} ({other.origin})"
            )
