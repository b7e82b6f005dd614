"""Run `ansible-playbook` and `ansible-inventory` in forks of one process, which has imported Ansible.

Of the 0.8 s of processor time of a short playbook, Ansible's imports take three quarters. The process imports Ansible once.

A fork has the arguments, environment and working directory of the command. Some tests run the command itself: those of
tests/lab and tests/unit/playbooks/test_collection.py, for example.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

PROGRAMS = Path(sys.executable).parent
ROOM = "." * 8000
"""Argument of the process, which makes its command line long enough for those of its forks."""
LONGEST_S = 300
"""A fork that takes longer is killed."""
IMPORTS = (
    *(
        "cli.playbook",
        "cli.inventory",
        "executor.process.worker",
        "plugins.strategy.linear",
        "plugins.callback.default",
    ),
    *(
        "plugins.connection.local",
        "plugins.shell.sh",
        "plugins.filter.core",
        "plugins.test.core",
        "plugins.action.command",
    ),
)
"""Modules of Ansible that the process imports: those that nearly every command needs."""


def run_ansible(
    name: str, *words: str | Path, directory: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of Ansible. The `ansible.cfg` of the directory applies, if there is one.

    Args:
        name: `ansible-playbook` or `ansible-inventory`.
        words: the arguments of the command.
        directory: the working directory.
        environment: variables in addition to those of this process.
    """
    variables = {**os.environ, **(environment or {})}
    if (directory / "ansible.cfg").exists():
        variables.setdefault("ANSIBLE_CONFIG", str(directory / "ansible.cfg"))
    settings = {key: value for key, value in variables.items() if key.startswith("ANSIBLE_")}
    process = _start(tuple(sorted(settings.items())))
    command = [str(word) for word in (PROGRAMS / name, *words)]
    with tempfile.TemporaryDirectory() as outputs:
        request = json.dumps([command, str(directory), variables, outputs])
        assert process.stdin
        assert process.stdout
        process.stdin.write(request + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        stdout, stderr = ((Path(outputs) / stream).read_text() for stream in ("stdout", "stderr"))
    return subprocess.CompletedProcess(command, code, stdout, stderr)


@cache
def _start(settings: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """Start a process whose Ansible has these settings, which Ansible reads when it is imported."""
    others = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, ROOM],
        cwd="/",  # which has no ansible.cfg
        env=others | dict(settings),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)  # the process ends when its standard input is closed
    return process


def _rename(command: list[str]) -> None:
    """Make this the command line of this process. Rackproof recognizes ansible-playbook by it (`run_lock.playbook`)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = "\0".join((sys.executable, *command)).encode()[: end - start - 1]
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(text.ljust(end - start, b"\0"))


def _become(command: list[str], directory: str, variables: dict[str, str], outputs: str) -> None:
    """Give this process the streams, directory, environment and command line of the command."""
    signal.alarm(LONGEST_S)
    atexit._clear()  # the process that was forked, and not this one, removes the temporary files
    streams = (os.devnull, f"{outputs}/stdout", f"{outputs}/stderr")
    for number, path in enumerate(streams):
        stream = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(directory)
    home = os.environ["ANSIBLE_HOME"]
    os.environ.clear()
    os.environ.update(variables | {"ANSIBLE_HOME": home})
    sys.argv = command
    _rename(command)


def _serve() -> None:
    """Read requests from standard input, run each in a fork, and print its exit code."""
    home = tempfile.mkdtemp()
    os.environ["ANSIBLE_HOME"] = home
    for module in IMPORTS:
        importlib.import_module(f"ansible.{module}")
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        fork = os.fork()
        if fork == 0:
            command, *place = json.loads(line)
            _become(command, *place)
            kind = Path(command[0]).name.partition("-")[2]
            sys.exit(sys.modules[f"ansible.cli.{kind}"].main(command))
        print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
    shutil.rmtree(home)


if __name__ == "__main__":
    _serve()
