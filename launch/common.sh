# shellcheck shell=bash
# What the launchers share; sourced from the repository's root.

# Refuses a variable that is no whole number from a least to, where it is given, a largest one.
check_count() {
  local name=$1 least=$2 most=${3:-} value=${!1}
  local range="$least or more"
  if [[ $most ]]; then range="from $least to $most"; fi
  if [[ ! $value =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((value < least)) || [[ $most && $value -gt $most ]]; then
    echo "$name must be a whole number, $range, got $value; see the head of $0." >&2
    exit 2
  fi
}

# Sets dry_run, recipe and flags from [--dry-run] [recipe.yaml] [flags of the recipe]; DRY_RUN=1 is --dry-run.
# Refuses a recipe that is not there, also where nothing is to run. --help prints the head of the launcher.
read_arguments() {
  if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^#SBATCH\|^[^#]/{/^# \|^#$/s/^# \{0,1\}//p}' "launch/${0##*/}"
    echo "flags of the recipe: python -m recipes.lightning.train fit --help, from the repository's root"
    exit
  fi
  DRY_RUN=${DRY_RUN:-0}
  check_count DRY_RUN 0 1
  dry_run=$DRY_RUN
  recipe=recipes/lightning/quickstart.yaml
  if [[ ${1:-} == --dry-run ]]; then dry_run=1; shift; fi
  if [[ ${1:-} == *.yaml ]]; then recipe=$1; shift; fi
  flags=("$@")
  if [[ ! -f $recipe ]]; then
    echo "the recipe must be a file, got $recipe, looked for from $PWD; correct the path." >&2
    exit 2
  fi
}

# Refuses a checkpoint by name where a run may be started more than once: each start would begin there, and lose the steps
# since. `why`: what starts it.
check_checkpoint() {
  local why=$1 i value
  for i in "${!flags[@]}"; do
    case ${flags[i]} in
      --ckpt_path) value=${flags[i + 1]:-nothing} ;;
      --ckpt_path=*) value=${flags[i]#*=} ;;
      *) continue ;;
    esac
    if [[ $value != auto ]]; then
      echo "--ckpt_path must be auto where $why, got $value: the run would begin there each time. Put the checkpoint" \
        "below a new output_dir, where auto finds it: mkdir -p NEW/start && ln -s CHECKPOINT.ckpt NEW/start/" >&2
      exit 2
    fi
  done
}

# Sets NPROC to one process for each GPU, or 2 without GPUs, and what the processes need.
set_environment() {
  local gpus=0 cores
  PYTHON=${PYTHON:-python}
  if [[ -z ${NPROC:-} || -z ${OMP_NUM_THREADS:-} ]]; then  # seconds: only where it is to be known
    gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
  fi
  NPROC=${NPROC:-$((gpus > 0 ? gpus : 2))} MAX_RESTARTS=${MAX_RESTARTS:-0}
  check_count NPROC 1
  check_count MAX_RESTARTS 0
  cores=$(nproc)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((gpus == 0 && cores > NPROC ? cores / NPROC : 1))}
  export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH}
  export PET_MAX_RESTARTS=$MAX_RESTARTS
  # torchrun would end its processes 30 s after SIGTERM and exit 1 whatever they saved: ask_workers stops them.
  export PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT
  # Restarted processes would find the keys of their predecessors in a shared store, and fail to connect.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
}

# Runs the recipe with one torchrun, whose rendezvous the arguments describe, or prints what would run.
train() {
  if ((PET_MAX_RESTARTS > 0)); then check_checkpoint "MAX_RESTARTS is $PET_MAX_RESTARTS"; fi
  local command=("$PYTHON" -m torch.distributed.run "$@" --nproc_per_node "$NPROC"
    -m recipes.lightning.train fit --config "$recipe" "${flags[@]}")
  if ((dry_run)); then
    show OMP_NUM_THREADS PYTHONPATH PET_MAX_RESTARTS PET_SIGNALS_TO_HANDLE TORCH_DISABLE_SHARE_RDZV_TCP_STORE \
      -- "${command[@]}"
  else
    supervise ask_workers deaf "${command[@]}"
  fi
}

# Prints NAME... -- command as one line of shell.
show() {
  while [[ $1 != -- ]]; do printf '%s=%q ' "$1" "${!1}"; shift; done
  shift
  printf '%q ' "$@"
  printf '\n'
}

# Runs a command and returns its status. On SIGTERM or SIGUSR1 it calls `ask` with the command's process twice a
# second until that ends: processes that are still starting hear it later. `received` is the last such signal;
# those that come after the end do nothing, for they must not turn a run that has saved into a failure.
# It waits by `read` from a pipe in which nothing comes: a signal that ends the `wait` for a `sleep` can make bash 5.2
# take 128 and its number for the command's status.
supervise() {
  local ask=$1 pid never status
  shift
  received=
  set -m  # a process group of its own: signals to this one reach the command only through `ask`
  "$@" &
  pid=$!
  set +m
  exec {never}<> <(:)
  trap 'received=TERM' TERM
  trap 'received=USR1' USR1
  trap 'kill -INT "$pid"' INT
  trap 'kill -HUP "$pid"' HUP  # a terminal that closes tells this group alone
  trap 'kill -QUIT "$pid"' QUIT
  while kill -0 "$pid" 2>/dev/null; do
    if [[ $received ]]; then "$ask" "$pid"; fi
    read -rt 0.5 -u "$never" || true
  done
  for _ in 1 2 3; do  # a signal ends this `wait` too; asked again, it has the command's own status
    status=0
    wait "$pid" || status=$?
    ((status > 128)) || break
  done
  exec {never}<&-
  trap : TERM USR1  # neither '' nor -: with one of them pending, bash 5.2 would end the shell by it
  trap - INT HUP QUIT
  return "$status"
}

# Becomes a command that ignores, like all that it starts, both signals. Training listens once it can save
# (ringflash.lightning.StopOnSignal).
deaf() {
  trap '' TERM USR1
  exec "$@"
}

# Sends SIGTERM to the processes of a torchrun, which save together and exit 0; torchrun then exits 0 too.
# No $(...) or <(...) here: bash 5.2 parses it again each time, and a signal whose trap runs meanwhile breaks that
# ("trap: unexpected EOF while looking for matching `)'").
ask_workers() {
  local file children workers=()
  for file in /proc/"$1"/task/*/children; do
    read -ra children 2>/dev/null <"$file" || true
    workers+=("${children[@]}")
  done
  kill -TERM "${workers[@]}" 2>/dev/null || true
}
