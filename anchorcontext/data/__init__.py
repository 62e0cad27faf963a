"""From corpora to windows: read, tokenise, pack, store, load.

::

    sources/                corpora -> documents, or named problems
    tokenizer.py            training and loading tokenizers; the anchor token
    encode.py               documents -> token ids, in worker processes
    tokens.py, tokenise.py  token ids in parts on disk; continuing after a kill
    mixture.py              which documents are kept, and which are held out
    arrange.py              document lengths -> which tokens make which window:
      upsample.py             fewer short documents, each source's share kept
      packing.py              by a packer of packers.py, best_fit.py
      interleave.py           documents in pieces over their window
    fronts.py               tags and copies of the anchor in front of documents
    assemble.py             segments -> windows
    store.py, builder.py    windows <-> a folder of memory-mapped files
    pipeline.py             all of the above; request.py says what was asked for,
                            account.py, report.py count every token
    view.py                 records -> windows under a config's mode and controls
    loader.py, prefetch.py  windows -> the micro-batches of one data-parallel rank
"""

from .builder import build_folder
from .loader import Loader, epoch_order
from .packing import Packing, pack
from .pipeline import prepare
from .report import PrepareReport
from .store import DocumentInfo, WindowDataset, WindowRecord
from .tokenizer import check_vocabulary, load_tokenizer, train_tokenizer
from .view import View, configured_view

__all__ = [
    "DocumentInfo",
    "Loader",
    "Packing",
    "PrepareReport",
    "View",
    "WindowDataset",
    "WindowRecord",
    "build_folder",
    "check_vocabulary",
    "configured_view",
    "epoch_order",
    "load_tokenizer",
    "pack",
    "prepare",
    "train_tokenizer",
]
