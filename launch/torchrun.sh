#!/usr/bin/env bash
# Run an anchorcontext command on every rank with torchrun.
#
#   launch/torchrun.sh COMMAND [ARGUMENTS], as: train CONFIG [KEY=VALUE]...
#
# One machine:   RANKS=8 launch/torchrun.sh train configs/llama3_8b_64k_anchor.yaml
# Four machines, on each of them, with NODE=0..3:
#   NODES=4 NODE=0 MASTER=node0:29500 RANKS=8 launch/torchrun.sh train CONFIG
#
# RANKS    ranks on this machine (default: its GPUs, or 1)
# NODES    machines (default 1); NODE: which one this is (default 0)
# MASTER   host:port of machine 0; needed with more than one machine
# RESTARTS restarts of the ranks when one of them fails, on one machine (default 0)
# BIN      folder of torchrun (default: the one on PATH)
set -euo pipefail

if [ $# -lt 1 ]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 2
fi
# shellcheck source=launch/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

gpus() { # nvidia-smi shows those, too, that CUDA_VISIBLE_DEVICES hides
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        tr , '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c . || true
    else
        { nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l
    fi
}
RANKS="${RANKS:-$(gpus)}"
NODES="${NODES:-1}"
# Without an active environment the checkout's own is taken.
[ -n "${BIN:-}" ] || command -v torchrun > /dev/null || BIN="$(dirname "${BASH_SOURCE[0]}")/../.venv/bin"
launcher="${BIN:+$BIN/}torchrun"

if [ "${RESTARTS:-0}" -gt 0 ]; then
    # The launcher's store would keep the addresses of the ranks that ended, and the new ones may
    # meet those (pytorch/pytorch issue 135712). With this the ranks bring a store of their own.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    [ "$NODES" -eq 1 ] || { echo "RESTARTS=$RESTARTS: for one machine; NODES=$NODES" >&2; exit 2; }
fi
if [ "$NODES" -gt 1 ]; then
    : "${MASTER:?set MASTER=host:port of machine 0}"
    rendezvous=(--nnodes "$NODES" --node-rank "${NODE:-0}"
        --master-addr "${MASTER%%:*}" --master-port "${MASTER##*:}")
else
    rendezvous=(--standalone)
fi

exec "$launcher" "${rendezvous[@]}" --nproc-per-node "$((RANKS > 0 ? RANKS : 1))" \
    --max-restarts "${RESTARTS:-0}" --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    -m anchorcontext "$@"
