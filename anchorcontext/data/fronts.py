"""What stands in front of documents and is not theirs: a copy of the anchor, and a domain tag.

::

    [anchor copy] [tag tokens ... document tokens ...]
      its own run    one run; the tag's tokens are never targets, its last one predicts the document

Every document of a window has them once, a continuation from another window included (its copy of
the anchor is optional); further pieces of an interleaved document have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COPIES = ("none", "documents", "segments")


@dataclass(frozen=True)
class Fronts:
    """Copies and tags of a corpus.

    ``copies``: a key of ``COPIES``: no copies; in front of a document's first token only; also in
    front of its continuation. ``tags``: the ids of each source's tag, int32; empty for no tags.
    """

    copies: str = "none"
    tags: Sequence[np.ndarray] = ()

    def tag(self, source: int) -> np.ndarray:
        """The tag of a source, int32 ids."""
        return self.tags[source] if len(self.tags) else np.zeros(0, dtype=np.int32)

    def copied(self, starts: np.ndarray) -> np.ndarray:
        """Which segments have a copy in front, bool, by their first token in the document."""
        if self.copies == "documents":
            return starts == 0
        return np.full(len(starts), self.copies == "segments")

    def num_tokens(self, sources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens in front of documents of ``sources`` (D,), and of continuations: int64 (D,)."""
        tags = np.array([len(tag) for tag in self.tags], dtype=np.int64)
        front = tags[sources] if len(tags) else np.zeros(len(sources), dtype=np.int64)
        return front + (self.copies != "none"), front + (self.copies == "segments")


def tag_ids(
    tokenizer: PreTrainedTokenizerBase, template: str | None, source_names: Sequence[str]
) -> list[np.ndarray]:
    """The tokens of each source's tag, ``template`` with its name for ``{source}``; int32.

    Raises:
        UserError: a tag without a token.
    """
    if template is None:
        return []
    texts = [template.format(source=name) for name in source_names]
    tags = [np.array(tokenizer.encode(t, add_special_tokens=False), dtype=np.int32) for t in texts]
    for text, tag in zip(texts, tags, strict=True):
        if not len(tag):
            raise UserError(f"data.tags = {template!r}: the tokenizer gives {text!r} no token")
    return tags
