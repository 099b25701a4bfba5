#!/usr/bin/env bash
# Train a recipe on this machine: environment plus one torchrun command.
#
#   launch/local.sh [--dry-run] [recipe.yaml] [flags of the recipe]
#
#   NPROC         processes; default one per GPU, or 2 without GPUs
#   MAX_RESTARTS  restarts after a crash, best with --ckpt_path auto; default 0
#   PYTHON        interpreter; default python
#
# SIGTERM or SIGUSR1: training saves and exits with 0 (docs/launch.md).
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/common.sh

read_arguments "$@"
set_environment
train --standalone
