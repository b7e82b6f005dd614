"""Run as a program, in a child process: write a shard of a checkpoint, read and compare it, or create, look up or remove files.

    python shard.py write FILE SEED BYTES DIRECT
    python shard.py read FILE SEED BYTES DIRECT
    python shard.py create|stat|remove DIRECTORY SECONDS MOST

SEED is the text from which the content of the shard is generated. DIRECT is 1 if the page cache is bypassed (O_DIRECT), otherwise
0. SECONDS is the time limit of `create` and `stat`. MOST is the maximum number of files.

The program prints a JSON object. It imports the standard library only, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

BLOCK = 1 << 20
"""Size in bytes of a block of a shard. Each block begins with its number, so that a block in the wrong place is detected."""
NUMBER_BYTES = 8


def block_data(pattern: bytes, number: int) -> bytes:
    """Return the content of the block with that number: the number, then the rest of the pattern."""
    return number.to_bytes(NUMBER_BYTES, "big") + pattern[NUMBER_BYTES:]


def pattern_of(seed: str) -> bytes:
    """Return BLOCK bytes that depend on the seed and cannot be compressed."""
    return hashlib.shake_256(seed.encode()).digest(BLOCK)


def write(path: str, seed: str, size: int, direct: bool) -> dict[str, Any]:
    """Write the shard and sync it; return how many seconds that took. Raises OSError."""
    pattern, began = pattern_of(seed), time.perf_counter()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        with mmap.mmap(-1, BLOCK) as buffer:  # page-aligned, as O_DIRECT requires
            for number in range(size // BLOCK):
                buffer[:] = block_data(pattern, number)
                _write_all(descriptor, buffer)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"seconds": time.perf_counter() - began}


def _write_all(descriptor: int, buffer: mmap.mmap) -> None:
    written = 0
    while written < BLOCK:
        with memoryview(buffer) as view, view[written:] as rest:
            written += os.write(descriptor, rest)


def read(path: str, seed: str, size: int, direct: bool) -> dict[str, Any]:
    """Read the shard and compare every byte with what `write` writes for this seed. Raises OSError.

    With `direct`, the read bypasses the page cache. Otherwise the kernel is asked first to drop the shard from the page cache.

    Returns the seconds that it took, the number of wrong bytes, and the offset of the first wrong byte (-1: none).
    """
    pattern, wrong, first, began = pattern_of(seed), 0, -1, time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        if not direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(-1, BLOCK) as buffer:
            for number in range(size // BLOCK):
                expected, found = block_data(pattern, number), _read_block(descriptor, number * BLOCK, buffer)
                if found != expected:
                    count, place = differences(found, expected)
                    first = number * BLOCK + place if first < 0 else first
                    wrong += count
    finally:
        os.close(descriptor)
    return {"seconds": time.perf_counter() - began, "wrong": wrong, "first": first}


def differences(found: bytes, expected: bytes) -> tuple[int, int]:
    """Return how many bytes differ, and the position of the first one. Bytes missing at the end of `found` count as different."""
    length = len(found)
    # XOR of two long integers: a loop over the bytes of a block would take a fifth of a second.
    bits = int.from_bytes(found, "big") ^ int.from_bytes(expected[:length], "big")
    different = bits.to_bytes(length, "big")
    return len(expected) - different.count(0), length - len(different.lstrip(b"\0"))


def _read_block(descriptor: int, offset: int, buffer: mmap.mmap) -> bytes:
    """Return the block; fewer bytes if the file ends before the end of the block."""
    length = 0
    while length < BLOCK:
        with memoryview(buffer) as view, view[length:] as rest:
            count = os.preadv(descriptor, [rest], offset + length)
        length += count
        if not count:
            break
    return buffer[:length]


def create(directory: str, seconds: float, most: int) -> dict[str, Any]:
    """Create empty files until `seconds` have passed or `most` exist. Raises OSError.

    Returns the number of files and the median seconds per file.
    """
    folder = Path(directory)
    folder.mkdir()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < most and time.perf_counter() - began < seconds:
        start = time.perf_counter()
        os.close(os.open(folder / str(len(times)), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        times.append(time.perf_counter() - start)
    return {"count": len(times), "typical": statistics.median(times) if times else 0.0}


def access(action: str, directory: str, seconds: float, most: int) -> dict[str, Any]:
    """Look up (`stat`) or delete (`remove`) the first `most` files that `create` made. Raises OSError.

    `stat` stops after `seconds`, even if files are left. `remove` has no time limit.

    Returns the number of files that were looked up or deleted, and the median seconds per file.
    """
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < most and (action == "remove" or time.perf_counter() - began < seconds):
        path = Path(directory) / str(len(times))
        start = time.perf_counter()
        if action == "stat":
            path.stat()
        else:
            path.unlink()
        times.append(time.perf_counter() - start)
    return {"count": len(times), "typical": statistics.median(times) if times else 0.0}


def main(action: str, path: str, *arguments: str) -> None:
    """Run the action and print what it returns, or `{"problem": …}` after an OSError."""
    try:
        if action in ("write", "read"):
            seed, size, direct = arguments
            answer = (write if action == "write" else read)(path, seed, int(size), direct == "1")
        elif action == "create":
            answer = create(path, float(arguments[0]), int(arguments[1]))
        else:
            answer = access(action, path, float(arguments[0]), int(arguments[1]))
    except OSError as error:
        answer = {"problem": f"{action}: {error.strerror or error}"}
    with contextlib.suppress(BrokenPipeError):
        json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
