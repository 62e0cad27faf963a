"""Prompts of RULER's tasks, drawn by the harness's own generators.

The harness's tasks draw 500 prompts from a tokenizer that they load by name, from texts that they
download, and some of their generators never return when a prompt cannot fit. Their functions take
all that as arguments, so nothing is patched: we call them with the model's tokenizer, the number of
samples asked for and local texts, from the seeds that the harness's command line sets. At a length
that its own tasks can make, the prompts are theirs, sample for sample.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import UserError
from ...words import counted
from ..tally import preserved_rng
from .catalog import RulerTask
from .require import quiet, sentence_splitter
from .sources import Sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
"""``input``, ``gen_prefix``, ``outputs``, ``max_length``: the harness's form of a sample."""

# The harness's arguments of its eight needle tasks (its niah_utils.py).
_WORDS = {"type_needle_k": "words", "type_needle_v": "numbers"}
NIAH: dict[str, dict[str, Any]] = {
    "niah_single_1": {"type_haystack": "repeat", **_WORDS},
    "niah_single_2": {"type_haystack": "essay", **_WORDS},
    "niah_single_3": {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "uuids"},
    "niah_multikey_1": {"type_haystack": "essay", **_WORDS, "num_needle_k": 4},
    "niah_multikey_2": {"type_haystack": "needle", **_WORDS},
    "niah_multikey_3": {
        "type_haystack": "needle",
        "type_needle_k": "uuids",
        "type_needle_v": "uuids",
    },
    "niah_multivalue": {"type_haystack": "essay", **_WORDS, "num_needle_v": 4},
    "niah_multiquery": {"type_haystack": "essay", **_WORDS, "num_needle_q": 4},
}
SEED, NUMPY_SEED = 0, 1234  # the defaults of the harness's command line
# Below this length the harness's variable tracking never returns: its worked example alone takes
# up to 500 tokens. A shorter example is then given.
SHORT_VT = 1024
VT_EXAMPLE_TOKENS = 500
VT_SPARE = 32  # variables are drawn, and some take more tokens than others


def ruler_rows(
    task: RulerTask,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    samples: int,
    sources: Sources,
) -> list[Row]:
    """Draw prompts of at most ``length`` tokens, the generator's count of them.

    The generators leave out the answer prefix, BOS or a chat template (and ``ruler_fwe`` the
    answer): :func:`anchorcontext.evaluate.harness.prompts.fit` sees to what the model reads.

    Args:
        task: which.
        tokenizer: the model's.
        length: tokens of prompt and answer.
        samples: how many; fewer come back only where the question file holds fewer.
        sources: the haystack and the questions.

    Raises:
        UserError: ``length`` is too small for the task.
    """
    sentence_splitter(download=sources.download)
    counter = _BoundedCount(tokenizer, limit=4000 + 100 * samples + length // 50)
    with _seeded(), quiet():
        rows = _GENERATORS[task.name](task, counter, length, samples, sources)
    if counter.exhausted or not rows or not all(row["outputs"] for row in rows):
        raise too_small(task, length)
    for row in rows:
        _check(task, row, length)
    return rows


class TooSmallError(UserError):
    """A length that a task's smallest prompt exceeds."""


def too_small(task: RulerTask, length: int, needed: int | None = None) -> TooSmallError:
    """The error for a length that a task's smallest prompt exceeds."""
    room = f" takes {needed:,} tokens with this tokenizer" if needed else " does not fit"
    return TooSmallError(
        f"{task.name} at {length:,} tokens: its smallest prompt with {task.generates} tokens of "
        f"answer{room}; ask for a greater length, or leave the task out"
    )


class _BoundedCount:
    """The tokenizer as the generators call it; after ``limit`` calls every text counts as empty.

    Two generators shrink a prompt for ever, and catch every exception on the way; a text that fits
    is what ends them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limit: int) -> None:
        self.tokenizer, self.left = tokenizer, limit

    @property
    def exhausted(self) -> bool:
        return self.left <= 0

    def __call__(self, text: str) -> SimpleNamespace:
        self.left -= 1
        ids = [] if self.exhausted else self.tokenizer(text, verbose=False)["input_ids"]
        return SimpleNamespace(input_ids=ids)

    def count(self, text: str) -> int:
        """Tokens of ``text``, not counted as a call of a generator."""
        return len(self.tokenizer(text, verbose=False)["input_ids"])


@contextmanager
def _seeded() -> Iterator[None]:
    """The generators draw from the global random numbers; the caller's come back untouched."""
    with preserved_rng(torch.device("cpu")):
        _seed()
        yield


def _seed() -> None:
    random.seed(SEED)
    np.random.seed(NUMPY_SEED)


def _needles(
    task: RulerTask, count: _BoundedCount, length: int, samples: int, sources: Sources
) -> list[Row]:
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE
    from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack

    how = NIAH[task.name]
    if task.source == "haystack":
        # As often as it takes: no sample may be shorter because the text is.
        words = sources.words
        haystack: Any = words * (1 + length // len(words)) if len(words) < length else words
    else:
        haystack = get_haystack(type_haystack=how["type_haystack"])
    try:
        rows: list[Row] = generate_samples(
            haystack,
            TOKENIZER=count,
            max_seq_length=length,
            template=TEMPLATE,
            num_samples=samples,
            tokens_to_generate=task.generates,
            **how,
        )
    except ValueError as error:
        raise too_small(task, length) from error
    if len(rows) < samples:
        raise too_small(task, length)
    return rows


def _variable_tracking(
    task: RulerTask, count: _BoundedCount, length: int, samples: int, sources: Sources
) -> list[Row]:
    from lm_eval.tasks.ruler import vt_utils

    step = 5 if length < SHORT_VT else 10
    example = _worked_example(task, count, short=length < SHORT_VT)
    state, numpy_state = random.getstate(), np.random.get_state()
    shown = example["input"] + " " + " ".join(example["outputs"]) + "\n\n"
    smallest, names = vt_utils.generate_input_output(step, 1, 4)
    needed = count.count(shown) + count.count(f"{smallest} {names}") + task.generates + VT_SPARE
    if needed > length:
        raise too_small(task, length, needed)
    random.setstate(state)
    np.random.set_state(numpy_state)
    rows: list[Row] = vt_utils.sys_vartrack_w_noise_random(
        tokenizer=count,
        num_samples=samples,
        max_seq_length=length,
        incremental=step,
        icl_example=example,
    )
    return rows


def _worked_example(task: RulerTask, count: _BoundedCount, *, short: bool) -> Row:
    """The example that stands in front of every variable tracking prompt."""
    from lm_eval.tasks.ruler import vt_utils

    text, _ = vt_utils.generate_input_output(5, 1, 4, is_icl=True)
    fits = count.count(text) + task.generates + VT_SPARE < VT_EXAMPLE_TOKENS
    _seed()
    if short or not fits:
        text, names = vt_utils.generate_input_output(2, 1, 4, is_icl=True)
        return {"input": text, "outputs": names}
    rows: list[Row] = vt_utils.sys_vartrack_w_noise_random(
        tokenizer=count, num_samples=1, max_seq_length=VT_EXAMPLE_TOKENS, incremental=5
    )
    return rows[0]


def _common_words(
    task: RulerTask, count: _BoundedCount, length: int, samples: int, sources: Sources
) -> list[Row]:
    from lm_eval.tasks.ruler import cwe_utils

    # Its shuffles come from a generator of the module, which other lengths have advanced.
    cwe_utils.RNG.setstate(_cwe_state(cwe_utils))
    shown, smallest, answer = cwe_utils.generate_input_output(10, length)
    listed = " ".join(f"{number}. {word}" for number, word in enumerate(answer, 1))
    needed = count.count(f"{shown}\n{smallest} {listed}") + task.generates
    if needed > length:  # the generator sizes its prompt with a worked example that it then omits
        raise too_small(task, length, needed)
    _seed()
    cwe_utils.RNG.setstate(_cwe_state(cwe_utils))
    rows: list[Row] = cwe_utils.sys_word_pair_random(
        num_samples=samples, max_seq_length=length, tokenizer=count
    )
    return rows


def _cwe_state(module: Any) -> Any:
    """The state of the module's generator as it is when the module has just been imported."""
    fresh = random.Random(42)
    fresh.shuffle(list(range(len(module.WORDS))))
    return fresh.getstate()


def _frequent_words(
    task: RulerTask, count: _BoundedCount, length: int, samples: int, sources: Sources
) -> list[Row]:
    from lm_eval.tasks.ruler import fwe_utils

    rows: list[Row] = fwe_utils.sys_kwext(
        tokenizer=count, max_seq_length=length, num_samples=samples
    )
    return rows


def _questions(
    task: RulerTask, count: _BoundedCount, length: int, samples: int, sources: Sources
) -> list[Row]:
    from lm_eval.tasks.ruler import qa_utils

    questions, documents = sources.load(task.source)
    # The generator shuffles its documents in place once a prompt takes all of them, and then finds
    # others at the places that its questions point to.
    held = 0
    for number, document in enumerate(documents):
        held += count.count(document)
        if held > length and number >= 10:
            break
    else:
        raise UserError(
            f"{task.name} at {length:,} tokens: the question file holds "
            f"{counted(held, 'token')} in {counted(len(documents), 'document')}; more than the "
            "length, in more than 10 documents, are needed: give a larger file, or a smaller length"
        )
    try:
        rows: list[Row] = qa_utils.generate_samples(
            count,
            docs=list(documents),
            qas=questions,
            max_seq_length=length,
            num_samples=min(samples, len(questions)),
            tokens_to_generate=task.generates,
        )
    except ValueError as error:
        raise too_small(task, length) from error
    for row in rows:
        gold = [documents[i] for i in questions[row["index"]]["context"]]
        assert all(text in row["input"] for text in gold), "a question without its documents"
    return rows


_Generator = Callable[[RulerTask, _BoundedCount, int, int, Sources], list[Row]]
_GENERATORS: dict[str, _Generator] = {
    **dict.fromkeys(NIAH, _needles),
    "ruler_vt": _variable_tracking,
    "ruler_cwe": _common_words,
    "ruler_fwe": _frequent_words,
    "ruler_qa_squad": _questions,
    "ruler_qa_hotpot": _questions,
}


def _check(task: RulerTask, row: Row, length: int) -> None:
    """The prompt holds its answer, whole, and only one answer is right."""
    if task.name == "ruler_fwe":
        coded = row["input"].split("coded words. ", 1)[1].rsplit("\nQuestion:", 1)[0]
        counts = Counter(coded.split())
        del counts["..."]
        asked = [counts.pop(word) for word in row["outputs"]]
        if min(asked) <= max(counts.values(), default=0):
            raise too_small(task, length)  # a tie for the third place
    elif task.match == "all":
        absent = [answer for answer in row["outputs"] if str(answer) not in row["input"]]
        assert not absent, f"{task.name}: {absent} is not in its prompt"
