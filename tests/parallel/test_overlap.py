"""``overlap``: with it a step is computed while the next one's rows travel, without it after."""

from __future__ import annotations

from anchorcontext.testing import run_distributed


def run_both_ways(rank, world):
    """Events and results of a forward and backward, with and without overlap."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from anchorcontext import Window, distributed_attention, make_plan
    from anchorcontext.parallel import attention

    events = []

    class Watched(attention.Exchange):
        def wait(self):
            if self._works:
                events.append("wait")
            return super().wait()

    attention.Exchange = Watched
    window = Window(np.zeros(64, dtype=np.int64), [0, 64], "full")
    found = []
    for overlap in (True, False):
        plan = make_plan(window, dist.group.WORLD, "zigzag", "ring", overlap=overlap)
        engine = plan.engine(torch.device("cpu"), torch.float32)
        compute = engine.forward

        def forward(*args, compute=compute):
            events.append("compute")
            return compute(*args)

        engine.forward = forward
        torch.manual_seed(rank)
        q, k, v, dout = (torch.randn(1, h, plan.local_length, 8) for h in (4, 2, 2, 4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = distributed_attention(*leaves, plan)
        in_forward = tuple(events)
        out.backward(dout)
        found.append((in_forward, [out.detach(), *(leaf.grad for leaf in leaves)]))
        engine.forward = compute
        events.clear()
    return found


def test_without_overlap_rows_are_waited_for_first_and_results_keep_their_bits():
    for (events, results), (events_without, results_without) in run_distributed(run_both_ways, 2):
        assert events == ("compute", "wait", "compute")
        assert events_without == ("wait", "compute", "compute")
        for one, other in zip(results, results_without, strict=True):
            assert one.equal(other)
