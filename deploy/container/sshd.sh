#!/bin/sh
# Run sshd without root in the foreground, on port 2222 by default. mpirun in another pod starts processes in this pod through it.
# The MPI operator mounts one key into $HOME/.ssh of every pod of a job. It is both the host key and the only authorized key.
# SetEnv sets environment variables of this container in the SSH sessions, which would otherwise lack them.
set -eu
port=${RACKPROOF_SSH_PORT:-2222}
keys=${RACKPROOF_SSH_DIRECTORY:-$HOME/.ssh}
if [ ! -r "$keys/id_rsa" ] || [ ! -r "$keys/authorized_keys" ]; then
  echo "rackproof: $keys/id_rsa or authorized_keys cannot be read: mount the job's key there (sshAuthMountPath of an MPIJob)" >&2
  exit 64
fi
work=$(mktemp -d /tmp/rackproof-sshd.XXXXXX)

list_variables() { # on one line, because sshd uses only the first SetEnv
  env | while IFS='=' read -r name value; do
    case $name in
      PATH | LD_LIBRARY_PATH | CUDA_HOME | OPAL_PREFIX | NVIDIA_* | NCCL_* | GLOO_* | OMPI_MCA_* | UCX_* | RACKPROOF_*) ;;
      *) continue ;;
    esac
    case $value in
      *'"'* | *\\*) continue ;; # SetEnv cannot quote these characters
    esac
    printf ' "%s=%s"' "$name" "$value"
  done
}

cat >"$work/config" <<CONFIG
Port $port
HostKey $keys/id_rsa
AuthorizedKeysFile $keys/authorized_keys
PidFile none
# StrictModes would reject the owner or the group that the kubelet gives the mounted key.
StrictModes no
UsePAM no
AuthenticationMethods publickey
PermitRootLogin no
AllowTcpForwarding no
AllowAgentForwarding no
AllowStreamLocalForwarding no
X11Forwarding no
PermitTunnel no
PrintMotd no
MaxStartups 256
SetEnv$(list_variables)
CONFIG
exec /usr/sbin/sshd -D -e -f "$work/config" "$@"
