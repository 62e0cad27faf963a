#!/usr/bin/env bash
# Run an anchorcontext command on every rank of a hostfile with the deepspeed launcher.
#
#   HOSTFILE=hosts launch/deepspeed.sh COMMAND CONFIG [KEY=VALUE]...
#
# The hostfile has one line a machine, "node1 slots=8": its name and its ranks. The launcher starts
# them over pdsh and ssh without passwords, in this folder, which all machines must see.
# Without ssh: NODE=0, 1, ... and MASTER on each machine, started by other means.
#
# HOSTFILE the machines
# MASTER   host:port of the first machine (default: asked over ssh, port 29500)
# NODE     start the ranks of this line of the hostfile only, on this machine
# BIN      folder of deepspeed (default: the one on PATH)
# OPTIONS  further options of the launcher, such as "--launcher openmpi"
#
# To stop with a checkpoint send SIGUSR1 to the ranks: pdsh -w HOSTS pkill -USR1 -f "anchorcontext
# train". Told to stop itself, the launcher gives them 30 seconds.
set -euo pipefail

if [ $# -lt 1 ]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 2
fi
: "${HOSTFILE:?set HOSTFILE to a file with lines like: node1 slots=8}"
# shellcheck source=launch/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# The launcher hands on few variables by itself and reads further ones from a file. It puts them on
# command lines and into its log, so keys and tokens stay out: log in on every machine.
file="$(mktemp)"
env | grep -E '^(NCCL|GLOO|TORCH|PYTORCH|OMP|TOKENIZERS|WANDB|HF)_[A-Z0-9_]*=[^ ]+$' |
    grep -vE '^[A-Z0-9_]*(KEY|TOKEN|SECRET|PASSWORD)=' > "$file"
exec 3< "$file" # open, so that it needs no name and nobody has to remove it later
rm "$file"
export DS_ENV_FILE=/dev/fd/3

rendezvous=()
if [ -n "${MASTER:-}" ]; then
    rendezvous=(--master_addr "${MASTER%%:*}" --master_port "${MASTER##*:}")
fi
if [ -n "${NODE:-}" ]; then
    : "${MASTER:?set MASTER=host:port of the first machine}"
    rendezvous+=(--no_ssh --node_rank "$NODE")
fi

# shellcheck disable=SC2086 # OPTIONS are several words
exec "${BIN:+$BIN/}deepspeed" --hostfile "$HOSTFILE" "${rendezvous[@]}" ${OPTIONS:-} \
    --no_local_rank --module anchorcontext "$@"
