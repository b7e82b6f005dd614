"""`rackproof cables`: print the cables that a run found, as lines of a manifest."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from fleet.inventory.manifest_file import COLUMNS, LINK_COLUMNS, MODULE_COLUMNS, is_module_serial, is_switch_text
from fleet.judge.host_inventory import MODULE_SERIAL, HostInventory, host_inventory
from fleet.judge.host_view import HostView
from fleet.judge.wiring.links import HostLinks, PortLink, host_links, port_name
from fleet.records.load import load
from fleet.report.formatting import clean
from schemas.errors import TROUBLE
from schemas.plans import LINK, MODULE

COMPLETE = 0
FORMULA = ("=", "+", "-", "@")
"""A spreadsheet program treats a cell that begins with one of these characters as a formula."""
Row = tuple[str, ...]


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add cables to the command."""
    verb = verbs.add_parser(
        "cables",
        help="print the cables that a run found, as lines of a manifest, for review",
        epilog="example: rackproof cables runs/rack12 > cables.csv. Compare every line with the cabling plan before the file "
        "becomes a manifest: it lists the cables as they are plugged in, right or wrong. Exit codes: 0 every network port "
        "with a link is listed (with --modules also every module); 2 a host, port or module is not listed (standard error has "
        "the reasons), no cable was found, or there is no run; 64 wrong usage.",
    )
    verb.add_argument("run_dir", type=Path, help="directory of the run")
    verb.add_argument(
        "--modules", action="store_true", help="also print the serial of the module or cable at each port"
    )
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    run = load(options.run_dir)
    views = [HostView(run.plan, host, run.evidence[host.name], ()) for host in run.plan.hosts]
    rows, missing = cable_rows([host_links(view) for view in views])
    modules, unread = module_rows([host_inventory(view) for view in views]) if options.modules else ([], [])
    missing += unread
    if options.json:
        document = {"simulated": run.plan.simulated, "cables": _objects(LINK_COLUMNS, rows)}
        document |= {"modules": _objects(MODULE_COLUMNS, modules)} if options.modules else {}
        print(json.dumps({**document, "not_listed": missing}, indent=1))
    else:
        writer = csv.DictWriter(sys.stdout, COLUMNS if options.modules else LINK_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*_objects(LINK_COLUMNS, rows), *_objects(MODULE_COLUMNS, modules)])
    for line in missing:
        print(f"not listed: {line}", file=sys.stderr)
    return TROUBLE if missing or not rows else COMPLETE


def _objects(columns: Sequence[str], rows: Iterable[Row]) -> list[dict[str, str]]:
    return [dict(zip(columns, row, strict=True)) for row in rows]


def module_rows(hosts: Iterable[HostInventory]) -> tuple[list[Row], list[str]]:
    """Return a row for the module or cable at each port, and the reason for each module without a row.

    Ports with nothing to read, such as ports without a module, are left out.
    """
    rows: list[Row] = []
    missing: list[str] = []
    for host in hosts:
        for part in (part for part in host.parts if part.name == MODULE_SERIAL):
            if is_module_serial(part.serial):
                rows.append((host.host, MODULE, port_name(part.scope), part.serial))
            else:
                missing.append(clean(f"{part.location}: the serial {part.serial} is not valid in a manifest"))
        missing += [clean(f"{host.host}: {port.reason}") for port in host.unread_ports if port.is_error]
    return rows, missing


def cable_rows(hosts: Sequence[HostLinks]) -> tuple[list[Row], list[str]]:
    """Return a row for each cable, and the reason for each host or port without a row. Ports without a link are left out."""
    links = [link for host in hosts for link in host.links]
    names = _switch_names(links)
    ends = Counter((link.switch_id, link.port) for link in links if link.switch_id)
    rows: list[Row] = []
    missing = [f"{host.host}: no record" for host in hosts if not host.has_record]
    missing += [f"{host.host}: no network port was read" for host in hosts if host.has_record and not host.links]
    for link in links:
        name = names.get(link.switch_id, "")
        if not link.switch_id:
            if link.has_link:
                missing.append(clean(f"{link.own_end}: {link.reason}"))
        elif not all(is_switch_text(text) and not text.startswith(FORMULA) for text in (name, link.port)):
            why = "the switch sends a name that is invalid in a manifest or unsafe in a spreadsheet"
            missing.append(clean(f"{link.own_end}: {why}: {link.end}"))
        elif ends[link.switch_id, link.port] > 1:
            missing.append(clean(f"{link.own_end}: several ports report that their cable ends at {link.end}"))
        else:
            rows.append((link.host, LINK, link.name, name, link.port))
    return rows, missing


def _switch_names(links: Iterable[PortLink]) -> dict[str, str]:
    """Return ID of each switch -> its name, or its ID if the switch has no name or shares its name with another switch."""
    ids: dict[str, set[str]] = defaultdict(set)
    for link in links:
        ids[link.switch].add(link.switch_id)
    return {
        link.switch_id: link.switch if len(ids[link.switch]) == 1 and link.switch else link.switch_id for link in links
    }
