"""Test a run over SSH in which two of three hosts are hostile. They must not decide what the control node reads, writes or runs.

The Python interpreter of both hostile hosts adds facts to every module result. The facts have the names of variables of the
roles and playbooks. Most values contain the path of a program on the control node. Host WRITER writes markup, shell and terminal
codes into the serials of its record, and later enlarges the record to 300 MB. Host LIAR reports the true size of its small
record, but sends 300 MB.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from fleet.report.formats import FORMATS
from tests.accepted import rackproof
from tests.lab.agent_install import install_agent
from tests.lab.kill_points import ANSIBLE_OUTPUT, MARK, ROOT, STATE, marked, smallest_benchmark_profile
from tests.lab.lab import MODULE_PYTHON, Lab
from tests.unit.playbooks.test_trust_boundary import variables_of_the_playbooks

HONEST, LIAR, WRITER = (f"node{number}" for number in range(1, 4))
RECORD_BYTES, MAX_BYTES = 300_000_000, 300_000_000
PYTHON = "/usr/local/bin/hostile-python"
HOSTILE = """#!/usr/bin/python3 -IS
import json, os, pathlib, subprocess, sys
values = json.loads(pathlib.Path("/hostile.json").read_text())
for record in pathlib.Path("{state}").glob("runs/*/record.json"):
    if values["gpus"] and record.stat().st_size < 8_000_000:
        document = json.loads(record.read_text()) | {{"gpus": values["gpus"]}}
        record.write_text(json.dumps(document))
        if document.get("launches"):
            os.truncate(record, values["bytes"])
done = subprocess.run(["{python}", *sys.argv[1:]], stdin=sys.stdin, capture_output=True)
output = done.stdout
try:
    result = json.loads(output)
    result.setdefault("ansible_facts", {{}}).update(values["facts"])
    result.update(values["keys"])
    if values["flood"] and "stat" in result:
        # "1" means that there is no checksum. Ansible's fetch then gets the content of the file from the module slurp.
        result["stat"]["checksum"] = "1"
    if values["flood"] and "encoding" in result:  # the result of slurp
        for _ in range(values["flood"] >> 20):
            sys.stdout.buffer.write(b"A" * (1 << 20))
    output = json.dumps(result).encode()
except ValueError:
    pass
sys.stdout.buffer.write(output)
sys.stderr.buffer.write(done.stderr)
sys.exit(done.returncode)
"""


def typed(option: dict[str, Any], program: str) -> Any:
    """Return a value of the option's type in argument_specs. If the type permits it, the value is or contains `program`."""
    values: dict[str, Any] = {"list": [program], "dict": {"x": program}, "bool": True, "int": 1, "float": 1.0}
    return values.get(option.get("type", "str"), program)


def facts(program: str) -> dict[str, Any]:
    """Return variable -> value for all variables of roles and playbooks. A value contains `program` if its type permits it.

    The names are from argument_specs, vars files and plays. Further names, internal ones included, are found by a regular
    expression in all files of roles and playbooks.
    """
    result: dict[str, Any] = dict.fromkeys(variables_of_the_playbooks(), program)
    for path in (ROOT / "roles").glob("*/meta/argument_specs.yml"):
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            result |= {name: typed(option, program) for name, option in entry.get("options", {}).items()}
    for path in (*(ROOT / "roles").glob("*/vars/*.yml"), *(ROOT / "playbooks").rglob("*_vars/*.yml")):
        for name, value in (yaml.safe_load(path.read_text()) or {}).items():
            result[name] = [program] if isinstance(value, list) or str(value).startswith("{{ [") else program
    for path in (ROOT / "playbooks").glob("*.yml"):
        for play in yaml.safe_load(path.read_text()):
            result |= dict.fromkeys(play.get("vars", {}), program)
    return result


@dataclass(frozen=True)
class Bait:
    """A directory on the control node whose path occurs only in what the hostile hosts send.

    No process may write to the directory or run the program in it. If the program runs, it creates the file `trace`.
    """

    directory: Path

    @property
    def program(self) -> Path:
        return self.directory / "program"

    @property
    def trace(self) -> Path:
        return self.directory / "trace"

    def create(self) -> None:
        self.directory.mkdir()
        self.program.write_text(f"#!/bin/sh\ntouch {self.trace}\n")
        self.program.chmod(0o755)

    def serial(self) -> str:
        """Return a serial number with markup, shell and template code, spreadsheet formulas and terminal codes."""
        touch = f"touch {self.trace}"
        return (
            f"../../../..{self.directory}/x[link](http://evil.example)![image](http://evil.example/i.png)"
            f"<script>alert(1)</script><img src=x onerror=alert(1)>`{touch}`$({touch});\n"
            f"\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b31m\u202e{{{{ lookup('pipe', '{touch}') }}}}|=cmd|'/C calc'!A0"
        )


@dataclass(frozen=True)
class Played:
    """The finished run."""

    lab: Lab
    bait: Bait
    run: Path
    output: str
    peak_bytes: int
    """Largest resident memory of a single process of the playbook on the control node."""
    total_bytes: int
    """Largest sum of the memory of all processes of the playbook on the control node. Shared pages are counted once."""
    new_files: list[str]
    """Files and directories that the run created, except those in its run directory and in the directory of the lab."""
    seconds: float

    def report(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.run / "report.json").read_text())
        return document


PEAK = (
    "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
    "print('PEAK', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
)
"""Program that runs a command and then prints the resident memory, in KiB, of the largest process of the command."""


class MemorySampler(threading.Thread):
    """Samples the memory of all processes with this mark (see MARK), and keeps the largest sum in `total`."""

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self.total, self.mark, self.ended = 0, mark, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.25):
            self.total = max(self.total, sum(map(proportional_bytes, marked(self.mark))))


def proportional_bytes(pid: int) -> int:
    """Return the memory of a process. A page that several processes share is divided among them."""
    with contextlib.suppress(OSError):
        result = re.search(r"^Pss: +(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(result.group(1)) * 1024 if result else 0
    return 0


def files_below(directory: Path, *excluded: Path) -> set[str]:
    """Return the relative paths of all files and directories below `directory`, except `excluded` and what is below them."""
    return {
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if not any(path.is_relative_to(other) for other in excluded)
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, agent_archive: Path) -> Iterator[Played]:
    """Make two hosts hostile, run the acceptance playbook, and sample the memory of its processes on the control node."""
    directory = tmp_path_factory.mktemp("hostile")
    bait, runs = Bait(directory / "bait"), directory / "runs"
    bait.create()
    runs.mkdir()
    (directory / "tiny.yml").write_text(yaml.safe_dump(smallest_benchmark_profile()))
    variables = {
        "rackproof_profile": str(directory / "tiny.yml"),
        "rackproof_runs_directory": str(runs),
        "rackproof_gang": "none",
        "rackproof_python": sys.executable,
        "rackproof_system_torch": True,
        "rackproof_minimum_free_bytes": 100_000_000,
        "nvidia_driver_state": "ignored",
    }
    with Lab(directory / "lab", hosts=3) as lab:
        install_agent(lab, agent_archive)
        same = {"uuid": f"GPU-{bait.serial()}", "name": bait.serial()}
        gpus = [
            {"index": 0, "serial": bait.serial(), "pci_bus_id": "0", **same},
            {"index": 1, "serial": f"=1+{bait.serial()}", "pci_bus_id": f"1{bait.serial()}", **same},
        ]
        program = str(bait.program)
        hostile: dict[str, Any] = {"facts": facts(program), "keys": hostile_keys(program)}
        for host in (LIAR, WRITER):
            values = hostile | {
                "bytes": RECORD_BYTES,
                "flood": RECORD_BYTES if host == LIAR else 0,
                "gpus": gpus if host == WRITER else [],
            }
            lab.put(host, "/hostile.json", json.dumps(values))
            lab.put(host, PYTHON, HOSTILE.format(state=STATE, python=MODULE_PYTHON), 0o755)
        python = {host: {"ansible_python_interpreter": PYTHON} for host in (LIAR, WRITER)}
        inventory = lab.inventory(python, variables)
        before, began = files_below(directory, runs / "r1", lab.directory), time.monotonic()
        sampler = MemorySampler(lab.control)
        sampler.start()
        done = lab.run(
            [
                *(sys.executable, "-c", PEAK, Path(sys.executable).parent / "ansible-playbook", "-i", inventory),
                *(ROOT / "playbooks" / "acceptance.yml", "-e", "rackproof_run_id=r1"),
            ],
            check=False,
            timeout=300,
            cwd=ROOT,
            env={MARK: lab.control, **ANSIBLE_OUTPUT, "ANSIBLE_HOME": str(lab.directory / "home")},
            stderr=subprocess.STDOUT,
        )
        sampler.ended.set()
        sampler.join()
        seconds = time.monotonic() - began
        output, _, peak = done.stdout.rpartition("PEAK ")
        new_files = sorted(files_below(directory, runs / "r1", lab.directory) - before)
        print(f"{seconds:.1f} s, largest process {int(peak) >> 10} MiB, all {sampler.total >> 20} MiB")
        yield Played(lab, bait, runs / "r1", output, int(peak) * 1024, sampler.total, new_files, seconds)


def hostile_keys(program: str) -> dict[str, Any]:
    """Return keys with which module results of a host try to change the inventory or the behavior of Ansible."""
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": program,
        "rackproof_notify_sendmail": program,
    }
    added = {"host_name": HONEST, "host_vars": variables, "groups": ["gpu_hosts"]}
    return {
        "add_host": added,
        "add_group": "localhost",
        "_ansible_no_log": False,
        "_ansible_delegated_vars": {"ansible_delegated_host": "localhost", **variables},
        "_ansible_notify": [program],
        "ansible_stats": {"data": {"x": program}},
        "warnings": [],
    }


def test_nothing_named_by_a_host_is_written_or_run(played: Played) -> None:
    assert sorted(path.name for path in played.bait.directory.iterdir()) == ["program"]
    assert not played.bait.trace.exists()
    assert played.bait.program.read_text().startswith("#!/bin/sh")
    assert played.new_files == ["runs/prometheus"]
    names = {str(path.relative_to(played.run)) for path in (played.run / "hosts").iterdir()}
    assert names <= {f"hosts/{host}.json" for host in (HONEST, LIAR, WRITER)}


def test_memory_of_the_control_node_is_bounded(played: Played) -> None:
    assert 30_000_000 < played.peak_bytes < MAX_BYTES
    assert 30_000_000 < played.total_bytes < MAX_BYTES
    assert f"record.json has {RECORD_BYTES} bytes, more than 8000000" in " ".join(played.output.split())
    assert sum(path.stat().st_size for path in played.run.rglob("*")) < 20_000_000


def test_honest_host_is_accepted_and_hostile_hosts_are_not(played: Played) -> None:
    decisions = {host["name"]: host["decision"] for host in played.report()["hosts"]}
    assert decisions == {HONEST: "accepted", LIAR: "incomplete", WRITER: "rejected"}
    assert "FINAL ACCEPTANCE: REHEARSAL FAIL" in played.output
    serials = {item["serial"] for item in played.report()["verdicts"] if item.get("serial")}
    assert serials == {played.bait.serial(), f"=1+{played.bait.serial()}"}


CODES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")
"""Control characters other than tab and line feed, and the mark that reverses the direction of text."""


class Tags(HTMLParser):
    """The tags of a page with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, str | None]]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attributes))


def test_outputs_escape_what_a_host_wrote(played: Played) -> None:
    run = played.run
    printed = {
        "playbook": played.output,
        "report": rackproof("report", run).stdout,
        "host": rackproof("report", run, "--host", WRITER).stdout,
        "notice": json.loads(rackproof("notice", run).stdout)["text"],
        "mail": rackproof("notice", run, "--mail-to", "a@example.org").stdout,
        "watch": rackproof("watch", run, "--once").stdout,
        "rma": rackproof("rma", run, "--host", WRITER).stdout,
    }
    files = {
        path.name: path for path in run.rglob("*") if path.is_file() and path.parent.name not in ("hosts", "agent")
    }
    assert {*FORMATS} - {"observations.parquet"} <= {*files}
    texts = printed | {name: path.read_bytes().decode() for name, path in files.items()}
    for name, text in texts.items():
        assert not CODES.search(text.replace("\r\n", "\n")), name
    assert all("evil.example" in printed[name] for name in ("report", "host"))
    for page in (name for name in texts if name.endswith(".html")):
        tags = Tags()
        tags.feed(texts[page])
        assert not [tag for tag, _ in tags.found if tag in ("img", "iframe", "object")], page
        assert [tag for tag, _ in tags.found].count("script") == 2, page
        links = [value for _, pairs in tags.found for key, value in pairs if key in ("href", "src")]
        assert not [link for link in links if "evil" in str(link)], page
        assert not [key for _, pairs in tags.found for key, _ in pairs if key.startswith("on")], page
    for page in (name for name in texts if name.endswith(".md")):
        without_code = re.sub(r"`[^`\n]*`", "", re.sub(r"```text\n.*?```", "", texts[page], flags=re.DOTALL))
        assert "evil.example" not in without_code, page
        assert "<" not in without_code.replace("<http", ""), page
    for row in csv.reader(io.StringIO(texts["observations.csv"], newline="")):
        assert not [cell for cell in row if re.match(r"\s*[=+@]", cell)]
    ElementTree.parse(files["junit.xml"])  # noqa: S314 - our own file
    families = text_string_to_metric_families(texts["verdicts.prom"])
    labels = [value for family in families for sample in family.samples for value in sample.labels.values()]
    assert any("evil.example" in value for value in labels)
    assert not played.bait.trace.exists()
    outside = files_below(played.run.parents[1], played.run, played.lab.directory)
    assert outside == {"bait", "bait/program", "runs", "runs/prometheus", "tiny.yml"}
