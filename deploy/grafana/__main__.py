"""Write the dashboards: `python -m deploy.grafana`, in a checkout with the packages of `make dev`."""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.grafana import burnin_dashboard, fleet_dashboard, host_dashboard, run_dashboard
from deploy.grafana.board import document
from fleet.integrations.alerts.rules import RUNBOOK

DASHBOARDS = Path(__file__).with_name("dashboards")
BOARDS = (fleet_dashboard.BOARD, host_dashboard.BOARD, run_dashboard.BOARD, burnin_dashboard.BOARD)


def dashboards(runbook: str = RUNBOOK) -> dict[str, str]:
    """Return file name -> dashboard as JSON."""
    return {f"rackproof-{board.name}.json": document(board, runbook) for board in BOARDS}


def main() -> None:
    """Write the dashboards."""
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana", description="Write the dashboards as JSON.")
    parser.add_argument(
        "--to", type=Path, default=DASHBOARDS, metavar="DIRECTORY", help="output directory (default: %(default)s)"
    )
    parser.add_argument("--runbook", default=RUNBOOK, help="URL of docs/alerts.md (default: %(default)s)")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    for name, text in dashboards(options.runbook).items():
        (options.to / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
