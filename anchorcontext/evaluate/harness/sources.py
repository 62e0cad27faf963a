"""What prompts are made of besides what the generators draw: a haystack and questions.

RULER hides needles in Paul Graham's essays and asks SQuAD and HotpotQA; all three are downloads.
``--haystack`` and ``--qa`` take files of this machine instead. What is then scored is the same
task on another text: the report says so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import UserError
from .catalog import Source
from .require import hub, sentence_splitter

PUBLISHED_TEXT = "the published one"
Questions = tuple[list[dict[str, Any]], list[str]]
"""The harness's form: questions with their ``context`` as indices of documents; the documents."""


@dataclass
class Sources:
    """Local texts, and whether the hub may be asked for the others."""

    haystack: Path | None = None
    """A text file, or a folder of ``*.txt`` and ``*.md``."""
    qa: list[Path] = field(default_factory=list)
    """SQuAD and HotpotQA JSON files, told apart by their form."""
    download: bool = False
    _described: dict[str, dict[str, str]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for path in [*([self.haystack] if self.haystack else []), *self.qa]:
            if not path.exists():
                raise UserError(f"{path}: no such file; give a path on this machine")

    def missing(self, source: Source) -> str | None:
        """Why prompts that need ``source`` cannot be made here; None when they can."""
        try:
            self.load(source)
        except _Unavailable as reason:
            return str(reason)
        return None

    def load(self, source: Source) -> Any:
        """The words of the haystack, the questions, or None for ``"none"``."""
        if source == "none":
            return None
        return self.words if source == "haystack" else getattr(self, source)

    def describe(self, source: Source) -> dict[str, str]:
        """What stands in the report and in a unit's fingerprint: name and digest of the text."""
        if source not in self._described:
            self._described[source] = self._describe(source)
        return self._described[source]

    def _describe(self, source: Source) -> dict[str, str]:
        if source == "none":
            return {}
        path = self.haystack if source == "haystack" else self._qa_files.get(source)
        content = json.dumps(self.load(source)).encode()
        facts = {
            source: PUBLISHED_TEXT if path is None else path.name,
            "digest": hashlib.blake2b(content, digest_size=8).hexdigest(),
        }
        if source == "haystack":
            facts["sentences"] = sentence_splitter(download=self.download)
        return facts

    @cached_property
    def words(self) -> list[str]:
        """The haystack, word by word."""
        if self.haystack is None:
            return self._fetch("haystack", "--haystack TEXT", _published_essays)
        files = [self.haystack]
        if self.haystack.is_dir():
            files = sorted(p for p in self.haystack.iterdir() if p.suffix in (".txt", ".md"))
        try:
            text = " ".join(file.read_text(encoding="utf-8") for file in files)
        except UnicodeDecodeError as error:
            raise UserError(f"--haystack {self.haystack}: not a UTF-8 text ({error})") from None
        words = re.sub(r"\s+", " ", text).strip().split(" ")
        if words == [""]:
            raise UserError(f"--haystack {self.haystack}: holds no text")
        return words

    @cached_property
    def squad(self) -> Questions:
        """Questions of SQuAD 2.0 that have an answer."""
        if "squad" in self._qa_files:
            return _read_squad(self._qa_files["squad"])
        return self._fetch("squad", "--qa SQUAD.json", _published_squad)

    @cached_property
    def hotpotqa(self) -> Questions:
        """Questions of HotpotQA, its distractors among the documents."""
        if "hotpotqa" in self._qa_files:
            return _read_hotpotqa(self._qa_files["hotpotqa"])
        return self._fetch("hotpotqa", "--qa HOTPOTQA.json", _published_hotpotqa)

    @cached_property
    def _qa_files(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for path in self.qa:
            kind = _qa_kind(path)
            if kind in found:
                raise UserError(f"--qa {path}: {found[kind]} is a {kind} file too; give one")
            found[kind] = path
        return found

    def _fetch(self, source: str, option: str, read: Callable[[bool], Any]) -> Any:
        try:
            with hub(download=self.download):
                return read(self.download)
        except _Unavailable:
            raise
        except Exception as error:
            # Whatever the hub's client raises: the answer is the same, and the task is not run.
            raise _Unavailable(
                f"needs {option}, or a download (--download; {type(error).__name__})"
            ) from error


class _Unavailable(Exception):
    """A text is not on this machine; the message says which option gives it."""


def _published_essays(download: bool) -> list[str]:
    from lm_eval.tasks.ruler.prepare_niah import get_haystack

    words = get_haystack(type_haystack="essay")
    assert isinstance(words, list)
    return words


def _published_squad(download: bool) -> Questions:
    if not download:
        raise _Unavailable("needs --qa SQUAD.json, or a download (--download)")
    from lm_eval.tasks.ruler.qa_utils import read_squad

    return read_squad()


def _published_hotpotqa(download: bool) -> Questions:
    if not download:
        raise _Unavailable("needs --qa HOTPOTQA.json, or a download (--download)")
    from lm_eval.tasks.ruler.qa_utils import read_hotpotqa

    return read_hotpotqa()


def _qa_kind(path: Path) -> str:
    content = _read_json(path)
    if isinstance(content, dict) and "data" in content:
        return "squad"
    if isinstance(content, list) and content and {"question", "context"} <= set(content[0]):
        return "hotpotqa"
    raise UserError(
        f"--qa {path}: neither SQuAD (an object with 'data') nor HotpotQA (a list of objects with "
        "'question', 'answer' and 'context'); give such a file"
    )


def _read_squad(path: Path) -> Questions:
    """As the harness reads SQuAD: documents sorted, each once; impossible questions left out."""
    paragraphs = [article["paragraphs"] for article in _read_json(path)["data"]]
    documents = sorted({p["context"] for article in paragraphs for p in article})
    index = {text: number for number, text in enumerate(documents)}
    questions = []
    for article in paragraphs:
        for paragraph in article:
            own = index[paragraph["context"]]
            others = [i for i in (index[p["context"]] for p in article) if i != own]
            questions += [
                {
                    "query": question["question"],
                    "outputs": [answer["text"] for answer in question["answers"]],
                    "context": [own],
                    "more_context": others,
                }
                for question in paragraph["qas"]
                if not question.get("is_impossible")
            ]
    return _checked(path, questions, documents)


def _read_hotpotqa(path: Path) -> Questions:
    """As the harness reads HotpotQA: a document is its title and its sentences."""
    samples = _read_json(path)
    texts = [[f"{title}\n{''.join(lines)}" for title, lines in s["context"]] for s in samples]
    documents = sorted({text for sample in texts for text in sample})
    index = {text: number for number, text in enumerate(documents)}
    questions = [
        {
            "query": sample["question"],
            "outputs": [sample["answer"]],
            "context": [index[text] for text in own],
        }
        for sample, own in zip(samples, texts, strict=True)
    ]
    return _checked(path, questions, documents)


def _checked(path: Path, questions: list[dict[str, Any]], documents: list[str]) -> Questions:
    if not questions:
        raise UserError(f"--qa {path}: holds no question that has an answer")
    return questions, documents


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"--qa {path}: not a JSON file ({error})") from None
