"""Benchmarks of the communication between ranks and between hosts."""

from __future__ import annotations

from collections.abc import Mapping

from schemas.benchmarks import BACKENDS, DTYPES, OPS, Benchmark, Cost, Output, make_outputs

NOT_USED_BY_NCCL = "not a port of the fabric: NCCL does not use it, because NCCL_IB_HCA is {}"
"""Reason why `verbs` does not measure a port. The placeholder is the value of the variable."""
_NCCL_CHOICE = {
    "algorithm": ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"),
    "protocol": ("LL", "LL128", "SIMPLE"),
    "transport": str,
    "nvls": bool,
    "nccl_log": str,
    "nccl_settings": str,
    "nccl_other_settings": str,
}


SMALL_MESSAGE_BYTES = 8
"""Size of the messages whose latency or rate is measured between two RDMA ports, or between a GPU and its partner in `pairs`."""
_PORT = {"size_bytes": int, "mtu": int, "gid_index": int, "gid_type": str, "numa_node": str, "pci_path": str}


def bus_factor(op: str, ranks: int) -> float:
    """Return busbw / algbw of a collective, as nccl-tests defines it (doc/PERFORMANCE.md)."""
    if op in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks


COMMUNICATION: Mapping[str, Benchmark] = {
    "collective": Benchmark(
        group="collectives",
        title="Collectives",
        summary="bandwidth, latency and correctness of the collective operations between all ranks, and NCCL's transport",
        settings={
            "ops": [*OPS],
            "placements": ["out_of_place", "in_place"],
            "sizes_bytes": [8 << (3 * step) for step in range(11)],  # 8 B to 8 GiB
            "graph_ops": ["all_reduce", "all_gather", "reduce_scatter", "broadcast"],
            "graph_sizes_bytes": [8, 4096, 32768],
            "precision": 0.005,
            "seconds": 0.2,  # for each operation and size
        },
        choices={"graph_ops": OPS},
        outputs=[
            *make_outputs(
                "collective.{op}",
                {"algbw": "B/s", "busbw": "B/s", "latency": "s", "wrong_elements": "1"},
                "world",
                over={"op": "ops", "size_bytes": "sizes_bytes", "placement": "placements"},
                params={"backend": BACKENDS, "moved_bytes": int, "places": int, **_NCCL_CHOICE},
            ),
            Output(
                name="collective.{op}.graph_latency",
                unit="s",
                scope="world",
                over={"op": "graph_ops", "size_bytes": "graph_sizes_bytes"},
                params={"backend": BACKENDS, "placement": str, "nccl_log": str},
                gpu_only=True,
            ),
            *make_outputs("collective", {"transport": "1", "nvls": "1", "channels": "1"}, "world", gpu_only=True),
        ],
        params={"dtype": DTYPES, "world_size": int},
        cpu_settings={"sizes_bytes": [8, 1 << 16, 1 << 20]},
        cost_s=0.0,
        costs=[
            Cost(seconds=-0.125, timed=["seconds"], over=["ops", "placements", "sizes_bytes"], per="peers"),
            Cost(seconds=0.0565, over=["ops", "placements", "sizes_bytes"], per="doubling"),
            Cost(seconds=0.6, over=["graph_ops"], per="peers"),
        ],
        parts=["NVLink"],
        needs_peers=True,
        needs_group=True,
    ),
    "pairs": Benchmark(
        group="links",
        title="Pairs of hosts",
        summary="bandwidth and latency between every two hosts of a gang, from each GPU to the GPU of the same number",
        settings={
            "rounds": 0,  # maximum number of rounds, in each of which a host has at most one partner; 0: all pairs of hosts
            "size_bytes": 1 << 26,  # smaller for a pair that cannot exchange this size several times in `seconds` / 2
            "seconds": 0.4,  # for each round
        },
        outputs=[
            Output(name="pairs.bandwidth", unit="B/s", scope="peers"),
            Output(name="pairs.latency", unit="s", scope="peers", constants={"size_bytes": SMALL_MESSAGE_BYTES}),
            Output(name="pairs.wrong_elements", unit="1", scope="peers", demanded=False),
        ],
        params={"rail": int, "round": int, "size_bytes": int, "world_size": int},
        adapted=["size_bytes"],
        cost_s=0.0,
        costs=[Cost(seconds=0.1, timed=["seconds"], per="round")],
        parts=["NVLink"],
        needs_peers=True,
        needs_group=True,
    ),
    "verbs": Benchmark(
        group="links",
        title="RDMA ports",
        summary="perftest on each RDMA port: with itself, and with the port of the same rail on other hosts",
        settings={
            "figures": ["bandwidth", "latency", "message_rate"],
            "ops": ["write"],
            "directions": ["one_way", "both_ways"],
            "memories": ["host"],
            # In tests between hosts, `together` tests all rails of a pair at once, `alone` one rail after the other.
            "sharings": ["together"],
            "rounds": 0,  # as in the benchmark `pairs`
            "size_bytes": 1 << 16,
            "seconds": 1,  # for each test; perftest accepts only whole seconds
        },
        choices={"ops": ("write", "read", "send"), "memories": ("host", "gpu"), "sharings": ("alone", "together")},
        outputs=[
            *make_outputs(
                "verbs",
                {"bandwidth": "B/s", "rate_ratio": "1", "mtu": "B"},
                "port",
                over={"op": "ops", "direction": "directions", "memory": "memories", "sharing": "sharings"},
                params={**_PORT, "pcie_rate": float},
                demanded=False,
            ),
            *make_outputs(
                "verbs",
                {"latency": "s", "message_rate": "1/s"},
                "port",
                over={"sharing": "sharings"},
                params=_PORT,
                constants={"size_bytes": SMALL_MESSAGE_BYTES},
                demanded=False,
            ),
            Output(
                name="verbs.best_ratio",
                unit="1",
                scope="port",
                params={"partners": int, "pcie_rate": float},
                demanded=False,
            ),
        ],
        params={"rail": int},
        cost_s=0.5,
        # The first two costs are for a host alone, the last two for a round between hosts. In each pair of costs, the first is
        # for the bandwidths, the second for latency and message rate.
        costs=[
            Cost(seconds=0.25, timed=["seconds"], over=["ops", "directions", "memories"], per="port"),
            Cost(seconds=0.5, timed=["seconds"] * 2, per="port"),
            Cost(seconds=1.3, timed=["seconds"], over=["ops", "directions", "memories", "sharings"], per="port_round"),
            Cost(seconds=2.4, per="port_round"),
        ],
        parts=["fabric"],
        needs_torch=False,
    ),
    "mnnvl": Benchmark(
        group="collectives",
        title="NVLink between hosts",
        summary="collectives of a launch in one NVLink domain, with NVLink between the hosts and without it",
        settings={"ops": ["all_reduce", "all_gather"], "sizes_bytes": [1 << 30]},
        choices={"ops": OPS},
        outputs=make_outputs(
            "mnnvl",
            {"busbw": "B/s", "speedup": "1", "wrong_elements": "1"},
            "world",
            over={"op": "ops", "size_bytes": "sizes_bytes"},
            params={"mnnvl": bool, "transport": str},
            gpu_only=True,
            demanded=False,
        ),
        params={"world_size": int},
        cost_s=60.0,
        parts=["NVLink"],
        needs_peers=True,
        needs_group=True,
        needs_nvlink_domain=True,
    ),
}
