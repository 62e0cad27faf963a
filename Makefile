# `make demo` and `make test` are all a fresh machine needs: Python 3.11+ with venv, make, gcc.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
EXTRAS := dev,eval,gguf,tensorboard,wandb
# Test processes; distributed tests start up to 8 single-threaded ranks each.
JOBS   ?= 2
TESTS  ?= tests

# Without the safe path, `python -m` would put this folder on sys.path, where kernels/ would hide
# the Hugging Face package of that name.
export PYTHONSAFEPATH := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help venv lint style type test test-slurm chaos gpu-check parity demo demo-smollm2 docs wheel clean

help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(VENV)/.installed ## Create .venv and install the package with its development tools.

$(VENV)/.installed: setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is too old: Python 3.11 or newer is needed; make PYTHON=python3.x"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "no venv module: apt install python3-venv"; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

lint: venv ## Check style, format and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory type
	$(CC) -std=gnu11 -Wall -Wextra -Wno-psabi -Werror -fsyntax-only kernels/*.c

style: venv ## Mend what the formatter and the linter can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy finds modules by folder, so it gets a folder in which kernels/ stands where it is installed.
type: venv ## Check types.
	@rm -rf build/typing && mkdir -p build/typing/anchorcontext
	@ln -s $(addprefix ../../../,$(wildcard anchorcontext/*) kernels) build/typing/anchorcontext/
	cd build/typing && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml \
		--cache-dir ../../.mypy_cache --package anchorcontext

test: venv ## Run the CPU test suite; TESTS=tests/plan runs a part.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile $(TESTS)

# Runs where only torch, triton, numpy and transformers are: nothing is installed.
gpu-check: ## Check every engine on this machine's GPU; GPU_CHECK="--device cpu --quick" tries it.
	@rm -rf build/gpu && mkdir -p build/gpu/anchorcontext
	@ln -s $(addprefix ../../../,$(wildcard anchorcontext/*) kernels) build/gpu/anchorcontext/
	PYTHONPATH=build/gpu $(PYTHON) -m anchorcontext.bench.gpu_check $(GPU_CHECK)

# SLURM's daemons run as root, in a folder of their own. Where there is no apt, or no root, or no
# network, the tests say why they skip.
SLURM := slurm-wlm munge pdsh
test-slurm: venv ## Train over a two-node SLURM on this machine; as root it is installed first.
	@if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && ! command -v slurmctld > /dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
			--no-install-recommends $(SLURM) || echo "$(SLURM) could not be installed"; fi
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs tests/train/test_slurm.py

chaos: venv ## Kill, starve and damage one training run 40 times; CHAOS="--faults 10 --seed 1".
	OMP_NUM_THREADS=1 $(BIN)/python tests/train/chaos.py $(CHAOS)

parity: venv ## Compare the distributed demo model with a single device.
	OMP_NUM_THREADS=1 RANKS=2 BIN=$(BIN) launch/torchrun.sh parity configs/demo.yaml

demo: venv ## Documents -> tokenizer -> windows -> 2 ranks -> parity -> export, in minutes.
	BIN=$(BIN) launch/demo.sh

demo-smollm2: venv ## The same on a pretrained model, SmolLM2-135M.
	BIN=$(BIN) launch/demo_smollm2.sh

docs: venv ## Write the pages that are made from the code.
	$(BIN)/anchorcontext config --reference > docs/config.md
	$(BIN)/python -c 'from anchorcontext.watch.draw import draw_modes; draw_modes("docs/masks.png")'
	$(BIN)/python -c 'from anchorcontext.watch.draw import draw_layouts; draw_layouts("docs/layouts.png")'
	$(BIN)/anchorcontext bench layouts --markdown docs/benchmarks.md

wheel: venv ## Build the wheel into dist/.
	$(BIN)/python -m build --wheel --no-isolation

clean: ## Remove what was built, but neither .venv nor runs/.
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find anchorcontext kernels tests -name __pycache__ -prune -exec rm -rf {} +
