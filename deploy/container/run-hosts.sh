#!/bin/sh
# Launcher of an MPIJob: run `rackproof run-host` on all hosts of the hostfile at once, then print their records, one host after the
# other. mpirun forwards the output of its processes in pieces that do not end where lines end, so it would mix the records.
#   run-hosts.sh PLAN [OPTIONS of run-host]      PLAN: path of the plan on the hosts
set -u
hostfile=${OMPI_MCA_orte_default_hostfile:-/etc/mpi/hostfile}
if [ $# = 0 ] || [ ! -s "$hostfile" ]; then
  echo "rackproof: usage: run-hosts PLAN [OPTION…], in the launcher of an MPIJob, which mounts the hostfile as $hostfile" >&2
  exit 64
fi
plan=$1
shift

# If a process fails, mpirun ends all others. A host that fails must not stop the other hosts, so its process exits with 0. Without
# `--bind-to none`, mpirun binds each process to a part of the cores.
# shellcheck disable=SC2016 # the shell of each host expands the parameters
mpirun --map-by ppr:1:node --bind-to none sh -c 'rackproof run-host --quiet "$@" || :' sh "--plan=$plan" "$@" &
mpirun=$!
trap 'kill "$mpirun" 2>/dev/null' TERM INT
wait "$mpirun"
code=$?
while kill -0 "$mpirun" 2>/dev/null; do # a signal has ended `wait`, but mpirun is still ending its processes
  wait "$mpirun"
  code=$?
done

while read -r host _ <&3; do
  case $host in '' | '#'*) continue ;; esac
  # shellcheck disable=SC2086 # the variable has several words
  if ! timeout 300 ssh ${OMPI_MCA_plm_rsh_args-} -o ConnectionAttempts=3 "$host" rackproof emit-record "--plan=$plan" </dev/null; then
    echo "rackproof: no record of $host" >&2
    code=2
  fi
  echo # ends a line that was cut off
done 3<"$hostfile"
exit "$code"
