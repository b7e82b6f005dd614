"""Seeded computations whose results must be bit-identical: in every repetition, and on all GPUs with equal model and software.

The computations find a GPU that computes or copies wrongly without reporting an error (silent data corruption). Many such GPUs
fail only when hot, so the computations are repeated with all GPUs busy. Each result is compared, on the device, with the
first result. The result of a copy is compared with the copied data instead. A digest (a checksum of 64 bits) stands for each
result. The control node compares the digests of the first results of all GPUs with equal model and software.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from agent.benchmarks.compute.digest_workloads import WORKLOADS, Computation, peer_copy, unsupported_workload
from agent.benchmarks.runtime.context import Context
from agent.gang.heartbeat import describe_error
from schemas.records import ERROR, SKIPPED, UNSUPPORTED


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `digest.value` (16 hexadecimal digits), and numbers of errors: `.mismatches`, `.wrong_peer_copies`.

    `.mismatches` counts the wrong repetitions of a workload, `.wrong_peer_copies` the wrong round trips to another GPU and back.

    `seconds` is divided equally among the workloads. Each kind of copy in the setting `peer_copies` counts as one more workload;
    its share of the time is for the copies to all other GPUs together.
    """
    workloads = settings["workloads"]
    peer_copies = settings["peer_copies"] if context.kind == "gpu" else []
    seconds = settings["seconds"] / (len(workloads) + len(peer_copies))
    allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    for workload in workloads:
        context.set_phase(f"digest {workload}")
        context.host_barrier(workload)
        torch.backends.cuda.matmul.allow_tf32 = workload == "gemm_tf32"
        _run_workload(context, workload, settings["size"], seconds)
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    for copy in peer_copies:
        _copy_to_peers(context, copy, settings["size"], seconds)


def _run_workload(context: Context, workload: str, size: int, seconds: float) -> None:
    common: dict[str, Any] = {"unit": "1", "scope": context.device_scope, "workload": workload, "size": size}
    reason, status = unsupported_workload(workload, context.device), UNSUPPORTED
    digests = Digests()
    if not reason:
        try:
            _repeat(context, WORKLOADS[workload](size, context.device), seconds, digests)
        except (RuntimeError, ValueError) as error:
            reason, status = describe_error(error), ERROR
        finally:  # wrong digests count even if the device fails later
            if digests.mismatches:
                context.report("digest.mismatches", digests.mismatches, repetitions=digests.count, **common)
    if reason:
        for name in ("digest.value", "digest.mismatches"):
            if not context.has_reported(name, context.device_scope, {"workload": workload}):
                context.report_absent(name, status=status, reason=reason, **common)
        return
    context.report("digest.value", f"{digests.first & (1 << 64) - 1:016x}", **common)
    if not digests.mismatches:
        context.report("digest.mismatches", 0, repetitions=digests.count, **common)


def _copy_to_peers(context: Context, copy: str, size: int, seconds: float) -> None:
    """Copy to every other GPU of the host and back. In each round all GPUs copy at once, each to a different GPU."""
    ranks = context.local_world_size
    for offset in range(1, ranks):
        peer = (context.local_rank + offset) % ranks
        context.set_phase(f"digest copies to local rank {peer}")
        context.host_barrier(f"peer {offset}")
        common: dict[str, Any] = {"unit": "1", "scope": context.pair_scope(peer), "copy": copy, "size": size}
        if reason := context.why_absent(peer):  # an access to a lost GPU could break this process's CUDA context
            context.report_absent("digest.wrong_peer_copies", status=SKIPPED, reason=reason, **common)
            continue
        digests, reason = Digests(), ""
        try:
            computation = peer_copy(size, context.device, torch.device("cuda", peer))
            _repeat(context, computation, seconds / (ranks - 1), digests)
        except (RuntimeError, ValueError) as error:
            reason = describe_error(error)
        finally:  # wrong copies count even if a device fails later
            if digests.mismatches:
                context.report("digest.wrong_peer_copies", digests.mismatches, repetitions=digests.count, **common)
        if reason and not digests.mismatches:
            context.report_absent("digest.wrong_peer_copies", status=ERROR, reason=reason, **common)
        elif not digests.mismatches:
            context.report("digest.wrong_peer_copies", 0, repetitions=digests.count, **common)
    context.host_barrier("done")
    context.release_memory()  # this process also holds memory on the other GPUs, which their ranks need next


@dataclass
class Digests:
    """The digests of one workload so far: the first digest, the number of wrong digests, and the number of checked digests."""

    first: int = 0
    mismatches: int = 0
    count: int = 0


def _repeat(context: Context, computation: Computation, seconds: float, digests: Digests) -> None:
    """Repeat a computation and count its digests.

    Each digest is compared with the digest of the right result; if that result is not known, with the first digest.
    """
    compute = computation.compute
    factors = digest_factors(compute())
    first = right = compute_digest(compute(), factors)
    digests.first = int(first)
    if computation.expected is not None:
        expected = computation.expected
        right = compute_digest(expected, digest_factors(expected)).to(context.device)
        digests.mismatches, digests.count = int(first != right), 1
    deadline, least = time.monotonic() + seconds, digests.count + 4
    while digests.count < least or time.monotonic() < deadline:
        mismatches = torch.zeros((), dtype=torch.int64, device=context.device)
        for _ in range(4):
            mismatches += compute_digest(compute(), factors) != right
        context.synchronize()  # has a time-out, unlike reading the count
        digests.mismatches += int(mismatches)
        digests.count += 4


def compute_digest(result: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit digest, on the tensor's device: the sum modulo 2⁶⁴ of the words, each multiplied by its own odd factor.

    Multiplication by an odd factor loses no bit, so one flipped bit changes the sum. The order of the additions does not change
    it.
    """
    return (_words(result) * factors).sum()


def digest_factors(result: torch.Tensor) -> torch.Tensor:
    """Return an odd factor for each word of the result: a hash of the word's position.

    With evenly rising factors, such as 1, 3, 5, 7, bit flips at equal distances could cancel in the sum. For example, changes of
    four words by +1, -1, -1 and +1 would change the sum by 1 - 3 - 5 + 7 = 0. One faulty lane of a GPU causes such flips.

    The hash is the mixing function of SplitMix64, but with arithmetic shifts, because torch has no logical shift for int64.
    See Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    mixed = torch.arange(1, _words(result).numel() + 1, device=result.device) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * _signed(factor)
    return mixed ^ (mixed >> 31) | 1


def _signed(word: int) -> int:
    """Return the int64 with the bits of a word: torch has no arithmetic of unsigned 64-bit integers."""
    return word - (1 << 64) if word >> 63 else word


def _words(result: torch.Tensor) -> torch.Tensor:
    """Return the result as words of at most 32 bits.

    In words of 64 bits, two flips of the highest bit would cancel: 2⁶³ times any odd factor is 2⁶³ modulo 2⁶⁴.
    """
    return result.contiguous().view(-1).view(torch.int16 if result.element_size() == 2 else torch.int32)
