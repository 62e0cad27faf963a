"""Tables, readings and figures of ``diagnose first-token``.

Readings state what the numbers say; the thresholds they use are the constants below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from ..sheet import LARGER, STANDS_OUT, Sheet, Table
from .arms import EXCLUDED, PLAIN
from .measure import ArmResult, FirstTokenSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def first_token_sheet(
    settings: FirstTokenSettings, results: Sequence[ArmResult], *, command: str, made: list[str]
) -> Sheet:
    """Everything that was measured."""
    return Sheet(
        name="first-token",
        title="The first token: sink mass or larger error",
        command=command,
        made=made,
        settings=asdict(settings),
        readings=first_token_readings(results),
        tables=[_table(settings, results)],
    )


def cause(spot: dict[str, float], tokens: int) -> str:
    """Why a column holds the share of D it holds: "no more than others", "sink mass", "larger logit
    error", "both", or "neither"."""
    due = STANDS_OUT / tokens
    if spot["share"] < due:
        return "no more than others"
    mass, error = spot["mass"] >= due, spot["score_ratio"] >= LARGER
    if mass and error:
        return "both"
    if mass:
        return "sink mass"
    return "larger logit error" if error else "neither"


_CAUSES = {
    "no more than others": f"it holds less than {STANDS_OUT:g} equal shares",
    "sink mass": "sink mass: its probability is large, its logit error is not",
    "larger logit error": "a larger logit error: its probability is not large",
    "both": "both: its probability is large, and so is its logit error",
    "neither": "neither its probability nor its logit error stands out",
}


def first_token_readings(results: Sequence[ArmResult]) -> list[str]:
    """What the arms say, setting by setting; where the first column does not stand out, what moves
    it is not asked."""
    readings = []
    for setting in dict.fromkeys(r.setting for r in results):
        arms = {r.arm: r for r in results if r.setting == setting}
        if PLAIN not in arms:
            continue
        readings.append(_plain(setting, arms[PLAIN]))
        if EXCLUDED in arms:
            readings.append(_excluded(setting, arms[PLAIN], arms[EXCLUDED]))
        plain = arms[PLAIN]
        if cause(plain.spot(), int(plain.values["tokens"])) != "no more than others":
            readings += _others(setting, arms)
    readings += _clamped(results)
    return readings


def _plain(setting: str, result: ArmResult) -> str:
    spot, tokens = result.spot(), int(result.values["tokens"])
    per_mass = spot["share"] / spot["mass"] if spot["mass"] else float("inf")
    return (
        f"{setting}: the first of {tokens:,} columns holds {spot['share']:.1%} of D and "
        f"{spot['mass']:.1%} of the probability ({per_mass:.2g} of D for each of it; a column's "
        f"equal share is {1 / tokens:.2%}); its logit error is {spot['score_ratio']:.2f} times "
        f"that of the others. {_CAUSES[cause(spot, tokens)].capitalize()}."
    )


def _excluded(setting: str, plain: ArmResult, rest: ArmResult) -> str:
    ratio, spot = total(rest) / total(plain), rest.spot()
    left = 1 - plain.spot()["share"]
    change = "deviate as before"
    if ratio > LARGER * left:
        change = "deviate more, now that they share its probability"
    elif ratio < left / LARGER:
        change = "deviate less"
    return (
        f"{setting}: when nobody sees the first token, D is {ratio:.2f} times what it was, where "
        f"its column alone would leave {left:.2f}: the others {change}. The next column then holds "
        f"{spot['share']:.1%} of D, with {spot['mass']:.1%} of the probability."
    )


def _others(setting: str, arms: dict[str, ArmResult]) -> list[str]:
    plain = arms[PLAIN].spot()["share"]
    readings = []
    tokens = {arm: r for arm, r in arms.items() if arm.startswith("token:")}
    if tokens and plain:
        listed = ", ".join(f"{arm[6:]} {r.spot()['share']:.1%}" for arm, r in tokens.items())
        ratios = [r.spot()["share"] / plain for r in tokens.values()]
        alike = all(1 / LARGER <= ratio <= LARGER for ratio in ratios)
        verdict = "it is the place that counts" if alike else "the token counts"
        readings.append(
            f"{setting}: with another first token its column holds {listed} (BOS {plain:.1%}): "
            f"{verdict}."
        )
    for arm, result in arms.items():
        if arm.startswith("moved:") and "bos" in result.values["spots"]:
            first, bos = result.spot()["share"], result.spot("bos")["share"]
            wins = "the first place" if first > bos else "BOS"
            readings.append(
                f"{setting}: with BOS at index {arm[6:]} the first column holds {first:.1%}, BOS's "
                f"own {bos:.1%}: the share follows {wins}."
            )
        if arm.startswith("gap:") and plain:
            share = result.spot()["share"]
            far = "keeps" if 1 / LARGER <= share / plain <= LARGER else "changes"
            readings.append(
                f"{setting}: {arm[4:]} positions further from the others, the first column {far} "
                f"its share: {share:.1%} instead of {plain:.1%}."
            )
    return readings


def _clamped(results: Sequence[ArmResult]) -> list[str]:
    """Against the same arm in the widest dtype: what is left there is no rounding."""
    found = {(r.setting, r.arm): r for r in results}
    readings = []
    for (setting, arm), result in found.items():
        weights = setting.partition(":")[0]
        wide = next(
            (
                found[f"{weights}:{d}", arm]
                for d in ("fp64", "fp32")
                if (f"{weights}:{d}", arm) in found
            ),
            None,
        )
        plain = found.get((setting, PLAIN))
        if arm != "clamped" or plain is None or wide is None or wide is result:
            continue
        exact = total(wide) / total(result)
        readings.append(
            f"{setting}: clamping the first position gives {total(result) / total(plain):.2f} "
            f"times the D of shifting it too, {min(exact, 1.0):.0%} of which is there in "
            f"{wide.setting.partition(':')[2]} as well, since distances to the first token change."
        )
    return readings


def total(result: ArmResult) -> float:
    """D, entry form, weighted."""
    return float(result.values["total"]["entry"]["weighted"])


def _table(settings: FirstTokenSettings, results: Sequence[ArmResult]) -> Table:
    rows: list[list[Any]] = []
    for result in results:
        tokens = int(result.values["tokens"])
        for name, spot in result.values["spots"].items():
            rows.append(
                [
                    result.setting,
                    result.arm if name == "first" else f"{result.arm}, BOS",
                    int(spot["column"]),
                    total(result),
                    f"{spot['share']:.1%}",
                    f"{spot['share_unweighted']:.1%}",
                    f"{spot['mass']:.1%}",
                    f"{spot['probability']:.1%}",
                    float(spot["score"]),
                    f"{spot['score_ratio']:.2f}",
                    f"{spot['score_share']:.2%}",
                    cause(spot, tokens),
                ]
            )
    reference, other = settings.shifts
    return Table(
        f"Shift {other} against {reference}, {settings.tokens:,} tokens. D: eq. 4, entry form, "
        "weighted, sum over layers and heads. Of one key column: its share of D, weighted and not; "
        "its share of the probability with the same weights; the mean probability on it; eq. 5, "
        "entry form, that over the mean of the other columns, and its share of the sum.",
        [
            "setting",
            "arm",
            "column",
            "D",
            "share of D",
            "unweighted",
            "share of mass",
            "probability",
            "logit error",
            "over others'",
            "share of errors",
            "cause",
        ],
        rows,
    )


def draw_first_token(results: Sequence[ArmResult]) -> dict[str, Figure]:
    """``first-token-columns``: D, mass and logit error by column; ``first-token-heads``: a head's
    share of D on the first column against its probability there.

    Raises:
        UserError: matplotlib is not installed.
    """
    from ...watch.draw import new_figure

    plain = [r for r in results if r.arm == PLAIN]
    columns = new_figure(width=13.0, height=4.2)
    for index, (key, title) in enumerate(
        (("columns", "D a column"), ("scores", "logit error"), ("mass", "probability"))
    ):
        axes = columns.add_subplot(1, 3, index + 1)
        for result in plain:
            x = np.array(result.values["edges"][:-1]) + 1
            axes.plot(x, result.values[key], marker=".", linewidth=1, label=result.setting)
        axes.set(xscale="log", yscale="log", title=title, xlabel="key column, counted from 1")
        axes.grid(alpha=0.3)
    heads = new_figure(width=4.4 * max(len(plain), 1), height=4.2)
    for index, result in enumerate(plain):
        axes = heads.add_subplot(1, len(plain), index + 1)
        whole = np.maximum(np.array(result.values["heads"]), 1e-300)
        share = np.array(result.values["first"]) / whole
        axes.scatter(np.array(result.values["head_mass"]).ravel(), share.ravel(), s=8)
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
        axes.set(xlabel="probability on the first column", title=result.setting)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.grid(alpha=0.3)
    if plain:
        columns.axes[0].legend(fontsize=8)
        heads.axes[0].set_ylabel("first column's share of a head's D")
    return {"first-token-columns": columns, "first-token-heads": heads} if plain else {}
