"""What a command can refuse by looking at its arguments, it refuses before it imports torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from anchorcontext.cli.plan import MIXES
from anchorcontext.estimate.windows import MIXES as KNOWN_MIXES

DEMO = str(Path(__file__).parents[2] / "configs" / "demo.yaml")
HYBRID = ("attention.exchange=hybrid", "attention.ulysses=2")
REFUSED = {
    "plan, mix": (["plan", DEMO, "--mix", "books"], "'books' is not one of"),
    "plan, world": (["plan", DEMO, "--world", "8x"], "--world '8x'"),
    "plan, large world": (["plan", DEMO, "--world", "5000"], "1 to 1024 ranks"),
    "plan, no sp": (
        ["plan", DEMO, "--world", "7", "parallel.sp=4", *HYBRID],
        "no parallel.sp fits",
    ),
    "plan, hardware": (["plan", DEMO, "--hardware", "h1000"], "h1000"),
    "inspect": (["inspect", DEMO, "data.path=gone"], "'gone' is not a prepared folder"),
    "inspect, mode": (["inspect", "--documents", "7", "--mode", "ancho"], "did you mean 'anchor'?"),
    "evaluate": (["evaluate", "gone"], "gone: no such folder"),
    "evaluate, empty": (["evaluate", "."], "holds no complete checkpoint"),
    "evaluate, device": (
        ["evaluate", "gone", "--tasks", "loss-by-position", "--device", "cpu"],
        "--device cpu",
    ),
    "evaluate, tasks": (["evaluate", "gone", "--tasks", "vtt"], "did you mean vt"),
    "evaluate, lengths": (["evaluate", "gone", "--lengths", "4.5K"], "--lengths"),
    "average": (["average", "gone", "--out", "mean"], "gone: no such folder"),
    "average, one": (["average", "model", "--out", "mean"], "at least 2 snapshots"),
    "average, scores": (["average", "--scores", "gone.json"], "gone.json: no such file"),
    "export": (["export", "gone", "mean"], "holds no complete checkpoint"),
    "report": (["report", "gone"], "holds no metrics.jsonl"),
    "compare": (["compare", "gone", "lost"], "holds no metrics.jsonl"),
}
SCRIPT = """
import json, sys
from click.testing import CliRunner
from anchorcontext.cli import group
# An import of one of them raises, so that every command is judged alone.
sys.modules.update(dict.fromkeys(["torch", "transformers", "deepspeed", "lm_eval"]))
answers = {}
for name, (arguments, _) in json.load(sys.stdin).items():
    result = CliRunner().invoke(group, arguments)
    answers[name] = (result.exit_code, result.output, repr(result.exception))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The exit status and output of every command, from one process without heavy libraries."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").touch()
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(REFUSED),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistyped_argument_is_refused_without_heavy_imports(answers, name):
    status, output, exception = answers[name]
    assert status == 2, exception
    assert REFUSED[name][1] in output


def test_the_mixes_that_plan_offers_are_those_it_knows():
    assert MIXES == KNOWN_MIXES
