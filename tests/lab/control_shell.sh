#!/bin/sh
# Shell of the control node for Ansible (ansible_shell_executable). It runs modules with control_python.py.
# The inventories of the labs set this shell, because they cannot set the Python interpreter: playbooks/host_vars/localhost.yml
# sets the interpreter and takes precedence over an inventory.
python=${2%% *}
case $python in
*/python3) [ "$2" != "$python && sleep 0" ] || exec "${0%/*}/control_python.py" ;;
esac
exec /bin/sh "$@"
