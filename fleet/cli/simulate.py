"""`rackproof simulate`: write the run of a simulated fleet."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from fleet.progress import progress_bar
from fleet.quantities import counted
from fleet.simulate.cabling import HOSTS_PER_LEAF
from fleet.simulate.faults import FAULTS
from fleet.simulate.fleet import MAX_GPUS, Fleet, place_faults, write_run
from fleet.simulate.gpu_data import model_names
from fleet.simulate.records import ALL, JUDGED
from schemas.errors import UsageError


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add simulate to the command."""
    verb = verbs.add_parser(
        "simulate",
        help="write the run of a simulated fleet with given faults; its report says SIMULATED",
        description="Writes a run directory as if the hosts of a simulated fleet had been measured: a real plan, and records "
        "drawn from measurements of real GPUs. `rackproof report RUN_DIR` judges it. Its report says SIMULATED and cannot "
        "accept hardware.",
        epilog="example: rackproof simulate runs/demo --hosts 64 --racks 8 --fault ecc --fault slow_nic:r03-h02:5 "
        f"--fault unreachable. Kinds of faults: {', '.join(FAULTS)}",
    )
    verb.add_argument("run_dir", type=Path, nargs="?", help="new directory; its name is the run id")
    verb.add_argument("--hosts", type=_count, default=8, help="hosts (default: %(default)s)")
    verb.add_argument(
        "--gpus", type=_count, default=8, help=f"GPUs per host, at most {MAX_GPUS} (default: %(default)s)"
    )
    verb.add_argument("--racks", type=_count, help="racks (default: one per eight hosts)")
    verb.add_argument("--model", default="h200-sxm", help=f"GPU: {', '.join(model_names())} (default: %(default)s)")
    verb.add_argument("--profile", default="standard", help="profile, as for rackproof plan (default: %(default)s)")
    verb.add_argument("--gang", choices=["rack", "all", "none"], default="rack",
                      help="hosts that launch together (default: %(default)s)")  # fmt: skip
    verb.add_argument("--fabric-gbps", type=float, default=400.0,
                      help="line rate in Gb/s of the fabric port of each GPU (default: %(default)g)")  # fmt: skip
    verb.add_argument("--hosts-per-leaf", type=_count, default=HOSTS_PER_LEAF,
                      help="hosts that share one leaf switch for each rail (default: %(default)s)")  # fmt: skip
    verb.add_argument("--nvlink-domains", action="store_true",
                      help="the hosts of a rack are one NVLink domain, as in GB200 NVL72")  # fmt: skip
    verb.add_argument("--storage", action="store_true",
                      help="also simulate storage tests: four directories on each host, and one that all share")  # fmt: skip
    verb.add_argument("--bmcs", action="store_true", help="each host has a BMC, whose readings are simulated too")
    verb.add_argument("--fault", action="append", default=[], metavar="KIND[:HOST[:GPU]]",
                      help="fault to inject; may be repeated; without HOST or GPU the seed selects one")  # fmt: skip
    verb.add_argument(
        "--seed",
        type=int,
        default=0,
        help="random seed of the noise, and of the hosts and GPUs that get the faults (default: %(default)s)",
    )
    verb.add_argument("--readings", choices=[ALL, JUDGED], default=ALL,
                      help=f"{JUDGED}: write little more than the readings that criteria judge, for large fleets "
                           "(default: %(default)s)")  # fmt: skip
    verb.add_argument("--jobs", type=_count, default=1, help="writer processes (default: %(default)s)")
    verb.add_argument("--list-faults", action="store_true", help="list the kinds of faults")
    verb.add_argument(
        "--json",
        action="store_true",
        help="print JSON: the run and its faults, or with --list-faults the kinds of faults",
    )
    verb.set_defaults(call=call)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to 1000000")
    return int(text)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    if options.list_faults:
        kinds = [{"kind": fault.kind, "of": "gpu" if fault.of_gpu else "host", "about": fault.description}
                 for fault in FAULTS.values()]  # fmt: skip
        lines = [f"{kind['kind']:<21} {kind['of']:<5} {kind['about']}" for kind in kinds]
        print(json.dumps(kinds, indent=1) if options.json else "\n".join(lines))
        return 0
    if options.run_dir is None:
        raise UsageError("no RUN_DIR: give a new directory, such as runs/demo")
    fleet = _fleet(options)
    directory: Path = options.run_dir
    if directory.is_symlink() or (directory.exists() and (not directory.is_dir() or any(directory.iterdir()))):
        raise UsageError(f"{directory} already exists: a simulated run needs a new directory; give another name")
    began = time.monotonic()
    plan = fleet.plan(directory.absolute().name, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    faults = place_faults(options.fault, plan, fleet.seed)
    with progress_bar(sys.stderr):
        write_run(directory, fleet, faults, plan, jobs=min(options.jobs, os.cpu_count() or 1))
    gpus = sum(len(host.devices) for host in plan.hosts)
    if options.json:
        print(json.dumps({
            "run_dir": str(directory), "simulated": True, "profile": plan.profile, "hosts": len(plan.hosts), "gpus": gpus,
            "faults": [{"kind": item.fault.kind, "host": item.host, **({"gpu": item.gpu} if item.fault.of_gpu else {})}
                       for item in faults],
        }))  # fmt: skip
        return 0
    print(f"SIMULATED run {plan.run_id}: profile {plan.profile}, {counted(len(plan.hosts), 'host')}, {counted(gpus, 'GPU')}, "
          f"written in {time.monotonic() - began:.1f} s")  # fmt: skip
    for item in faults:
        print(f"fault {item}")
    print(f"next: rackproof report {directory}")
    return 0


def _fleet(options: argparse.Namespace) -> Fleet:
    racks = options.racks or -(-options.hosts // 8)
    if racks > options.hosts:
        raise UsageError(f"--racks {racks}: more racks than hosts ({options.hosts}); give fewer racks")
    if options.hosts < 2 * {"rack": racks, "all": 1, "none": 0}[options.gang]:
        raise UsageError(
            f"--hosts {options.hosts} --racks {racks} --gang {options.gang}: a gang would have only 1 host, but a launch "
            "needs at least 2: give more hosts per gang, or --gang none"
        )
    if options.gpus > MAX_GPUS:
        raise UsageError(f"--gpus {options.gpus}: a host has at most {MAX_GPUS}")
    if not 0 < options.fabric_gbps <= 100_000:
        raise UsageError(f"--fabric-gbps {options.fabric_gbps:g}: give more than 0 and at most 100000")
    return Fleet(
        hosts=options.hosts,
        gpus=options.gpus,
        racks=racks,
        model=options.model,
        profile=options.profile,
        gang=options.gang,
        fabric_gbps=options.fabric_gbps,
        nvlink_domains=options.nvlink_domains,
        storage=options.storage,
        bmcs=options.bmcs,
        hosts_per_leaf=options.hosts_per_leaf,
        seed=options.seed,
        readings=options.readings,
    )
