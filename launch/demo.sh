#!/usr/bin/env bash
# The main job, end to end, on 2 gloo ranks of one machine: documents -> windows -> training with
# parity checks -> Hugging Face folder -> one table. `make demo` installs first, then calls this.
#
# CONFIG, RANKS and further KEY=VALUE arguments change it. Called again it goes on with the run it
# finds; remove the run's folder to start anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/env.sh

BIN="${BIN:-.venv/bin}"
CONFIG="${CONFIG:-configs/demo.yaml}"
export BIN RANKS="${RANKS:-2}"

run="$("$BIN/python" -c '
import sys
from anchorcontext.config import load_config
config = load_config(sys.argv[1], sys.argv[2:])
print(f"{config.run.output_dir}/{config.run.name}")' "$CONFIG" "$@")"

"$BIN/anchorcontext" prepare "$CONFIG" "$@"
launch/torchrun.sh train "$CONFIG" "$@"
"$BIN/anchorcontext" export "$run" "$run/hf" --overwrite
"$BIN/anchorcontext" report "$run"
