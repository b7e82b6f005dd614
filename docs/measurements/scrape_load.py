"""Compare the HTTP server of the exporter with that of prometheus_client under load: first many scrapers, then half-open clients.

Usage: python docs/measurements/scrape_load.py [SCRAPERS] [HALF_OPEN]      default: 100 and 1000
The page imitates that of a host with sixteen GPUs. Each server runs in its own process, which reports its memory. In the output,
`ours` is the exporter's server and `stock` that of prometheus_client.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from prometheus_client import CollectorRegistry, start_http_server

from agent.exporter.exporter import registry
from agent.exporter.web import Server
from collectors.base import Family

GPUS, FAMILIES, LINKS = 16, 60, 18


class FakeCollector:
    """A collector with as many readings as on a host with sixteen GPUs."""

    name = "made"

    def collect(self) -> list[Family]:
        """Return a gauge for each GPU in each family, and five counters for each of its links."""
        time.sleep(0.02)
        families = [Family(name=f"gpu.reading{number}", unit="1", help="Help") for number in range(FAMILIES)]
        families += [
            Family(name=f"gpu.nvlink.counter{number}", unit="1", help="Help", counter=True) for number in range(5)
        ]
        for gpu in range(GPUS):
            labels = {"gpu": str(gpu), "uuid": f"GPU-00000000-0000-0000-0000-{gpu:012d}"}
            for number, family in enumerate(families):
                for link in range(LINKS if number >= FAMILIES else 1):
                    family.add(labels | ({"link": str(link)} if number >= FAMILIES else {}), gpu * 1.5)
        return families


def serve(kind: str) -> None:
    """Serve until standard input ends, then print the peak memory."""
    registered: CollectorRegistry = registry([FakeCollector()])
    if kind == "ours":
        print(Server(registered, "127.0.0.1", 0).port, flush=True)
    else:
        server, _ = start_http_server(0, addr="127.0.0.1", registry=registered)
        print(server.server_port, flush=True)
    sys.stdin.read()
    status = Path("/proc/self/status").read_text()
    print(re.search(r"VmHWM:\s+(\d+) kB", status)[1], flush=True)  # type: ignore[index]
    os._exit(0)


def scrape(port: int, times: list[float], begin: threading.Event) -> None:
    """Scrape once and append the duration in seconds, or infinity if it failed."""
    begin.wait()
    began = time.monotonic()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            answer.read()
        times.append(time.monotonic() - began)
    except OSError:
        times.append(float("inf"))


def measure(kind: str, scrapers: int, half_open: int) -> tuple[float, float, float, int]:
    """Return p95 of the scrapes and time until half-open clients were closed, in s, peak RSS in MiB, number of failed scrapes."""
    with subprocess.Popen(
        [sys.executable, __file__, "--serve", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        port = int(server.stdout.readline())  # type: ignore[union-attr]
        times: list[float] = []
        begin = threading.Event()
        threads = [threading.Thread(target=scrape, args=(port, times, begin)) for _ in range(scrapers)]
        for thread in threads:
            thread.start()
        begin.set()
        for thread in threads:
            thread.join()
        closed = hold_open(port, half_open)
        output, _ = server.communicate("")
    failed = sum(duration == float("inf") for duration in times)
    p95 = statistics.quantiles(times, n=20)[-1] if not failed else float("inf")
    return p95, closed, int(output) / 1024, failed


def hold_open(port: int, count: int, max_s: float = 20.0) -> float:
    """Open `count` silent connections; return the seconds until all were closed, or infinity."""
    clients = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            clients.append(socket.create_connection(("127.0.0.1", port), timeout=5))
    began = time.monotonic()
    for client in clients:
        client.settimeout(max(0.01, max_s - (time.monotonic() - began)))
        try:
            client.recv(1)
        except TimeoutError:
            return float("inf")
        except OSError:
            continue
        finally:
            client.close()
    return time.monotonic() - began


def main() -> None:
    """Print the figures of both servers, and the ratio of their p95."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    scrapers, half_open = (int(word) for word in (*sys.argv[1:], *("100", "1000")[len(sys.argv) - 1 :]))
    results = {kind: measure(kind, scrapers, half_open) for kind in ("ours", "stock")}
    for kind, (p95, closed, memory, failed) in results.items():
        state = f"closed in {closed:.1f} s" if closed < float("inf") else "still open after 20 s"
        print(
            f"{kind:<6} {scrapers} scrapers p95 {p95:.3f} s ({failed} failed), {half_open} half-open clients {state}, "
            f"at most {memory:.0f} MiB"
        )
    print(f"p95, stock / ours: {results['stock'][0] / results['ours'][0]:.1f}")


if __name__ == "__main__":
    main()
