"""Rules of the controls (docs/controls.md): what contradicts a mode, and what would change nothing.

A control that has no effect is refused like a contradiction: an experiment with it would compare a
run with itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from anchorcontext.config.base import Problem

if TYPE_CHECKING:
    from anchorcontext.config.schema import Config
    from anchorcontext.config.sections import AttentionSection

# Engines without fp32.
_HALF_ENGINES = ("flash_attn", "varlen")
_UNSEEN = "has no effect with attention.anchor.visible = false: no document sees the anchor"
_NO_ANCHOR = "has no meaning in attention.mode = {!r}, which has no anchor for all documents"


def broken_controls(config: Config) -> Iterator[Problem]:
    """Every rule of a control that ``config`` breaks."""
    yield from _anchor(config)
    yield from _anchor_token(config)
    yield from _positions(config)
    yield from _precision(config)


def _anchor(config: Config) -> Iterator[Problem]:
    mode, anchor = config.attention.mode, config.attention.anchor
    copied = config.data.anchor_copies != "none"
    if mode != "anchor":
        for key, value, asked, other in (
            ("visible", False, not anchor.visible, "leave it out"),
            ("reset_positions", True, anchor.reset_positions, "choose intra_doc_reset"),
            ("copies", True, anchor.copies, "prepare them with data.anchor_copies"),
        ):
            if asked:
                fix = f"set attention.mode to anchor, or {other}"
                yield Problem(f"attention.anchor.{key}", value, _NO_ANCHOR.format(mode), fix)
        if anchor.position and (mode == "full" or not copied):
            yield Problem(
                "attention.anchor.position",
                anchor.position,
                _NO_ANCHOR.format(mode) + " and, with these windows, no copies of one",
                "set attention.mode to anchor, or leave it out",
            )
        return
    if not anchor.visible:
        for key, unseen in (("position", anchor.position), ("copies", anchor.copies)):
            if unseen:
                fix = "leave it out, or make the anchor visible"
                yield Problem(f"attention.anchor.{key}", unseen, _UNSEEN, fix)
    if anchor.copies and config.loss.boundary == "train":
        yield Problem(
            "attention.anchor.copies",
            True,
            "with loss.boundary = 'train' the last token of a document would predict a copy",
            "set it to false, or loss.boundary to mask",
        )


def _anchor_token(config: Config) -> Iterator[Problem]:
    attention, data = config.attention, config.data
    key, token = "attention.anchor.token", attention.anchor.token
    if token is None:
        return
    if data.anchor == "none":
        yield Problem(
            key,
            token,
            "there is no anchor to replace with data.anchor = 'none'",
            "leave it out, or prepare windows with an anchor",
        )
    elif not attention.anchor.visible:
        yield Problem(key, token, _UNSEEN, "leave it out, or make the anchor visible")
    elif attention.mode.startswith("intra_doc") and data.shared_anchor:
        yield Problem(
            key,
            token,
            f"has no effect in attention.mode = {attention.mode!r}: no document sees the anchor",
            "leave it out, or set attention.mode to anchor or full",
        )


def _positions(config: Config) -> Iterator[Problem]:
    plain = config.data.anchor_copies == "none" and config.positions.offset == 0
    if config.positions.clamp_first and config.attention.mode == "intra_doc_reset" and plain:
        yield Problem(
            "positions.clamp_first",
            True,
            "has no effect in attention.mode = 'intra_doc_reset': documents begin at position 0",
            "leave it out, or choose another attention.mode",
        )


def _precision(config: Config) -> Iterator[Problem]:
    attention, precision = config.attention, config.attention.precision
    if config.model.dtype == "fp32":
        for name in ("rope_tables", "rotation", "qk"):
            if getattr(precision, name) != "model":
                yield Problem(
                    f"attention.precision.{name}",
                    getattr(precision, name),
                    "has no effect with model.dtype = 'fp32'",
                    "leave it out, or set model.dtype to bf16",
                )
        return
    if precision.rope_tables == "fp32" and precision.rotation == "model":
        yield Problem(
            "attention.precision.rope_tables",
            "fp32",
            "is lost where attention.precision.rotation = 'model' multiplies with tables of "
            f"model.dtype = {config.model.dtype!r}",
            "set rotation to fp32 or engine, too",
        )
    if precision.engine_rotates and precision.attends_in_fp32:
        yield Problem(
            "attention.precision.qk",
            "fp32",
            "has no meaning with attention.precision.rotation = 'engine', which takes queries and "
            "keys in model.dtype and rotates and multiplies them in fp32",
            "leave it out, or set rotation to fp32",
        )
    elif precision.engine_rotates:
        yield from _needs_fp32(attention, "rotation", "engine")
    elif precision.attends_in_fp32:
        yield from _needs_fp32(attention, "qk", "fp32")


def _needs_fp32(attention: AttentionSection, key: str, value: str) -> Iterator[Problem]:
    """What cannot multiply fp32 queries and keys, as ``attention.precision.<key>`` wants it."""
    asked = f"attention.precision.{key} = {value!r} needs products of fp32"
    if attention.engine in _HALF_ENGINES:
        yield Problem(
            "attention.engine",
            attention.engine,
            f"takes bf16 and fp16, and {asked}",
            f"set it to auto, or {key} to model",
        )
    if attention.backend != "native":
        yield Problem(
            "attention.backend",
            attention.backend,
            f"runs on flash-attn, which takes bf16 and fp16, and {asked}",
            f"set it to native, or {key} to model",
        )
