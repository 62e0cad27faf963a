# Environment of every rank; the other scripts of this folder source it.

# Without it `python -m` puts the working directory on sys.path, where a checkout's kernels/ would
# hide the Hugging Face package of that name.
export PYTHONSAFEPATH=1

# One thread a rank unless told otherwise: ranks of one machine share its cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# The tokenizer's threads do not survive the fork of a data worker.
export TOKENIZERS_PARALLELISM=false

# Fewer out-of-memory errors from fragmentation: windows differ in the sizes they allocate.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
