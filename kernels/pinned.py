"""Small host tensors to the device, without waiting for what the device is at."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on ``device``; the copy waits in the current stream, the host does not.

    From ordinary memory CUDA copies only after the stream has done all that was asked of it before.
    """
    if device.type == "cuda":
        # The pinned copy may be dropped at once: its memory is used again after the transfer only.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
