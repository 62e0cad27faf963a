"""``make gpu-check``: everything that only a GPU can show, in one script without downloads.

It needs torch, triton, numpy and transformers, and the package's own files; no DeepSpeed, no
flash-attn. In order: what is installed; every engine against fp64 in bf16; a few training steps of
a tiny model against stock transformers; speed of forward and backward by mode and length; RoPE by
the engine and exact rows; the other dtypes against fp64. An engine that fails is reported and left
out of what follows; the rest goes on, in a new process where a kernel has left the GPU unusable to
this one. Results are written as JSON and Markdown after each step, so that a run cut short leaves
what it has; steps for which the time did not suffice are named.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anchorcontext.kernels import engine_report, merge

from ..markdown import markdown_table
from . import engine_settings, kernels, numerics
from .beside_stock import train_beside_stock
from .numerics import QUANTITIES

# Every length and dtype costs compilations (flex: two for each length and mode), which take more of
# the minutes than the sums do: only bf16, what is trained in, is checked at all lengths.
FULL = {"numerics": (1024, 4096, 16384), "others": (1024,), "speed": (16384, 65536, 131072)}
QUICK = {"numerics": (300,), "others": (300,), "speed": (1024,)}
MINUTES = 7.0
"""No step starts later than this."""
ERROR_LIMITS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}
"""Largest relative error of outputs and gradients, and largest error of the LSE: a few roundings of
the dtype."""
TRAINING_LIMITS = {"bfloat16": 3e-2, "float32": 1e-4}


class DeviceLost(Exception):
    """No CUDA call of this process succeeds any more, since ``part`` failed."""

    def __init__(self, part: str) -> None:
        super().__init__(part)
        self.part = part


@dataclass
class Check:
    """The parts done so far."""

    folder: Path
    device: torch.device
    setting: dict[str, str]
    without: tuple[str, ...] = ()
    """Engines, and other parts, that are left out: they have lost a process its device."""
    deadline: float = math.inf
    """`time.perf_counter` after which no step starts."""
    failures: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    """Steps for which the time did not suffice."""
    parts: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)

    def attempt(self, what: str, compute: Callable[[], Any], part: str) -> Any:
        """What ``compute`` returns; None, and a line on record, when it raises or time is up."""
        if part in self.without:
            return None
        started = time.perf_counter()
        if started > self.deadline:
            self.late.append(what)
            return None
        try:
            found = compute()
        except DeviceLost:
            raise
        except Exception as error:  # whatever a kernel's compiler or the driver throws
            self.fail(what, error, part)
            return None
        _say(f"{what}: {time.perf_counter() - started:.1f} s")
        return found

    def fail(self, what: str, error: Exception, part: str) -> None:
        """Put the failure of a step on record.

        Raises:
            DeviceLost: nothing more can be computed in this process.
        """
        traceback.print_exception(error)
        first = str(error).strip().splitlines()[:1]
        self.failures.append(f"{what}: {type(error).__name__}: {' '.join(first)}")
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as lost:  # an illegal address, for one, is never forgiven
                raise DeviceLost(part) from lost

    def record(self, name: str, results: Sequence[Any], section: str) -> None:
        """Keep a part's results (data classes) so far and write everything there is."""
        self.parts[name] = [_without_nan(asdict(result)) for result in results]
        self.sections[name] = section
        self.write()

    def write(self) -> None:
        """gpu_check.json and gpu_check.md."""
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = {
            "setting": self.setting,
            "failures": self.failures,
            "not_reached": self.late,
            **self.parts,
        }
        (self.folder / "gpu_check.json").write_text(json.dumps(whole, indent=2) + "\n")
        lines = [f"{name} {value}" for name, value in self.setting.items()]
        notes = [f"- failed: {failure}" for failure in self.failures]
        notes += [f"- not run, the time was up: {step}" for step in self.late]
        sections = self.sections.values()
        page = "\n\n".join(["# GPU check", ", ".join(lines) + ".", *notes, *sections])
        (self.folder / "gpu_check.md").write_text(page + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; 0 when nothing failed, 1 when something did, 2 without the device."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="folder written")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no step starts later")
    parser.add_argument("--without", nargs="*", default=[], help="engines to leave out")
    parser.add_argument("--failed", nargs="*", default=[], help="failures to begin with")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        _say("gpu-check: no CUDA device here; nothing was checked")
        return 2
    device = torch.device(options.device)
    deadline = time.perf_counter() + 60 * options.minutes
    check = Check(
        options.out, device, _setting(device), tuple(options.without), deadline, options.failed
    )
    try:
        _run(check, quick=options.quick)
    except DeviceLost as lost:
        check.write()
        return _go_on_without(lost.part, check, quick=options.quick)
    check.write()
    for failure in check.failures:
        _say(f"FAILED {failure}")
    for step in check.late:
        _say(f"not run, the time was up: {step}")
    _say(f"written to {options.out}")
    return 1 if check.failures else 0


def _run(check: Check, *, quick: bool) -> None:
    sizes = QUICK if quick else FULL
    found = _Numerics(check)
    engines = found.sound_engines(torch.bfloat16, sizes["numerics"])
    check.attempt("merges in Triton", partial(_fused_merges, check.device), "merges")
    _training(check)
    _speed(check, sizes["speed"], engines, quick=quick)
    _settings(check)
    for dtype in (torch.float16, torch.float32):
        found.sound_engines(dtype, sizes["others"])


def _go_on_without(part: str, check: Check, *, quick: bool) -> int:
    """The check over again in a new process, which finds everything compiled, without ``part``."""
    if part in check.without:
        _say(f"FAILED the device is lost without {part}, too")
        return 1
    _say(f"{part} has left the device unusable: once more without it")
    left = (check.deadline - time.perf_counter()) / 60
    command = [sys.executable, "-m", "anchorcontext.bench.gpu_check", "--out", str(check.folder)]
    command += ["--device", str(check.device), "--minutes", str(left)]
    command += ["--without", *check.without, part, "--failed", *check.failures]
    return subprocess.run([*command, *["--quick"] * quick], check=False).returncode


def _fused_merges(device: torch.device) -> None:
    """Merges that Triton could not make run in torch, and nothing but a warning says so."""
    if device.type == "cuda" and merge._fused_kernels(device) is None:
        raise RuntimeError("Triton's merges do not run on this device; see the warning above")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _setting(device: torch.device) -> dict[str, str]:
    versions = {}
    for package in ("torch", "triton", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "date": str(datetime.date.today()), **versions}


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """What was not measured as null: JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in values.items()
    }


class _Numerics:
    """Errors of the engines against fp64, dtype by dtype."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._results: list[numerics.EngineErrors] = []
        self._skipped: list[tuple[str, str, str]] = []

    def sound_engines(self, dtype: torch.dtype, lengths: Sequence[int]) -> list[str]:
        """The engines whose errors stay within the limit."""
        check, short = self._check, str(dtype).removeprefix("torch.")
        sound: list[str] = []
        exact_results: dict = {}
        for name, reason in engine_report(check.device, dtype).items():
            if name in check.without:
                reason = "it has left the device unusable"
            if reason is not None:
                self._skipped.append((name, short, reason))
                continue
            compute = partial(_errors, check.device, lengths, dtype, name, exact_results)
            found = check.attempt(f"errors of {name} in {short}", compute, name)
            if found is None:
                continue
            # torch's own call comes with every engine; one line of it is enough.
            known = {(r.engine, r.mode, r.tokens, r.dtype) for r in self._results}
            self._results += [
                r for r in found if (r.engine, r.mode, r.tokens, r.dtype) not in known
            ]
            worst = _worst(found, name)
            if worst <= ERROR_LIMITS[short]:
                sound.append(name)
            else:
                check.failures.append(
                    f"{name} in {short}: error {worst:.1e} above {ERROR_LIMITS[short]:.0e}"
                )
            self._record()
        self._record()
        return sound

    def _record(self) -> None:
        tables = [
            markdown_table(numerics.HEADERS, numerics.table_rows(self._results)),
            markdown_table(("engine", "dtype", "not run, because"), self._skipped),
        ]
        section = "\n\n".join(["## Errors against fp64", *tables])
        self._check.record("numerics", self._results, section)


def _worst(found: Sequence[numerics.EngineErrors], name: str) -> float:
    """The engine's largest error; infinite where one is not a number."""
    errors = [getattr(r, quantity) for r in found if r.engine == name for quantity in QUANTITIES]
    return max((math.inf if math.isnan(error) else error for error in errors), default=math.inf)


def _errors(
    device: torch.device, lengths: Sequence[int], dtype: torch.dtype, name: str, exact_results: dict
) -> list[numerics.EngineErrors]:
    found = numerics.bench_numerics(
        lengths=lengths,
        dtypes=[dtype],
        device=device,
        heads=(4, 2),
        head_dim=128,
        engines=[name],
        exact_results=exact_results,
    )
    return list(found)


def _speed(check: Check, lengths: Sequence[int], engines: Sequence[str], *, quick: bool) -> None:
    """TFLOP/s of the sound engines in bf16, 32 query and 8 key/value heads of 128."""
    names = [name for name in engines if name != "reference"]
    results: list[kernels.KernelSpeed] = []
    for tokens in lengths:
        for mode in kernels.MODES:
            what = f"speed in mode {mode} at {tokens:,} tokens"
            found = check.attempt(
                what,
                partial(
                    kernels.bench_kernels,
                    lengths=[tokens],
                    device=check.device,
                    dtype=torch.bfloat16,
                    heads=(4, 1) if quick else (32, 8),
                    head_dim=128,
                    modes=[mode],
                    engines=names,
                    failed=partial(_contestant_failed, check, what),
                ),
                "speed",
            )
            results += found or []
            table = markdown_table(kernels.HEADERS, kernels.table_rows(results))
            check.record("speed", results, f"## Speed in bf16\n\n{table}")


def _contestant_failed(check: Check, what: str, name: str, error: Exception) -> None:
    check.fail(f"{what}: {name}", error, name)


def _settings(check: Check) -> None:
    """RoPE by the engine and exact rows, each by the engine that `auto` takes for it."""
    results: list[engine_settings.SettingError] = []
    for dtype in (torch.bfloat16, torch.float32):
        short = str(dtype).removeprefix("torch.")
        for what, compute, limit in (
            ("RoPE by the engine", engine_settings.rope_in_engine, ERROR_LIMITS[short]),
            ("exact rows", engine_settings.exact_rows, 0.0),
        ):
            if what in check.without:
                continue
            found = check.attempt(f"{what} in {short}", partial(compute, check.device, dtype), what)
            if found is None:
                continue
            results.append(found)
            if not found.error <= limit:
                check.failures.append(f"{what} in {short}: {found} above {limit}")
    table = markdown_table(engine_settings.HEADERS, engine_settings.table_rows(results))
    check.record("settings", results, f"## RoPE by the engine, and exact rows\n\n{table}")


def _training(check: Check) -> None:
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        found = check.attempt(
            f"training in {short}", partial(train_beside_stock, check.device, dtype), "training"
        )
        if found is None:
            continue
        results.append(found)
        limit = TRAINING_LIMITS[short]
        if not (found.loss <= limit and found.weights <= limit):  # a NaN is above it
            check.failures.append(f"training in {short}: {found} above {limit}")
    rows = [(r.dtype, r.engine, r.steps, f"{r.loss:.1e}", f"{r.weights:.1e}") for r in results]
    table = markdown_table(("dtype", "engine", "steps", "loss", "change of the weights"), rows)
    check.record(
        "training",
        results,
        f"## A tiny LLaMA beside stock transformers, relative differences\n\n{table}",
    )


if __name__ == "__main__":
    sys.exit(main())
