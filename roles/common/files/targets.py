"""Write or remove scrape targets of Prometheus (file_sd) on the control node. Each exporter is a target of at most one run.

targets.py DIRECTORY RUN < TARGETS   write TARGETS to DIRECTORY/RUN.json, and remove their addresses from the files of other runs
targets.py DIRECTORY < TARGETS       remove the addresses of TARGETS from the files of all runs

The file of an interrupted run still has the targets of its hosts. If another run then used these hosts, Prometheus would scrape
each of them for two runs, and every alert would fire twice.

TARGETS is a list of target groups, in which `failed` states whether the run has failed on the host, perhaps because another run
uses the host. The target of such a host stays with the other run, if there is one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any


def write(path: Path, groups: list[dict[str, Any]]) -> bool:
    """Write target groups to a file in one step, because Prometheus may read it at any time; delete the file if there are none.

    Return whether this changed the file.
    """
    if not groups:
        existed = path.exists()
        path.unlink(missing_ok=True)
        return existed
    text = f"{json.dumps(groups, indent=2)}\n"
    if path.exists() and path.read_text() == text:
        return False
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.chmod(0o644)
    os.replace(new, path)
    return True


def remove(path: Path, addresses: Collection[str]) -> tuple[bool, set[str]]:
    """Remove the addresses from the targets of a run. Return whether this changed the file, and the addresses that remain.

    A group without the label `run_id` was not written by a run, and is kept.
    """
    groups = json.loads(path.read_text())
    kept, remaining = [], set[str]()
    for group in groups:
        if "run_id" in group.get("labels", {}):
            targets = [address for address in group["targets"] if address not in addresses]
            kept += [{**group, "targets": targets}] if targets else []
            remaining |= set(targets)
        else:
            kept.append(group)
    return kept != groups and write(path, kept), remaining


def main(directory: str = "", run: str = "", *others: str) -> int:
    """Write or remove targets. Print as JSON whether a file has changed, and the files of other runs that cannot be changed."""
    if not directory or others:
        print(f"usage:{(__doc__ or '').partition(chr(10))[2]}", end="", file=sys.stderr)
        return 2
    groups = json.load(sys.stdin)
    failed = [group.pop("failed", False) for group in groups]
    addresses = {
        address
        for group, has_failed in zip(groups, failed, strict=True)
        if not has_failed
        for address in group["targets"]
    }
    problems, changed, of_others = [], False, set[str]()
    own = Path(directory) / f"{run}.json" if run else None
    for path in sorted(Path(directory).glob("*.json")):
        if path != own:
            try:
                file_changed, remaining = remove(path, addresses)
                changed, of_others = changed | file_changed, of_others | remaining
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                problems.append(f"{path}: {error}")
    if own:
        try:
            changed |= write(own, [group for group in groups if of_others.isdisjoint(group["targets"])])
        except OSError as error:
            print(f"cannot write the targets: {error}", file=sys.stderr)
            return 1
    print(json.dumps({"changed": changed, "problems": problems}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
