"""``make gpu-check``: everything that only a GPU can show, in one script without downloads.

It needs torch, triton, numpy and transformers, and the package's own files; no DeepSpeed, no
flash-attn. In order: what is installed; every engine against fp64; a few training steps of a tiny
model against stock transformers; speed of forward and backward by mode and length. An engine that
fails is reported and left out of what follows; the rest goes on. Results are written as JSON and
Markdown after each step, so that a run cut short leaves what it has; steps for which the time did
not suffice are named.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anchorcontext.kernels import engine_report

from ..markdown import markdown_table
from . import kernels, numerics
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


@dataclass
class Check:
    """The parts done so far."""

    folder: Path
    device: torch.device
    setting: dict[str, str]
    deadline: float = math.inf
    """`time.perf_counter` after which no step starts."""
    failures: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    """Steps for which the time did not suffice."""
    parts: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)

    def attempt(self, what: str, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns; None, and a line on record, when it raises or time is up."""
        started = time.perf_counter()
        if started > self.deadline:
            self.late.append(what)
            return None
        try:
            found = compute()
        except Exception as error:  # whatever a kernel's compiler or the driver throws
            self.fail(what, error)
            return None
        _say(f"{what}: {time.perf_counter() - started:.1f} s")
        return found

    def fail(self, what: str, error: Exception) -> None:
        """Put the failure of a step on record."""
        traceback.print_exception(error)
        first = str(error).strip().splitlines()[:1]
        self.failures.append(f"{what}: {type(error).__name__}: {' '.join(first)}")

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
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        _say("gpu-check: no CUDA device here; nothing was checked")
        return 2
    device = torch.device(options.device)
    deadline = time.perf_counter() + 60 * options.minutes
    check = Check(options.out, device, _setting(device), deadline)
    sizes = QUICK if options.quick else FULL
    engines = _sound_engines(check, sizes["numerics"], sizes["others"])
    _training(check)
    _speed(check, sizes["speed"], engines, quick=options.quick)
    check.write()
    for failure in check.failures:
        _say(f"FAILED {failure}")
    for step in check.late:
        _say(f"not run, the time was up: {step}")
    _say(f"written to {options.out}")
    return 1 if check.failures else 0


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


def _sound_engines(
    check: Check, lengths: Sequence[int], lengths_of_others: Sequence[int]
) -> dict[str, list[str]]:
    """Engines by dtype whose errors against fp64 stay within the limits; the second lengths are
    those of dtypes other than bf16."""
    results: list[numerics.EngineErrors] = []
    sound: dict[str, list[str]] = {}
    skipped: list[tuple[str, str, str]] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        short = str(dtype).removeprefix("torch.")
        exact_results: dict = {}
        for name, reason in engine_report(check.device, dtype).items():
            if reason is not None:
                skipped.append((name, short, reason))
                continue
            found = check.attempt(
                f"errors of {name} in {short}",
                partial(
                    _errors,
                    check.device,
                    lengths if dtype == torch.bfloat16 else lengths_of_others,
                    dtype,
                    name,
                    exact_results,
                ),
            )
            if found is None:
                continue
            # torch's own call comes with every engine; one line of it is enough.
            known = {(r.engine, r.mode, r.tokens, r.dtype) for r in results}
            results += [r for r in found if (r.engine, r.mode, r.tokens, r.dtype) not in known]
            worst = _worst(found, name)
            if worst <= ERROR_LIMITS[short]:
                sound.setdefault(short, []).append(name)
            else:
                check.failures.append(
                    f"{name} in {short}: error {worst:.1e} above {ERROR_LIMITS[short]:.0e}"
                )
            _record_errors(check, results, skipped)
    _record_errors(check, results, skipped)
    return sound


def _record_errors(
    check: Check,
    results: Sequence[numerics.EngineErrors],
    skipped: Sequence[tuple[str, str, str]],
) -> None:
    tables = [
        markdown_table(numerics.HEADERS, numerics.table_rows(results)),
        markdown_table(("engine", "dtype", "not run, because"), skipped),
    ]
    check.record("numerics", results, "\n\n".join(["## Errors against fp64", *tables]))


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


def _speed(
    check: Check, lengths: Sequence[int], engines: dict[str, list[str]], *, quick: bool
) -> None:
    """TFLOP/s of the sound engines in bf16, 32 query and 8 key/value heads of 128."""
    names = [name for name in engines.get("bfloat16", []) if name != "reference"]
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
            )
            results += found or []
            table = markdown_table(kernels.HEADERS, kernels.table_rows(results))
            check.record("speed", results, f"## Speed in bf16\n\n{table}")


def _contestant_failed(check: Check, what: str, name: str, error: Exception) -> None:
    check.fail(f"{what}: {name}", error)


@dataclass(frozen=True)
class TrainingDifference:
    """A few SGD steps under our attention against the same under stock transformers."""

    dtype: str
    engine: str
    steps: int
    loss: float
    """Largest relative difference of a step's loss."""
    weights: float
    """Relative difference of the weights' change after the last step."""


def _training(check: Check) -> None:
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        found = check.attempt(
            f"training in {short}", partial(train_beside_stock, check.device, dtype)
        )
        if found is None:
            continue
        results.append(found)
        limit = TRAINING_LIMITS[short]
        if max(found.loss, found.weights) > limit:
            check.failures.append(f"training in {short}: {found} above {limit}")
    rows = [(r.dtype, r.engine, r.steps, f"{r.loss:.1e}", f"{r.weights:.1e}") for r in results]
    table = markdown_table(("dtype", "engine", "steps", "loss", "change of the weights"), rows)
    check.record(
        "training",
        results,
        f"## A tiny LLaMA beside stock transformers, relative differences\n\n{table}",
    )


def train_beside_stock(
    device: torch.device, dtype: torch.dtype, steps: int = 3
) -> TrainingDifference:
    """Train a tiny LLaMA on one window in mode ``anchor``: ours, and stock in fp64 with a dense
    mask; plain SGD, so that a wrong gradient scale shows."""
    from ..model import TrainModel, cast_parameters, enable
    from ..model.rope import verify_rope
    from ..parallel import make_plan, shard
    from ..testing.models import stock_loss, tiny_llama
    from ..window import Window

    generator = torch.Generator().manual_seed(0)
    documents = [
        torch.randint(3, 128, (n,), generator=generator).tolist() for n in (70, 1, 300, 13, 127)
    ]
    window = Window.from_documents(documents, anchor_id=1)
    start = tiny_llama().state_dict()

    def fresh(dtype: torch.dtype) -> Any:
        model = tiny_llama()
        model.load_state_dict(start)
        return cast_parameters(model, dtype)

    ours = TrainModel(enable(fresh(dtype).to(device)), 64).train()
    stock = fresh(dtype).to(torch.float64).train()
    verify_rope(ours.causal_lm)
    plan = make_plan(window)
    local = shard(window, plan, device)
    descents = _Descent(ours.causal_lm), _Descent(stock)
    worst = 0.0
    for _ in range(steps):
        loss_sum, count = ours(local.input_ids, local.position_ids, local.labels, plan)
        losses = loss_sum / count, stock_loss(stock, window) / window.num_targets
        for loss, descent in zip(losses, descents, strict=True):
            loss.backward()
            descent.step()
        worst = max(worst, abs(float(losses[0].detach()) / float(losses[1].detach()) - 1))
    change, expected = (descent.change() for descent in descents)
    weights = float((change - expected).norm() / expected.norm())
    name = plan.engine(device, dtype).name
    return TrainingDifference(str(dtype).removeprefix("torch."), name, steps, worst, weights)


class _Descent:
    """Plain SGD on fp64 copies of a model's weights."""

    def __init__(self, model: torch.nn.Module, rate: float = 0.05) -> None:
        self.parameters, self.rate = list(model.parameters()), rate
        self.before = [parameter.detach().double().clone() for parameter in self.parameters]
        self.now = [weight.clone() for weight in self.before]

    def step(self) -> None:
        """Apply the gradients and clear them."""
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, self.now, strict=True):
                assert parameter.grad is not None
                weight -= self.rate * parameter.grad.double()
                parameter.copy_(weight)
                parameter.grad = None

    def change(self) -> torch.Tensor:
        """What the steps added to all weights, fp64, on the CPU."""
        pairs = zip(self.now, self.before, strict=True)
        return torch.cat([(now - before).flatten().cpu() for now, before in pairs])


if __name__ == "__main__":
    sys.exit(main())
