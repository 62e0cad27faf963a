"""One model, one task, one length: its result, stored whole and never computed twice."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...errors import writing
from ...files import written_whole

FORMAT = 1
VERSIONS = ("anchorcontext", "lm_eval", "transformers", "torch", "wonderwords")


@dataclass(frozen=True)
class UnitResult:
    """The score of one model in one task at one length."""

    model: str
    task: str
    length: int | None
    """Tokens of prompt and answer; None for a task that has no length of ours."""
    score: float
    """Percent."""
    stderr: float | None
    """Percent, of the mean over samples; None where the harness gives none."""
    metric: str
    samples: int
    requested: int | None
    """Samples asked for; None: all there are."""
    prompt_tokens: float | None
    """Mean over samples, BOS, chat template and answer prefix included."""
    longest: int | None
    """Tokens of the longest prompt and its answer; at most ``length``."""
    sized_for: int | None
    """The length that the harness's generator was asked for."""
    batch_size: int
    seconds: float
    texts: dict[str, str]
    """The haystack or the questions: name and digest."""
    fingerprint: str
    versions: dict[str, str]


def versions() -> dict[str, str]:
    """Of everything that decides a score, as far as it is installed."""
    found = {}
    for name in VERSIONS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def fingerprint(facts: Mapping[str, Any]) -> str:
    """A digest of what a result depends on."""
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class UnitStore:
    """Results below ``folder``, one JSON file a unit, beside what the harness wrote of it.

    ::

        MODEL/TASK-4096/unit.json             our result; written last, by a rename
        MODEL/TASK-4096/results_*.json        the harness's results
        MODEL/TASK-4096/samples_*.jsonl       every prompt, answer and score
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, model: str, task: str, length: int | None) -> Path:
        """The folder of one unit."""
        return self.folder / model / (task if length is None else f"{task}-{length}")

    def load(
        self, model: str, task: str, length: int | None, fingerprint: str
    ) -> UnitResult | None:
        """The stored result; None when there is none, or one of other circumstances."""
        result = _read(self.place(model, task, length) / "unit.json")
        return result if result is not None and result.fingerprint == fingerprint else None

    def results(self, model: str) -> list[UnitResult]:
        """Every stored result under a model's name, whatever the circumstances."""
        found = map(_read, sorted((self.folder / model).glob("*/unit.json")))
        return [result for result in found if result is not None]

    def save(self, result: UnitResult) -> None:
        """Store a result; a reader sees all of it or nothing."""
        path = self.place(result.model, result.task, result.length) / "unit.json"
        with writing("--output", path.parent), written_whole(path) as beside:
            beside.write_text(json.dumps(dataclasses.asdict(result), indent=2) + "\n")


def _read(path: Path) -> UnitResult | None:
    try:
        return UnitResult(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


# What a task that is not RULER's is known by, the first that it has.
MAIN_METRICS = ("acc_norm", "acc", "score", "exact_match", "f1")


def read_score(
    results: Mapping[str, Any], task: str, length: int | None
) -> tuple[float, float | None, str, int]:
    """A task's score out of the harness's results: percent, standard error, metric, samples."""
    values = results["results"][task]
    names = [str(length)] if length is not None else MAIN_METRICS
    metrics = {key.split(",")[0]: key for key in values if isinstance(values[key], float)}
    found = next((name for name in names if name in metrics), None)
    if found is None:
        found = next(name for name in metrics if not name.endswith("_stderr"))
    key = metrics[found]
    error = values.get(key.replace(found, f"{found}_stderr", 1))
    counted = [
        count["effective"]
        for name, count in results["n-samples"].items()
        if name == task or task in results.get("group_subtasks", {})
    ]
    stderr = 100 * error if isinstance(error, float) else None
    metric = "string match" if length is not None else found
    return 100 * values[key], stderr, metric, sum(counted)


def write_harness_files(results: dict[str, Any], folder: Path, model: Path) -> None:
    """Leave the harness's own results and samples of ``model`` in ``folder``, in place of older
    ones."""
    from lm_eval.loggers import EvaluationTracker

    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("results_*.json"), *folder.glob("samples_*.jsonl")]:
        old.unlink()
    tracker = EvaluationTracker(output_path=str(folder / "results.json"))
    tracker.general_config_tracker.log_experiment_args(
        model_source="hf",
        model_args={"pretrained": str(model)},
        system_instruction=None,
        chat_template=None,
        fewshot_as_multiturn=True,
    )
    samples = results.pop("samples")
    results["config"] = {"model": "hf", "model_args": {"pretrained": str(model)}}
    results["lm_eval_version"] = version("lm_eval")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name, rows in samples.items():
        tracker.save_results_samples(task_name=name, samples=rows)
    # The tracker only notes what it could not write.
    missing = [
        kind
        for kind, number in (("results_*.json", 1), ("samples_*.jsonl", len(samples)))
        if len(list(folder.glob(kind))) < number
    ]
    if missing:
        raise RuntimeError(f"the harness did not write {', '.join(missing)} in {folder}")
