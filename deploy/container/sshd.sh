#!/bin/sh
# sshd without root on port 2222, in the foreground: mpirun starts its part on this host by it.
# The MPI operator mounts one key into every pod of a job, as $HOME/.ssh: it is whom sshd lets in, and what sshd is known by.
# The variables of this container are given on: a session over SSH would have none of them.
set -eu
port=${RACKPROOF_SSH_PORT:-2222}
keys=${RACKPROOF_SSH_DIRECTORY:-$HOME/.ssh}
if [ ! -r "$keys/id_rsa" ] || [ ! -r "$keys/authorized_keys" ]; then
  echo "rackproof: $keys/id_rsa or authorized_keys cannot be read: mount the job's key there (sshAuthMountPath of an MPIJob)" >&2
  exit 64
fi
work=$(mktemp -d /tmp/rackproof-sshd.XXXXXX)

given() { # one line: sshd heeds the first SetEnv alone
  env | while IFS='=' read -r name value; do
    case $name in
      PATH | LD_LIBRARY_PATH | CUDA_HOME | OPAL_PREFIX | NVIDIA_* | NCCL_* | GLOO_* | OMPI_MCA_* | UCX_* | RACKPROOF_*) ;;
      *) continue ;;
    esac
    case $value in
      *'"'* | *\\*) continue ;; # sshd has no way to write it
    esac
    printf ' "%s=%s"' "$name" "$value"
  done
}

cat >"$work/config" <<CONFIG
Port $port
HostKey $keys/id_rsa
AuthorizedKeysFile $keys/authorized_keys
PidFile none
# Who may write the mounted key is the kubelet's business: its files belong to root or to a group.
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
SetEnv$(given)
CONFIG
exec /usr/sbin/sshd -D -e -f "$work/config" "$@"
