"""`rackproof revalidate`: run the revalidation playbook from a timer."""

from __future__ import annotations

import argparse
from pathlib import Path

from fleet.integrations.revalidate import ROOT, revalidate


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add revalidate to the command."""
    verb = verbs.add_parser(
        "revalidate",
        help="run playbooks/revalidate.yml with the date in the run id; exits 0, 1 or 2 as report does (2 instead of 0 if "
        "nodes stay drained in the scheduler), 75 if the run is in progress, or if a run that began in the same minute was "
        "already accepted or rejected",
        epilog="example: rackproof revalidate -i inventory/rack12 --name rack12 -- -e rackproof_budget_s=300",
    )
    verb.add_argument(
        "-i", "--inventory", action="append", required=True, help="as for ansible-playbook; may be repeated"
    )
    verb.add_argument("--name", default="revalidate", help="prefix of the run id (default: revalidate)")
    verb.add_argument(
        "--date",
        default="%Y%m%d",
        help="suffix of the run id: the local time, in strftime format (default: %(default)s)",
    )
    verb.add_argument(
        "--runs", type=Path, default=ROOT / "runs", help="directory of the runs (default: runs, next to playbooks)"
    )
    verb.add_argument(
        "--active",
        action="store_true",
        help="measure nothing: exit 0 if a run in --runs is active, so that the checkout must not be updated, and 1 if none is. "
        "Schedules with rackproof_schedule_repository use this option",
    )
    verb.add_argument(
        "--not-updated",
        action="store_true",
        help="measure nothing: send the notification that the checkout could not be updated, and exit 2. Schedules with "
        "rackproof_schedule_repository use this option",
    )
    verb.add_argument("options", nargs="*", help="after --: options for ansible-playbook")
    verb.set_defaults(call=revalidate)
