"""The tasks that can be asked for, the presets, and the paper's published scores."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ...errors import UserError
from ..lengths import length_label

Source = Literal["none", "haystack", "squad", "hotpotqa"]


@dataclass(frozen=True)
class RulerTask:
    """One of RULER's 13 tasks (arXiv 2404.06654, table 2 and appendix B)."""

    name: str
    """In the harness."""
    label: str
    """In the papers."""
    generates: int
    """Tokens that the answer may take; they count against the length."""
    source: Source = "none"
    """What the prompt is made of besides what the generator draws."""
    match: Literal["all", "part"] = "all"
    """All references of an answer count, or any one of them suffices."""


RULER = {
    task.name: task
    for task in (
        RulerTask("niah_single_1", "NIAH-Single-1", 128),
        RulerTask("niah_single_2", "NIAH-Single-2", 128, "haystack"),
        RulerTask("niah_single_3", "NIAH-Single-3", 128, "haystack"),
        RulerTask("niah_multikey_1", "NIAH-Multikey-1", 128, "haystack"),
        RulerTask("niah_multikey_2", "NIAH-Multikey-2", 128),
        RulerTask("niah_multikey_3", "NIAH-Multikey-3", 128),
        RulerTask("niah_multivalue", "NIAH-Multivalue", 128, "haystack"),
        RulerTask("niah_multiquery", "NIAH-Multiquery", 128, "haystack"),
        RulerTask("ruler_vt", "VT", 30),
        RulerTask("ruler_cwe", "CWE", 120),
        RulerTask("ruler_fwe", "FWE", 50),
        RulerTask("ruler_qa_squad", "QA-1", 32, "squad", "part"),
        RulerTask("ruler_qa_hotpot", "QA-2", 32, "hotpotqa", "part"),
    )
}
PRESETS = {
    "ruler-13": list(RULER),
    # The paper's set for LLaMA-2 (arXiv 2411.13476, section 5): without Multikey-3 and CWE.
    "ruler-11": [name for name in RULER if name not in ("niah_multikey_3", "ruler_cwe")],
    # What needs neither a haystack nor questions.
    "ruler-synthetic": [name for name, task in RULER.items() if task.source == "none"],
}
ALIASES = {name.removeprefix("ruler_"): name for name in RULER if name.startswith("ruler_")}
STANDARD = {
    "hellaswag": "Rowan/hellaswag",
    "mmlu": "cais/mmlu",
    "longbench": "Xnhyacinth/LongBench",
}
"""Tasks without a length of ours, and the data set of the hub that each is made of."""
LOSS_BY_POSITION = "loss-by-position"

PUBLISHED_LENGTHS = ("4K", "8K", "16K", "32K", "64K", "128K")
# arXiv 2411.13476, LLaMA-2-7B trained on SlimPajama at 128K: mean of 11 tasks.
PUBLISHED = {
    "full attention": (88.85, 83.61, 81.65, 71.38, 70.56, 62.75),
    "intra-doc": (88.98, 84.11, 82.60, 72.07, 70.87, 64.31),
    "intra-doc, reset": (90.01, 84.43, 82.82, 73.30, 73.34, 65.75),
    "anchor": (90.60, 86.41, 83.67, 74.28, 77.69, 66.15),
    "anchor, tag": (89.09, 84.07, 83.07, 75.77, 74.67, 65.46),
}


def expand_tasks(asked: str | Iterable[str]) -> list[str]:
    """Names as the harness has them, presets spelt out, each once, in the order asked.

    ``asked`` is a comma-separated text or names. A name that is none of ours is looked up in the
    harness, which has thousands.

    Raises:
        UserError: there is no such task; the message has the nearest names.
    """
    names = asked.split(",") if isinstance(asked, str) else list(asked)
    found: dict[str, None] = {}
    for name in filter(None, (part.strip() for part in names)):
        if name in PRESETS:
            found |= dict.fromkeys(PRESETS[name])
        else:
            found[_known(ALIASES.get(name, name))] = None
    if not found:
        raise UserError(f"--tasks {asked!r}: name at least one task, such as {_some_names()}")
    return list(found)


def published_score(row: str, length: int) -> float | None:
    """The paper's mean at this length; it prints 4K and does not say whether 4,000 or 4,096."""
    label = "4K" if length == 4000 else length_label(length)
    if label not in PUBLISHED_LENGTHS:
        return None
    return PUBLISHED[row][PUBLISHED_LENGTHS.index(label)]


def _known(name: str) -> str:
    ours = {*RULER, *STANDARD, LOSS_BY_POSITION}
    if name in ours:
        return name
    near = difflib.get_close_matches(name, [*ours, *PRESETS, *ALIASES], n=3)
    if near:
        raise UserError(f"--tasks {name!r}: no such task; did you mean {', '.join(near)}?")
    others = _harness_names()
    if name in others:
        return name
    near = difflib.get_close_matches(name, others, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else f"choose from {_some_names()}"
    raise UserError(f"--tasks {name!r}: no such task; {hint}")


def _harness_names() -> list[str]:
    from .require import require_harness

    require_harness()
    from lm_eval.tasks import TaskManager

    return list(TaskManager().all_tasks)


def _some_names() -> str:
    return ", ".join([*PRESETS, *RULER, *STANDARD, LOSS_BY_POSITION])
