"""The Triton engine: our own flash attention over a tile list, anchors and RoPE in the same launch.

One launch forward and three backward, whatever the number of tiles (:mod:`.triton_forward`,
:mod:`.triton_backward`, :mod:`.worklist`). It takes fp32, bf16 and fp16 on NVIDIA GPUs from Ampere
on, with head dimensions up to 256; with TRITON_INTERPRET=1 it computes on CPU tensors, slowly, for
tests. Work lists are made and sent to the device once per tile list; no call waits for the device.

The same call with the same block sizes gives the same bits every time: all sums are in a
fixed order. Tuning measures time, so it may choose otherwise in another process; under
``torch.use_deterministic_algorithms``, with ``autotune=False`` and for exact tile lists the table's
sizes are kept. A row of an exact list walks over its document's keys in steps counted from their
first, masked throughout: the same operations in the same order, whatever rows share its block.
"""

from __future__ import annotations

import functools
import importlib.util

import numpy as np
import torch

from anchorcontext.errors import UserError

from . import triton_config
from .anchored import AnchorKeys, nothing_to_do
from .interface import SoftmaxState, Tiles
from .rotation import Rotation
from .triton_config import Config
from .triton_launch import Call, rows

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_MIN_CAPABILITY = (8, 0)
_TUNING_ROWS = 4096


class TritonEngine:
    """Flash attention in Triton; see `Engine` for the two methods' contract.

    Args:
        precision: how fp32 operands are multiplied: ``"tf32x3"`` on tensor cores in three passes
            (error near fp32's) or ``"ieee"`` in fp32 throughout.
        autotune: measure the candidates for block sizes on first use.
    """

    name = "triton"
    exact = True
    takes_anchors = True
    takes_rotation = True
    auto_devices = ("cuda",)

    def __init__(self, precision: str = "tf32x3", autotune: bool = True) -> None:
        assert precision in ("tf32x3", "ieee"), precision
        self.precision = precision
        self.autotune = autotune

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this engine cannot serve ``device`` and ``dtype``; None when it can."""
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed (pip install 'triton>=3.6')"
        if dtype not in _DTYPES:
            return f"it takes fp32, bf16 and fp16, not {dtype}"
        if device.type == "cpu":
            hint = "set TRITON_INTERPRET=1 before Python starts"
            return None if _interpreted() else f"on cpu tensors it only runs interpreted ({hint})"
        if device.type != "cuda":
            return f"it runs on CUDA devices, not on {device.type}"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no CUDA device"
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_CAPABILITY:
            return (
                f"it needs compute capability 8.0, the device has {capability[0]}.{capability[1]}"
            )
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Tiles,
        scale: float,
        state: SoftmaxState,
        *,
        anchors: AnchorKeys | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        """Merge the attention of the tiles, and of the anchors, into ``state``, in place.

        With ``rotation``, q, k and the anchors' keys come unrotated.

        Raises:
            UserError: a head dimension above 256 (or odd, with ``rotation``), or a scale <= 0.
        """
        _check(q, scale, rotation)
        call = Call(q, k, v, tiles, scale, anchors, rotation, self.precision)
        call.forward(state, self._config("forward", q, rotation, tiles.exact))

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tiles: Tiles,
        scale: float,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        *,
        anchors: AnchorKeys | None = None,
        d_anchors: torch.Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        """Add the gradients of the tiles into ``dq``, ``dk``, ``dv`` and of the anchors into ``dq``
        and ``d_anchors`` (A, 2, Hkv, D), in place.

        With ``rotation``, all gradients are those of the unrotated q, k and anchors.

        Raises:
            UserError: as `forward`.
        """
        _check(q, scale, rotation)
        if nothing_to_do(tiles, anchors):
            return
        call = Call(q, k, v, tiles, scale, anchors, rotation, self.precision)
        dout = rows(dout)
        delta, lse2, ds0 = call.prepare(dout, rows(out), lse, d_anchors)
        call.dq(dout, delta, lse2, ds0, dq, self._config("dq", q, rotation))
        call.dkdv(dout, delta, lse2, dk, dv, self._config("dkdv", q, rotation))

    def _config(
        self, kernel: str, q: torch.Tensor, rotation: Rotation | None, exact: bool = False
    ) -> Config:
        if q.device.type == "cpu":
            return triton_config.INTERPRETER
        rope, head_dim = rotation is not None, q.shape[-1]
        capability = torch.cuda.get_device_capability(q.device)
        options = triton_config.candidates(kernel, head_dim, q.dtype, rope, capability)
        fixed = exact or not self.autotune or torch.are_deterministic_algorithms_enabled()
        if fixed or len(options) == 1 or torch.cuda.is_current_stream_capturing():
            return options[0]
        key = (kernel, str(q.device), head_dim, q.dtype, rope, self.precision)
        return triton_config.tuned(key, options, functools.partial(self._seconds, kernel, q, rope))

    def _seconds(self, kernel: str, like: torch.Tensor, rope: bool, config: Config) -> float:
        """Time of one launch on a causal document of 4096 tokens, 8 query and 2 key heads."""
        from triton.testing import do_bench

        num_rows, head_dim = _TUNING_ROWS, like.shape[-1]
        generator = torch.Generator(like.device).manual_seed(0)
        q, k, v, dout = (
            torch.randn(num_rows, heads, head_dim, generator=generator, device=like.device).to(
                like.dtype
            )
            for heads in (8, 2, 2, 8)
        )
        table = torch.ones(num_rows, head_dim // 2, device=like.device)
        rotation = Rotation(table, table, table, table) if rope else None
        tiles = Tiles(np.array([[0, num_rows, 0, num_rows, 1]]))
        call = Call(q, k, v, tiles, head_dim**-0.5, None, rotation, self.precision)
        state = SoftmaxState.empty(q)
        if kernel == "forward":
            return do_bench(lambda: call.forward(state, config), warmup=5, rep=20)
        delta, lse2, ds0 = call.prepare(dout, state.out, state.lse.fill_(10.0), None)
        grads = [torch.zeros(x.shape, device=x.device) for x in (q, k, v)]
        if kernel == "dq":
            return do_bench(
                lambda: call.dq(dout, delta, lse2, ds0, grads[0], config), warmup=5, rep=20
            )
        return do_bench(
            lambda: call.dkdv(dout, delta, lse2, grads[1], grads[2], config), warmup=5, rep=20
        )


def _check(q: torch.Tensor, scale: float, rotation: Rotation | None) -> None:
    head_dim = q.shape[-1]
    if head_dim > _MAX_HEAD_DIM or (rotation is not None and head_dim % 2):
        raise UserError(
            f"head dimension {head_dim}: the Triton engine takes up to {_MAX_HEAD_DIM}, an even "
            "one when it rotates by itself; choose another engine"
        )
    if scale <= 0:
        raise UserError(f"attention scale {scale}: the Triton engine takes a positive one")


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
