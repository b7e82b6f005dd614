#!/bin/sh
# Arguments of the container:
#   [OPTIONS]                     run `rackproof run OPTIONS`, which acceptance-tests this host
#   rackproof [OPTIONS]           the same
#   rackproof --help, --version   print the help or the version of Rackproof
#   rackproof COMMAND …           run `rackproof COMMAND …`
#   sshd                          run sshd, to which the mpirun of another container connects
#   mpi COMMAND …                 run COMMAND, configured so that its mpirun can connect to the sshd of the other containers
#   run-hosts PLAN [OPTIONS]      run `rackproof run-host` in the other containers with mpirun, then print their records
#   PROGRAM …                     run any other program
set -eu
here=$(dirname "$0")
state=${RACKPROOF_CONTAINER_STATE:-/tmp/rackproof-container}

# The arbitrary user that OpenShift assigns may have no writable home directory.
if [ ! -w "${HOME:-/}" ]; then
  export HOME=/tmp
fi

record_command() { # writes the name of the command to the file that healthy.sh reads
  mkdir -p "$state" && printf '%s\n' "$@" >"$state/command"
}

if [ "${1-}" = rackproof ]; then
  shift
  case ${1-} in
    --version | -h | --help) exec rackproof "$@" ;;
    '' | -*) ;;
    *)
      record_command "$1"
      exec rackproof "$@"
      ;;
  esac
fi
case ${1-} in
  '' | -*)
    record_command run
    exec rackproof run "$@"
    ;;
  sshd)
    shift
    record_command sshd
    exec "$here/sshd.sh" "$@"
    ;;
  mpi)
    shift
    record_command mpi
    exec "$here/mpi.sh" "$@"
    ;;
  run-hosts)
    shift
    record_command run-hosts
    exec "$here/mpi.sh" "$here/run-hosts.sh" "$@"
    ;;
esac
if ! command -v "$1" >/dev/null; then
  echo "rackproof: no program $1 in this image: for a command of Rackproof use \`rackproof $1 …\`" >&2
  exit 64
fi
record_command "$1"
exec "$@"
