"""``diagnose gradients``: what dtype, shifts and controls do to the gradient that trains.

The reference is fp32 at shift 0 with the weights rounded to bf16, so that an arm in bf16 differs in
its arithmetic alone; what the rounding of the weights does is an arm of its own.

Arms are written ``DTYPE[+CONTROL...][@SHIFT]``: ``bf16``, ``bf16@16``, ``bf16+rope_tables+
rotation``; controls are keys of ``attention.precision``, set to fp32, and ``weights``: those of the
checkpoint, not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...config.sections import ModelSection, PrecisionSection
from ...errors import UserError
from ...model import TrainModel
from ...model.load import build_model
from ...model.rope import cast_parameters
from ...weights import folder_digest
from ..checks import at_least, check_reach
from ..models import read_config
from ..texts import corpus_digest, read_texts
from ..units import Progress, Tell, Unit, UnitStore
from .compare import Apart, TextGradients, compare, text_gradients

RESULT_VERSION = 2
CONTROLS = ("rope_tables", "rotation", "qk", "weights")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
REFERENCE = "fp32"


@dataclass(frozen=True)
class GradientArm:
    """A dtype, the controls, and the shift."""

    dtype: str
    controls: tuple[str, ...]
    shift: int

    @classmethod
    def parse(cls, text: str) -> GradientArm:
        """The arm that ``text`` names.

        Raises:
            UserError: unknown dtype or control, or one without effect.
        """
        name, _, shift = text.strip().partition("@")
        dtype, *controls = name.split("+")
        unknown = [control for control in controls if control not in CONTROLS]
        if dtype not in DTYPES or unknown or not (shift or "0").isdigit():
            raise UserError(
                f"arm {text!r}: give DTYPE[+CONTROL...][@SHIFT], DTYPE bf16 or fp32, controls "
                f"{', '.join(CONTROLS)}; as in bf16+rotation@16"
            )
        if dtype == "fp32" and set(controls) - {"weights"}:
            raise UserError(f"arm {text!r}: controls have no effect in fp32; leave them out")
        if dtype == "bf16" and "weights" in controls:
            raise UserError(f"arm {text!r}: weights are rounded in bf16; take fp32+weights")
        if "rope_tables" in controls and "rotation" not in controls:
            raise UserError(
                f"arm {text!r}: tables in fp32 are lost in a rotation in bf16; add +rotation"
            )
        ordered = tuple(control for control in CONTROLS if control in controls)
        return cls(dtype, ordered, int(shift or 0))

    def __str__(self) -> str:
        return self.base + (f"@{self.shift}" if self.shift else "")

    @property
    def base(self) -> str:
        """The arm without its shift."""
        return "+".join((self.dtype, *self.controls))


@dataclass(frozen=True)
class GradientSettings:
    """Everything that decides the numbers of ``diagnose gradients``.

    Attributes:
        model: Hugging Face model folder.
        arms: see :class:`GradientArm`.
        tokens: T.
        texts, source, seed: see :func:`~..texts.read_texts`.
    """

    model: str
    arms: tuple[str, ...] = (
        "fp32@16",
        "fp32+weights",
        "bf16",
        "bf16@16",
        "bf16+rotation",
        "bf16+rope_tables+rotation",
        "bf16+rope_tables+rotation@16",
        "bf16+qk",
        "bf16+rope_tables+rotation+qk",
        "bf16+rope_tables+rotation+qk@16",
    )
    tokens: int = 1024
    texts: int = 2
    source: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class GradientResult:
    """One arm: for each text, its loss and how far its gradient is from others'.

    ``against`` maps "fp32" (the reference) and, of a shifted arm, "unshifted" (the same arm at
    shift 0) to one mapping a text, from a tensor's name to :class:`~.compare.Apart`.
    """

    arm: str
    losses: list[float]
    against: dict[str, list[dict[str, Apart]]]


def check_gradient_settings(settings: GradientSettings) -> GradientSettings:
    """The settings with arms in their usual form, or why they cannot be measured.

    Raises:
        UserError: unknown arms, too few tokens, positions the model does not reach.
    """
    at_least("--tokens", [settings.tokens], 2)
    at_least("--texts", [settings.texts], 1)
    arms = [GradientArm.parse(arm) for arm in settings.arms]
    if not arms:
        raise UserError("--arms is empty: give at least one, as in bf16")
    check_reach(
        settings.model,
        read_config(settings.model, settings.tokens),
        settings.tokens,
        max(arm.shift for arm in arms),
        fix="take fewer --tokens, or smaller shifts",
    )
    names = tuple(dict.fromkeys(str(arm) for arm in arms if str(arm) != REFERENCE))
    return replace(settings, arms=names)


def gradient_units(settings: GradientSettings) -> list[Unit]:
    """Every arm, text by text."""
    digest = folder_digest(settings.model)
    texts = corpus_digest(settings.model, settings.source)
    return [
        Unit(
            f"{arm} text {text}",
            {
                "arm": arm,
                "text": text,
                "tokens": settings.tokens,
                "model": digest,
                "texts": texts,
                "seed": settings.seed,
            },
        )
        for text in range(settings.texts)
        for arm in settings.arms
    ]


def run_gradients(settings: GradientSettings, out: Path, *, tell: Tell | None = None) -> None:
    """Measure what is not yet stored; settings come from :func:`check_gradient_settings`.

    Memory: one model, and the gradients of at most three (the reference's, an arm's, and those of
    the arm shifted).

    Raises:
        UserError: the model or the texts cannot be read, or ``out`` not be written.
    """
    store = UnitStore(out, "gradients", RESULT_VERSION)
    missing = store.missing(gradient_units(settings))
    if not missing:
        return
    progress = Progress(missing, tell)
    texts = read_texts(
        settings.model,
        settings.texts,
        settings.tokens,
        source=settings.source,
        seed=settings.seed,
    )
    for text in texts:
        units = {u.facts["arm"]: u for u in missing if u.facts["text"] == text.number}
        if not units:
            continue

        def gradients(arm: GradientArm, ids: torch.Tensor = text.ids) -> TextGradients:
            return _gradients(settings, arm, ids)

        for name, result in _text_results([GradientArm.parse(a) for a in units], gradients):
            store.save(units[name], result)
            progress.stored(units[name])


def stored_gradients(
    settings: GradientSettings, out: Path
) -> tuple[list[GradientResult], list[str]]:
    """What is stored, arm by arm, and where and with what it was measured."""
    store = UnitStore(out, "gradients", RESULT_VERSION)
    units = gradient_units(settings)
    results = []
    for arm in settings.arms:
        found = [store.load(unit) for unit in units if unit.facts["arm"] == arm]
        kept = [result for result in found if result is not None]
        if not kept:
            continue
        against = {
            other: [
                {name: Apart(*sums) for name, sums in result["against"][other].items()}
                for result in kept
            ]
            for other in kept[0]["against"]
        }
        results.append(GradientResult(arm, [float(r["loss"]) for r in kept], against))
    return results, store.made(units)


def _text_results(
    arms: list[GradientArm], gradients: Callable[[GradientArm], TextGradients]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(arm, result) of one text; an arm's unshifted gradient is computed when it is needed."""
    reference = gradients(GradientArm.parse(REFERENCE))
    for base in dict.fromkeys(arm.base for arm in arms):
        own = [arm for arm in arms if arm.base == base]
        plain = GradientArm.parse(base)
        unshifted = reference if base == REFERENCE else gradients(plain)
        for arm in own:
            found = unshifted if arm == plain else gradients(arm)
            against = {"fp32": compare(found, reference)}
            if arm.shift:
                against["unshifted"] = compare(found, unshifted)
            yield (
                str(arm),
                {
                    "loss": found.loss,
                    "against": {
                        other: {name: list(asdict(apart).values()) for name, apart in by.items()}
                        for other, by in against.items()
                    },
                },
            )


def _gradients(
    settings: GradientSettings, arm: GradientArm, input_ids: torch.Tensor
) -> TextGradients:
    section = ModelSection(path=settings.model, dtype="bf16", gradient_checkpointing=True)
    controls = {control: "fp32" for control in arm.controls if control != "weights"}
    precision = PrecisionSection.model_validate(controls)
    own_weights = "weights" in arm.controls
    model = build_model(
        section,
        window_tokens=settings.tokens,
        dtype=DTYPES["fp32" if own_weights else "bf16"],
        precision=precision,
        probe=False,
    )
    cast_parameters(model, DTYPES[arm.dtype])
    # Peaked softmax gradients are full of numbers below 1e-38, which processors handle slowly.
    torch.set_flush_denormal(True)
    try:
        return text_gradients(TrainModel(model).train(), input_ids, arm.shift)
    finally:
        torch.set_flush_denormal(False)
