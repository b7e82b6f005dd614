"""Name the causes of a slow rank: readings of its GPU, or of its host's CPU, that differ from the medians of its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

MIN_DEVIATION = 0.05
"""Smallest relevant difference from the peers' median, as a fraction of the median: the clocks of healthy GPUs differ by less.
It is also the smallest relevant difference between two shares of time, and the smallest relevant wait, as a fraction of the time
that the rank computes."""
MIN_HOTTER_K = 10.0
"""Kelvin above the peers' median from which a GPU counts as hotter."""
MIN_MORE_PRESSURE = 0.2
"""A host counts as short of processors if its share of time with CPU pressure exceeds the peers' median by more than this."""
LAUNCH_BOUND_SHARE = 0.6
"""If the host launches kernels for more than this share of the compute time, the GPU waits for the host in parts of the step. On
healthy H100 and H200 in virtual machines the share is 0.66 to 0.92, and the compute time grows by 0.5 to 0.7 ms for each
millisecond of launching (measured)."""
REASONS: Mapping[str, str] = {
    "hw_thermal": "thermal slowdown (hardware)",
    "sw_thermal": "thermal slowdown (software)",
    "hw_power_brake": "power brake",
    "hw_slowdown": "hardware slowdown",
}
"""NVML's clock event reason, as in the parameter `reason` of `straggler.throttled_share` -> the reason in words."""
POWER_CAP = "power_cap"
"""The clock event reason for a GPU at its power limit. It is not in REASONS, because healthy GPUs also run at this limit."""

Figures = Mapping[str, float]
"""Name of a figure -> its value. The name is the last part of the observation's name, such as `clock`; for a share of time with a
clock event reason, the reason follows: `throttled_share hw_thermal`."""
Sign = Callable[[Figures, Figures], str]
"""A function from the rank's figures and the peers' medians to a deviation in words, or an empty string."""


def signs(chosen: Iterable[Sign], own: Figures, usual: Figures) -> list[str]:
    """Return in words the signs that a rank shows."""
    return [text for sign in chosen if (text := sign(own, usual))]


def rank_and_peers(name: str, own: Figures, usual: Figures) -> tuple[float, float]:
    """Return the value of a figure on the rank, and its median over the peers; 0 in place of a number that is not reported."""
    return own.get(name, 0.0), usual.get(name, 0.0)


def _clock(own: Figures, usual: Figures) -> str:
    mine, others = rank_and_peers("clock", own, usual)
    if not 0 < mine < others * (1 - MIN_DEVIATION):
        return ""
    share, _ = rank_and_peers(f"throttled_share {POWER_CAP}", own, usual)
    capped = share > MIN_DEVIATION and "power" in own and "power" in usual
    why = (
        f" because of its power limit (it drew {own['power']:.0f} W, its peers {usual['power']:.0f} W)"
        if capped
        else ""
    )
    return f"its SM clock was {mine / 1e6:.0f} MHz (peers: {others / 1e6:.0f} MHz){why}"


def _throttled(own: Figures, usual: Figures) -> str:
    shares = {words: rank_and_peers(f"throttled_share {reason}", own, usual) for reason, words in REASONS.items()}
    texts = [
        f"{words} active for {mine * 100:.0f} % of the time"
        for words, (mine, others) in shares.items()
        if mine > others + MIN_DEVIATION
    ]
    return ", ".join(texts)


def _temperature(own: Figures, usual: Figures) -> str:
    mine, others = rank_and_peers("temperature", own, usual)
    return f"its GPU was at {mine:.0f} °C (peers: {others:.0f} °C)" if others and mine > others + MIN_HOTTER_K else ""


def _quota(own: Figures, usual: Figures) -> str:
    mine, others = rank_and_peers("cpu_throttled_share", own, usual)
    is_stopped = mine > others + MIN_DEVIATION
    return f"the CPU quota of its cgroup stopped it in {mine * 100:.0f} % of the quota periods" if is_stopped else ""


def _cpus(own: Figures, usual: Figures) -> str:
    """Return in words that the rank may use fewer processors than its peers; empty if it does not have to wait for them."""
    mine, others = rank_and_peers("cpus", own, usual)
    is_fewer = 0 < mine < others and ("cpu_wait" not in own or _cpu_wait(own, usual))
    return f"the rank may use {mine:.0f} of its host's processors, its peers {others:.0f}" if is_fewer else ""


def _launch(own: Figures, usual: Figures) -> str:
    """Return in words that launching kernels takes long, if the GPU waits for it; otherwise an empty string."""
    mine, others = rank_and_peers("launch", own, usual)
    bound = mine > LAUNCH_BOUND_SHARE * own["compute"] and mine > others * (1 + MIN_DEVIATION)
    return (
        f"its GPU waits for the CPU: launching kernels takes {milliseconds(mine)} a step (peers: {milliseconds(others)})"
        if bound and others
        else ""
    )


def _cpu_wait(own: Figures, usual: Figures) -> str:
    mine, others = rank_and_peers("cpu_wait", own, usual)
    much = mine > MIN_DEVIATION * own["compute"] and mine > 2 * others
    return (
        f"its threads wait {milliseconds(mine)} a step for a processor (peers: {milliseconds(others)})" if much else ""
    )


def _pressure(own: Figures, usual: Figures) -> str:
    mine, others = rank_and_peers("cpu_pressure", own, usual)
    busy = mine > others + MIN_MORE_PRESSURE
    return (
        f"its host was short of processors for {mine * 100:.0f} % of the time (peers: {others * 100:.0f} %)"
        if busy
        else ""
    )


def _cpu_time(own: Figures, usual: Figures) -> str:
    """Return in words that the rank needs much more CPU time than its peers; empty if not, or if the GPU limits the step time."""
    mine, others = rank_and_peers("cpu_time", own, usual)
    is_host_bound = "launch" not in own or own["launch"] > LAUNCH_BOUND_SHARE * own["compute"]
    is_slower = is_host_bound and 0 < others * 1.2 < mine
    return (
        f"the rank needs {milliseconds(mine)} of CPU time a step (peers: {milliseconds(others)})" if is_slower else ""
    )


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


GPU_SIGNS: Sequence[Sign] = (_clock, _throttled, _temperature)
SLOW_GPU_SIGNS: Sequence[Sign] = (_clock, _throttled)
"""Signs that the GPU computes more slowly. A hotter GPU does not, unless its clock is lower."""
CPU_LIMIT_SIGNS: Sequence[Sign] = (_quota, _cpus)
"""Signs that a setting limits the rank's CPU time, so that no part is faulty."""
HOST_SIGNS: Sequence[Sign] = (_launch, _cpu_wait, _cpu_time, _pressure)
SHORTAGE_SIGNS: Sequence[Sign] = (_quota, _cpus, _cpu_wait, _pressure)
"""Signs that the rank does not get the CPU time that it needs."""
