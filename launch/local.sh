#!/usr/bin/env bash
# Train a recipe on this machine: environment plus one torchrun command.
#
#   launch/local.sh [--dry-run] [recipe.yaml] [flags of the recipe]
#
#   NPROC   processes; default one for each GPU, or 2 without GPUs
#   PYTHON  interpreter; default python
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python}
dry_run=false
if [[ ${1:-} == --dry-run ]]; then dry_run=true; shift; fi
recipe=recipes/lightning/quickstart.yaml
if [[ ${1:-} == *.yaml ]]; then recipe=$1; shift; fi

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
NPROC=${NPROC:-$((gpus > 0 ? gpus : 2))}
if ((gpus > 0)); then
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
else
  cores=$(nproc)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
fi
export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH}

command=("$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$NPROC"
  -m recipes.lightning.train fit --config "$recipe" "$@")
if $dry_run; then
  printf 'OMP_NUM_THREADS=%s PYTHONPATH=%s' "$OMP_NUM_THREADS" "$PYTHONPATH"
  printf ' %q' "${command[@]}"
  printf '\n'
else
  exec "${command[@]}"
fi
