#!/bin/sh
# Shell of the control node for Ansible (ansible_shell_executable).
# With pipelining, Ansible runs a module by the command `PYTHON && sleep 0`, and writes the module to standard input.
# For this command, the shell starts control_python.py in place of PYTHON.
# The inventories of the labs set this shell, because they cannot set the Python interpreter: playbooks/host_vars/localhost.yml
# sets the interpreter and takes precedence over an inventory.
python=${2%% *}
case $python in
*/python3) [ "$2" != "$python && sleep 0" ] || exec "${0%/*}/control_python.py" ;;
esac
exec /bin/sh "$@"
