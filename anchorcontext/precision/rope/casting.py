"""Hazards of casting: what becomes of RoPE's ``inv_freq`` on every way to a model in low precision.

Each route is run on a tiny LLaMA, and its table compared with theta ** (-2i/d).
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from ...model import TrainModel, enable
from ...model.quiet import quiet_progress
from ...model.rope import cast_parameters, expected_inv_freq, rotary_modules
from ..units import Unit, UnitStore

FAR = 131_072
EXACT_ENOUGH = 1e-6
RESULT_VERSION = 1
BF16 = torch.bfloat16


@dataclass(frozen=True)
class CastResult:
    """``inv_freq`` after one route.

    Attributes:
        route: as a user would write it.
        dtype: of the table; "-" if the route could not be run.
        relative_error: largest, over frequencies.
        radians: how far the angle of position 131,072 is off, the largest over frequencies.
        note: why it could not be run.
    """

    route: str
    dtype: str
    relative_error: float
    radians: float
    note: str = ""

    @property
    def kept(self) -> bool:
        """Whether the table is what the config describes, as far as fp32 goes."""
        return self.relative_error <= EXACT_ENOUGH


def measure_casts(
    head_dim: int = 64, theta: float = 1e5, deepspeed: bool = True
) -> list[CastResult]:
    """Run every route on a tiny model with the given RoPE.

    Args:
        deepspeed: also those of DeepSpeed, each in a process of its own (seconds); where it is not
            installed their ``note`` says so.
    """
    config = _config(head_dim, theta)
    results = [_result(route, make(config), config) for route, make in ROUTES.items()]
    with tempfile.TemporaryDirectory() as folder:
        with quiet_progress():
            _model(config).save_pretrained(folder)
        for route, keywords in FROM_PRETRAINED.items():
            with quiet_progress():
                model = AutoModelForCausalLM.from_pretrained(folder, **keywords)
            results.append(_result(route, model, config))
    if deepspeed:
        results += [_deepspeed_result(route, ours, head_dim, theta) for route, ours in DEEPSPEED]
    return results


def stored_casts(out: Path, *, measure: bool, deepspeed: bool = True) -> list[CastResult]:
    """:func:`measure_casts`, kept under ``out`` for these versions; [] if missing and not asked to
    ``measure``."""
    names = ("torch", "transformers", *(["deepspeed"] if deepspeed else []))
    versions = {name: _version(name) for name in names}
    store, unit = UnitStore(out, "rope", RESULT_VERSION), Unit("casts", versions)
    found = store.load(unit)
    if found is None and measure:
        results = measure_casts(deepspeed=deepspeed)
        store.save(unit, {"casts": [asdict(result) for result in results]})
        found = store.load(unit)
    return [CastResult(**result) for result in found["casts"]] if found else []


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _config(head_dim: int, theta: float) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=2 * head_dim,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )


def _model(config: LlamaConfig, **keywords: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **keywords)
    return model


def _by_default_dtype(config: LlamaConfig) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        return _model(config, dtype=BF16)
    finally:
        torch.set_default_dtype(before)


ROUTES: dict[str, Callable[[LlamaConfig], nn.Module]] = {
    "as built, fp32": lambda config: _model(config),
    "model.to(torch.bfloat16)": lambda config: _model(config).to(BF16),
    "model.bfloat16()": lambda config: _model(config).bfloat16(),
    "model.half()": lambda config: _model(config).half(),
    "from_config(dtype=torch.bfloat16)": lambda config: _model(config, dtype=BF16),
    "torch.set_default_dtype(torch.bfloat16)": _by_default_dtype,
    "model.bfloat16().float()": lambda config: _model(config).bfloat16().float(),
    "anchorcontext cast_parameters(model, torch.bfloat16)": lambda config: cast_parameters(
        _model(config), BF16
    ),
    "anchorcontext TrainModel(model).to(torch.bfloat16)": lambda config: _train_model(config).to(
        BF16
    ),
}
FROM_PRETRAINED: dict[str, dict[str, Any]] = {
    "from_pretrained(dtype=torch.bfloat16)": {"dtype": BF16},
    "from_pretrained(torch_dtype=torch.bfloat16)": {"torch_dtype": BF16},
    "from_pretrained(dtype=torch.float16)": {"dtype": torch.float16},
}
DEEPSPEED = (
    ("deepspeed.initialize, bf16", False),
    ("deepspeed.initialize, bf16, of anchorcontext's TrainModel", True),
)


def _train_model(config: LlamaConfig) -> nn.Module:
    model = _model(config)
    enable(model)
    return TrainModel(model)


def _result(route: str, model: nn.Module, config: LlamaConfig) -> CastResult:
    (rotary,) = rotary_modules(model).values()
    table = rotary.inv_freq.detach().double().cpu().numpy()
    return _compare(route, table, str(rotary.inv_freq.dtype), config)


def _compare(route: str, table: np.ndarray, dtype: str, config: LlamaConfig) -> CastResult:
    expected, _ = expected_inv_freq(config)
    error = np.abs(table - expected)
    return CastResult(
        route,
        dtype.removeprefix("torch."),
        float((error / expected).max()),
        float(error.max() * FAR),
    )


def _deepspeed_result(route: str, ours: bool, head_dim: int, theta: float) -> CastResult:
    # DeepSpeed wants a process group, which must not outlive the measurement.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            table, dtype = pool.submit(_deepspeed_table, ours, head_dim, theta).result()
        except ImportError as error:
            return CastResult(route, "-", float("nan"), float("nan"), f"not run: {error}")
    return _compare(route, np.array(table), dtype, _config(head_dim, theta))


def _deepspeed_table(ours: bool, head_dim: int, theta: float) -> tuple[list[float], str]:
    """Runs in a process of its own."""
    import deepspeed

    from ...train.engine import quiet_deepspeed, without_compiled_operators

    without_compiled_operators()
    os.environ["LOCAL_RANK"] = "0"
    config = _config(head_dim, theta)
    model = _train_model(config) if ours else _model(config)
    with tempfile.TemporaryDirectory() as folder, quiet_deepspeed():
        store = f"file://{Path(folder) / 'store'}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        engine, *_ = deepspeed.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "torch_adam": True}},
            },
            dist_init_required=False,
        )
        (rotary,) = rotary_modules(engine.module).values()
        table, dtype = rotary.inv_freq.double().tolist(), str(rotary.inv_freq.dtype)
        torch.distributed.destroy_process_group()
    return table, dtype
