"""Take the hosts from the command line instead of an inventory, for runs whose hosts a scheduler or launcher selects."""

from __future__ import annotations

import argparse
from typing import Any

from fleet.inventory.ansible import Variables, check_hosts
from schemas.errors import UsageError

VARIABLES = {
    "gpus": "rackproof_gpu_count",
    "model": "rackproof_gpu_model",
    "epochs": "rackproof_epochs",
    "batch_size": "rackproof_batch_size",
    "validation_only": "rackproof_validation_only",
}
"""Option that goes with --hosts -> the inventory variable that it sets."""
RACK = "listed"
"""Name of the rack (`rackproof_rack`) of all hosts in --hosts."""


def add_options(plan: argparse.ArgumentParser) -> None:
    """Add --hosts and related options to the verb `plan`."""
    group = plan.add_argument_group("without an inventory")
    group.add_argument(
        "--hosts",
        help="NAME or NAME=ADDRESS of each host, comma-separated, in rank order; two or more hosts form a gang",
    )
    group.add_argument("--gpus", type=int, metavar="N", help="number of GPUs that each host was ordered with")
    group.add_argument("--model", help="criteria pack of the GPUs that were ordered, such as h200-sxm")
    group.add_argument("--validation-only", action="store_true", help="skip the training benchmarks")
    group.add_argument("--epochs", type=int, help="number of training epochs")
    group.add_argument("--batch-size", type=int, help="training images per rank and step")


def refuse_with_inventory(options: argparse.Namespace) -> None:
    """Raise UsageError if an option is given that goes only with --hosts."""
    for option in _given(options):
        name = option.replace("_", "-")
        raise UsageError(f"--{name} goes only with --hosts: with -i, set {VARIABLES[option]} in the inventory")


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of VARIABLES that are given, with their values."""
    values = {option: getattr(options, option) for option in VARIABLES}
    return {
        option: value for option, value in values.items() if value is not None and value is not False and value != ""
    }


def hosts_of_options(options: argparse.Namespace) -> dict[str, Variables]:
    """Return the hosts in --hosts, with the other options as inventory variables.

    Raises:
        UsageError: a host is named twice, or a value is invalid.
    """
    variables = {VARIABLES[option]: value for option, value in _given(options).items()}
    names = [part.strip().partition("=") for part in options.hosts.split(",")]
    hosts: dict[str, Variables] = {}
    for name, _, address in names:
        if name in hosts:
            raise UsageError(f"--hosts names {name} twice: one machine would be measured twice")
        hosts[name] = {
            "ansible_host": address or name,
            "rackproof_rack": RACK,
            "rackproof_gang": "rack" if len(names) > 1 else "none",
            **variables,
        }
    return check_hosts(hosts)
