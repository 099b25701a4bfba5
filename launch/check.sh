#!/usr/bin/env bash
# Print this node's name if `ringflash doctor` finds no fault on it, and what doctor found on stderr. For slurm.sbatch.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH}
if found=$("${PYTHON:-python}" -m ringflash doctor 2>&1); then
  echo "$SLURMD_NODENAME"
else
  printf '%s: left out\n%s\n' "$SLURMD_NODENAME" "$found" >&2
fi
