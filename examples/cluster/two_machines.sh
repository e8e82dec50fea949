#!/bin/bash
# Two machines by hand. Run the same line on both; HOST is the name or address of one of them:
#   examples/cluster/two_machines.sh HOST
# RANKS_PER_NODE is the number of processes on each, PORT a free port of HOST.

set -euo pipefail
host="${1:?the name of one of the machines}"
ranks_per_node="${RANKS_PER_NODE:-2}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec torchrun --nnodes 2 --nproc-per-node "$ranks_per_node" --rdzv-id fpipe \
    --rdzv-backend c10d --rdzv-endpoint "$host:${PORT:-29500}" \
    examples/train.py --ranks "$((2 * ranks_per_node))" "${@:2}"
