#!/bin/sh
# What the container does with its arguments:
#   none, or only flags           rackproof run, with those flags: accepts this host
#   rackproof [flags]             the same
#   rackproof VERB …              that verb
#   sshd                          sshd on port 2222, for MPI
#   mpi COMMAND …                 COMMAND, where mpirun in it is to reach the others' sshd
#   anything else                 that program
set -eu
here=$(dirname "$0")
state=${RACKPROOF_CONTAINER_STATE:-/tmp/rackproof-container}

# A user that the system chose may have no home that it can write.
if [ ! -w "${HOME:-/}" ]; then
  export HOME=/tmp
fi

does() { # what the health check looks at
  mkdir -p "$state" && printf '%s\n' "$@" >"$state/does"
}

if [ "${1-}" = rackproof ]; then
  shift
  case ${1-} in
    --version | -h | --help) exec rackproof "$@" ;;
    '' | -*) ;;
    *)
      does "$1"
      exec rackproof "$@"
      ;;
  esac
fi
case ${1-} in
  '' | -*)
    does run
    exec rackproof run "$@"
    ;;
  sshd)
    shift
    does sshd
    exec "$here/sshd.sh" "$@"
    ;;
  mpi)
    shift
    does mpi
    exec "$here/mpi.sh" "$@"
    ;;
esac
if ! command -v "$1" >/dev/null; then
  echo "rackproof: $1 is no program in this image: for a verb of Rackproof write \`rackproof $1 …\`" >&2
  exit 64
fi
does "$1"
exec "$@"
