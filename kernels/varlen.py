"""Engines over variable-length flash attention on CUDA: torch's own, and the flash-attn package.

Both take sequences packed end to end (:mod:`.varlen_calls`), bf16 or fp16, head dimensions up to
256 and GQA natively, and align a causal mask bottom-right. Both return an output in the dtype of q
and an fp32 LSE, merged in fp32; both backwards compute a block's exact gradients from the *merged*
output and LSE, and return them in the dtype of q, added up in fp32.

What differs is only how the functions are called and what they return:

* ``varlen``: ``aten::_flash_attention_forward`` and ``_backward``, which torch builds for CUDA from
  FlashAttention-2 (``torch.nn.attention.varlen`` calls the same); no further wheel is needed.
* ``flash_attn``: the private functions of ``flash_attn.flash_attn_interface`` from 2.7 on, or those
  of FlashAttention-3's ``flash_attn_interface`` on Hopper where it is installed. Argument lists
  differ between versions and are filled by name.

Shapes of a call: q and out (N, Hq, D), k and v (M, Hkv, D), LSE (Hq, N), ``cu_seqlens`` (n + 1,).
A query that sees no key has output 0 and LSE ``+inf`` there; the merge takes both infinities.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch

from anchorcontext.errors import UserError

from .interface import SoftmaxState, Tiles
from .merge import lse_for_backward, merge_, merge_rows_
from .varlen_calls import VarlenCall, varlen_calls

_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_ATTN, _FLASH_ATTN_3 = "flash_attn.flash_attn_interface", "flash_attn_interface"
_broken: dict[str, str] = {}
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _VarlenEngine:
    """Tile lists through a variable-length function; see `Engine` for the methods' contract."""

    name: ClassVar[str]
    exact = False
    takes_anchors = False
    takes_rotation = False

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Tiles,
        scale: float,
        state: SoftmaxState,
    ) -> None:
        """Merge the tiles' attention into ``state``, in place.

        Raises:
            UserError: a head dimension that flash attention does not take.
        """
        _check_head_dim(q.shape[-1])
        for call in varlen_calls(tiles, q.device):
            queries, keys = call.queries, call.keys
            out, lse = self._forward(queries.load(q), keys.load(k), keys.load(v), call, scale)
            if queries.index is None:
                merge_(state, queries.start, queries.stop, out, lse.t())
            else:
                merge_rows_(state, queries.index, out, lse.t())

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
    ) -> None:
        """Add the tiles' gradients into ``dq``, ``dk`` and ``dv``, in place."""
        lse = lse_for_backward(lse).to(torch.float32)
        for call in varlen_calls(tiles, q.device):
            queries, keys = call.queries, call.keys
            grads = self._backward(
                queries.load(dout),
                queries.load(q),
                keys.load(k),
                keys.load(v),
                queries.load(out),
                queries.load(lse).t().contiguous(),
                call,
                scale,
            )
            for total, grad, rows in zip((dq, dk, dv), grads, (queries, keys, keys), strict=True):
                rows.add_(total, grad)

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of one call."""
        raise NotImplementedError

    def _backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: VarlenCall,
        scale: float,
    ) -> _Gradients:
        """dq, dk and dv of one call, from the merged output and LSE."""
        raise NotImplementedError


class VarlenEngine(_VarlenEngine):
    """torch's own operators."""

    name = "varlen"

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this engine cannot serve ``device`` and ``dtype``; None when it can."""
        if device.type != "cuda":
            return f"it runs on cuda tensors, not on {device.type}"
        if not torch.backends.cuda.is_flash_attention_available():
            return f"torch {torch.__version__} was built without flash attention"
        return _why_not_flash(device, dtype)

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_edges(call), 0.0, call.causal, False, scale=scale, **_window(call)
        )
        return out, lse

    def _backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: VarlenCall,
        scale: float,
    ) -> _Gradients:
        no_dropout = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)
        return torch.ops.aten._flash_attention_backward(
            *(dout.contiguous(), q, k, v, out, lse, *_edges(call), 0.0, call.causal, *no_dropout),
            scale=scale,
            **_window(call),
        )


class FlashAttnEngine(_VarlenEngine):
    """The flash-attn package; FlashAttention-3 on Hopper where it is installed."""

    name = "flash_attn"

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this engine cannot serve ``device`` and ``dtype``; None when it can."""
        installed = [name for name in (_FLASH_ATTN, _FLASH_ATTN_3) if _installed(name)]
        if not installed:
            return "flash-attn is not installed (pip install flash-attn --no-build-isolation)"
        # The functions for CPU tensors of anchorcontext.testing say so.
        wanted = getattr(sys.modules.get("flash_attn"), "device_type", "cuda")
        if device.type != wanted:
            return f"it runs on {wanted} tensors, not on {device.type}"
        interface = _interface(_is_hopper(device))
        if interface is None:
            broken = [f"{name}: {_broken[name]}" for name in installed if name in _broken]
            if broken:
                return f"flash-attn cannot be imported ({'; '.join(broken)})"
            return "flash-attn 2 is not installed, and FlashAttention-3 needs a Hopper GPU"
        if not _is_known(interface):
            return (
                f"{interface.__name__} is too old: flash-attn 2.7 or a later FlashAttention-3 is "
                "needed (pip install --upgrade flash-attn)"
            )
        return _why_not_flash(device, dtype)

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: VarlenCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        function = _varlen(_interface(_is_hopper(q.device)), "forward")
        out, lse, *_ = function(**_arguments(function, call, scale, q=q, k=k, v=v))
        return out, lse

    def _backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: VarlenCall,
        scale: float,
    ) -> _Gradients:
        function = _varlen(_interface(_is_hopper(q.device)), "backward")
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
        function(**_arguments(function, call, scale, **tensors, dq=dq, dk=dk, dv=dv))
        return dq, dk, dv


def _why_not_flash(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in _DTYPES:
        return f"flash attention takes bf16 and fp16, not {dtype}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "flash attention needs an Ampere GPU or a newer one"
    return None


def _edges(call: VarlenCall) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """``cu_seqlens`` of queries and keys, and the longest sequence of each."""
    queries, keys = call.queries, call.keys
    return queries.cu_seqlens, keys.cu_seqlens, queries.longest, keys.longest


def _window(call: VarlenCall) -> dict[str, int]:
    return {"window_size_left": -1, "window_size_right": 0 if call.causal else -1}


def _arguments(
    function: Callable, call: VarlenCall, scale: float, **tensors: torch.Tensor
) -> dict[str, Any]:
    """Arguments by name: what this version of ``function`` takes of ours, and "off" for the rest
    of what it asks for."""
    cu_q, cu_k, longest_q, longest_k = _edges(call)
    ours = {
        **tensors,
        **_window(call),
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
        "softmax_scale": scale,
        "causal": call.causal,
        "is_causal": call.causal,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dropout_p": 0.0,
        "softcap": 0.0,
        "alibi_slopes": None,
        "return_softmax": False,
    }
    return {name: ours[name] for name in _parameters(function) if name in ours}


@functools.cache
def _parameters(function: Callable) -> tuple[str, ...]:
    written = getattr(function, "_init_fn", function)  # a custom operator hides its signature
    return tuple(inspect.signature(written).parameters)


def _interface(hopper: bool) -> ModuleType | None:
    """The module with the functions: FlashAttention-3's on Hopper, else flash-attn 2's; one of
    those that are too old where there is no other."""
    names = (_FLASH_ATTN_3, _FLASH_ATTN) if hopper else (_FLASH_ATTN,)
    found = [module for module in map(_imported, names) if module is not None]
    return next(filter(_is_known, found), found[0] if found else None)


def _imported(name: str) -> ModuleType | None:
    """The module; None, once and for all, where it is missing or cannot be imported."""
    if name in _broken or not _installed(name):
        return None
    try:
        return importlib.import_module(name)
    except Exception as error:  # a wheel built for another torch fails in many ways
        _broken[name] = f"{type(error).__name__}: {' '.join(str(error).splitlines()[:1])}"
        return None


def _is_known(interface: ModuleType) -> bool:
    """Whether these are the functions of flash-attn 2.7 on, or of FlashAttention-3 since."""
    return "window_size" not in _parameters(_varlen(interface, "forward"))


def _varlen(interface: ModuleType | None, direction: str) -> Callable:
    """FlashAttention-3 has one function for batches and for sequences packed end to end."""
    varlen = getattr(interface, f"_flash_attn_varlen_{direction}", None)
    return varlen or getattr(interface, f"_flash_attn_{direction}")


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _installed(name: str) -> bool:
    package = name.partition(".")[0]
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _check_head_dim(head_dim: int) -> None:
    if head_dim > 256 or head_dim % 8:
        raise UserError(
            f"head dimension {head_dim}: flash attention takes multiples of 8 up to 256; choose "
            "another engine (attention.engine: triton, flex or reference)"
        )
