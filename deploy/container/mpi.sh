#!/bin/sh
# Run a command that uses mpirun, and configure this mpirun to connect to the sshd of the other pods (port 2222 by default). The
# job mounts the same key into all of its pods. sshd uses it as host key, and ssh accepts no server with another host key.
set -eu
port=${RACKPROOF_SSH_PORT:-2222}
keys=${RACKPROOF_SSH_DIRECTORY:-$HOME/.ssh}
if [ ! -r "$keys/id_rsa" ] || [ ! -r "$keys/id_rsa.pub" ]; then
  echo "rackproof: $keys/id_rsa or id_rsa.pub cannot be read: mount the job's key there (sshAuthMountPath of an MPIJob)" >&2
  exit 64
fi
work=$(mktemp -d /tmp/rackproof-mpi.XXXXXX)
printf 'rackproof %s\n' "$(cat "$keys/id_rsa.pub")" >"$work/known_hosts"
cat >"$work/config" <<CONFIG
Host *
  Port $port
  IdentityFile $keys/id_rsa
  IdentitiesOnly yes
  BatchMode yes
  HostKeyAlias rackproof
  StrictHostKeyChecking yes
  UserKnownHostsFile $work/known_hosts
  ConnectTimeout 10
  ConnectionAttempts 30
  ServerAliveInterval 15
  ServerAliveCountMax 4
CONFIG
# Open MPI 4 reads the options of ssh from the first variable, Open MPI 5 from the second.
export OMPI_MCA_plm_rsh_args="-F $work/config"
export PRTE_MCA_plm_ssh_args="-F $work/config"
exec "$@"
