"""``diagnose rope``: where attention rounds, on real layers and on normal numbers.

Heads come from a model's own layers: the walk runs the stock forward, and beside it every layer
once more on the same input with a RoPE that turns nothing, whose attention function then sees q and
k before their rotation. Each layer is measured on that one input at every position offset, so a
difference between offsets is RoPE's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import UserError
from ...model.rope import expected_inv_freq, head_size
from ...weights import folder_digest
from ..checks import at_least
from ..models import Setting, lab_model, read_config
from ..rotary import Rotary
from ..texts import Text, corpus_digest, read_texts
from ..units import Progress, Tell, Unit, UnitStore
from ..walk import Variant, walk
from ..workers import Workers
from .bands import EIGHTH, NUM_BANDS, bands_of, energy_shares, one_sided, turned, wavelengths
from .parts import Parts, split, split_bands
from .stages import Heads, parse_stack

NORMAL = "normal"
NORMAL_HEADS = 4
BANDED = "sdpa:bf16"
"""The stack that is also split by bands of frequencies: at the first and the last offset, and at
the first with the pairs of q and k turned."""
RESULT_VERSION = 3


@dataclass(frozen=True)
class RopeSettings:
    """Everything that decides the numbers of ``diagnose rope``.

    Attributes:
        model: Hugging Face model folder.
        sources: where heads come from: settings such as pretrained:bf16, whose layers are captured,
            and "normal": standard normal q, k and v, rounded to bf16.
        layers: of the captured models; empty: first, middle and last.
        stacks: see :func:`~.stages.parse_stack`.
        offsets: position of the first token.
        shift: of the twin.
        tokens: T.
        heads: query heads measured of each layer, evenly spread.
        texts, source, seed: see :func:`~..texts.read_texts`; ``seed`` also of random weights and
            normal numbers.
    """

    model: str
    sources: tuple[str, ...] = ("pretrained:bf16", "random:bf16", NORMAL)
    layers: tuple[int, ...] = ()
    stacks: tuple[str, ...] = (
        "eager:bf16",
        "sdpa:bf16",
        "rotation-fp32:bf16",
        "tables-fp32:bf16",
        "qk-fp32:bf16",
        "sdpa:fp16",
        "quantised:fp8_e4m3",
        "all:fp32",
        "all:bf16",
        "all:fp16",
        "all:fp8_e4m3",
        "all:fp8_e5m2",
        "positions:bf16",
        "frequencies:bf16",
    )
    offsets: tuple[int, ...] = (0, 1024, 16384, 131072)
    shift: int = 16
    tokens: int = 512
    heads: int = 3
    texts: int = 1
    source: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Split:
    """One stored split: ``source``, ``layer``, ``text``, ``stack``, ``offset`` and the parts."""

    source: str
    layer: int
    text: int
    stack: str
    offset: int
    parts: Parts


@dataclass(frozen=True)
class BandSplit(Split):
    """One stored split by bands, of q and k as they are or ``turned``: ``parts`` over bands;
    ``energy`` and ``one_sided`` (bands,) of them as they are and ``wavelengths`` (bands, 2), see
    :mod:`~.bands`."""

    turned: bool
    energy: np.ndarray
    one_sided: np.ndarray
    wavelengths: np.ndarray


def check_rope_settings(settings: RopeSettings) -> RopeSettings:
    """The settings with layers filled in and lists in order, or why they cannot be measured.

    Raises:
        UserError: an unknown source or stack, layers the model does not have, too few tokens.
    """
    config = read_config(settings.model, settings.tokens)
    num_layers = config.get_text_config().num_hidden_layers
    layers = settings.layers or (0, num_layers // 2, num_layers - 1)
    layers = tuple(sorted(set(layers)))
    if layers[0] < 0 or layers[-1] >= num_layers:
        raise UserError(
            f"--layers {','.join(map(str, layers))}: {settings.model} has the layers 0 to "
            f"{num_layers - 1}"
        )
    offsets = at_least("--offsets", settings.offsets, 0)
    for option, number, least in (
        ("--shift", settings.shift, 1),
        ("--tokens", settings.tokens, 2),
        ("--heads", settings.heads, 1),
        ("--texts", settings.texts, 1),
    ):
        at_least(option, [number], least)
    if not settings.sources or not settings.stacks:
        raise UserError("--sources and --stacks: give at least one each, as in normal, sdpa:bf16")
    sources = tuple(s if s == NORMAL else str(Setting.parse(s)) for s in settings.sources)
    stacks = tuple(parse_stack(stack).name for stack in settings.stacks)
    return replace(settings, layers=layers, sources=sources, stacks=stacks, offsets=offsets)


def rope_units(settings: RopeSettings) -> list[Unit]:
    """Every stack at every offset, of every layer of every source; then :data:`BANDED`, if it is
    among the stacks and there are two offsets, by bands."""
    near, far = settings.offsets[0], settings.offsets[-1]
    by_bands = [(near, 0.0), (near, EIGHTH), (far, 0.0)] if near != far else []
    units = []
    for layer in _layer_facts(settings):
        where = f"{layer['source']} layer {layer['layer']} text {layer['text']}"
        for stack in settings.stacks:
            formats = parse_stack(stack)
            for offset in settings.offsets:
                facts = {**layer, "stack": stack, "offset": offset, "formats": formats.formats}
                name = f"{where} {stack} offset {offset}"
                units.append(Unit(name, facts, len(formats.rounds) + 1.0))
        for offset, angle in by_bands if BANDED in settings.stacks else ():
            facts = {
                **layer,
                "stack": BANDED,
                "offset": offset,
                "formats": parse_stack(BANDED).formats,
                "bands": NUM_BANDS,
                "turned": angle,
            }
            name = f"{where} {BANDED} offset {offset} by bands" + (", turned" if angle else "")
            units.append(Unit(name, facts, NUM_BANDS + 1.0))
    return units


def _layer_facts(settings: RopeSettings) -> Iterator[dict[str, Any]]:
    """What decides the numbers of each layer, whatever the stack."""
    digest = folder_digest(settings.model)
    texts = corpus_digest(settings.model, settings.source)
    for source in settings.sources:
        synthetic = source == NORMAL
        for text in range(1 if synthetic else settings.texts):
            for layer in (0,) if synthetic else settings.layers:
                yield {
                    "source": source,
                    "layer": layer,
                    "text": text,
                    "shift": settings.shift,
                    "tokens": settings.tokens,
                    "heads": settings.heads,
                    "model": digest,
                    "texts": None if synthetic else texts,
                    "seed": settings.seed,
                }


def run_rope(
    settings: RopeSettings, out: Path, *, workers: Workers, tell: Tell | None = None
) -> None:
    """Measure what is not yet stored; ``settings`` come from :func:`check_rope_settings`.

    Raises:
        UserError: the model or the texts cannot be read, or ``out`` not be written.
    """
    store = UnitStore(out, "rope", RESULT_VERSION)
    missing = store.missing(rope_units(settings))
    progress = Progress(missing, tell)

    @cache
    def texts() -> list[Text]:
        return read_texts(
            settings.model,
            settings.texts,
            settings.tokens,
            source=settings.source,
            seed=settings.seed,
        )

    for source in settings.sources:
        wanted = [unit for unit in missing if unit.facts["source"] == source]
        if not wanted:
            continue
        for key, heads in _heads(settings, source, wanted, texts, workers):
            for unit in wanted:
                if (unit.facts["text"], unit.facts["layer"]) != key:
                    continue
                progress.at(unit)
                store.save(unit, _measure(unit, heads, settings, workers))
                progress.stored(unit)


def _measure(unit: Unit, heads: Heads, settings: RopeSettings, workers: Workers) -> dict[str, Any]:
    """The result of one unit."""
    stack = parse_stack(unit.facts["stack"])
    only = spread(heads.num_heads, settings.heads)
    options: dict[str, Any] = {
        "offset": unit.facts["offset"],
        "shift": settings.shift,
        "workers": workers,
        "only": only,
    }
    if "bands" not in unit.facts:
        return asdict(split(heads, stack, **options))
    bands = bands_of(heads.inv_freq)
    seen = turned(heads, unit.facts["turned"]) if unit.facts["turned"] else heads
    return {
        "parts": asdict(split_bands(seen, stack, bands, **options)),
        "energy": energy_shares(heads, bands, only),
        "one_sided": one_sided(heads, bands, only),
        "wavelengths": wavelengths(heads.inv_freq, bands),
    }


def spread(num_heads: int, count: int) -> list[int]:
    """At most ``count`` heads of 0 .. ``num_heads`` - 1, evenly spread."""
    return sorted({round(x) for x in np.linspace(0, num_heads - 1, min(count, num_heads))})


def stored_splits(
    settings: RopeSettings, out: Path
) -> tuple[list[Split], list[BandSplit], list[str]]:
    """What is stored of these settings, and where and with what it was measured."""
    store = UnitStore(out, "rope", RESULT_VERSION)
    units = rope_units(settings)
    splits, bands = [], []
    for unit in units:
        result = store.load(unit)
        if result is None:
            continue
        where = {key: unit.facts[key] for key in ("source", "layer", "text", "stack", "offset")}
        if "bands" in unit.facts:
            parts = _parts(result.pop("parts"))
            about: dict[str, Any] = {name: np.array(value) for name, value in result.items()}
            about["turned"] = unit.facts["turned"] != 0
            bands.append(BandSplit(**where, parts=parts, **about))
        else:
            splits.append(Split(**where, parts=_parts(result)))
    return splits, bands, store.made(units)


def _parts(stored: dict[str, Any]) -> Parts:
    return Parts(**{name: np.array(value, dtype=float) for name, value in stored.items()})


def capture(
    model: PreTrainedModel,
    rotary: Rotary | None,
    input_ids: torch.Tensor,
    layers: tuple[int, ...],
    workers: Workers,
) -> Iterator[tuple[int, Heads]]:
    """(layer, heads before their rotation, fp64) of a stock forward of ``input_ids`` (T,)."""
    positions = torch.arange(input_ids.numel())
    inv_freq, factor = expected_inv_freq(model.config)
    still = _NoRotation(2 * len(inv_freq))
    variants = [Variant(positions, rotary=rotary), Variant(positions, rotary=still)]
    for states in walk(model, input_ids, variants, workers=workers, same_input=True):
        if states.layer in layers:
            seen = states.attention[1]
            yield (
                states.layer,
                Heads(
                    seen.query.double(),
                    seen.key.double(),
                    seen.value.double(),
                    seen.scaling,
                    torch.from_numpy(inv_freq),
                    factor,
                ),
            )
        if states.layer == max(layers):
            return


def normal_heads(config: PreTrainedConfig, tokens: int, seed: int) -> Heads:
    """Standard normal q, k and v on the grid of bf16, with the RoPE and head dimension of a
    config."""
    dim = head_size(config.get_text_config())
    generator = torch.Generator().manual_seed(seed)
    shape = (NORMAL_HEADS, tokens, dim)
    q, k, v = (torch.randn(shape, generator=generator).bfloat16().double() for _ in range(3))
    inv_freq, factor = expected_inv_freq(config)
    return Heads(q, k, v, dim**-0.5, torch.from_numpy(inv_freq), factor)


class _NoRotation:
    """Tables of ones and zeros, which leave q and k as they are, bit for bit."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*position_ids.shape, self.dim)
        return x.new_ones(shape), x.new_zeros(shape)


def _heads(
    settings: RopeSettings,
    source: str,
    wanted: list[Unit],
    texts: Callable[[], list[Text]],
    workers: Workers,
) -> Iterator[tuple[tuple[int, int], Heads]]:
    """((text, layer), heads) of all that ``wanted`` asks for."""
    keys: set[tuple[Any, Any]] = {(unit.facts["text"], unit.facts["layer"]) for unit in wanted}
    if source == NORMAL:
        config = read_config(settings.model, settings.tokens)
        yield (0, 0), normal_heads(config, settings.tokens, settings.seed)
        return
    with lab_model(
        settings.model,
        Setting.parse(source),
        workers=workers,
        longest=settings.tokens,
        seed=settings.seed,
    ) as (model, rotary):
        for text in texts():
            layers = tuple(layer for number, layer in sorted(keys) if number == text.number)
            if not layers:
                continue
            for layer, heads in capture(model, rotary, text.ids, layers, workers):
                yield (text.number, layer), heads
