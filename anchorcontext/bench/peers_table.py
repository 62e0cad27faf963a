"""The section of docs/benchmarks.md that ``bench peers`` writes, and whether targets were met."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..markdown import markdown_table
from .peer_functions import ANCHOR, FULL, FUNCTIONS, INTRA_DOC
from .peers import BYTES_TARGET, ContenderResult, PeersReport, SettingResult

TARGET_HEADERS = ("computes", "", "best of ours", "best peer", "ratio", "target", "")
NOTES = (
    "Times are those of the slowest rank over the best peer's that computes the same function in "
    "the same setting, repeat by repeat; the median of the repeats. No peer computes `anchor`: its "
    "times are over the best peer's that computes `intra_doc`, which is less work.",
    "Bytes are counted by the ranks' network interfaces, headers included; without root by the "
    "machine's loopback interface, what other programs send included. gloo's reduce-scatter, "
    "which llama3 varlen calls, moves twice what NCCL's would.",
    "ring-flash-attn 0.1.8 is the package from PyPI; flash-attn's functions are provided for CPU "
    "tensors. Zigzag varlen wants documents divisible by 2 P: each is padded at its end.",
    "DeepSpeed's UlyssesSPAttentionHF hands no documents on: packed or not, it computes `full`.",
    "PyTorch's dispatcher of context parallel has no CPU operator (`NotImplementedError`): its "
    "ring is called with the CPU operator handed in. Its path for document masks, FlexAttention, "
    "has no backward on CPUs.",
    "DeepSpeed and PyTorch compute with torch's operator in the tensors' dtype; ours and "
    "ring-flash-attn's run the backward in fp32.",
)


@dataclass(frozen=True)
class Verdict:
    """How far ahead of the peers the best of ours is, in time or in bytes."""

    function: str
    what: str
    ours: str
    peer: str
    """With its median seconds, or its bytes."""
    ratio: float
    """The peer's time or bytes over ours."""
    target: float

    @property
    def met(self) -> bool:
        """Whether the target was reached."""
        return self.ratio >= self.target


def verdicts(report: PeersReport) -> list[Verdict]:
    """One for each function with peers and each setting, and one for the bytes."""
    found = []
    for function in FUNCTIONS:
        counted = None
        for setting in report.settings:
            ours, peers = setting.of(function, ours=True), setting.of(function, ours=False)
            if not (ours and peers):
                continue
            best, peer = (min(side, key=lambda r: r.median_seconds) for side in (ours, peers))
            found.append(
                Verdict(
                    function,
                    f"time, {setting.setting.name}",
                    best.name,
                    f"{peer.name}, {peer.median_seconds:.2f} s",
                    1 / time_ratio(best, peer),
                    setting.setting.target,
                )
            )
            counted = _bytes_verdict(function, ours, peers)
        if counted is not None:
            found.append(counted)
    return found


def _bytes_verdict(
    function: str, ours: list[ContenderResult], peers: list[ContenderResult]
) -> Verdict:
    best, peer = (min(side, key=lambda r: r.wire_bytes or 0.0) for side in (ours, peers))
    ratio = (peer.wire_bytes or 0.0) / (best.wire_bytes or 1.0)
    theirs = f"{peer.name}, {(peer.wire_bytes or 0.0) / 1e6:.2f} MB"
    return Verdict(function, "bytes", best.name, theirs, ratio, BYTES_TARGET)


def time_ratio(result: ContenderResult, other: ContenderResult) -> float:
    """The median over the repeats of the ratio of their times."""
    return float(np.median(np.array(result.seconds) / np.array(other.seconds)))


def target_rows(report: PeersReport) -> list[tuple[str, ...]]:
    """Rows of the table of targets."""
    return [
        (
            verdict.function,
            verdict.what,
            verdict.ours,
            verdict.peer,
            f"{verdict.ratio:.2f}×",
            f"{verdict.target:g}×",
            "met" if verdict.met else "**missed**",
        )
        for verdict in verdicts(report)
    ]


def contender_headers(report: PeersReport) -> tuple[str, ...]:
    """Headers of the tables of contenders."""
    names = [setting.setting.name for setting in report.settings]
    return ("attention", *names, "MB sent a rank", "largest error, out", "gradients")


def contender_rows(report: PeersReport, function: str) -> list[tuple[str, ...]]:
    """Rows of the table of those that compute ``function``, a column a setting."""
    rows: list[tuple[str, ...]] = []
    some = next((s.results for s in report.settings if s.results), [])
    for index, contender in enumerate(some):
        if contender.function != function:
            continue
        everywhere = [s.results[index] if s.results else None for s in report.settings]
        if contender.unavailable is not None:
            rows.append((contender.name, f"did not run: {contender.unavailable}"))
            continue
        cells = [
            "–" if result is None else _relative_time(result, setting)
            for result, setting in zip(everywhere, report.settings, strict=True)
        ]
        # In the last setting: a throttled one where there is any, in which nobody else sends.
        sent = [r.wire_bytes for r in everywhere if r is not None and r.wire_bytes is not None]
        name = f"**{contender.name}**" if contender.ours else contender.name
        errors = (_error(contender.out_error), _error(contender.gradient_error))
        rows.append((name, *cells, f"{sent[-1] / 1e6:.2f}", *errors))
    width = len(contender_headers(report))
    return [row + ("",) * (width - len(row)) for row in rows]


def peers_markdown(report: PeersReport, setting: str, command: str) -> str:
    """The section of docs/benchmarks.md."""
    parts = ["## Against peers", f"Written by `{command}`. {setting}"]
    parts.append("\n".join(f"- {line}" for line in setting_lines(report)))
    parts.append(markdown_table(TARGET_HEADERS, target_rows(report)))
    for function in FUNCTIONS:
        where = f", the first {report.full_tokens:,} tokens" if function == FULL else ""
        parts.append(f"### `{function}`{where}")
        rows = contender_rows(report, function)
        parts.append(markdown_table(contender_headers(report), rows))
    parts.append("\n".join(f"- {note}" for note in NOTES))
    return "\n\n".join(parts)


def setting_lines(report: PeersReport) -> list[str]:
    """What each setting was, and why one was left out."""
    return [_setting_line(setting, report.flops_per_second) for setting in report.settings]


def _setting_line(result: SettingResult, flops_per_second: float) -> str:
    setting = result.setting
    if setting.flops_per_byte is None or result.bytes_per_second is None:
        return f"{setting.name}: all ranks on one loopback interface, not throttled."
    line = (
        f"{setting.name}: each rank in a network namespace behind a link of "
        f"{result.bytes_per_second / 1e6:.2f} MB/s, {setting.flops_per_byte / 1e3:g} kFLOP of the "
        f"{flops_per_second / 1e9:.1f} GFLOP/s that one rank reaches for each byte."
    )
    return line if result.unavailable is None else f"{line} Left out: {result.unavailable}."


def _relative_time(result: ContenderResult, setting: SettingResult) -> str:
    function = INTRA_DOC if result.function == ANCHOR else result.function
    peers = setting.of(function, ours=False)
    if not peers:
        return f"{result.median_seconds:.3f} s"
    best = min(peers, key=lambda r: r.median_seconds)
    return f"{time_ratio(result, best):.2f}"


def _error(error: float | None) -> str:
    return "–" if error is None else f"{error:.1e}"
