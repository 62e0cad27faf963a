"""Readers of RULER's prompts that use no model: their scores tell whether the prompts are sound.

Each is a model of lm-evaluation-harness and answers from the prompt's text alone. The perfect one
scores 100 only when every prompt holds its whole answer and its whole question.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

from lm_eval.api.model import LM

NEEDLE = re.compile(r"One of the special magic \w+ for (.+?) is: ([\w-]+)\.")
QUERY = re.compile(r"What (?:is|are all) the special magic \w+ for (.+?) mentioned in the provided")
QA_DOCUMENT = re.compile(r"The (\w+) of (\w+) is (\w+)\.")
QA_QUESTION = re.compile(r"Question: What is the (\w+) of (\w+)\?")


class ScriptedReader(LM):
    """Answers every request with :meth:`answer` of its prompt."""

    def answer(self, prompt: str) -> str:
        """What this reader says."""
        raise NotImplementedError

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The harness's entry: one answer a request."""
        return [self.answer(request.args[0]) for request in requests]

    def loglikelihood(self, requests: Sequence[Any]) -> NoReturn:
        """Readers generate."""
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> NoReturn:
        """Readers generate."""
        raise NotImplementedError


class PerfectReader(ScriptedReader):
    """Reads everything and answers what is asked.

    Its question answering knows documents of the form ``The colour of X is Y.`` alone.
    """

    def answer(self, prompt: str) -> str:
        """The answer to the prompt's last question."""
        if "numbered list of words" in prompt:
            return " ".join(_most_common(_listed_words(prompt), 10))
        if "coded text" in prompt:
            return " ".join(_most_common(_coded_words(prompt), 3))
        if "variable assignment" in prompt:
            return " ".join(_chain(prompt))
        if question := QA_QUESTION.search(prompt):
            answers = {(a, b): value for a, b, value in QA_DOCUMENT.findall(prompt)}
            return answers.get((question[1], question[2]), "")
        query = QUERY.search(prompt)
        assert query is not None, f"no question in {prompt[-200:]!r}"
        keys = re.split(r", and |, ", query[1])
        return " ".join(value for key, value in NEEDLE.findall(prompt) if key in keys)


class FirstNeedleReader(ScriptedReader):
    """Answers with the first thing that could be an answer, whatever is asked."""

    def answer(self, prompt: str) -> str:
        """The first needle's value, variable, word, or document's answer."""
        if "numbered list of words" in prompt:
            return _listed_words(prompt)[0]
        if "coded text" in prompt:
            return next(word for word in _coded_words(prompt) if word != "...")
        if "variable assignment" in prompt:
            return _chain(prompt)[0]
        if QA_QUESTION.search(prompt):
            found = QA_DOCUMENT.search(prompt)
            return found[3] if found else ""
        needle = NEEDLE.search(prompt)
        return needle[2] if needle else ""


class ConstantReader(ScriptedReader):
    """Says the same to everything, and it is no answer."""

    def answer(self, prompt: str) -> str:
        """A question mark."""
        return "?"


def _listed_words(prompt: str) -> list[str]:
    listed = prompt.split("appear most often.\n", 1)[1].rsplit("\nQuestion:", 1)[0]
    return [word.strip() for word in re.split(r"\d+\. ", listed) if word.strip()]


def _coded_words(prompt: str) -> list[str]:
    return prompt.split("coded words. ", 1)[1].rsplit("\nQuestion:", 1)[0].split()


def _most_common(words: Sequence[str], number: int) -> list[str]:
    counts = Counter(words)
    del counts["..."]
    return [word for word, _ in counts.most_common(number)]


def _chain(prompt: str) -> list[str]:
    """The variables of the last text that lead to the value asked for, in order."""
    text = prompt[prompt.rindex("Memorize and track the chain") :]
    value = re.findall(r"assigned the value (\d+) in the text", text)[-1]
    names: list[str] = []
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
        if source == value or source in names:
            names.append(name)
    return names
