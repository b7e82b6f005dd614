"""Answer requests in a virtual machine that `machines.py` has started: `guest.py HOST DIRECTORY`.

DIRECTORY is shared with the test and with the other virtual machines. This program first creates the file ready.HOST in it. Then
it waits for the requests 0.json, 1.json … in DIRECTORY. A request is an object: host -> shell command. The program runs the
command of HOST, and writes the exit code to N.HOST.json (N: number of the request). The request `null` ends the program.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

POLL_S = 0.1


def write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)


def main(host: str, directory: Path) -> None:
    write(directory / f"ready.{host}", "")
    number = 0
    while True:
        path = directory / f"{number}.json"
        if not path.exists():
            time.sleep(POLL_S)
            continue
        commands = json.loads(path.read_text(encoding="utf-8"))
        if commands is None:
            return
        code = subprocess.run(["/bin/sh", "-exc", commands[host]], check=False).returncode
        write(directory / f"{number}.{host}.json", json.dumps(code))
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
