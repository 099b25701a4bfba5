#!/usr/bin/env bash
# Train a recipe on several hosts: environment plus one torchrun command. Start this on every host.
#
#   launch/host.sh [--dry-run] [recipe.yaml] [flags of the recipe]
#
#   NNODES         number of hosts
#   NODE_RANK      index of this host, from 0; default SLURM's
#   RDZV_ENDPOINT  host:port of the rendezvous: host 0 and a free port on it
#   RDZV_ID        name of the job; default ringflash
#   LOCAL_ADDR     address of this host for the others; default its name
#   NPROC          processes on this host; default one per GPU, or 2 without GPUs
#   MAX_RESTARTS   restarts after a crash, best with --ckpt_path auto; default 0
#   PYTHON         interpreter; default python
#
# SIGTERM or SIGUSR1 to any host: training saves and exits with 0 on all of them (docs/launch.md).
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/common.sh
read_arguments "$@"

NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}}
for name in NNODES NODE_RANK RDZV_ENDPOINT; do
  if [[ -z ${!name:-} ]]; then
    echo "$name must be set for a training over several hosts, got nothing; on one host use launch/local.sh." >&2
    exit 2
  fi
done
check_count NNODES 1
check_count NODE_RANK 0 $((NNODES - 1))

set_environment
rendezvous=(--nnodes "$NNODES" --rdzv_id "${RDZV_ID:-ringflash}" --rdzv_backend c10d
  --rdzv_endpoint "$RDZV_ENDPOINT" --rdzv_conf "is_host=$((NODE_RANK == 0))")
train "${rendezvous[@]}" ${LOCAL_ADDR:+--local_addr "$LOCAL_ADDR"}
