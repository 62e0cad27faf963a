"""Rules between keys: what no single value can break. Each names the value, the rule and a fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from anchorcontext.config.base import Problem, shown
from anchorcontext.config.control_rules import broken_controls
from anchorcontext.config.deepspeed import contradictions

if TYPE_CHECKING:
    from anchorcontext.config.schema import Config

# Keys of a transformers config that belong to other keys of ours.
_SCRATCH_TAKEN = {
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "attn_implementation": "attention.engine",
    "_attn_implementation": "attention.engine",
}

# Layout and exchange of ring-flash-attn's functions; auto is the first that fits.
_RING_FLASH_ATTN = {
    "full": (("zigzag", "ring"), ("contiguous", "gather"), ("contiguous", "ring")),
    "intra_doc": (("contiguous", "gather"), ("zigzag", "ring")),
}
_RING_FLASH_ATTN["intra_doc_reset"] = _RING_FLASH_ATTN["intra_doc"]


def broken_rules(config: Config) -> list[Problem]:
    """Every rule that ``config`` breaks, in the order of its sections."""
    return [
        *_model(config),
        *_rope(config),
        *_positions(config),
        *_data(config),
        *_windows(config),
        *_train(config),
        *_checkpoint(config),
        *_evaluate(config),
        *_profile(config),
        *_exchange(config),
        *_backend(config),
        *broken_controls(config),
        *contradictions(config),
    ]


def _model(config: Config) -> Iterator[Problem]:
    model = config.model
    if (model.path is None) == (model.scratch is None):
        both = model.path is not None
        yield Problem(
            "model.path",
            model.path,
            f"exactly one of model.path and model.scratch is set, not {'both' if both else 'none'}",
            "set the other to null" if both else "set one of them",
        )
    yield from _checkpointing(config)
    if model.compile and config.train.zero_stage == 3:
        yield Problem(
            "model.compile",
            True,
            "train.zero_stage = 3 gathers weights in hooks of the modules that are compiled",
            "set it to false, or zero_stage to 2",
        )
    if model.scratch is None:
        return
    if not isinstance(model.scratch.get("model_type"), str):
        yield Problem(
            "model.scratch.model_type",
            model.scratch.get("model_type"),
            "names the architecture in transformers",
            "set it to llama, qwen2, qwen3 or mistral",
        )
    for key, ours in _SCRATCH_TAKEN.items():
        if key in model.scratch:
            value = model.scratch[key]
            yield Problem(f"model.scratch.{key}", value, f"is decided by {ours}", "leave it out")


def _checkpointing(config: Config) -> Iterator[Problem]:
    model = config.model
    for key, value, default in (
        ("checkpoint_every", model.checkpoint_every, 1),
        ("keep_attention", model.keep_attention, False),
        ("offload_activations", model.offload_activations, False),
    ):
        if value != default and not model.gradient_checkpointing:
            yield Problem(
                f"model.{key}",
                value,
                "says how layers are checkpointed, and model.gradient_checkpointing = false",
                f"set model.gradient_checkpointing to true, or {key} to {shown(default)}",
            )
    if model.keep_attention and config.attention.backend != "native":
        yield Problem(
            "model.keep_attention",
            True,
            f"attention.backend = {config.attention.backend!r} computes attention in functions of "
            "its own, which keep nothing over a recomputation",
            "set it to false, or attention.backend to native",
        )


def _rope(config: Config) -> Iterator[Problem]:
    rope, scratch = config.model.rope, config.model.scratch or {}
    scaled = rope.type not in (None, "default")
    if scaled and rope.factor is None:
        yield Problem(
            "model.rope.factor",
            None,
            f"model.rope.type = {rope.type!r} needs a factor",
            "set it to the new context length divided by the original one",
        )
    if rope.type == "default" and rope.factor is not None:
        yield Problem(
            "model.rope.factor",
            rope.factor,
            "has no meaning for model.rope.type = 'default'",
            "set it to null, or choose linear, dynamic, yarn or llama3",
        )
    for name, ours in (("rope_theta", rope.theta), ("rope_parameters", rope.theta or rope.type)):
        if name in scratch and ours is not None and scratch[name] != ours:
            yield Problem(
                f"model.scratch.{name}",
                scratch[name],
                "contradicts model.rope",
                f"leave it out; model.rope sets theta = {shown(rope.theta)}",
            )


def _positions(config: Config) -> Iterator[Problem]:
    attention = config.attention
    if attention.mode == "intra_doc_reset" or attention.anchor.reset_positions:
        return  # positions restart at each document, so the window may exceed the model's range
    places = (
        ("model.max_position_embeddings", config.model.max_position_embeddings),
        (
            "model.scratch.max_position_embeddings",
            (config.model.scratch or {}).get("max_position_embeddings"),
        ),
    )
    for key, value in places:
        if isinstance(value, int) and value < config.longest_position:
            yield Problem(
                key,
                value,
                _longest_position(config),
                f"set it to {config.longest_position} or more, or leave it out",
            )


def _longest_position(config: Config) -> str:
    anchor, offset = config.attention.anchor.position, config.positions.offset
    if anchor + 1 == config.longest_position:
        return f"attention.anchor.position = {anchor} lies beyond it"
    shift = f" + positions.offset = {offset}" if offset else ""
    return f"positions run to data.window_tokens = {config.data.window_tokens}{shift}"


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.tokenizer is not None and data.train_tokenizer is not None:
        yield Problem(
            "data.tokenizer",
            data.tokenizer,
            "data.train_tokenizer makes a tokenizer of its own",
            "set one of the two to null",
        )
    if data.train_tokenizer is not None and config.model.path is not None:
        yield Problem(
            "data.train_tokenizer.vocab_size",
            data.train_tokenizer.vocab_size,
            f"the pretrained model of model.path = {config.model.path!r} has its own tokenizer",
            "set data.train_tokenizer to null",
        )
    if data.tokenizer is None and data.train_tokenizer is None and config.model.path is None:
        yield Problem(
            "data.tokenizer",
            None,
            "a model from scratch brings no tokenizer",
            "set data.tokenizer to a tokenizer's folder, or data.train_tokenizer.vocab_size",
        )
    for index, source in enumerate(data.sources):
        if source.path is None and source.kind != "stdlib":
            yield Problem(
                f"data.sources.{index}.path",
                None,
                f"a source of kind {source.kind!r} is a file or a folder",
                "set its path",
            )
        if source.tokens_field is not None and data.train_tokenizer is not None:
            yield Problem(
                f"data.sources.{index}.tokens_field",
                source.tokens_field,
                "rows that are tokenised already have no text to train a tokenizer on",
                "set data.tokenizer to the tokenizer that made them, and data.train_tokenizer to "
                "null",
            )
    if data.anchor == "none" and config.attention.mode == "anchor":
        yield Problem(
            "data.anchor",
            data.anchor,
            "attention.mode = 'anchor' needs an anchor at token 0",
            "set data.anchor to auto, or choose another attention.mode",
        )


def _windows(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.packing.max_truncation > 0 and data.packing.method != "best_fit":
        yield Problem(
            "data.packing.max_truncation",
            data.packing.max_truncation,
            f"is of best_fit; data.packing.method = {data.packing.method!r} cuts "
            f"{'wherever a window ends' if data.packing.method == 'concat' else 'nothing'}",
            "leave it out, or set data.packing.method to best_fit",
        )
    if data.interleave is not None:
        for key in ("pieces", "cut", "tokens"):
            least, most = getattr(data.interleave, key)
            if least > most:
                yield Problem(
                    f"data.interleave.{key}",
                    [least, most],
                    "is the least and the most",
                    f"set it to {[most, least]}",
                )
        if config.attention.backend != "native":
            yield Problem(
                "data.interleave",
                True,
                f"documents in pieces are nothing for attention.backend = "
                f"{config.attention.backend!r}, which takes each as one run of tokens",
                "set attention.backend to native, or data.interleave to false",
            )
    if data.anchor_copies == "none":
        return
    if data.anchor == "none":
        yield Problem(
            "data.anchor_copies",
            data.anchor_copies,
            "there is no anchor to copy with data.anchor = 'none'",
            "set data.anchor to auto, or data.anchor_copies to none",
        )
    if config.attention.mode == "anchor":
        yield Problem(
            "data.anchor_copies",
            data.anchor_copies,
            "attention.mode = 'anchor' shows one anchor to all documents",
            "set attention.mode to intra_doc, or data.anchor_copies to none",
        )


def _train(config: Config) -> Iterator[Problem]:
    train, schedule = config.train, config.schedule
    micro = train.micro_batch_windows
    if train.windows_per_step % micro:
        yield Problem(
            "train.windows_per_step",
            train.windows_per_step,
            f"must be a multiple of train.micro_batch_windows = {micro}",
            f"set it to {-(-train.windows_per_step // micro) * micro}",
        )
    if schedule.warmup_steps > train.steps:
        yield Problem(
            "schedule.warmup_steps",
            schedule.warmup_steps,
            f"must not exceed train.steps = {train.steps}",
            f"set it to {train.steps} or less",
        )


def _checkpoint(config: Config) -> Iterator[Problem]:
    snapshots, steps = config.checkpoint.snapshots, config.train.steps
    if snapshots is not None and (snapshots.last - 1) * snapshots.apart >= steps:
        yield Problem(
            "checkpoint.snapshots.last",
            snapshots.last,
            f"snapshots {snapshots.apart} steps apart must fit into train.steps = {steps}",
            f"set it to {(steps - 1) // snapshots.apart + 1} or less",
        )


def _evaluate(config: Config) -> Iterator[Problem]:
    evaluate, data = config.evaluate, config.data
    if evaluate.every is None:
        return
    held_out = [task for task in evaluate.tasks if task in ("held_out", "loss_by_position")]
    if held_out and data.validation_fraction == 0:
        yield Problem(
            "data.validation_fraction",
            0,
            f"evaluate.tasks = {list(evaluate.tasks)} needs documents that are held out",
            "raise it, to 0.01 for instance, and prepare again",
        )
    for length in evaluate.lengths or ():
        if length > data.window_tokens:
            yield Problem(
                "evaluate.lengths",
                list(evaluate.lengths or ()),
                f"must not exceed data.window_tokens = {data.window_tokens}",
                f"leave {length} out",
            )


def _profile(config: Config) -> Iterator[Problem]:
    profile, steps = config.watch.profile, config.train.steps
    if profile is not None and profile.first > steps:
        yield Problem(
            "watch.profile.from",
            profile.first,
            f"lies behind the last step, train.steps = {steps}: nothing would be recorded",
            f"set it to {steps} or less",
        )


def _exchange(config: Config) -> Iterator[Problem]:
    exchange, ulysses, sp = config.attention.exchange, config.attention.ulysses, config.parallel.sp
    if sp % ulysses:
        yield Problem(
            "attention.ulysses",
            ulysses,
            f"must divide parallel.sp = {sp}",
            f"use one of {[n for n in range(1, sp + 1) if sp % n == 0]}",
        )
    elif exchange == "hybrid" and not 1 < ulysses < sp:
        yield Problem(
            "attention.ulysses",
            ulysses,
            f"must lie between 1 and parallel.sp = {sp}, for attention.exchange = 'hybrid'",
            "set it to the ranks of a node, or choose ring, gather or ulysses",
        )
    elif exchange == "ulysses" and ulysses not in (1, sp):
        yield Problem(
            "attention.ulysses",
            ulysses,
            "is all of parallel.sp for attention.exchange = 'ulysses'",
            "leave it out, or choose hybrid",
        )
    if config.attention.exact and exchange in ("ring", "hybrid"):
        yield Problem(
            "attention.exchange",
            exchange,
            "rounds differently for every sp, which attention.exact rules out",
            "choose auto, gather or ulysses, or set attention.exact to false",
        )


def _backend(config: Config) -> Iterator[Problem]:
    """What ring-flash-attn cannot express, of what is known before a window is."""
    attention, sp = config.attention, config.parallel.sp
    if attention.backend == "native":
        return
    name, native = "attention.backend = 'ring_flash_attn'", "set attention.backend to native"
    if sp < 2:
        yield Problem("parallel.sp", sp, f"is 2 or more with {name}", f"raise it, or {native}")
    mode = attention.mode
    if mode == "anchor" and (attention.anchor.copies or not attention.anchor.visible):
        mode = "intra_doc"  # nothing that all documents see
    if mode not in _RING_FLASH_ATTN:
        yield Problem(
            "attention.mode",
            attention.mode,
            f"needs a key that all documents see; {name} has full, intra_doc and intra_doc_reset",
            f"choose one of these, or {native}",
        )
        return
    for key, value, default in (
        ("ulysses", attention.ulysses, 1),
        ("exact", attention.exact, False),
        ("engine", attention.engine, "auto"),
    ):
        if value != default:
            rule = f"is {shown(default)} with {name}, which has no such choice"
            yield Problem(f"attention.{key}", value, rule, f"leave it out, or {native}")
    ways = _RING_FLASH_ATTN[mode]
    fitting = [
        (layout, exchange)
        for layout, exchange in ways
        if attention.layout in ("auto", layout) and attention.exchange in ("auto", exchange)
    ]
    if not fitting:
        known = ", ".join(f"layout {layout} with exchange {exchange}" for layout, exchange in ways)
        yield Problem(
            "attention.layout",
            attention.layout,
            f"with attention.exchange = {attention.exchange!r} is not among what {name} has for "
            f"mode {attention.mode}: {known}",
            f"choose one of these, or {native}",
        )
    elif config.model.dtype == "fp32" and fitting[0][1] == "ring":
        yield Problem(
            "model.dtype",
            "fp32",
            f"gets wrong gradients from the rings of {name}",
            f"set it to bf16, or {native}",
        )
