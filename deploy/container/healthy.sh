#!/bin/sh
# Whether what the container was started for is there: sshd and the exporter answer; everything else can write its results.
set -u
state=${RACKPROOF_CONTAINER_STATE:-/tmp/rackproof-container}
read -r does <"$state/does" || exit 1

answers() {
  python3 -c 'import socket, sys; socket.create_connection(("127.0.0.1", int(sys.argv[1])), 3).close()' "$1" 2>/dev/null
}

case $does in
  sshd) answers "${RACKPROOF_SSH_PORT:-2222}" ;;
  export) answers "${RACKPROOF_EXPORTER_PORT:-9836}" ;;
  *) [ -w "${RACKPROOF_RESULTS:-/results}" ] ;;
esac
