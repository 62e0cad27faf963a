"""What ``diagnose shift`` measures: settings, presets, and the walks they ask for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from ...errors import UserError
from ..checks import at_least, check_reach
from ..difference import Scores
from ..models import Setting, read_config

PANELS = ("shift", "token", "length")
KINDS = ("length", "shift")
# Raised when what a stored result holds, or how it is computed, changes.
RESULT_VERSION = 1


@dataclass(frozen=True)
class Walk:
    """One forward of a text at ``reference`` and, beside it, at each of ``shifts``.

    ``kind`` is "shift" (many shifts, one length) or "length" (one shift, many lengths, of which the
    longest contains the others). ``tokens`` is the longest length.
    """

    setting: Setting
    kind: str
    reference: int
    shifts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the forward."""
        return self.lengths[-1]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(shift, length) of every deviation it gives, in order."""
        return [(shift, length) for shift in self.shifts for length in self.lengths]

    def work(self) -> float:
        """Its share of the time, in no unit: per variant, layers are linear and attention is not.

        At 4,096 tokens attention and its differences take about as long as the layers; fp32 takes
        half as long again as bf16, fp64 three times as long.
        """
        weight = {"fp32": 1.5, "fp64": 3.0}.get(self.setting.dtype, 1.0)
        return weight * (len(self.shifts) + 1) * self.tokens * (1 + self.tokens / 4096)


@dataclass(frozen=True)
class ShiftSettings:
    """Everything that decides the numbers of ``diagnose shift``.

    Attributes:
        model: Hugging Face model folder.
        settings: weights and dtypes of the three panels.
        beside: further ones, measured against length only, up to ``beside_tokens``.
        reference: the shift Delta_2 that the others are compared with.
        shifts: Delta_1 at ``tokens`` tokens.
        length_shift: Delta_1 against length.
        lengths: tokens, rising.
        panels: which of the paper's three panels; "token" needs the walk of "shift".
        texts: number of sequences; source, seed: see :func:`~..texts.read_texts`.
        scores: see :mod:`~..difference`.
        same_input: see :func:`~..walk.walk`.
        extrapolate: allow positions past the model's trained length.
    """

    model: str
    settings: tuple[Setting, ...]
    shifts: tuple[int, ...]
    lengths: tuple[int, ...]
    beside: tuple[Setting, ...] = ()
    beside_tokens: int = 1024
    reference: int = 16
    tokens: int = 4096
    length_shift: int = 0
    panels: tuple[str, ...] = PANELS
    texts: int = 2
    source: str | None = None
    seed: int = 0
    scores: Scores = "fp32"
    same_input: bool = False
    extrapolate: bool = False
    device: str = "cpu"

    @property
    def text_tokens(self) -> int:
        """Tokens of every text: enough for all panels, chosen or not, so that texts stay equal."""
        return max(self.tokens, *self.lengths)

    def walks(self) -> list[Walk]:
        """The walks of one text: those against length, which are the quicker ones, first."""
        walks = []
        short = tuple(n for n in self.lengths if n <= self.beside_tokens)
        if "length" in self.panels:
            walks += [self._against_length(setting, self.lengths) for setting in self.settings]
            walks += [self._against_length(setting, short) for setting in self.beside if short]
        if {"shift", "token"} & set(self.panels):
            walks += [
                Walk(setting, "shift", self.reference, self.shifts, (self.tokens,))
                for setting in self.settings
            ]
        return walks

    def fingerprint(self, walk: Walk, model_digest: str) -> str:
        """Of everything but the text that decides the walk's numbers."""
        facts = {
            "version": RESULT_VERSION,
            "walk": asdict(walk),
            "model": model_digest,
            "seed": self.seed if walk.setting.weights == "random" else None,
            "scores": self.scores,
            "same_input": self.same_input,
            "device": self.device.partition(":")[0],
        }
        text = json.dumps(facts, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def _against_length(self, setting: Setting, lengths: tuple[int, ...]) -> Walk:
        return Walk(setting, "length", self.reference, (self.length_shift,), lengths)


def _settings(*texts: str) -> tuple[Setting, ...]:
    return tuple(Setting.parse(text) for text in texts)


PAPER_SHIFTS = (0, 2, 4, 6, 8, 10, 12, 14, 15, 17, 18, 20, 22, 50, 100, 200, 500, 1000, 2000)
PRESETS = {
    # Figure 1 of arXiv 2411.13476; fp16 and the floor in fp64 are ours.
    "paper": ShiftSettings(
        model="",
        settings=_settings("pretrained:bf16", "pretrained:fp32", "random:bf16"),
        beside=_settings("pretrained:fp16", "pretrained:fp64"),
        shifts=PAPER_SHIFTS,
        lengths=(64, 128, 256, 512, 1024, 2048, 4096, 8192),
        texts=50,
        # 8,192 tokens shifted by 16 pass a trained length of 8,192.
        extrapolate=True,
    ),
    "quick": ShiftSettings(
        model="",
        settings=_settings("pretrained:bf16", "pretrained:fp32", "random:bf16"),
        beside=_settings("pretrained:fp64"),
        shifts=(0, 8, 15, 17, 100, 1000),
        tokens=1024,
        lengths=(64, 256, 1024),
        beside_tokens=256,
    ),
}


def check_settings(settings: ShiftSettings) -> ShiftSettings:
    """The settings in order (numbers rising, each once), or why they cannot be measured.

    Raises:
        UserError: too few tokens, negative shifts, an unknown panel, positions past the model's
            trained length, a device that is not there, a model that cannot be walked.
    """
    import torch

    settings = replace(
        settings,
        shifts=at_least("--shifts", settings.shifts, 0),
        lengths=at_least("--lengths", settings.lengths, 2),
    )
    at_least("--tokens", [settings.tokens], 2)
    at_least("--reference", [settings.reference], 0)
    at_least("--length-shift", [settings.length_shift], 0)
    at_least("--texts", [settings.texts], 1)
    for panel in settings.panels:
        if panel not in PANELS:
            raise UserError(f"--panels {panel}: choose from {', '.join(PANELS)}")
    if not settings.settings and not settings.beside:
        raise UserError("--settings is empty: give weights and dtype, as in pretrained:bf16")
    if not settings.walks():
        raise UserError(
            f"nothing to measure: no length of {', '.join(map(str, settings.lengths))} is within "
            f"--beside-tokens {settings.beside_tokens}"
        )
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {settings.device}: torch sees no GPU; leave it out")
    config = read_config(settings.model, settings.text_tokens)
    for walk in settings.walks():
        check_reach(
            settings.model,
            config,
            walk.tokens,
            max(walk.reference, *walk.shifts),
            fix="measure shorter ones (--tokens, --lengths, --shifts), or add --extrapolate",
            extrapolate=settings.extrapolate,
        )
    return settings
