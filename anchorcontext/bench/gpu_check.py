"""``make gpu-check``: everything that only a GPU can show, in one script without downloads.

It needs torch, triton, numpy and transformers, and the package's own files; no DeepSpeed, no
flash-attn. In order: what is installed; every engine against fp64; speed of forward and backward by
mode and length; a few training steps of a tiny model against stock transformers. An engine that
fails is reported and left out of what follows; the rest goes on. Results are written as JSON and
Markdown as soon as a part is done, so that a run cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
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

from . import kernels, numerics
from .markdown import markdown_table

# One H200 needs about 3 minutes for these; docs/kernels.md says what it measured.
FULL = {"numerics": (1024, 4096, 16384), "speed": (16384, 65536, 131072)}
QUICK = {"numerics": (300,), "speed": (1024,)}
ERROR_LIMITS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}
"""Largest relative error of outputs and gradients: a few roundings of the dtype."""
TRAINING_LIMITS = {"bfloat16": 3e-2, "float32": 1e-4}


@dataclass
class Check:
    """The parts done so far."""

    folder: Path
    device: torch.device
    setting: dict[str, str]
    failures: list[str] = field(default_factory=list)
    parts: dict[str, Any] = field(default_factory=dict)
    sections: list[str] = field(default_factory=list)

    def attempt(self, what: str, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns; None, and a failure on record, when it raises."""
        started = time.perf_counter()
        try:
            found = compute()
        except Exception as error:  # whatever a kernel's compiler or the driver throws
            traceback.print_exc()
            first = str(error).strip().splitlines()[:1]
            self.failures.append(f"{what}: {type(error).__name__}: {' '.join(first)}")
            return None
        _say(f"{what}: {time.perf_counter() - started:.1f} s")
        return found

    def record(self, name: str, results: Any, section: str) -> None:
        """Keep a part's results and write everything there is."""
        self.parts[name] = results
        self.sections.append(section)
        self.write()

    def write(self) -> None:
        """gpu_check.json and gpu_check.md."""
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = {"setting": self.setting, "failures": self.failures, **self.parts}
        (self.folder / "gpu_check.json").write_text(json.dumps(whole, indent=2) + "\n")
        lines = [f"{name} {value}" for name, value in self.setting.items()]
        failed = [f"- failed: {failure}" for failure in self.failures]
        page = "\n\n".join(["# GPU check", ", ".join(lines) + ".", *failed, *self.sections])
        (self.folder / "gpu_check.md").write_text(page + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; 0 when nothing failed, 1 when something did, 2 without the device."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="folder written")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        _say("gpu-check: no CUDA device here; nothing was checked")
        return 2
    device = torch.device(options.device)
    check = Check(options.out, device, _setting(device))
    sizes = QUICK if options.quick else FULL
    engines = _sound_engines(check, sizes["numerics"])
    _speed(check, sizes["speed"], engines, quick=options.quick)
    _training(check)
    check.write()
    for failure in check.failures:
        _say(f"FAILED {failure}")
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


def _sound_engines(check: Check, lengths: Sequence[int]) -> dict[str, list[str]]:
    """Engines by dtype whose errors against fp64 stay within the limits."""
    results: list[numerics.EngineErrors] = []
    sound: dict[str, list[str]] = {}
    skipped: list[tuple[str, str, str]] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        short = str(dtype).removeprefix("torch.")
        for name, reason in engine_report(check.device, dtype).items():
            if reason is not None:
                skipped.append((name, short, reason))
                continue
            found = check.attempt(
                f"errors of {name} in {short}",
                partial(_errors, check.device, lengths, dtype, name),
            )
            if found is None:
                continue
            # torch's own call comes with every engine; one line of it is enough.
            known = {(r.engine, r.mode, r.tokens, r.dtype) for r in results}
            results += [r for r in found if (r.engine, r.mode, r.tokens, r.dtype) not in known]
            worst = max(
                (getattr(r, quantity) for r in found if r.engine == name
                 for quantity in ("out", "dq", "dk", "dv")), default=0.0,
            )  # fmt: skip
            if worst <= ERROR_LIMITS[short]:
                sound.setdefault(short, []).append(name)
            else:
                check.failures.append(
                    f"{name} in {short}: error {worst:.1e} above {ERROR_LIMITS[short]:.0e}"
                )
    tables = [
        markdown_table(numerics.HEADERS, numerics.table_rows(results)),
        markdown_table(("engine", "dtype", "not run, because"), skipped),
    ]
    check.record(
        "numerics", [asdict(r) for r in results], "\n\n".join(["## Errors against fp64", *tables])
    )
    return sound


def _errors(
    device: torch.device, lengths: Sequence[int], dtype: torch.dtype, name: str
) -> list[numerics.EngineErrors]:
    found = numerics.bench_numerics(
        lengths=lengths, dtypes=[dtype], device=device, heads=(4, 2), head_dim=128, engines=[name]
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
            found = check.attempt(
                f"speed in mode {mode} at {tokens:,} tokens",
                partial(
                    kernels.bench_kernels,
                    lengths=[tokens],
                    device=check.device,
                    dtype=torch.bfloat16,
                    heads=(4, 1) if quick else (32, 8),
                    head_dim=128,
                    modes=[mode],
                    engines=names,
                ),
            )
            results += found or []
    table = markdown_table(kernels.HEADERS, kernels.table_rows(results))
    check.record("speed", [asdict(r) for r in results], f"## Speed in bf16\n\n{table}")


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
        [asdict(r) for r in results],
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
