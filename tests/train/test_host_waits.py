"""Where a step makes the host wait for the device: at its end, not in its micro-batches.

On a CPU nobody waits, but the operators that would are the same ones.
"""

import torch

from anchorcontext.testing import run_distributed

READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2")
"""Operators of aten whose result has to come to the host; ``item`` is the first one."""


def reads_of_a_step(rank, world_size, config):
    """How often the host reads in a step's micro-batches, and in its update."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from anchorcontext.train import step
    from anchorcontext.train.job import Job
    from anchorcontext.watch.metrics import StepMeter

    class Reads(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.found = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            boolean_index = name == "index" and any(
                i is not None and i.dtype == torch.bool for i in args[1]
            )
            if name in READS or boolean_index:
                self.found.append(name)
            return func(*args, **kwargs or {})

    job = Job(config)
    apply_step, found = step.apply_step, {}
    for _ in range(2):  # the first one records ZeRO-3's order of modules
        batches = job.next_micro_batches()
        plans = step.plan_micro_batches(batches, job.mesh, config.attention, job.control, job.cost)
        targets, meter = step.count_targets(batches, job.mesh, job.control), StepMeter()
        with Reads() as micro_batches:

            def update(*args, micro_batches=micro_batches):
                found["micro-batches"] = list(micro_batches.found)
                result = apply_step(*args)
                found["update"] = micro_batches.found[len(found["micro-batches"]) :]
                return result

            step.apply_step = update
            step.train_step(job.engine, plans, targets, meter)
    assert len(plans) == 2
    job.close()
    return found


def test_the_host_reads_nothing_in_micro_batches_and_little_in_the_update(tiny):
    config = tiny(
        model={"dtype": "bf16", "gradient_checkpointing": True, "keep_attention": True},
        parallel={"sp": 2},
        train={"zero_stage": 3, "windows_per_step": 2},
    )
    for found in run_distributed(reads_of_a_step, 2, config):
        assert found["micro-batches"] == []
        assert 0 < len(found["update"]) < 8, found["update"]
