"""Moving the rows of a plan between ranks: point to point, sizes known to both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from anchorcontext.kernels.pinned import to_device

from ..plan import Rows, Transfer
from .meter import Meter


@dataclass(frozen=True)
class Peers:
    """The ranks a transfer's peer numbers stand for: ``ranks[peer]`` is a rank of ``group``."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]

    def operation(self, call: Callable, tensor: torch.Tensor, peer: int) -> dist.P2POp:
        """A point-to-point operation with ``peer``; bytes travel, so any dtype does."""
        flat = tensor.view(-1).view(torch.uint8)
        return dist.P2POp(
            call, flat, dist.get_global_rank(self.group, self.ranks[peer]), group=self.group
        )


def take(buffer: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The selected rows of ``buffer``; a view where they are one interval, else a copy."""
    if len(rows.intervals) == 1:
        start, stop = rows.intervals[0].tolist()
        return buffer[start:stop]
    return buffer.index_select(0, _index(rows, buffer.device))


def add_(buffer: torch.Tensor, rows: Rows, values: torch.Tensor) -> None:
    """``buffer[rows] += values``, in place."""
    if len(rows.intervals) == 1:
        start, stop = rows.intervals[0].tolist()
        buffer[start:stop] += values
    else:
        buffer.index_add_(0, _index(rows, buffer.device), values)


def put_(buffer: torch.Tensor, rows: Rows, values: torch.Tensor) -> None:
    """``buffer[rows] = values``, in place."""
    if len(rows.intervals) == 1:
        start, stop = rows.intervals[0].tolist()
        buffer[start:stop] = values
    else:
        buffer.index_copy_(0, _index(rows, buffer.device), values)


class Exchange:
    """One transfer in flight.

    Posting sends the selected rows of ``source`` and starts to receive; :meth:`wait` returns what
    arrived, one tensor a received message, in the plan's order. Between two ranks messages are
    matched by order, so all ranks post their transfers in the same sequence; a transfer in which
    this rank has no part posts nothing.

    Args:
        transfer: from the plan.
        source: (R, ...) the rows that sends select from; received rows share row shape and dtype.
        peers: whom peer numbers mean; None on a single device, where nothing is sent.
    """

    def __init__(
        self,
        transfer: Transfer,
        source: torch.Tensor,
        peers: Peers | None,
        meter: Meter,
    ) -> None:
        self.transfer = transfer
        self._meter = meter
        row_shape = source.shape[1:]
        self._outgoing = [take(source, m.rows).contiguous() for m in transfer.sends]
        self._arriving = [
            torch.empty((m.rows.num_rows, *row_shape), dtype=source.dtype, device=source.device)
            for m in transfer.receives
        ]
        operations: list[dist.P2POp] = []
        self._works: list[dist.Work] = []
        if not transfer.busy:
            return
        assert peers is not None, "a transfer between ranks needs their group"
        for message, tensor in zip(transfer.sends, self._outgoing, strict=True):
            operations.append(peers.operation(dist.isend, tensor, message.peer))
            meter.bytes_sent += tensor.numel() * tensor.element_size()
            meter.messages_sent += 1
        for message, tensor in zip(transfer.receives, self._arriving, strict=True):
            operations.append(peers.operation(dist.irecv, tensor, message.peer))
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> list[torch.Tensor]:
        """Until everything sent has left and everything due has arrived."""
        with self._meter.waiting():
            for work in self._works:
                work.wait()
        self._works, self._outgoing = [], []
        return self._arriving


def _index(rows: Rows, device: torch.device) -> torch.Tensor:
    """The rows' index tensor, kept with the plan: made once a micro-batch, not once a layer."""
    if device not in rows.cache:
        parts = [torch.arange(start, stop) for start, stop in rows.intervals.tolist()]
        index = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
        rows.cache[device] = to_device(index, device)
    return rows.cache[device]
