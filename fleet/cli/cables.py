"""`rackproof cables`: print the cables of a run as found, as lines of a manifest."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from fleet.inventory.manifest_file import LINK_COLUMNS, is_switch_text
from fleet.judge.host_view import HostView
from fleet.judge.wiring.links import HostLinks, PortLink, host_links
from fleet.records.load import load
from fleet.report.formatting import clean
from schemas.errors import TROUBLE
from schemas.plans import LINK

COMPLETE = 0
FORMULA = ("=", "+", "-", "@")
"""A spreadsheet evaluates a cell that begins with one of these."""
Row = tuple[str, ...]


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add cables to the command."""
    verb = verbs.add_parser(
        "cables",
        help="print the cables of a run as found, as lines of a manifest, for review",
        epilog="example: rackproof cables runs/rack12 > cables.csv. Compare every line with the cabling plan before the file "
        "becomes a manifest: it lists what is there, right or wrong. Exit codes: 0 every network port with a link is listed; "
        "2 some are not (standard error has the reasons), or there is no run; 64 wrong usage.",
    )
    verb.add_argument("run_dir", type=Path, help="directory of the run")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    run = load(options.run_dir)
    hosts = [host_links(HostView(run.plan, host, run.evidence[host.name], ())) for host in run.plan.hosts]
    rows, missing = cable_rows(hosts)
    if options.json:
        lines = [dict(zip(LINK_COLUMNS, row, strict=True)) for row in rows]
        print(json.dumps({"simulated": run.plan.simulated, "cables": lines, "not_listed": missing}, indent=1))
    else:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([LINK_COLUMNS, *rows])
    for line in missing:
        print(f"not listed: {line}", file=sys.stderr)
    return TROUBLE if missing or not rows else COMPLETE


def cable_rows(hosts: Sequence[HostLinks]) -> tuple[list[Row], list[str]]:
    """Return a row for each cable, and the ports without one, with the reasons. Ports without a link are left out."""
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
            missing.append(clean(f"{link.own_end}: the switch sends a text that a manifest cannot have: {link.end}"))
        elif ends[link.switch_id, link.port] > 1:
            missing.append(clean(f"{link.own_end}: several ports are at {link.end}"))
        else:
            rows.append((link.host, LINK, link.name, name, link.port))
    return rows, missing


def _switch_names(links: Iterable[PortLink]) -> dict[str, str]:
    """Return ID of each switch -> its name; its ID if it has no name, or shares the name with another switch."""
    ids: dict[str, set[str]] = defaultdict(set)
    for link in links:
        ids[link.switch].add(link.switch_id)
    return {
        link.switch_id: link.switch if len(ids[link.switch]) == 1 and link.switch else link.switch_id for link in links
    }
