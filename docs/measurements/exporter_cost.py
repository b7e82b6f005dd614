"""Measure the cost of the exporter during training: its share of a CPU core, and the loss of training throughput.

Usage: python docs/measurements/exporter_cost.py [SECONDS] [ROUNDS]

All GPUs of this machine (or two CPU processes) train without a pause. A round measures SECONDS without an exporter and SECONDS
with one, which samples ten times per second and is scraped once per second. The order alternates from round to round.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
PORT = 29836
SETTLE_S = 2.0
WIDTH, BATCH, LAYERS = (8192, 4096, 4) if torch.cuda.is_available() else (256, 64, 2)
TICKS = os.sysconf("SC_CLK_TCK")


def train(log: Path) -> None:
    """Run one rank; rank 0 logs the time after every tenth step."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(BATCH, WIDTH, device=device)
    with log.open("w") as file:
        while True:
            for _ in range(10):
                with torch.autocast(device.type, torch.bfloat16):
                    loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if gpu:
                torch.cuda.synchronize(device)
            if dist.get_rank() == 0:
                print(time.monotonic(), file=file, flush=True)


def rate(log: Path, begin: float, end: float) -> float:
    """Return the steps per second between two times."""
    times = [at for at in map(float, log.read_text().split()) if begin <= at <= end]
    return 10 * (len(times) - 1) / (times[-1] - times[0])


def cpu_s(process: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def run_exporter(seconds: float) -> tuple[float, float, float]:
    """Run the exporter; return begin and end of the measured time, and the exporter's share of a core."""
    command = [sys.executable, str(ROOT / "rackproof"), "export", "--listen", "127.0.0.1", "--port", str(PORT)]
    exporter = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ready = time.monotonic() + 30
        while not scraped():
            if time.monotonic() > ready:
                sys.exit("the exporter does not answer")
            time.sleep(0.2)
        time.sleep(SETTLE_S)
        begin, before = time.monotonic(), cpu_s(exporter.pid)
        while (left := begin + seconds - time.monotonic()) > 0:
            scraped()
            time.sleep(min(1.0, left))
        end = time.monotonic()
        return begin, end, (cpu_s(exporter.pid) - before) / (end - begin)
    finally:
        exporter.kill()
        exporter.wait()


def scraped() -> bool:
    """Return whether the exporter answered a scrape."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=10) as page:
            return bool(page.read())
    except OSError:
        return False


def main(seconds: float, rounds: int) -> None:
    """Print the results of each round, and the medians."""
    processes = torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "steps"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        error_file = (
            Path(directory) / "errors"
        )  # not the terminal, because torchrun prints a traceback when a signal ends it
        with error_file.open("w") as file:
            training = subprocess.Popen([*launch, __file__, "--train", str(log)], stderr=file)
        try:
            while not log.exists() or len(log.read_text().split()) < 20:
                if training.poll() is not None:
                    sys.exit(f"the training ended:\n{error_file.read_text()}")
                time.sleep(0.5)
            ratios, shares = [], []
            for number in range(rounds):
                without, with_exporter, share = one_round(log, seconds, exporter_first=bool(number % 2))
                ratios.append(with_exporter / without)
                shares.append(share)
                print(
                    f"{without:.3f} steps/s alone, {with_exporter:.3f} with the exporter: {ratios[-1]:.4f}; {share:.2%} of a core"
                )
        finally:
            training.terminate()
            training.wait()
    print(
        f"throughput with the exporter / without, {processes} ranks: median {statistics.median(ratios):.4f} "
        f"({min(ratios):.4f} to {max(ratios):.4f}), {rounds} rounds of {seconds:g} s; exporter: median "
        f"{statistics.median(shares):.2%} of a core"
    )


def one_round(log: Path, seconds: float, *, exporter_first: bool) -> tuple[float, float, float]:
    """Return the steps per second without and with the exporter, and its share of a core."""
    measured = run_exporter(seconds) if exporter_first else None
    time.sleep(SETTLE_S)
    begin = time.monotonic()
    time.sleep(seconds)
    alone = rate(log, begin, time.monotonic())
    begin, end, share = measured or run_exporter(seconds)
    return alone, rate(log, begin, end), share


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(Path(sys.argv[2]))
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0, int(sys.argv[2]) if len(sys.argv) > 2 else 5)
