"""The table and the readings of bands of frequencies.

Readings state what the numbers say; the thresholds they use are the constants below and in
:mod:`~..sheet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..sheet import CLEAR, Table, trend
from .measure import BANDED, BandSplit
from .parts import KINDS, QUANTITIES

# What comes from these frequencies, or from how q and k lie, in a reading: at least this share.
MOST = 0.5


@dataclass(frozen=True)
class BandMeans:
    """Of one source, means over layers and texts; D is eq. 4 under the shift.

    Attributes:
        near, far: the first and the last offset.
        wavelengths: (B, 2) tokens.
        energy, one_sided: (B,) as in :mod:`~.bands`.
        total: (3,) D near, near with pairs turned, far.
        alone: (3, B) D of each band alone, at the same.
        parts: (3, B) the parts of D.
    """

    near: int
    far: int
    wavelengths: np.ndarray
    energy: np.ndarray
    one_sided: np.ndarray
    total: np.ndarray
    alone: np.ndarray
    parts: np.ndarray

    @property
    def growth(self) -> float:
        """D far over D near."""
        return float(self.total[2] / self.total[0])

    @property
    def by_turning(self) -> float:
        """D near with pairs turned over D near."""
        return float(self.total[1] / self.total[0])

    @property
    def shares_of_growth(self) -> np.ndarray:
        """(B,): they add up to one."""
        shares: np.ndarray = (self.parts[2] - self.parts[0]) / (self.total[2] - self.total[0])
        return shares

    def slower_than(self, tokens: int) -> np.ndarray:
        """(B,) bool: bands all of whose wavelengths are longer than a text."""
        slow: np.ndarray = self.wavelengths[:, 0] > tokens
        return slow


def band_means(bands: Sequence[BandSplit]) -> dict[str, BandMeans]:
    """By source; without those that are not stored at two offsets, or whose D is 0 or no number."""
    found = {}
    for source in dict.fromkeys(b.source for b in bands):
        own = [b for b in bands if b.source == source]
        near, far = min(b.offset for b in own), max(b.offset for b in own)
        places = [(near, False), (near, True), (far, False)]
        at = [[b for b in own if (b.offset, b.turned) == place] for place in places]
        if near == far or not all(at):
            continue
        total, alone, parts = (
            np.array([_mean(place, name) for place in at]) for name in ("total", "alone", "ordered")
        )
        if np.isfinite(total).all() and (total > 0).all():
            energy, one = (
                np.mean([getattr(b, k) for b in own], axis=0) for k in ("energy", "one_sided")
            )
            found[source] = BandMeans(
                near, far, own[0].wavelengths, energy, one, total, alone, parts
            )
    return found


def _mean(splits: Sequence[BandSplit], name: str) -> Any:
    index = (KINDS.index("twin"), QUANTITIES.index("probability"))
    return np.mean([getattr(split.parts, name)[index] for split in splits], axis=0)


def band_table(found: dict[str, BandMeans], shift: int) -> list[Table]:
    """One table, or none."""
    if not found:
        return []
    first = next(iter(found.values()))
    near, far = f"offset {first.near:,}", f"offset {first.far:,}"
    rows: list[list[Any]] = []
    for source, of in found.items():
        grows = of.growth >= CLEAR
        for number in range(len(of.energy)):
            rows.append(
                [
                    source,
                    _tokens(of.wavelengths[number]),
                    f"{of.energy[number]:.0%}",
                    f"{of.one_sided[number]:.0%}",
                    *of.alone[:, number].tolist(),
                    *(f"{of.parts[i, number] / of.total[i]:.0%}" for i in (0, 2)),
                    f"{of.shares_of_growth[number]:.0%}" if grows else None,
                ]
            )
        rows.append([source, "all", "100%", None, *of.total.tolist(), "100%", "100%", None])
    return [
        Table(
            f"D of {BANDED} under a shift of {shift} by bands of RoPE's frequencies: alone, only q "
            "and k of a band are rounded and all else is fp64; parts, bands switched on in order. "
            "Energy: the band's share of rms(|q|) rms(|k|). In one dimension: the share of |q|² "
            "and |k|² in the larger of a pair's two (50%: in both alike). Turned: every pair of q "
            "and k turned by an eighth of a turn first, which changes nothing in exact arithmetic. "
            f"Of the growth: parts of what D has more at {far}, where it grows {CLEAR} times or "
            "more.",
            [
                "heads from",
                "wavelengths, tokens",
                "energy",
                "in one dimension",
                f"alone, {near}",
                f"alone, {near}, turned",
                f"alone, {far}",
                f"part, {near}",
                f"part, {far}",
                "of the growth",
            ],
            rows,
        )
    ]


def band_readings(found: dict[str, BandMeans], tokens: int) -> list[str]:
    """Whether D grows with the offset, by which frequencies, and why, source by source."""
    return [
        f"{source}, {BANDED}: from offset {of.near:,} to {of.far:,} D {trend(of.growth)}; "
        + (_why(of, tokens) if of.growth >= CLEAR else _why_not(of))
        for source, of in found.items()
    ]


def _why(of: BandMeans, tokens: int) -> str:
    slow = of.slower_than(tokens)
    share = float(of.shares_of_growth[slow].sum())
    if share < MOST:
        most = int(of.shares_of_growth.argmax())
        return (
            f"{share:.0%} of the growth comes from frequencies slower than the text: it is not "
            f"they. Those of {_tokens(of.wavelengths[most])} tokens add most, "
            f"{of.shares_of_growth[most]:.0%}."
        )
    energy = of.energy[slow]
    lying = float((of.one_sided[slow] * energy).sum() / energy.sum())
    which = (
        f"{share:.0%} of the growth comes from frequencies slower than the text ("
        f"{_tokens(of.wavelengths[slow])} tokens, {energy.sum():.0%} of the scores' energy). "
        "Turning every pair of q and k by an eighth of a turn, which changes nothing in exact "
        f"arithmetic, makes D {of.by_turning:.3g} times what it was at offset {of.near:,}: "
    )
    if of.by_turning - 1 >= MOST * (of.growth - 1):
        return which + (
            f"it is how q and k lie in these pairs, {lying:.0%} of their energy in one of the two "
            "dimensions (50%: in both alike), which near 0 hardly turn."
        )
    return which + "it is how little these frequencies turn near 0, not how q and k lie in them."


def _why_not(of: BandMeans) -> str:
    slowest = of.alone[2, -1] / of.alone[0, -1] if of.alone[0, -1] else float("nan")
    return (
        f"the slowest band ({_tokens(of.wavelengths[-1])} tokens, {of.energy[-1]:.0%} of the "
        f"scores' energy) alone grows {slowest:.3g} times and makes up "
        f"{of.parts[2, -1] / of.total[2]:.0%} of D far out; turning every pair of q and k by an "
        f"eighth of a turn makes D at offset {of.near:,} {of.by_turning:.3g} times what it was."
    )


def _tokens(lengths: np.ndarray) -> str:
    """Of wavelengths: the shortest and the longest, in three digits."""
    low, high = (f"{float(f'{x:.3g}'):,.0f}" for x in (lengths.min(), lengths.max()))
    return f"{low} to {high}"
