"""Hosts named on the command line in place of an inventory, where a scheduler or a launcher has picked them."""

from __future__ import annotations

import argparse
from typing import Any

from fleet.inventory.ansible import Variables, check_addresses, check_variables
from schemas.errors import UsageError

RACK = "listed"


def add_options(plan: argparse.ArgumentParser) -> None:
    """Adds --hosts and what goes with it to the verb `plan`."""
    group = plan.add_argument_group("without an inventory")
    group.add_argument("--hosts", help="NAME or NAME=ADDRESS of each host, comma between them: one gang, in this order")
    group.add_argument("--gpus", type=int, metavar="N", help="GPUs that each host was ordered with")
    group.add_argument("--model", default="", help="criteria pack of the GPUs that were ordered, such as h200-sxm")
    group.add_argument("--validation-only", action="store_true", help="everything but the training")
    group.add_argument("--epochs", type=int, help="epochs of the training")
    group.add_argument("--batch-size", type=int, help="images a rank and step in the training")


def hosts_listed(options: argparse.Namespace) -> dict[str, Variables]:
    """The hosts of --hosts with the variables that an inventory would give them.

    Raises:
        UsageError: a host is named twice, or a value is wrong.
    """
    chosen: dict[str, Any] = {
        "rackproof_gpu_count": options.gpus,
        "rackproof_gpu_model": options.model or None,
        "rackproof_epochs": options.epochs,
        "rackproof_batch_size": options.batch_size,
        "rackproof_validation_only": options.validation_only or None,
    }
    given = {key: value for key, value in chosen.items() if value is not None}
    names = [part.strip().partition("=") for part in options.hosts.split(",")]
    found: dict[str, Variables] = {}
    for name, _, address in names:
        if name in found:
            raise UsageError(f"--hosts names {name} twice: one machine would be measured twice")
        several = len(names) > 1
        found[name] = {
            "ansible_host": address or name,
            "rackproof_rack": RACK,
            "rackproof_gang": "rack" if several else "none",
            **given,
        }
    check_variables(found)
    check_addresses(found)
    return found
