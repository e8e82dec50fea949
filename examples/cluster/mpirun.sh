#!/bin/bash
# Open MPI, MPICH, Intel MPI or PALS: one process for each rank. fpipe.init() reads the variables of mpirun.
#   examples/cluster/mpirun.sh                                              # four processes on this machine
#   MASTER_ADDR=node1 examples/cluster/mpirun.sh -host node1:2,node2:2      # on two machines; rank 0 is on node1
# Options are those of mpirun. RANKS is the number of processes.

set -euo pipefail
ranks="${RANKS:-4}"
# `env` gives the variables to the processes, whatever the option of this mpirun is called.
variables=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}")
for name in MASTER_ADDR MASTER_PORT NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME; do
    [[ -v $name ]] && variables+=("$name=${!name}")
done
exec mpirun -n "$ranks" "$@" env "${variables[@]}" python examples/train.py --ranks "$ranks"
