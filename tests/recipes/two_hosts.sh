#!/usr/bin/env bash
# Runs a command on two hosts as srun would, with SLURM_NODEID and LOCAL_ADDR set, and fails if one fails.
# SIGUSR1 is handed on to both.
#
# Each host is a network namespace with an address of its own, and a cable between them, in a user namespace that
# needs no privilege; where the machine allows none, both are this machine. The first line says which.
set -euo pipefail

apart=(unshare --user --map-root-user --net --mount)

connect() {
  mount -t tmpfs tmpfs /run
  for host in 0 1; do ip netns add "host$host"; done
  ip link add cable0 netns host0 type veth peer name cable1 netns host1
  for host in 0 1; do
    ip -n "host$host" address add "10.77.0.$host/31" dev "cable$host"
    ip -n "host$host" link set "cable$host" up
    ip -n "host$host" link set lo up
  done
}

if [[ ${1:-} == --connected ]]; then
  shift
  connect
  [[ $1 != true ]] || exit 0
  echo "two network namespaces"
  on() {
    export SLURM_NODEID=$1 GLOO_SOCKET_IFNAME=cable$1 LOCAL_ADDR=10.77.0.$1
    shift
    exec ip netns exec "host$SLURM_NODEID" "$@"
  }
elif "${apart[@]}" "$0" --connected true 2>/dev/null; then
  exec "${apart[@]}" "$0" --connected "$@"
else
  echo "one network namespace"
  on() { export SLURM_NODEID=$1 LOCAL_ADDR=127.0.0.1; shift; exec "$@"; }
  port=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  export RDZV_ENDPOINT=127.0.0.1:$port
fi

# Not with `wait` alone: bash 5.2 may exit with 255, or report the signal, if one arrives meanwhile (launch/common.sh).
exec {never}<> <(:)
on 1 "$@" &
hosts=("$!")
on 0 "$@" &
hosts+=("$!")
trap 'kill -USR1 "${hosts[@]}" 2>/dev/null || true' USR1
for host in "${hosts[@]}"; do
  while kill -0 "$host" 2>/dev/null; do read -rt 0.5 -u "$never" || true; done
  wait "$host" || wait "$host"  # again if a signal interrupted it
done
