"""Where documents come from. Every source gives its entries in one fixed order, in chunks.

::

    documents.py   documents and problems; chunks
    files.py       listing, digests, plain and compressed bytes
    rows.py        fields of a row -> documents (text, or token ids with spans)
    text.py, jsonl.py, table.py, hub.py, stdlib.py   one kind of source each
    opening.py     the entries of ``data.sources`` -> sources

A new kind is a class with the members of :class:`~.opening.Source` and one line in
:func:`open_source`.
"""

from .documents import Chunk, Document, Item, Position, Problem, ProblemLog, sift
from .files import list_files
from .opening import Source, open_source, open_sources, read_documents
from .rows import RowReader
from .stdlib import StandardLibrary

__all__ = [
    "Chunk",
    "Document",
    "Item",
    "Position",
    "Problem",
    "ProblemLog",
    "RowReader",
    "Source",
    "StandardLibrary",
    "list_files",
    "open_source",
    "open_sources",
    "read_documents",
    "sift",
]
