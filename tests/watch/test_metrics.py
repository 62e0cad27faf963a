"""The shares of ranks become one record: token-weighted, in one collective."""

import json
import math
import time

import pytest
import torch

from anchorcontext.parallel.meter import Meter, Stopwatch
from anchorcontext.testing import run_distributed
from anchorcontext.watch.flops import ModelShape, training_flops
from anchorcontext.watch.metrics import (
    LocalStep,
    StepMeter,
    gather_steps,
    make_record,
    peak_memory_bytes,
)


def measured(bytes_sent=0, exchange=0.0, compute=0.0):
    """The meter of a plan that cost this much."""
    meter = Meter()
    meter.bytes_sent = bytes_sent
    meter.exchange, meter.compute = Stopwatch(seconds=exchange), Stopwatch(seconds=compute)
    return meter


def record_of(*ranks: LocalStep, **values):
    return make_record(ranks, **{"step": 1, "lr": 0.1, "grad_norm": 2.0, **values})


def test_loss_is_the_sum_over_the_count_not_a_mean_of_means():
    record = record_of(
        LocalStep(loss_sum=2.0, loss_tokens=1), LocalStep(loss_sum=90.0, loss_tokens=9)
    )
    assert record.loss == pytest.approx(9.2, rel=1e-12)
    assert record.perplexity == pytest.approx(math.exp(9.2), rel=1e-12)
    assert record.loss_tokens == 10


def test_a_rank_without_targets_changes_nothing():
    assert record_of(LocalStep(loss_sum=6.0, loss_tokens=3), LocalStep()).loss == 2.0


def test_a_step_without_targets_is_reported_as_skipped_with_valid_json():
    record = record_of(LocalStep(), LocalStep(), grad_norm=None, skip_reason="no target")
    assert record.skipped and record.loss is None and record.perplexity is None
    json.dumps(record.as_dict(), allow_nan=False)


def test_numbers_that_are_not_finite_become_null():
    record = record_of(LocalStep(loss_sum=math.nan, loss_tokens=1), grad_norm=math.inf)
    assert record.as_dict()["loss"] is None and record.as_dict()["grad_norm"] is None
    assert record_of(LocalStep(loss_sum=1e6, loss_tokens=1)).as_dict()["perplexity"] is None


def test_speed_is_the_slowest_ranks_and_the_parts_are_means():
    record = record_of(
        LocalStep(tokens=300, seconds=2.0, seconds_exchange=0.5, bytes_sent=10),
        LocalStep(tokens=100, seconds=4.0, seconds_exchange=1.5, bytes_sent=30),
    )
    assert record.seconds == 4.0
    assert record.tokens_per_second == 100.0
    assert record.tokens_per_second_per_rank == 50.0
    assert record.seconds_exchange == 1.0
    assert (record.bytes_sent, record.bytes_sent_max) == (40, 30)


def test_the_parts_of_a_step_add_up_to_it():
    slow = LocalStep(
        seconds=4.0,
        seconds_data=0.5,
        seconds_exchange=1.0,
        seconds_compute=2.0,
        seconds_attention=1.5,
        seconds_optimizer=0.25,
    )
    record = record_of(slow, LocalStep(seconds=3.0, seconds_compute=3.0))
    parts = [
        getattr(record, f"seconds_{part}")
        for part in ("data", "exchange", "compute", "optimizer", "other")
    ]
    assert parts == [0.25, 0.5, 2.5, 0.125, 0.625]
    assert sum(parts) == record.seconds


def test_the_meter_takes_waiting_for_the_exchange_out_of_forward_and_backward():
    meter = StepMeter()
    with meter.timed("forward_backward"):
        time.sleep(0.02)
    meter.add_micro_batch(loss_sum=1.0, loss_tokens=1, tokens=1, attention=measured(exchange=0.015))
    local = meter.finish()
    assert 0.005 <= local.seconds_compute <= local.seconds - 0.015


def test_predicted_bytes_stand_beside_those_counted():
    meter = StepMeter()
    meter.add_micro_batch(loss_sum=1.0, loss_tokens=1, tokens=1, attention=measured(bytes_sent=7))
    meter.predict_bytes(6)
    record = record_of(meter.finish(), LocalStep(bytes_sent=1, bytes_predicted=1))
    assert (record.bytes_sent, record.bytes_predicted) == (8, 7)


def test_flops_utilisation_and_balance():
    shape = ModelShape(linear_weights=1000, num_layers=2, num_heads=4, head_dim=8)
    ranks = [
        LocalStep(tokens=10, attention_pairs=30, seconds=2.0),
        LocalStep(tokens=10, attention_pairs=90, seconds=1.0),
    ]
    record = record_of(*ranks, shape=shape, peak_flops=1e6)
    assert record.flops == training_flops(shape, tokens=20, pairs=120)
    assert record.mfu == pytest.approx(record.flops / (2.0 * 2 * 1e6), rel=1e-12)
    assert record.attention_balance == 1.5
    assert record_of(*ranks, shape=shape).mfu is None
    assert record_of(*ranks).flops is None


def test_the_meter_sums_micro_batches_and_starts_anew():
    meter = StepMeter()
    for loss in (torch.tensor(1.5, requires_grad=True), 2.5):
        meter.add_micro_batch(
            loss_sum=loss,
            loss_tokens=torch.tensor(2),
            tokens=3,
            attention_pairs=4,
            attention=measured(bytes_sent=5, exchange=0.25, compute=0.5),
        )
    with meter.timed("optimizer"):
        pass
    local = meter.finish()
    assert (local.loss_sum, local.loss_tokens, local.tokens) == (4.0, 4, 6)
    assert (local.attention_pairs, local.bytes_sent) == (8, 10)
    assert (local.seconds_exchange, local.seconds_attention) == (0.5, 1.0)
    assert 0 < local.seconds_optimizer < local.seconds and local.seconds_data == 0
    assert local.peak_memory_bytes > 2**20
    meter.start()
    assert meter.finish().tokens == 0


class Gpu:
    """A clock of its own that runs while work is queued, and events on it."""

    def __init__(self, monkeypatch):
        self.seconds, self.waited = 0.0, 0
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing, "other events have no time"

            def record(self):
                self.at = gpu.seconds

            def synchronize(self):
                gpu.waited += 1

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        self.used = {"allocated": 900, "reserved": 1000}  # of a parity check, before the step
        for kind in self.used:
            monkeypatch.setattr(
                torch.cuda, f"max_memory_{kind}", lambda device, kind=kind: self.used[kind]
            )
        monkeypatch.setattr(
            torch.cuda,
            "reset_peak_memory_stats",
            lambda device: self.used.update(allocated=70, reserved=80),
        )


def test_on_a_gpu_parts_of_a_step_are_its_own_time_and_nothing_waits_for_it(monkeypatch):
    gpu, attention = Gpu(monkeypatch), Meter()
    meter = StepMeter("cuda")
    attention.measure_on("cuda")
    with meter.timed("data"):
        gpu.seconds += 100.0  # of the step before: the host reads windows meanwhile
    for _ in range(2):
        with meter.timed("forward_backward"):
            gpu.seconds += 1.0
            with attention.waiting():
                gpu.seconds += 2.0
            with attention.computing():
                gpu.seconds += 4.0
    with meter.timed("optimizer"):
        gpu.seconds += 8.0
    meter.add_micro_batch(loss_sum=1.0, loss_tokens=1, tokens=1, attention=attention)
    assert gpu.waited == 0
    local = meter.finish()
    assert (local.seconds_exchange, local.seconds_attention) == (4.0, 8.0)
    assert (local.seconds_compute, local.seconds_optimizer) == (10.0, 8.0)
    assert local.seconds_data < 1.0
    assert (local.peak_memory_bytes, local.peak_reserved_bytes) == (70, 80)
    assert attention.exchange.seconds == 4.0, "reading twice counts once"


def test_many_fp32_micro_batches_are_summed_in_fp64():
    meter = StepMeter()
    for loss in (2.0**25, 1.0, 1.0, 1.0):
        meter.add_micro_batch(loss_sum=torch.tensor(loss), loss_tokens=1, tokens=1)
    assert meter.finish().loss_sum == 2.0**25 + 3


def test_peak_memory_keeps_the_highest_level():
    noise = 2**20  # the kernel counts resident pages in per-core batches
    block = torch.ones(2**24)  # 64 MiB, touched
    high = peak_memory_bytes()
    assert high >= block.nbytes
    del block
    assert abs(peak_memory_bytes() - high) <= noise


def gathered(rank, world_size):
    import torch.distributed as dist

    calls = []
    original = dist.all_gather

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    dist.all_gather = counted
    local = LocalStep(
        loss_sum=rank + 0.1, loss_tokens=rank, bytes_sent=2**40 + rank, seconds=1.0 + rank
    )
    return gather_steps(local), len(calls)


def test_every_rank_gets_all_shares_exactly_in_one_collective():
    expected = [
        LocalStep(loss_sum=r + 0.1, loss_tokens=r, bytes_sent=2**40 + r, seconds=1.0 + r)
        for r in range(3)
    ]
    for shares, calls in run_distributed(gathered, 3):
        assert shares == expected
        assert all(isinstance(share.bytes_sent, int) for share in shares)
        assert calls == 1


def test_one_process_needs_no_process_group():
    assert gather_steps(LocalStep(tokens=7)) == [LocalStep(tokens=7)]
