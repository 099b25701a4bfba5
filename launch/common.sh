# shellcheck shell=bash
# Functions shared by the launchers; source this from the repository's root.

# A pipe that stays empty, for `supervise`. Opened here because no signal may be trapped while bash parses <(...): see
# ask_workers.
exec {never}<> <(:)

# Exits with 2 unless a variable is a whole number in a range: check_count NAME LEAST [MOST].
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
# Exits with 2 if there is no such recipe, also in a dry run. --help prints the head of the launcher.
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

# Refuses --ckpt_path with a name if a run may be restarted: each restart would begin at that checkpoint and lose the
# steps since then. The argument says why it may be restarted.
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

# Sets NPROC to one process per GPU, or 2 without GPUs, and exports the environment of the processes.
set_environment() {
  local gpus=0 cores
  PYTHON=${PYTHON:-python}
  if [[ -z ${NPROC:-} || -z ${OMP_NUM_THREADS:-} ]]; then  # importing torch takes seconds: only if needed
    gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
  fi
  NPROC=${NPROC:-$((gpus > 0 ? gpus : 2))} MAX_RESTARTS=${MAX_RESTARTS:-0}
  check_count NPROC 1
  check_count MAX_RESTARTS 0
  cores=$(nproc)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((gpus == 0 && cores > NPROC ? cores / NPROC : 1))}
  export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH}
  export PET_MAX_RESTARTS=$MAX_RESTARTS
  # On SIGTERM torchrun would kill its processes after 30 s and exit with 1, even if they have saved. Instead,
  # ask_workers stops them.
  export PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT
  # Ranks compare calls over gloo, which would connect every rank with every other one at the start of each group.
  export TORCH_GLOO_LAZY_INIT=${TORCH_GLOO_LAZY_INIT:-1}
  # In a shared store restarted processes would find the keys of their predecessors and fail to connect.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
}

# Runs the recipe with one torchrun, or prints the command in a dry run. The arguments are torchrun's rendezvous flags.
train() {
  if ((PET_MAX_RESTARTS > 0)); then check_checkpoint "MAX_RESTARTS is $PET_MAX_RESTARTS"; fi
  local command=("$PYTHON" -m torch.distributed.run "$@" --nproc_per_node "$NPROC"
    -m recipes.lightning.train fit --config "$recipe" "${flags[@]}")
  if ((dry_run)); then
    show OMP_NUM_THREADS PYTHONPATH PET_MAX_RESTARTS PET_SIGNALS_TO_HANDLE TORCH_GLOO_LAZY_INIT \
      TORCH_DISABLE_SHARE_RDZV_TCP_STORE -- "${command[@]}"
  else
    supervise ask_workers deaf "${command[@]}"
  fi
}

# Prints variables and a command as one line of shell: show NAME... -- COMMAND...
show() {
  while [[ $1 != -- ]]; do printf '%s=%q ' "$1" "${!1}"; shift; done
  shift
  printf '%q ' "$@"
  printf '\n'
}

# Runs a command and returns its status: supervise ASK COMMAND...
# After SIGTERM or SIGUSR1 it calls ASK with the command's process id twice a second until the command ends, because
# processes that are still starting do not react yet. `received` is the last such signal. Signals after the end are
# ignored: they must not turn a run that has saved into a failure.
# It waits with `read` on a pipe that stays empty: if a signal interrupted the `wait` for a `sleep`, bash 5.2 could
# report 128 plus the signal's number as the command's status.
supervise() {
  local ask=$1 pid status state
  shift
  received=
  trap 'received=TERM' TERM  # before the command starts: a signal in between would kill this shell and orphan it
  trap 'received=USR1' USR1
  set -m  # its own process group: signals to ours reach the command only through `ask`
  "$@" &
  pid=$!
  set +m
  trap 'kill -INT "$pid"' INT
  trap 'kill -HUP "$pid"' HUP  # a terminal that closes signals only our group
  trap 'kill -QUIT "$pid"' QUIT
  # Not `kill -0`: bash 5.2 has missed the end of a command while it ran traps, and left it a zombie for ever.
  while mapfile -t state 2>/dev/null <"/proc/$pid/stat" && [[ ${state[0]:-} == *") "[!Z]" $BASHPID "* ]]; do
    if [[ $received ]]; then "$ask" "$pid"; fi
    read -rt 0.5 -u "$never" || true
  done
  for _ in 1 2 3; do  # a signal interrupts this `wait`, too; the next one returns the command's status
    status=0
    wait "$pid" || status=$?
    ((status > 128)) || break
  done
  trap : TERM USR1  # neither '' nor -: a pending signal would then kill the shell (bash 5.2)
  trap - INT HUP QUIT
  return "$status"
}

# Executes a command with both signals ignored, in its child processes as well. Training handles them once it can save
# (ringflash.lightning.StopOnSignal).
deaf() {
  trap '' TERM USR1
  exec "$@"
}

# Sends SIGTERM to the processes of a torchrun, which save together and exit with 0; torchrun then exits with 0, too.
# No $(...) or <(...) here: bash 5.2 parses them again on every call, and a trap that runs during the parse breaks it
# ("trap: unexpected EOF while looking for matching `)'").
ask_workers() {
  local file children workers=()
  for file in /proc/"$1"/task/*/children; do
    read -ra children 2>/dev/null <"$file" || true
    workers+=("${children[@]}")
  done
  kill -TERM "${workers[@]}" 2>/dev/null || true
}
