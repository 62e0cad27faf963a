# shellcheck shell=bash
# Environment of every rank; the other scripts of this folder source it. What is set already stays.

# Without it `python -m` puts the working directory on sys.path, where a checkout's kernels/ would
# hide the Hugging Face package of that name.
export PYTHONSAFEPATH=1

# One thread a rank unless told otherwise: ranks of one machine share its cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# The tokenizer's threads do not survive the fork of a data worker.
export TOKENIZERS_PARALLELISM=false

# Fewer out-of-memory errors from fragmentation: windows differ in the sizes they allocate.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# A collective that does not end is broken off by its process group's timeout (10 minutes, set in
# train/launch.py), which names it. The monitor of the watchdog thread waits longer than that, so as
# not to end the process first with less to say.
export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="${TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC:-900}"

# NCCL's own words on what failed.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# Flight recorder: each rank's last collectives, written on such a timeout to this prefix + rank;
# torch's command `torchfrtrace` reads the files of all ranks and names the one that did not come.
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}"
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
export TORCH_FR_DUMP_TEMP_FILE="${TORCH_FR_DUMP_TEMP_FILE:-${TMPDIR:-/tmp}/nccl_trace_rank_}"

# What torchrun, told to stop, leaves its ranks to finish their step and save in; its own 30 seconds
# would cut large checkpoints off.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
