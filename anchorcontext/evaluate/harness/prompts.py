"""What the model reads: the harness's task over drawn prompts, and the length budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UserError
from .catalog import RulerTask
from .require import quiet, sentence_splitter
from .ruler import Row, TooSmallError, ruler_rows, too_small
from .scoring import SCORES
from .sources import Sources

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerBase

MAX_FITS = 6


@dataclass(frozen=True)
class PromptFormat:
    """How a prompt becomes the model's tokens; the harness's ``hf`` model does the same."""

    tokenizer: PreTrainedTokenizerBase
    chat: bool = False
    """Through the tokenizer's chat template, the answer prefix as the begun answer."""

    def __post_init__(self) -> None:
        if self.chat and not self.tokenizer.chat_template:
            raise UserError(
                "--chat-template: this model's tokenizer has none; leave the option out, as for "
                "every base model"
            )

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text; without a generation prompt its last message stays open."""
        text = self.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def render(self, task: ConfigurableTask, row: Row) -> str:
        """The prompt of one sample, exactly as the harness will ask it."""
        text = task.fewshot_context(
            row,
            num_fewshot=0,
            apply_chat_template=self.chat,
            fewshot_as_multiturn=True,
            chat_template=self.apply_chat_template if self.chat else None,
            gen_prefix=task.doc_to_prefix(row),
        )
        return str(text)

    def token_ids(self, prompt: str) -> list[int]:
        """The model's input ids, with one BOS at most.

        A template may render BOS, and the tokenizer may put one in front: the harness then leaves
        the tokenizer's out.

        Raises:
            UserError: two BOS are in front all the same.
        """
        bos = self.tokenizer.bos_token
        rendered = bool(bos) and prompt.startswith(bos)
        kwargs = {"add_special_tokens": False} if rendered else {}
        ids: list[int] = self.tokenizer(prompt, verbose=False, **kwargs)["input_ids"]
        first = self.tokenizer.bos_token_id
        if first is not None and ids[:2] == [first, first]:
            raise UserError(
                f"the prompt begins with BOS ({bos}) twice: the chat template and the tokenizer "
                "both put it there; mend one of them"
            )
        return ids


@dataclass(frozen=True)
class Fitted:
    """A task of the harness whose prompts and answers keep within ``length`` tokens."""

    spec: RulerTask
    length: int
    sized_for: int
    """What the generator was asked for; less than ``length`` where its own count fell short."""
    task: ConfigurableTask
    rows: list[Row]
    tokens: list[int]
    """Of each prompt, answer not included."""


def fit(
    spec: RulerTask,
    length: int,
    samples: int,
    form: PromptFormat,
    sources: Sources,
) -> Fitted:
    """Draw a task's prompts so that each, with its answer, takes at most ``length`` tokens.

    The first try asks the generator for ``length`` itself, as the harness does. Where the answer
    prefix, the chat template or BOS then make a prompt too long, all are drawn anew for as much
    less; the harness would cut tokens off the front, and with them a needle or the question.

    Raises:
        UserError: ``length`` is too small.
    """
    budget = length
    for _ in range(MAX_FITS):
        try:
            drawn = ruler_rows(spec, form.tokenizer, budget, samples, sources)
        except TooSmallError:
            if budget == length:
                raise
            raise too_small(spec, length) from None  # the length that was asked for
        rows = [{**row, "max_length": length} for row in drawn]
        task = harness_task(spec, length, rows)
        tokens = [len(form.token_ids(form.render(task, row))) for row in rows]
        over = max(tokens) + spec.generates - length
        if over <= 0:
            return Fitted(spec, length, budget, task, rows, tokens)
        budget -= over
        if budget <= spec.generates:
            break
    raise too_small(spec, length, max(tokens) + spec.generates)


def harness_task(spec: RulerTask, length: int, rows: list[Row]) -> ConfigurableTask:
    """The harness's own task, its prompts and its score replaced by ours.

    Everything else (how a prompt and its answer prefix are put together, greedy generation, how
    many tokens) is what the harness's file says.
    """
    import datasets

    def prompts(**_: Any) -> dict[str, Any]:
        return {"test": datasets.Dataset.from_list(rows, split=datasets.Split.TEST)}

    overrides = {
        "task": spec.name,
        "custom_dataset": prompts,
        "process_results": score_results(spec, length),
        "metric_list": [
            {"metric": str(length), "aggregation": "mean", "higher_is_better": True},
        ],
    }
    with quiet():
        loaded = ruler_manager().load([{"group": "anchorcontext", "task": [overrides]}])
    (task,) = loaded["tasks"].values()
    generates = task.config.generation_kwargs["max_gen_toks"]
    assert generates == spec.generates, f"{spec.name} generates {generates} tokens"
    return task


def score_results(spec: RulerTask, length: int) -> Callable[[Row, list[str]], dict[str, float]]:
    """The harness's hook: one sample's answers in, its score (0 to 1) under the length out."""

    def process_results(row: Row, answers: list[str]) -> dict[str, float]:
        from lm_eval.tasks.ruler.common_utils import postprocess_pred

        score = SCORES[spec.match](postprocess_pred(answers), [row["outputs"]])
        return {str(length): score / 100}

    return process_results


@cache
def ruler_manager() -> TaskManager:
    """The harness's index of its RULER folder alone: that of all its tasks takes seconds."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    sentence_splitter(download=False)
    folder = Path(str(lm_eval.__file__)).parent / "tasks" / "ruler"
    return TaskManager(include_path=str(folder), include_defaults=False)
