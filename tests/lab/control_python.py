#!/usr/bin/python3 -IS
"""Run Ansible modules on the control node: the module `command` in a new process, other modules in forks of one server process.

Commands that the module `command` runs may search their parent processes for the playbook, or leave a process running. Other
modules do neither. In a fork of the server, which `module_python.py` requests, a module takes a fifth of the time.
"""

import os
import sys

COMMAND = b"module_fqn='ansible.modules.command'"
"""Text that only the program of the module `command` contains."""


def main():
    """Replace this process by one that runs the module.

    The program of the module is on standard input or, if there are arguments, in the file that the first argument names.
    """
    in_server = False
    if not sys.argv[1:]:
        program = sys.stdin.buffer.read()
        module = os.memfd_create("module")
        with os.fdopen(os.dup(module), "wb") as file:
            file.write(program)
        os.lseek(module, 0, os.SEEK_SET)
        os.dup2(module, 0)
        os.close(module)
        in_server = b"module_fqn=" in program and COMMAND not in program
    path = f"{__file__.rpartition('/')[0]}/{'module_python' if in_server else 'module_server'}.py"
    os.execv(path, [path, *sys.argv[1:]])  # noqa: S606


if __name__ == "__main__":
    main()
