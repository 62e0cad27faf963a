"""``bench peers``: everyone computes what it claims, bytes are counted, the network throttles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from anchorcontext.bench import netns, peers, peers_table
from anchorcontext.bench.exact import exact_attention
from anchorcontext.bench.netns import (
    LOOPBACK,
    WIRE,
    NetworkUnavailable,
    enter_port,
    private_loopback,
    throttled_network,
)
from anchorcontext.bench.peer_functions import CONTENDERS, zigzag_rows
from anchorcontext.bench.peers import (
    SETTINGS,
    ContenderResult,
    PeersReport,
    SettingResult,
    Workload,
)
from anchorcontext.cli.bench import command
from anchorcontext.plan import mixes
from anchorcontext.testing import run_distributed
from anchorcontext.testing.oracle import dense_attention, dense_mask

LENGTHS = (69, 5, 130, 1, 180, 120)
# bf16 rounds a value of 4 by up to 0.016; a wrong mask is off by more than 0.5 (see below).
OUT_TOLERANCE, GRADIENT_TOLERANCE = 0.03, 0.15


def why_no_network():
    """Why this machine and user cannot make a throttled network; None where they can."""
    try:
        with throttled_network(1, 1e6):
            return None
    except NetworkUnavailable as reason:
        return str(reason)


@pytest.fixture
def network():
    reason = why_no_network()
    if reason is not None:
        pytest.skip(reason)
    return throttled_network


def tiny(repeats=1):
    return Workload(
        window_tokens=506,
        full_tokens=250,
        mix="tiny",
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        dtype=torch.bfloat16,
        sp=4,
        repeats=repeats,
        seed=0,
    )


def test_everyone_computes_what_it_claims_and_ours_sends_what_its_plan_predicts(monkeypatch):
    monkeypatch.setitem(mixes.MIXES, "tiny", lambda tokens, seed: np.array(LENGTHS))
    throttled = why_no_network() is None
    report = peers.bench_peers(tiny(), [SETTINGS["nvlink" if throttled else "loopback"]])
    assert report.settings[0].unavailable is None
    assert report.documents == len(LENGTHS) + 1
    assert len(report.settings[0].results) == len(CONTENDERS)
    for result in report.settings[0].results:
        assert result.unavailable is None, result
        assert result.out_error < OUT_TOLERANCE, result
        assert result.gradient_error < GRADIENT_TOLERANCE, result
        assert min(result.seconds) > 0
        if result.ours:
            assert result.payload_bytes == result.predicted_bytes
            payload = np.mean(result.payload_bytes)
            assert payload > 0
            # Headers and barriers are all that a link carries beyond the payload.
            assert payload <= result.wire_bytes
            assert result.wire_bytes <= 1.1 * payload + 20_000 or not throttled, result
    assert {verdict.function for verdict in peers_table.verdicts(report)} == {"full", "intra_doc"}


@pytest.mark.parametrize("mode", ["full", "intra_doc", "anchor"])
def test_the_exact_results_are_those_of_the_dense_oracle(mode):
    lengths, generator = (1, 300, 7, 40), torch.Generator().manual_seed(0)
    edges = np.r_[0, np.cumsum(lengths)]
    q, k, v, dout = (torch.randn(348, heads, 8, generator=generator) for heads in (4, 2, 2, 4))
    found = exact_attention(q, k, v, dout, edges, mode)
    leaves = [x.double().transpose(0, 1).clone().requires_grad_() for x in (q, k, v)]
    mask = dense_mask(np.repeat(np.arange(4), lengths).tolist(), mode)
    out = dense_attention(*leaves, mask, 8**-0.5)
    out.backward(dout.double().transpose(0, 1))
    wanted = (out.detach(), *(leaf.grad for leaf in leaves))
    for got, want in zip((found.out, found.dq, found.dk, found.dv), wanted, strict=True):
        assert (got.transpose(0, 1) - want).abs().max() < 1e-12


def test_another_mask_is_further_off_than_the_tolerances():
    generator = torch.Generator().manual_seed(0)
    edges = np.r_[0, 1, 1 + np.cumsum(LENGTHS)]
    tensors = [torch.randn(506, heads, 16, generator=generator) for heads in (8, 2, 2, 8)]
    found = [exact_attention(*tensors, edges, mode) for mode in ("full", "intra_doc", "anchor")]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert (found[one].out - found[other].out).abs().max() > 10 * OUT_TOLERANCE
        assert (found[one].dv - found[other].dv).abs().max() > 5 * GRADIENT_TOLERANCE


def test_zigzag_rows_hold_every_token_once_and_pad_documents_at_their_end():
    edges = np.r_[0, np.cumsum((1, 16, 21))]
    rows = np.stack([zigzag_rows(edges, rank, 4) for rank in range(4)])
    assert sorted(rows[rows >= 0]) == list(range(38))
    assert rows.shape[1] * 4 == 8 + 16 + 24
    assert rows[0].tolist() == [0, -1, 1, 2, 15, 16, 17, 18, 19, -1, -1, -1]


def send_to_the_next(rank, world, interface, count):
    """Seconds to hand ``count`` bytes on, and what the interface sent."""
    import time

    import torch
    import torch.distributed as dist

    from anchorcontext.bench.netns import bytes_sent

    mine, theirs = torch.ones(count, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8)
    dist.barrier()
    sent, start = bytes_sent(interface), time.perf_counter()
    dist.barrier()
    works = [dist.isend(mine, (rank + 1) % world), dist.irecv(theirs, (rank - 1) % world)]
    for work in works:
        work.wait()
    dist.barrier()
    return time.perf_counter() - start, bytes_sent(interface) - sent


def test_links_are_throttled_and_nothing_is_left_behind(network):
    before, files = host_interfaces(), len(os.listdir("/proc/self/fd"))
    with network(2, 2e6) as ports:
        enter = partial(enter_port, ports)
        found = run_distributed(send_to_the_next, 2, WIRE, 1_000_000, enter=enter)
    for seconds, sent in found:
        assert seconds > 0.4, "1 MB at 2 MB/s takes half a second"
        assert 1_000_000 <= sent < 1_100_000
    with private_loopback(2) as ports:
        enter = partial(enter_port, ports)
        found = run_distributed(send_to_the_next, 2, LOOPBACK, 1_000_000, enter=enter)
    for _, sent in found:
        assert 2_000_000 <= sent < 2_200_000, "one counter for both ranks, and for nobody else"
    with pytest.raises(RuntimeError), network(2, 2e6):
        raise RuntimeError
    assert len(os.listdir("/proc/self/fd")) <= files + 2  # of the fork server
    assert host_interfaces() == before


def test_a_killed_process_takes_its_network_along(network):
    before = host_interfaces()
    code = (
        "import sys, time\n"
        "from anchorcontext.bench.netns import throttled_network\n"
        "with throttled_network(2, 1e6):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGKILL)
    assert host_interfaces() == before


def host_interfaces():
    return sorted(os.listdir("/sys/class/net"))


def test_a_setting_that_fails_does_not_take_the_others_along(monkeypatch):
    def on_ranks(job, sp, enter):
        raise RuntimeError("rank 1 of 4 failed:\nTraceback\nRuntimeError: connection closed")

    monkeypatch.setitem(mixes.MIXES, "tiny", lambda tokens, seed: np.array(LENGTHS))
    monkeypatch.setattr(peers, "run_distributed", lambda *args, **kwargs: [1e10] * 4)
    monkeypatch.setattr(peers, "_on_ranks", on_ranks)
    heard = []
    report = peers.bench_peers(tiny(), [SETTINGS["loopback"]], heard.append)
    assert report.settings[0].unavailable == "a rank failed: RuntimeError: connection closed"
    assert "Traceback" in heard[-1]


def test_without_root_the_reason_is_named(monkeypatch):
    def refuse(name, *arguments):
        raise NetworkUnavailable(f"{name}: Operation not permitted; network namespaces need root")

    monkeypatch.setattr(netns, "_call", refuse)
    with pytest.raises(NetworkUnavailable, match="need root"), throttled_network(2, 1e6):
        pass


def result(name, function, ours, seconds, sent, unavailable=None):
    return ContenderResult(
        name=name,
        function=function,
        ours=ours,
        unavailable=unavailable,
        seconds=[] if unavailable else seconds,
        wire_bytes=None if unavailable else sent,
        payload_bytes=[],
        predicted_bytes=[],
        out_error=1e-2,
        gradient_error=2e-2,
    )


def report():
    results = [
        result("ring", "full", True, [2.0, 1.0, 4.0], 2e6),
        result("gather", "intra_doc", True, [0.5, 0.5, 0.5], 1e6),
        result("auto", "anchor", True, [1.0, 1.0, 1.0], 1e6),
        result("peer", "full", False, [2.0, 2.0, 2.0], 4e6),
        result("varlen", "intra_doc", False, [1.0, 1.0, 1.0], 6e6),
        result("other", "full", False, [], 0.0, "not installed"),
    ]
    return PeersReport(
        documents=3,
        full_tokens=64,
        flops_per_second=1e10,
        settings=[
            SettingResult(SETTINGS["loopback"], None, None, results),
            SettingResult(SETTINGS["infiniband"], 1e6, "setns: need root", []),
        ],
    )


def test_targets_are_judged_against_the_best_peer_of_the_same_function():
    found = {(v.function, v.what): v for v in peers_table.verdicts(report())}
    assert found["full", "time, loopback"].ratio == pytest.approx(1.0)  # median of 1, 0.5, 2
    assert found["intra_doc", "time, loopback"].ratio == pytest.approx(2.0)
    assert found["intra_doc", "bytes"].met and found["intra_doc", "bytes"].ratio == 6.0
    assert not found["full", "bytes"].met
    assert not any(function == "anchor" for function, _ in found)


def test_the_command_writes_its_section_with_what_did_not_run_and_why(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(peers, "bench_peers", lambda workload, settings, tell: report())
    page = tmp_path / "benchmarks.md"
    outcome = CliRunner().invoke(command, ["peers", "--markdown", str(page)])
    assert outcome.exit_code == 0, outcome.output
    text = page.read_text()
    assert "<!-- begin peers -->" in text and "Left out: setns: need root." in text
    assert "| other | did not run: not installed |" in text
    assert "| **auto** | 1.00 | – | 1.00 |" in text
    assert "**missed**" in text
