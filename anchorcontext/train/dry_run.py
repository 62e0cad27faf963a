"""Validate a run without weights, optimiser or training: config, ranks, model, data, one plan."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import Config, load_config
from ..evaluate.live import build_measures
from ..model import build_config
from ..parallel import build_mesh, make_plan
from ..plan import check_heads
from ..watch.sizes import model_sizes
from .checkpoint_files import WorldLayout, find_checkpoints
from .costs import cost_model, plan_options, predicted_bytes
from .engine import check_deepspeed_options, deepspeed_config
from .job import build_loader, open_dataset, run_folder
from .launch import start_process
from .preflight import check_same_setup
from .reshard import check_movable
from .resume import check_resumable


@dataclass(frozen=True)
class DryRun:
    """What a run would do."""

    resumes_at: int
    """Steps that the run folder's last complete checkpoint has done; 0 for a new run."""
    steps: int
    world_size: int
    dp: int
    sp: int
    accumulation: int
    model_type: str
    num_layers: int
    windows: int
    """Windows in the dataset."""
    window_id: int
    window_tokens: int
    window_documents: int
    window_targets: int
    layout: str
    exchange: str
    tokens_per_rank: int
    """Of the window, padding included."""
    pairs_per_rank: list[int]
    """Visible (query, key) pairs each rank of the SP group computes, per layer and head."""
    bytes_per_rank: list[int]
    """What each rank of the SP group sends for the window's attention in one training step."""


def dry_run(config: Config) -> DryRun:
    """Check everything that can be checked before weights are loaded, and plan one window.

    Raises:
        UserError: whatever would stop the run.
    """
    process = start_process()
    control = process.control
    check_same_setup(config, control)
    with control.together("checking the config"):
        shape = config.check_world(process.world_size)
        check_deepspeed_options(deepspeed_config(config, process.world_size, process.device))
    mesh = build_mesh(config.parallel.sp)
    with control.together("looking into the run folder"):
        checkpoints, _ = find_checkpoints(run_folder(config) / "checkpoints")
        for checkpoint in checkpoints[-1:]:
            check_movable(checkpoint.layout, WorldLayout.of(config, process.world_size))
            check_resumable(load_config(checkpoint.path / "config.yaml"), config)
    with control.together("opening the data and the model's config"):
        dataset = open_dataset(config)
        loader = build_loader(config, dataset, mesh)
        model = build_config(
            config.model, window_tokens=config.longest_position, vocab_size=dataset.vocab_size
        )
        sizes = model_sizes(model)
        cost = cost_model(config, sizes)
        windows = next(loader)
        build_measures(config, dataset, loader.view)
    options = plan_options(config.attention, cost)
    plan = make_plan(windows[0], mesh.sp_group, **options, engine=config.attention.engine)
    check_heads(sizes.num_heads, sizes.num_kv_heads, plan.data.ulysses)
    sent = predicted_bytes(plan, config, sizes)
    group = control.gather((plan.num_pairs, sent))[: mesh.sp]
    return DryRun(
        resumes_at=checkpoints[-1].step if checkpoints else 0,
        steps=config.train.steps,
        world_size=mesh.world_size,
        dp=mesh.dp,
        sp=mesh.sp,
        accumulation=shape.accumulation,
        model_type=sizes.model_type,
        num_layers=sizes.num_layers,
        windows=len(dataset),
        window_id=loader.window_ids(0, 1)[0],
        window_tokens=plan.length,
        window_documents=len(windows[0].cu_seqlens) - 1,
        window_targets=windows[0].num_targets,
        layout=plan.data.layout,
        exchange=plan.data.exchange_name,
        tokens_per_rank=plan.local_length,
        pairs_per_rank=[pairs for pairs, _ in group],
        bytes_per_rank=[sent for _, sent in group],
    )
