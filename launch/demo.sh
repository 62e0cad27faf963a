#!/usr/bin/env bash
# The main job, end to end, on 2 gloo ranks of one machine: `make demo` installs first, then calls
# this. CONFIG, RANKS and further KEY=VALUE arguments change it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/env.sh

BIN="${BIN:-.venv/bin}"
CONFIG="${CONFIG:-configs/demo.yaml}"
export BIN RANKS="${RANKS:-2}"

"$BIN/anchorcontext" prepare "$CONFIG" "$@"
launch/torchrun.sh train "$CONFIG" "$@"
"$BIN/anchorcontext" export "$CONFIG" "$@"
