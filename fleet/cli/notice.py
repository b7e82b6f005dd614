"""`rackproof notice`: print the notification about a run, for a webhook or as a mail."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fleet.integrations.notification import STATES, failure, mail, payload, read
from schemas import documents
from schemas.errors import UsageError


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add notice to the command."""
    notice = verbs.add_parser(
        "notice",
        help="print decision, summary and link of a run as JSON for a webhook, or as a mail",
        epilog="example: rackproof notice runs/rack12-20261121 --on rejected,incomplete --link https://runs.example.org",
    )
    notice.add_argument("run_dir", type=Path, help="directory of the run, which has a report (not with --failed)")
    notice.add_argument(
        "--on",
        default=",".join(STATES),
        help="print the notification only if the run is in one of these states, comma-separated: accepted, rejected, incomplete, "
        "busy (incomplete only because hosts were in use); default: all; '': never. Unless --on is '', the notification is also "
        "printed in any other state if the run has left nodes drained in the scheduler",
    )
    notice.add_argument(
        "--failed",
        default="",
        metavar="REASON",
        help="print the notification that the run has no report; REASON says why. The state of this notification is incomplete",
    )
    notice.add_argument(
        "--link",
        default="",
        help="URL of the directory of all runs, for the link to the report (default: print the path of the report instead)",
    )
    notice.add_argument(
        "--mail-to",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="print a mail to this address instead of JSON; may be repeated",
    )
    notice.add_argument(
        "--mail-from",
        default="",
        metavar="ADDRESS",
        help="sender of the mail (default: the program that sends the mail chooses it)",
    )
    notice.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    notify_on = [word for word in options.on.split(",") if word]
    if unknown := [word for word in notify_on if word not in STATES]:
        raise UsageError(f"--on {unknown[0]}{documents.nearest(unknown[0], STATES)}: choose from {', '.join(STATES)}")
    if options.failed:
        notification = failure(options.failed, options.run_dir)
    else:
        report, plan = read(options.run_dir)
        notification = payload(report, plan, link=options.link, directory=options.run_dir)
    if notification["state"] in notify_on or (notify_on and notification["drained"]):
        print(mail(notification, options.mail_to, options.mail_from) if options.mail_to else json.dumps(notification))
    return 0
