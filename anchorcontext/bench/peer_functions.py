"""What ``bench peers`` compares: our exchanges and other packages' attention, behind one signature.

Every contender takes a :class:`Case`, the same window for all, and says on each rank which tokens
it wants there and how to attend to them (:class:`Prepared`). Other packages run unmodified, from
their own entry points where these work on CPU tensors:

* ring-flash-attn (PyPI): its three exchanges, over flash-attn's functions for CPU tensors
  (:mod:`anchorcontext.testing.flash_attn_cpu`);
* DeepSpeed: ``UlyssesSPAttentionHF`` around transformers' SDPA attention;
* PyTorch: the ring of ``torch.distributed.tensor.experimental``. Its dispatcher knows the CUDA
  operators only, so it is handed the CPU operator.

Shape suffixes as in attention: q (1, Hq, S, D), k and v (1, Hkv, S, D) hold a rank's S rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..parallel import Plan, distributed_attention, make_plan
from ..parallel.ring_flash_attn import load_submodule
from ..plan import CostModel
from ..plan.ring_flash_attn import LLAMA3_VARLEN, ZIGZAG_RING, ZIGZAG_RING_VARLEN, Algorithm
from ..testing.flash_attn_cpu import install_flash_attn_cpu
from ..train.engine import without_compiled_operators
from ..window import Window

PADDING = -1
FULL, INTRA_DOC, ANCHOR = "full", "intra_doc", "anchor"
FUNCTIONS = (FULL, INTRA_DOC, ANCHOR)
"""The modes whose attention somebody here computes."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One window on the ranks of one group."""

    cu_seqlens: np.ndarray
    """int64 (n + 1,): edges of the documents; the first is the anchor, one token."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    cost: CostModel
    """Of this layer on these ranks and links: what our planner minimises."""
    group: dist.ProcessGroup

    @property
    def num_tokens(self) -> int:
        """L."""
        return int(self.cu_seqlens[-1])

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """P."""
        return dist.get_world_size(self.group)


@dataclass(frozen=True)
class Prepared:
    """One contender on one rank."""

    rows: np.ndarray
    """int64 (S,): the token in each of this rank's rows, ``PADDING`` where there is none."""
    attend: Attend
    plan: Plan | None = None
    """Ours only: counts the payload, and predicts it."""


@dataclass(frozen=True)
class Contender:
    """An attention to compare.

    ``prepare`` makes it on each rank, collectively. It raises a ``ValueError``, an ``ImportError``
    or a ``UserError``, the same on every rank, where the contender cannot run.
    """

    name: str
    function: str
    """Which of ``FUNCTIONS`` it computes."""
    ours: bool
    prepare: Callable[[Case], Prepared]


@dataclass(frozen=True)
class Ours:
    """This package's attention, as a trainer calls it; fields as of ``make_plan``."""

    mode: str
    exchange: str
    layout: str = "auto"
    ulysses: int = 1
    overlap: bool = True

    def __call__(self, case: Case) -> Prepared:
        """Plan the window."""
        ids = np.zeros(case.num_tokens, dtype=np.int64)
        plan = make_plan(
            Window(ids, case.cu_seqlens, self.mode),
            case.group,
            self.layout,
            self.exchange,
            ulysses=self.ulysses,
            overlap=self.overlap,
            cost=case.cost,
        )
        rows = plan.data.local_indices(case.rank, 0)
        rows = np.where(rows < case.num_tokens, rows, PADDING)
        return Prepared(rows, lambda q, k, v: distributed_attention(q, k, v, plan), plan)

    def __str__(self) -> str:
        parts = [self.exchange if self.ulysses == 1 else f"{self.exchange}, ulysses {self.ulysses}"]
        parts += [] if self.layout == "auto" else [self.layout]
        return ", ".join(parts + ([] if self.overlap else ["no overlap"]))


def ring_zigzag(case: Case) -> Prepared:
    """ring-flash-attn's zigzag ring: causal over the whole window."""
    module = _ring_flash_attn(ZIGZAG_RING, "zigzag_ring_flash_attn", case.dtype)
    attention = module.zigzag_ring_flash_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention(q, k, v, causal=True, group=case.group).transpose(1, 2)

    return Prepared(zigzag_rows([0, case.num_tokens], case.rank, case.size), attend)


def zigzag_varlen(case: Case) -> Prepared:
    """ring-flash-attn's zigzag ring over documents, each padded to a multiple of 2 P tokens."""
    module = _ring_flash_attn(ZIGZAG_RING_VARLEN, "zigzag_ring_flash_attn_varlen", case.dtype)
    attention = module.zigzag_ring_flash_attn_varlen_func
    chunk = 2 * case.size
    padded = -(-np.diff(case.cu_seqlens) // chunk) * chunk
    local = np.r_[0, np.cumsum(padded)] // case.size
    cu_seqlens = torch.from_numpy(local.astype(np.int32))
    longest = int(np.diff(local).max())

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (_packed(x) for x in (q, k, v))
        return _unpacked(attention(q, k, v, cu_seqlens, longest, causal=True, group=case.group))

    return Prepared(zigzag_rows(case.cu_seqlens, case.rank, case.size), attend)


def llama3_varlen(case: Case) -> Prepared:
    """ring-flash-attn's llama3 exchange: all keys to every rank, one head after the other."""
    module = _ring_flash_attn(LLAMA3_VARLEN, "llama3_flash_attn_varlen", case.dtype)
    rows = contiguous_rows(case)
    edges = case.cu_seqlens
    if len(rows) * case.size > case.num_tokens:  # the padding is a document of its own
        edges = np.r_[edges, len(rows) * case.size]
    *lengths, key_slice = module.llama3_flash_attn_prepare_cu_seqlens(
        torch.from_numpy(edges.astype(np.int32)), True, case.rank, case.size
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (_packed(x) for x in (q, k, v))
        return _unpacked(
            module.llama3_flash_attn_varlen_func(
                q, k, v, *lengths, heads_k_stride=1, local_k_slice=key_slice, causal=True,
                group=case.group,
            )
        )  # fmt: skip

    return Prepared(rows, attend)


def deepspeed_ulysses(case: Case) -> Prepared:
    """DeepSpeed's Ulysses for Hugging Face models: it hands no documents on."""
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    without_compiled_operators()
    deepspeed.comm.init_distributed("gloo", verbose=False)
    rows = contiguous_rows(case)
    attention = UlyssesSPAttentionHF(
        sdpa_attention_forward,
        batch_size=1,
        attn_head_count=case.num_heads,
        attn_head_size=case.head_dim,
        kv_head_count=case.num_kv_heads,
        num_hidden_layers=1,
        process_group=case.group,
        local_seq_length=len(rows),
        global_seq_length=len(rows) * case.size,
    )
    layer: Any = SimpleNamespace(
        training=True, is_causal=True, num_key_value_groups=case.num_heads // case.num_kv_heads
    )
    positions = torch.arange(case.rank * len(rows), (case.rank + 1) * len(rows))[None]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, _ = attention(layer, q, k, v, None, position_ids=positions)
        return out.unflatten(2, (case.num_heads, case.head_dim)).transpose(1, 2)

    return Prepared(rows, attend)


def torch_context_parallel(case: Case) -> Prepared:
    """PyTorch's context parallel: its ring, load-balanced (zigzag), over the CPU operator."""
    rows = zigzag_rows([0, case.num_tokens], case.rank, case.size)
    return Prepared(rows, lambda q, k, v: _TorchRing.apply(q, k, v, case.group))


class _TorchRing(torch.autograd.Function):
    """The forward and backward that PyTorch's dispatcher would call for a CUDA operator."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        from torch.distributed.tensor.experimental import _context_parallel as parallel

        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = parallel._attention._templated_ring_attention(
            group, 2, partial(_handed, operator), q, k, v, is_causal=True, dropout_p=0.0
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from torch.distributed.tensor.experimental import _context_parallel as parallel

        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = parallel._attention._templated_ring_attention_backward(
            ctx.group, 2, partial(_handed, operator), dout, "grad_out", q, k, v, out, lse,
            is_causal=True, dropout_p=0.0,
        )  # fmt: skip
        return dq, dk, dv, None


def _handed(operator: Callable, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(operator(*args, **kwargs))


CONTENDERS = (
    *(
        Contender(str(own), own.mode, True, own)
        for own in (
            Ours(FULL, "auto"),
            Ours(FULL, "ring", "zigzag"),
            Ours(FULL, "ring", "zigzag", overlap=False),
            Ours(FULL, "gather", "zigzag"),
            Ours(FULL, "ulysses"),
            Ours(FULL, "hybrid", "zigzag", ulysses=2),
            Ours(INTRA_DOC, "auto"),
            Ours(INTRA_DOC, "gather", "balanced"),
            Ours(INTRA_DOC, "ring", "balanced"),
            Ours(INTRA_DOC, "ring", "zigzag"),
            Ours(INTRA_DOC, "ring", "zigzag", overlap=False),
            Ours(ANCHOR, "auto"),
            Ours(ANCHOR, "ring", "balanced"),
        )
    ),
    Contender("ring-flash-attn zigzag", FULL, False, ring_zigzag),
    Contender("DeepSpeed UlyssesSPAttentionHF", FULL, False, deepspeed_ulysses),
    Contender("PyTorch context parallel", FULL, False, torch_context_parallel),
    Contender("ring-flash-attn llama3 varlen", INTRA_DOC, False, llama3_varlen),
    Contender("ring-flash-attn zigzag varlen", INTRA_DOC, False, zigzag_varlen),
)


def contiguous_rows(case: Case) -> np.ndarray:
    """int64 (S,): the rank's stretch of the window, padded at the end to a multiple of P."""
    per_rank = -(-case.num_tokens // case.size)
    rows = np.arange(case.rank * per_rank, (case.rank + 1) * per_rank)
    return np.where(rows < case.num_tokens, rows, PADDING)


def zigzag_rows(cu_seqlens: Any, rank: int, size: int) -> np.ndarray:
    """int64 (S,): of each document, padded at its end to 2 P chunks, the chunks r and 2P - 1 - r.

    Padding behind a document's last token is seen by no real one.
    """
    parts = []
    for start, stop in pairwise(cu_seqlens):
        chunk = -(-int(stop - start) // (2 * size))
        for number in (rank, 2 * size - 1 - rank):
            rows = np.arange(start + number * chunk, start + (number + 1) * chunk)
            parts.append(np.where(rows < stop, rows, PADDING))
    return np.concatenate(parts).astype(np.int64)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """(1, H, S, D) -> (S, H, D)."""
    return x.transpose(1, 2)[0]


def _unpacked(x: torch.Tensor) -> torch.Tensor:
    """(S, H, D) -> (1, H, S, D)."""
    return x.transpose(0, 1)[None]


def _ring_flash_attn(algorithm: Algorithm, name: str, dtype: torch.dtype) -> Any:
    """The package's submodule ``name``."""
    if str(dtype).removeprefix("torch.") not in algorithm.dtypes:
        raise ValueError(f"right gradients in {' and '.join(algorithm.dtypes)} alone, not {dtype}")
    install_flash_attn_cpu()
    return load_submodule(name)
