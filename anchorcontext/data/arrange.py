"""From document lengths to windows: upsampling, packing, interleaving, as the config asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .fronts import Fronts
from .interleave import interleave
from .packing import Packing, pack
from .segments import Dropped
from .upsample import upsample

if TYPE_CHECKING:
    from ..config.sections import DataSection

NOT_DRAWN = "upsample"


def arrange(
    data: DataSection,
    lengths: np.ndarray,
    sources: np.ndarray,
    hashes: np.ndarray,
    fronts: Fronts,
    *,
    held_out: bool = False,
) -> Packing:
    """The windows of D documents in stream order.

    Documents that are ``held_out`` are packed by the same method behind the same fronts, but all
    of them as they are: without upsampling, interleaving and limits on windows.

    Args:
        data: the options.
        lengths, sources, hashes: (D,) tokens, number of the source and hash of each document.
        fronts: what stands in front of documents.
    """
    kept = lengths
    if data.upsample is not None and not held_out:
        options = data.upsample
        kept = upsample(
            lengths, sources, hashes, below=options.below, keep=options.keep, seed=data.seed
        )
    first, again = fronts.num_tokens(sources)
    packing = pack(
        kept,
        data.window_tokens,
        anchor=data.shared_anchor,
        method=data.packing.method,
        max_truncation=data.packing.max_truncation,
        min_fill=0.0 if held_out else data.packing.min_fill,
        min_document_tokens=data.min_document_tokens,
        max_windows=None if held_out else data.max_windows,
        first=first,
        again=again,
    )
    lost = np.flatnonzero(kept < lengths)
    if len(lost):
        dropped = {NOT_DRAWN: Dropped(lost, (lengths - kept)[lost]), **packing.dropped}
        packing = replace(packing, dropped=dropped)
    if data.interleave is not None and not held_out:
        ways = data.interleave
        segments = interleave(
            packing.segments, pieces=ways.pieces, cut=ways.cut, tokens=ways.tokens, seed=data.seed
        )
        packing = replace(packing, segments=segments)
    return packing
