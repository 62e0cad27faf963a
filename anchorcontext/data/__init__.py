"""From corpora to windows: read, tokenise, pack, store, load.

::

    sources.py, stdlib.py   corpora -> documents, or named problems
    tokenizer.py            documents -> token ids; training a tokenizer; the anchor token
    packing.py              document lengths -> which tokens make which window
    store.py                windows <-> a folder of memory-mapped files
    pipeline.py, report.py  all of the above, with an account of every token
    loader.py, prefetch.py  windows -> the micro-batches of one data-parallel rank
"""

from .loader import Loader, epoch_order
from .packing import Packing, pack
from .pipeline import prepare
from .report import PrepareReport
from .store import DocumentInfo, WindowDataset, WindowRecord
from .tokenizer import check_vocabulary, load_tokenizer, train_tokenizer

__all__ = [
    "DocumentInfo",
    "Loader",
    "Packing",
    "PrepareReport",
    "WindowDataset",
    "WindowRecord",
    "check_vocabulary",
    "epoch_order",
    "load_tokenizer",
    "pack",
    "prepare",
    "train_tokenizer",
]
