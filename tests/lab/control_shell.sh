#!/bin/sh
# Shell of the control node for Ansible (ansible_shell_executable): runs modules by control_python.py.
# The labs replace the shell, because playbooks/host_vars sets the Python of the control node and takes precedence over their
# inventories.
python=${2%% *}
case $python in
*/python3) [ "$2" != "$python && sleep 0" ] || exec "${0%/*}/control_python.py" ;;
esac
exec /bin/sh "$@"
