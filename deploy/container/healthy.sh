#!/bin/sh
# Health check. For sshd and the exporter, exit 0 if the port accepts connections. For any other command, exit 0 if the results
# directory is writable.
set -u
state=${RACKPROOF_CONTAINER_STATE:-/tmp/rackproof-container}
read -r command <"$state/command" || exit 1

accepts_connections() {
  python3 -c 'import socket, sys; socket.create_connection(("127.0.0.1", int(sys.argv[1])), 3).close()' "$1" 2>/dev/null
}

case $command in
  sshd) accepts_connections "${RACKPROOF_SSH_PORT:-2222}" ;;
  export) accepts_connections "${RACKPROOF_EXPORTER_PORT:-9836}" ;;
  *) [ -w "${RACKPROOF_RESULTS:-/results}" ] ;;
esac
