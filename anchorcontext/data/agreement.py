"""Whether prepared windows are those that a config asks for."""

from __future__ import annotations

from pathlib import Path

from ..config import Config
from ..errors import UserError
from .store import WindowDataset
from .tokenizer import load_tokenizer

# What decides the windows apart from the corpus, which may be gone when the model is trained.
OPTIONS = (
    "window_tokens",
    "anchor",
    "anchor_copies",
    "packing",
    "upsample",
    "tags",
    "interleave",
    "add_eos",
    "min_document_tokens",
    "max_windows",
    "shares",
    "shuffle_documents",
    "validation_fraction",
)


def check_prepared(dataset: WindowDataset, config: Config) -> None:
    """Refuse windows that were made with other options, or for another tokenizer, than configured.

    Equal vocabulary sizes prove nothing: a pretrained model would learn from foreign ids.

    Raises:
        UserError: names every option that differs, with both values.
    """
    made = (dataset.meta or {}).get("request", {})
    asked = config.data.model_dump(mode="json")
    different = [
        f"data.{key} = {asked[key]!r}, prepared with {made[key]!r}"
        for key in OPTIONS
        if key in made and made[key] != asked[key]
    ]
    different += _tokenizer_difference(dataset, config, made.get("tokenizer"))
    if different:
        raise UserError(
            f"{dataset.path} was prepared differently than the config says: "
            f"{'; '.join(different)}. Run `anchorcontext prepare CONFIG --force`, or set the "
            "config to what was prepared"
        )


def _tokenizer_difference(dataset: WindowDataset, config: Config, made_with: object) -> list[str]:
    trained = made_with.get("train_vocab_size") if isinstance(made_with, dict) else None
    if config.data.train_tokenizer is not None:
        asked = config.data.train_tokenizer.vocab_size
        if made_with is None or trained == asked:
            return []
        found = "another tokenizer" if trained is None else repr(trained)
        return [f"data.train_tokenizer.vocab_size = {asked}, prepared with {found}"]
    folder = config.data.tokenizer or config.model.path
    ours = dataset.tokenizer_path
    if folder is None or not all(_holds_tokenizer(Path(f)) for f in (folder, ours)):
        return []  # only folders are compared: nothing is downloaded to check
    if load_tokenizer(folder).get_vocab() == load_tokenizer(ours).get_vocab():
        return []
    return [f"the tokenizer of {folder} gives other ids than the one of the windows, {ours}"]


def _holds_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file()
