#!/usr/bin/python3 -IS
"""Run Ansible modules on the control node: the module `command` in a new process, other modules in forks of one server process.

In a fork, a module takes a fifth of the time. The module `command` is not run in a fork: the commands of the playbooks may search
their parent processes for ansible-playbook, but the parent process of a fork is the server.
"""

import os
import sys

COMMAND = b"module_fqn='ansible.modules.command'"
"""Text that only the program of the module `command` contains."""


def main():
    """Continue as module_python.py or module_server.py.

    module_python.py runs the module in a fork of the server. module_server.py runs it in this process.

    module_server.py is used for the module `command`, for a program without `module_fqn=`, and for a program that Ansible passes
    in a file (the first argument).
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
