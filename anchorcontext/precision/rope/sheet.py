"""Tables and readings of ``diagnose rope``.

Readings state what the numbers say; the thresholds they use are the constants below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ..sheet import CLEAR, Sheet, Table, trend
from .band_sheet import band_means, band_readings, band_table
from .casting import FAR, CastResult
from .formats import lost_positions
from .measure import BandSplit, RopeSettings, Split
from .parts import KINDS, QUANTITIES
from .stages import STAGES, parse_stack

# A part is named in a reading from this share of the whole on.
NAMED = 0.1
# Parts explain the whole when stages alone, as independent errors, come this near.
EXPLAINED = 0.15
COLLAPSE = (("bf16", 4096), ("bf16", 131_072), ("fp16", 4096), ("fp16", 131_072))


def rope_sheet(
    settings: RopeSettings,
    splits: Sequence[Split],
    bands: Sequence[BandSplit],
    casts: Sequence[CastResult],
    *,
    command: str,
    made: list[str],
) -> Sheet:
    """Everything that was measured."""
    means = band_means(bands)
    by_bands = band_table(means, settings.shift)
    return Sheet(
        name="rope",
        title="Where the rounding happens",
        command=command,
        made=made,
        settings=asdict(settings),
        readings=rope_readings(splits, settings.shift)
        + band_readings(means, settings.tokens)
        + cast_readings(casts),
        tables=[
            _totals(splits, settings.shift),
            *(_parts(splits, kind, settings.shift) for kind in KINDS),
            *by_bands,
            _stacks(settings.stacks),
            _positions(),
            _casts(casts),
        ],
        brief=[
            _by_offset(splits, settings.shift),
            *(
                _parts([s for s in splits if s.offset == offset], "twin", settings.shift)
                for offset in sorted({settings.offsets[0], settings.offsets[-1]})
            ),
            *by_bands,
            _stacks(settings.stacks),
            _positions(),
            _casts(casts),
        ],
    )


def find(
    splits: Sequence[Split], *, stack: str, source: str | None = None, offset: int | None = None
) -> list[Split]:
    """The splits of a stack, over all layers and texts."""
    return [
        s
        for s in splits
        if s.stack == stack
        and (source is None or s.source == source)
        and (offset is None or s.offset == offset)
    ]


def mean_total(splits: Sequence[Split], kind: str, quantity: str) -> float:
    """Mean over layers and texts of the total; NaN without any."""
    index = (KINDS.index(kind), QUANTITIES.index(quantity))
    return float(np.mean([s.parts.total[index] for s in splits])) if splits else float("nan")


def mean_shares(splits: Sequence[Split], kind: str, quantity: str) -> dict[str, float]:
    """Stage -> its part of the total, from the means over layers and texts."""
    index = (KINDS.index(kind), QUANTITIES.index(quantity))
    parts = np.mean([s.parts.ordered[index] for s in splits], axis=0)
    whole = parts.sum()
    return {
        stage: float(part / whole) if whole else 0.0
        for stage, part in zip(STAGES, parts, strict=True)
    }


def mean_interaction(splits: Sequence[Split], kind: str, quantity: str) -> float:
    """Total minus what independent stages would give, over the total."""
    index = (KINDS.index(kind), QUANTITIES.index(quantity))
    rest = np.mean([s.parts.interaction[index] for s in splits])
    whole = np.mean([s.parts.total[index] for s in splits])
    return float(rest / whole) if whole else 0.0


def rope_readings(splits: Sequence[Split], shift: int) -> list[str]:
    """What the splits say, source by source."""
    readings = []
    for source in dict.fromkeys(s.source for s in splits):
        own = [s for s in splits if s.source == source]
        offsets = sorted({s.offset for s in own})
        for stack in ("sdpa:bf16", "eager:bf16"):
            at = find(own, stack=stack, offset=offsets[0])
            if not at:
                continue
            readings.append(
                f"{source}, {stack}, offset {offsets[0]:,}: of what a shift of {shift} changes in "
                f"probabilities, {_named(mean_shares(at, 'twin', 'probability'))}; "
                f"{_explained(mean_interaction(at, 'twin', 'probability'))}"
            )
        readings += _growth(own, source, offsets) + _remedies(own, source, offsets)
        readings += _single(own, source, offsets)
    return readings


def _named(shares: dict[str, float]) -> str:
    ordered = sorted(shares.items(), key=lambda item: -abs(item[1]))
    named = [f"{share:.0%} comes from {stage}" for stage, share in ordered if abs(share) >= NAMED]
    return ", ".join(named) or f"no stage adds {NAMED:.0%}"


def _explained(interaction: float) -> str:
    if abs(interaction) <= EXPLAINED:
        return f"the stages one at a time explain it, with {interaction:+.0%} of interaction."
    more = "more" if interaction > 0 else "less"
    return (
        f"together the stages do {abs(interaction):.0%} of it {more} than one at a time: they "
        "are not independent."
    )


def _growth(own: Sequence[Split], source: str, offsets: list[int]) -> list[str]:
    readings = []
    for stack in ("sdpa:bf16", "all:fp32"):
        first, last = (
            mean_total(find(own, stack=stack, offset=o), "twin", "probability")
            for o in (offsets[0], offsets[-1])
        )
        if not first or np.isnan(first) or np.isnan(last) or len(offsets) < 2:
            continue
        readings.append(
            f"{source}, {stack}: from offset {offsets[0]:,} to {offsets[-1]:,} the deviation "
            f"{trend(last / first)}."
        )
    return readings


def _remedies(own: Sequence[Split], source: str, offsets: list[int]) -> list[str]:
    """What rounding less buys, against stock."""
    stock = mean_total(find(own, stack="sdpa:bf16", offset=offsets[0]), "twin", "probability")
    found = {}
    for stack in ("rotation-fp32:bf16", "tables-fp32:bf16", "qk-fp32:bf16"):
        value = mean_total(find(own, stack=stack, offset=offsets[0]), "twin", "probability")
        if stock and not np.isnan(value) and not np.isnan(stock):
            found[stack] = value / stock
    if not found:
        return []
    listed = ", ".join(f"{stack} {ratio:.2g}" for stack, ratio in found.items())
    best = min(found, key=lambda stack: found[stack])
    verdict = (
        f"{best} leaves least"
        if found[best] < 1 / CLEAR
        else f"none is below {1 / CLEAR:.2f} of it"
    )
    return [f"{source}: of sdpa:bf16's deviation under the shift remain {listed}; {verdict}."]


def _single(own: Sequence[Split], source: str, offsets: list[int]) -> list[str]:
    """One stage alone in low precision, against fp64 at the furthest offset and against stock."""
    stock = mean_total(find(own, stack="sdpa:bf16", offset=offsets[-1]), "exact", "probability")
    readings = []
    for stack in dict.fromkeys(s.stack for s in own):
        if len(parse_stack(stack).rounds) > 1:
            continue
        at = find(own, stack=stack, offset=offsets[-1])
        value = mean_total(at, "exact", "probability")
        if at and stock and not np.isnan(stock):
            readings.append(
                f"{source}: {stack} alone, at offset {offsets[-1]:,}, deviates from fp64 by "
                f"{value / stock:.3g} times what all of sdpa:bf16 does."
            )
    return readings


def cast_readings(casts: Sequence[CastResult]) -> list[str]:
    """Which routes round RoPE's table."""
    measured = [cast for cast in casts if not cast.note]
    lost = [cast.route for cast in measured if not cast.kept]
    kept = [cast.route for cast in measured if cast.kept]
    readings = [
        f"Positions: {name} loses {first:,} first and keeps {left:,} of {count:,} ids."
        for name, count in COLLAPSE
        for first, left in [lost_positions(name, count)]
        if first is not None
    ]
    if lost:
        worst = max((c for c in measured if not c.kept), key=lambda c: c.radians)
        readings.append(
            f"inv_freq is rounded by {', '.join(lost)}: up to {worst.radians:.3g} radians at "
            f"position {FAR:,}. It is kept by {', '.join(kept) or 'no route'}."
        )
    elif measured:
        readings.append("inv_freq is kept by every route.")
    return readings


def _totals(splits: Sequence[Split], shift: int) -> Table:
    rows: list[list[Any]] = []
    for source, stack in dict.fromkeys((s.source, s.stack) for s in splits):
        for offset in sorted({s.offset for s in splits}):
            at = find(splits, stack=stack, source=source, offset=offset)
            if at:
                values = [
                    mean_total(at, kind, quantity) for kind in KINDS for quantity in QUANTITIES
                ]
                rows.append([source, stack, offset, *values])
    return Table(
        "Deviation of one layer given one input, mean over layers and texts: against fp64 at the "
        f"same positions, and against itself shifted by {shift}. Probabilities: eq. 4, entry form, "
        "weighted, sum over heads; scores: eq. 5, mean of absolute values; outputs: relative.",
        [
            "heads from",
            "stack",
            "offset",
            "fp64: probabilities",
            "scores",
            "outputs",
            "shifted: probabilities",
            "scores",
            "outputs",
        ],
        rows,
    )


def _by_offset(splits: Sequence[Split], shift: int) -> Table:
    offsets = sorted({s.offset for s in splits})
    ends = sorted({offsets[0], offsets[-1]})
    rows: list[list[Any]] = []
    for source, stack in dict.fromkeys((s.source, s.stack) for s in splits):
        own = find(splits, stack=stack, source=source)
        at = {o: find(own, stack=stack, offset=o) for o in offsets}
        rows.append(
            [
                source,
                stack,
                *(mean_total(at[o], "twin", "probability") for o in offsets),
                *(mean_total(at[o], "exact", "probability") for o in ends),
                *(mean_total(at[offsets[0]], kind, "score") for kind in ("twin", "exact")),
                mean_total(at[offsets[0]], "exact", "output"),
            ]
        )
    first = f"offset {offsets[0]:,}"
    return Table(
        f"D of one layer given one input under a shift of {shift}, by the first token's position "
        "(eq. 4, entry form, weighted, sum over the heads measured; mean over layers and texts); "
        f"then D against fp64 at the same positions; and, at {first}, the mean absolute score "
        "error (eq. 5) under the shift and against fp64, and the output's relative error against "
        "fp64.",
        [
            "heads from",
            "stack",
            *(f"offset {o:,}" for o in offsets),
            *(f"fp64, offset {o:,}" for o in ends),
            "scores, shifted",
            "scores, fp64",
            "output, fp64",
        ],
        rows,
    )


def _parts(splits: Sequence[Split], kind: str, shift: int) -> Table:
    what = "against fp64" if kind == "exact" else f"under a shift of {shift}"
    shares = {
        (source, stack, offset): (mean_shares(at, kind, "probability"), at)
        for source, stack in dict.fromkeys((s.source, s.stack) for s in splits)
        if len(parse_stack(stack).rounds) > 1
        for offset in sorted({s.offset for s in splits})
        if (at := find(splits, stack=stack, source=source, offset=offset))
    }
    shown = [
        stage for stage in STAGES if any(_percent(of[stage]) != "0.0%" for of, _ in shares.values())
    ]
    rows: list[list[Any]] = [
        [
            *key,
            *(_percent(of[stage]) for stage in shown),
            f"{mean_interaction(at, kind, 'probability'):+.0%}",
        ]
        for key, (of, at) in shares.items()
    ]
    return Table(
        f"Parts of D {what}, stages switched on in order; stages that add nothing anywhere are "
        "left out. Interaction: what D has more or less than independent stages one at a time.",
        ["heads from", "stack", "offset", *shown, "interaction"],
        rows,
    )


def _percent(share: float) -> str:
    text = f"{share:.1%}"
    return "0.0%" if text == "-0.0%" else text


def _stacks(stacks: Sequence[str]) -> Table:
    rows = [[stack, *parse_stack(stack).formats] for stack in stacks]
    return Table("The format of every stage, by stack.", ["stack", *STAGES], rows)


def _positions() -> Table:
    rows: list[list[Any]] = []
    for name in ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"):
        first, few = lost_positions(name, 4096)
        _, many = lost_positions(name, 131_072)
        rows.append([name, first, few, many])
    return Table(
        "Position ids held in a format.",
        ["format", "first one lost", "values left of 4,096", "of 131,072"],
        rows,
    )


def _casts(casts: Sequence[CastResult]) -> Table:
    rows: list[list[Any]] = [
        [c.route, c.dtype, c.relative_error, c.radians, c.note or ("kept" if c.kept else "rounded")]
        for c in casts
    ]
    return Table(
        f"RoPE's inv_freq after each way to a low-precision model, on a tiny LLaMA; radians: how "
        f"far the angle of position {FAR:,} is off.",
        ["route", "dtype", "relative error", "radians", "table"],
        rows,
    )
