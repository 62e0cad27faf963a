"""The GPU check, tried on the CPU: it needs nothing but torch, numpy and transformers, finds a
wrong engine, and writes what it has."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from anchorcontext.bench import gpu_check
from anchorcontext.bench.attention import Attention
from anchorcontext.bench.kernels import YARDSTICK, bench_kernels
from anchorcontext.bench.numerics import TORCH, bench_numerics
from anchorcontext.kernels import Tiles, cpu, cpu_library, cpu_short, rotating
from anchorcontext.kernels.cpu import CpuEngine

CPU = torch.device("cpu")
# What a machine with a GPU and no installation of ours need not have.
ABSENT = ("cloudpickle", "deepspeed", "matplotlib", "psutil", "pyarrow", "pydantic")
QUICK = ["--device", "cpu", "--quick"]


def test_runs_without_our_dependencies(tmp_path):
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"
        "from anchorcontext.bench.gpu_check import main\n"
        f"sys.exit(main({[*QUICK, '--out', str(tmp_path)]}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["failures"] == report["not_reached"] == []
    assert {r["engine"] for r in report["numerics"]} == {"cpu", "reference", TORCH}
    assert {r["mode"] for r in report["speed"]} == {"full", "intra_doc", "anchor"}
    assert [r["dtype"] for r in report["training"]] == ["float32", "bfloat16"]
    assert [r["error"] < 0.01 for r in report["settings"]] == [True] * 4
    page = (tmp_path / "gpu_check.md").read_text()
    assert "flash-attn is not installed" in page and "FlexAttention returns an LSE" in page


def test_a_wrong_and_a_broken_engine_are_failures(tmp_path, monkeypatch):
    real = bench_numerics

    def faulty(*, engines, **options):
        if engines == ["reference"]:
            raise RuntimeError("no kernel image\nis available")
        wrong = {"float16": {"dk": 0.5}, "float32": {"dq": math.nan}}
        return (
            replace(result, **wrong.get(result.dtype, {}))
            for result in real(engines=engines, **options)
        )

    monkeypatch.setattr(gpu_check.numerics, "bench_numerics", faulty)
    monkeypatch.setattr(gpu_check, "_training", lambda check: None)
    assert gpu_check.main([*QUICK, "--out", str(tmp_path)]) == 1
    failures = json.loads((tmp_path / "gpu_check.json").read_text())["failures"]
    assert "cpu in float16: error 5.0e-01 above 2e-03" in failures
    assert "cpu in float32: error inf above 1e-05" in failures
    assert "errors of reference in bfloat16: RuntimeError: no kernel image" in failures
    assert len(failures) == 5


def test_rope_that_an_engine_forgets_and_rows_that_depend_on_others_are_failures(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(rotating, "rotate", lambda x, cos, sin: x.to(cos.dtype))
    real = cpu_short.split
    monkeypatch.setattr(cpu_short, "split", lambda tiles: real(Tiles(tiles.array)))
    monkeypatch.setattr(cpu, "exact_calls", cpu.calls)
    check = gpu_check.Check(tmp_path, CPU, {})
    gpu_check._settings(check)
    # Rows of our C kernel have the same bits in any tiles: the operator's show the difference.
    monkeypatch.setattr(cpu_library, "_missing", lambda: "switched off by a test")
    gpu_check._settings(check)
    failed = [failure.split(":")[0] for failure in check.failures]
    assert failed.count("RoPE by the engine in float32") == 2
    assert failed.count("RoPE by the engine in bfloat16") == 2
    assert "exact rows in float32" in failed and "exact rows in bfloat16" in failed


def test_a_nan_in_one_gradient_is_above_every_limit(tmp_path, monkeypatch):
    real = CpuEngine.backward

    def spoiled(self, *arguments):
        real(self, *arguments)
        arguments[-1][:] = torch.nan  # dv: none of the other tensors' errors is one

    monkeypatch.setattr(CpuEngine, "backward", spoiled)
    check = gpu_check.Check(tmp_path, CPU, {})
    gpu_check._settings(check)
    gpu_check._training(check)
    failed = [failure.split(":")[0] for failure in check.failures]
    assert failed.count("RoPE by the engine in float32") == 1
    assert failed.count("training in float32") == failed.count("training in bfloat16") == 1


def test_an_engine_that_breaks_while_timed_takes_no_other_along(tmp_path, monkeypatch):
    def broken(self, *args):
        raise RuntimeError("out of resources")

    monkeypatch.setattr(gpu_check.kernels, "engine_report", lambda *args: {})
    monkeypatch.setattr(CpuEngine, "backward", broken)
    check = gpu_check.Check(tmp_path, CPU, {})
    gpu_check._speed(check, [300], ["cpu"], quick=True)
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert len(report["failures"]) == 3 and "cpu: RuntimeError: out of res" in report["failures"][0]
    assert [r["contestant"] for r in report["speed"]].count(YARDSTICK) == 3


def test_where_the_device_is_lost_a_new_process_goes_on_without(tmp_path, monkeypatch):
    commands = []

    def unusable(*_):
        raise RuntimeError("an illegal memory access was encountered")

    def run(check, quick):
        check.device = torch.device("cuda")
        check.attempt("errors of flex", unusable, "flex")

    def start(command, check):
        commands.append(command)
        return SimpleNamespace(returncode=5)

    monkeypatch.setattr(gpu_check, "_run", run)
    monkeypatch.setattr(gpu_check.torch.cuda, "synchronize", unusable)
    monkeypatch.setattr(gpu_check.subprocess, "run", start)
    arguments = [*QUICK, "--out", str(tmp_path), "--without", "triton", "--failed", "triton: lost"]
    assert gpu_check.main(arguments) == 5
    (command,) = commands
    without, failed = command.index("--without"), command.index("--failed")
    assert command[without + 1 : failed] == ["triton", "flex"]
    failure = "errors of flex: RuntimeError: an illegal memory access was encountered"
    assert command[failed + 1 : failed + 3] == ["triton: lost", failure]
    assert gpu_check.main([*QUICK, "--out", str(tmp_path), "--without", "flex"]) == 0, "left out"


def test_what_another_process_lost_the_device_to_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "_speed", lambda *args, **options: None)
    arguments = ["--without", "cpu", "training", "--failed", "errors of cpu: lost"]
    assert gpu_check.main([*QUICK, "--out", str(tmp_path), *arguments]) == 1
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["failures"] == ["errors of cpu: lost"] and report["training"] == []
    assert {r["engine"] for r in report["numerics"]} == {"reference", TORCH}
    assert "left the device unusable" in (tmp_path / "gpu_check.md").read_text()


def test_steps_that_come_too_late_are_named(tmp_path):
    assert gpu_check.main([*QUICK, "--minutes", "0", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert "errors of cpu in bfloat16" in report["not_reached"]
    assert "training in float32" in report["not_reached"]
    assert "not run, the time was up: training in" in (tmp_path / "gpu_check.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_claimed(tmp_path):
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_errors_are_near_the_rounding_of_the_dtype():
    results = list(
        bench_numerics(lengths=[200], dtypes=[torch.float32, torch.bfloat16], device=CPU)
    )
    for result in results:
        low, high = {"float32": (1e-8, 2e-6), "bfloat16": (1e-4, 1e-2)}[result.dtype]
        assert all(low < getattr(result, name) < high for name in ("out", "dq", "dk", "dv"))


def test_the_yardstick_has_the_flops_of_the_window():
    attention = Attention.draw("intra_doc", 3000, head_dim=8, dtype=torch.float32)
    assert sum(attention.lengths) == 3000
    pairs = sum(n * (n + 1) // 2 for n in attention.lengths)
    assert attention.flops == 4 * 8 * 2 * pairs
    results = bench_kernels(
        lengths=[500], device=CPU, dtype=torch.float32, heads=(2, 1), head_dim=8, repeats=1
    )
    yardsticks = [result for result in results if result.contestant == YARDSTICK]
    assert [result.over_yardstick for result in yardsticks] == [1.0, 1.0, 1.0]
