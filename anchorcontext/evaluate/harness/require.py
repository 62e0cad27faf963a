"""The harness is an extra: say so where it is missing, keep it quiet and offline where it runs."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ...errors import UserError

UNTRAINED = "untrained punkt"
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends
PACKAGES = {"lm_eval": "lm_eval[hf]", "wonderwords": "wonderwords", "nltk": "nltk"}


def require_harness() -> None:
    """Check that the extra ``eval`` is installed.

    Raises:
        UserError: a package of it is missing.
    """
    missing = [pip for name, pip in PACKAGES.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not installed: these tasks run through lm-evaluation-harness; "
            "pip install 'anchorcontext[eval]'"
        )


@contextlib.contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Keep the harness's notes and prints away from the terminal; its bars too unless ``bars``."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            if not bars:
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def hub(*, download: bool) -> Iterator[None]:
    """Let data sets come from the hub, or from its cache on this machine alone.

    The libraries read their ``*_OFFLINE`` variables once, when they are imported.
    """
    import datasets
    import huggingface_hub

    flags = [(datasets.config, "HF_HUB_OFFLINE"), (huggingface_hub.constants, "HF_HUB_OFFLINE")]
    before = [getattr(module, name) for module, name in flags]
    try:
        for module, name in flags:
            setattr(module, name, getattr(module, name) or not download)
        yield
    finally:
        for (module, name), value in zip(flags, before, strict=True):
            setattr(module, name, value)


@cache
def sentence_splitter(*, download: bool) -> str:
    """Make nltk's sentence splitter usable and say which it is; needed before the harness's NIAH.

    The harness splits essays into sentences to put needles between them, with nltk's trained
    English model, a download. Without it the same algorithm runs untrained: it ends a sentence at
    ``Dr.`` too, and a needle may then stand there. Prompts differ from the published ones in that.
    """
    import nltk
    from nltk.tokenize.punkt import PunktParameters, save_punkt_params

    name = "tokenizers/punkt_tab"
    with contextlib.suppress(LookupError):
        nltk.data.find(name)
        return UNTRAINED if _FOLDERS else "punkt_tab"
    if download and nltk.download("punkt_tab", quiet=True):
        return "punkt_tab"
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="anchorcontext-nltk-"))
    folder = Path(_FOLDERS[0].name)
    nltk.data.path.append(str(folder))  # first: nltk writes only where it also reads
    (folder / name).mkdir(parents=True)
    save_punkt_params(PunktParameters(), dir=str(folder / name / "english"))
    return UNTRAINED
