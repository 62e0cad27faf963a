"""RULER's prompts hold their answers, whole, within the length, whatever reads them.

One file, because the harness's word list takes ten seconds to import.
"""

import json
import shutil
from collections import Counter

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

from anchorcontext.cli.evaluate import command
from anchorcontext.errors import UserError
from anchorcontext.evaluate.harness.catalog import PRESETS, RULER
from anchorcontext.evaluate.harness.prompts import PromptFormat, fit
from anchorcontext.evaluate.harness.report import summarize
from anchorcontext.evaluate.harness.ruler import ruler_rows
from anchorcontext.evaluate.harness.run import Options, open_model, run_units, score_fitted
from anchorcontext.evaluate.harness.sources import Sources
from anchorcontext.evaluate.target import find_targets, put_in_front
from anchorcontext.testing import run_distributed
from anchorcontext.testing.models import tiny_model
from anchorcontext.testing.readers import ConstantReader, FirstNeedleReader, PerfectReader
from anchorcontext.train import train

SAMPLES = 4
LENGTHS = (512, 1500, 8192)
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n{{ m.content }}"
    "{% if not loop.last %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}\n[assistant]\n{% endif %}"
)


def word_tokenizer(*, adds_bos: bool = False, chat: bool = False) -> PreTrainedTokenizerFast:
    """A token a word: no vocabulary is needed to count them."""
    vocabulary = {"<unk>": 0, "<bos>": 1, "<eos>": 2}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT if chat else None,
    )
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    return tokenizer


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Sources:
    """A haystack shorter than the lengths, and questions about documents of 40 words."""
    folder = tmp_path_factory.mktemp("texts")
    haystack = folder / "haystack.txt"
    sentences = [f"Dr. Brown saw ship number {n} leave the harbour." for n in range(400)]
    haystack.write_text(" ".join(sentences))
    facts = [(f"subject{n}", f"answer{n}x") for n in range(600)]
    texts = {
        name: f"The colour of {name} is {value}. " + "So it goes. " * 12 for name, value in facts
    }
    squad = {
        "data": [
            {
                "paragraphs": [
                    {
                        "context": texts[name],
                        "qas": [
                            {
                                "question": f"What is the colour of {name}?",
                                "answers": [{"text": value}, {"text": f"a shade of {value}"}],
                                "is_impossible": False,
                            },
                            {"question": "Why?", "answers": [], "is_impossible": True},
                        ],
                    }
                ]
            }
            for name, value in facts
        ]
    }
    hotpotqa = [
        {
            "question": f"What is the colour of {name}?",
            "answer": value,
            "context": [[name, [texts[name]]], ["Other", [texts[facts[(n + 1) % 600][0]]]]],
        }
        for n, (name, value) in enumerate(facts)
    ]
    (folder / "squad.json").write_text(json.dumps(squad))
    (folder / "hotpotqa.json").write_text(json.dumps(hotpotqa))
    return Sources(haystack, [folder / "squad.json", folder / "hotpotqa.json"])


@pytest.fixture(scope="module")
def fitted(sources):
    """Every task at every length, drawn once."""
    form = PromptFormat(word_tokenizer())
    return {
        (name, length): fit(RULER[name], length, SAMPLES, form, sources)
        for name in RULER
        for length in LENGTHS
    }


def score(fitted, reader, name, length) -> float:
    """Percent, out of the harness's own results."""
    results = score_fitted(fitted[name, length], reader)
    return 100 * results["results"][name][f"{length},none"]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", RULER)
def test_readers_score_what_they_can(fitted, name, length):
    assert score(fitted, PerfectReader(), name, length) == 100
    assert score(fitted, ConstantReader(), name, length) == 0
    first = score(fitted, FirstNeedleReader(), name, length)
    assert first == pytest.approx(expected_of_the_first(fitted, name, length))


def expected_of_the_first(fitted, name, length) -> float:
    """What answering with the first candidate is worth, from the drawn rows."""
    known = {"niah_multivalue": 25, "niah_multiquery": 25, "ruler_vt": 20}
    known |= dict.fromkeys(("niah_single_1", "niah_single_2", "niah_single_3"), 100)
    if name in known:
        return known[name]
    shares = []
    for row in fitted[name, length].rows:
        text, outputs = row["input"], row["outputs"]
        if name == "ruler_cwe":
            first = text.split("1. ", 1)[1].split(" 2. ")[0]
        elif name == "ruler_fwe":
            first = next(w for w in text.split("coded words. ")[1].split() if w != "...")
        else:
            marker = "The colour of" if name.startswith("ruler_qa") else "One of the special magic"
            first = text[text.index(marker) :].split(".", 1)[0]
        hits = [output in first for output in outputs]
        shares.append(any(hits) if name.startswith("ruler_qa") else sum(hits) / len(hits))
    return 100 * sum(shares) / len(shares)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", RULER)
def test_prompt_and_answer_keep_within_the_length(fitted, name, length):
    found = fitted[name, length]
    assert len(found.rows) == SAMPLES
    assert max(found.tokens) + found.spec.generates <= length
    for row in found.rows:
        if not name.startswith("ruler_qa"):
            assert all(output in row["input"] for output in row["outputs"])


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", ["niah_multiquery", "ruler_fwe", "ruler_vt"])
def test_bos_and_template_count_against_the_length(sources, name, chat):
    """Both add tokens that the generators leave out; BOS stands there once."""
    form = PromptFormat(word_tokenizer(adds_bos=True, chat=True), chat)
    for length in range(700, 760, 20):
        found = fit(RULER[name], length, 2, form, sources)
        assert max(found.tokens) + found.spec.generates <= length
        for row in found.rows:
            prompt = form.render(found.task, row)
            assert form.token_ids(prompt)[:2] == [1, 0]
            assert prompt.endswith(row["gen_prefix"])
            assert ("[assistant]" in prompt) == chat


def test_a_chat_template_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="chat-template"):
        PromptFormat(word_tokenizer(), chat=True)


def test_two_bos_are_refused():
    form = PromptFormat(word_tokenizer(adds_bos=True))
    assert form.token_ids("<bos> a") == [1, 0]
    with pytest.raises(UserError, match="twice"):
        form.token_ids("<bos> <bos> a")


def test_bos_is_put_in_front_once():
    tokenizer = word_tokenizer()
    for _ in range(2):
        put_in_front(tokenizer, 1)
        assert tokenizer("a b")["input_ids"] == [1, 0, 0]


@pytest.mark.parametrize("name", [name for name in RULER if not name.startswith("ruler_qa")])
def test_too_small_a_length_is_an_error_not_a_hang(sources, name):
    form = PromptFormat(word_tokenizer())
    length = 90 if name == "ruler_fwe" else 160
    with pytest.raises(UserError, match=rf"at {length} tokens: its smallest prompt"):
        fit(RULER[name], length, 2, form, sources)


def test_a_length_that_only_the_answer_prefix_exceeds_is_named_as_asked_for(sources):
    form = PromptFormat(word_tokenizer())
    with pytest.raises(UserError, match="niah_single_1 at 200 tokens: its smallest prompt"):
        fit(RULER["niah_single_1"], 200, 2, form, sources)


def test_prompts_are_the_harness_own(tmp_path, sources):
    """At a length that the harness's tasks can make, sample for sample, in any order of tasks."""
    import random

    import numpy as np
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, vt_utils

    word_tokenizer().save_pretrained(tmp_path)
    fresh = random.Random(42)  # as after import
    fresh.shuffle(list(cwe_utils.WORDS))
    cwe_utils.RNG.setstate(fresh.getstate())
    for name, draw, length in [
        ("ruler_cwe", cwe_utils.get_cw_dataset, 600),
        ("niah_multikey_2", niah_utils.niah_multikey_2, 400),
        ("ruler_vt", vt_utils.get_vt_dataset, 1050),
        ("ruler_fwe", fwe_utils.fwe_download, 400),
    ]:
        random.seed(0)
        np.random.seed(1234)
        theirs = list(draw(max_seq_lengths=[length], tokenizer=str(tmp_path))["test"])
        assert ruler_rows(RULER[name], word_tokenizer(), length, 3, sources) == theirs[:3], name


def test_drawing_leaves_the_callers_random_numbers_alone(sources):
    import random

    import numpy as np

    random.seed(7)
    np.random.seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist()
    ruler_rows(RULER["ruler_vt"], word_tokenizer(), 1100, 1, sources)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_short_question_file_is_refused_where_the_harness_would_mix_up_documents(tmp_path):
    document = {"context": "The colour of x is y.", "qas": []}
    document["qas"] = [{"question": "What is the colour of x?", "answers": [{"text": "y"}]}]
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [document]}]}))
    with pytest.raises(UserError, match="in 1 document;"):
        ruler_rows(RULER["ruler_qa_squad"], word_tokenizer(), 600, 1, Sources(None, [path]))


def test_snapshots_of_a_run_are_exported_and_averaged(tiny, tmp_path):
    model = {"max_position_embeddings": 2048}
    every = {"every": 1, "keep": 2}
    config = tiny(model=model, train={"steps": 2}, checkpoint=every)
    run_distributed(lambda rank, world_size, config: train(config).step, 1, config)
    targets = find_targets([tmp_path / "runs" / "tiny"], snapshots=2, apart=1)
    options = Options(lengths=(1500,), samples=2, dtype="fp32", device="cpu")
    findings = run_units(targets, ["ruler_fwe"], options, tmp_path / "out")
    assert [r.model for r in findings.results] == ["tiny-step-000001", "tiny-step-000002"]
    assert findings.results[0].fingerprint != findings.results[1].fingerprint
    assert str(summarize(findings).scores["ruler_fwe"]["1500"]) == "0.00 ± 0.00"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_harness_model_reads_the_tokens_that_were_counted(model_folder, adds_bos, chat):
    form = PromptFormat(word_tokenizer(adds_bos=adds_bos, chat=True), chat)
    prompt = "a b c"
    if chat:
        prompt = form.apply_chat_template([{"role": "user", "content": prompt}])
    (target,) = find_targets([model_folder])
    with open_model(target, form.tokenizer, Options(dtype="fp32"), "cpu") as lm:
        ids, _ = lm.tok_batch_encode([prompt, prompt])
    assert ids.tolist() == [form.token_ids(prompt)] * 2
    assert ids[0].tolist().count(1) == int(adds_bos or chat)


MULTIPLE_CHOICE = """
task: hellaswag
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc_norm, aggregation: mean, higher_is_better: true}}]
"""


def test_a_task_whose_data_is_here_is_scored_by_the_harness(model_folder, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    rows = [{"question": "a b", "choices": ["c", "d e"], "answer": 0} for _ in range(3)]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "task.yaml").write_text(MULTIPLE_CHOICE.format(data=tmp_path / "data.jsonl"))
    local = TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr("anchorcontext.evaluate.harness.available._manager", lambda name: local)
    options = Options(samples=2, dtype="fp32", device="cpu")
    findings = run_units(find_targets([model_folder]), ["hellaswag"], options, tmp_path / "out")
    (result,) = findings.results
    assert (result.metric, result.samples, result.length) == ("acc_norm", 2, None)
    assert result.score in (0, 100)  # the same question twice


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny model that says nothing sensible, with the tokenizer of the prompts."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(max_position_embeddings=2048).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def test_one_command_from_folder_to_tables_and_again_without_computing(
    model_folder, tmp_path, monkeypatch
):
    arguments = [str(model_folder), "--tasks", "vt,qa_squad", "--lengths", "600,700"]
    arguments += ["--samples", "2", "--dtype", "fp32", "--device", "cpu"]
    arguments += ["--output", str(tmp_path), "--json", str(tmp_path / "found.json")]
    shown = CliRunner().invoke(command, arguments)
    assert shown.exit_code == 1, shown.output  # a task was skipped
    assert "--qa SQUAD.json" in shown.output
    report = json.loads((tmp_path / "found.json").read_text())["harness"]
    assert Counter(unit["length"] for unit in report["results"]) == {600: 1, 700: 1}
    assert report["scores"]["ruler_vt"]["600"]["mean"] == 0
    assert "ruler_qa_squad" not in report["scores"]
    assert "| VT | 0.00 | 0.00 |" in (tmp_path / "results.md").read_text()
    (samples,) = (tmp_path / "tiny" / "ruler_vt-600").glob("samples_ruler_vt_*.jsonl")
    assert len(samples.read_text().splitlines()) == 2
    (results,) = (tmp_path / "tiny" / "ruler_vt-600").glob("results_*.json")
    assert json.loads(results.read_text())["results"]["ruler_vt"]["600,none"] == 0

    def no_model(*_):
        raise AssertionError("everything was stored")

    monkeypatch.setattr("anchorcontext.evaluate.harness.run.open_model", no_model)
    again = CliRunner().invoke(command, arguments)
    assert "2 results of earlier calls" in again.output, again.output
    with pytest.raises(AssertionError, match="everything was stored"):  # other samples
        CliRunner().invoke(command, [*arguments, "--samples", "1"], catch_exceptions=False)


def test_a_second_call_adds_its_scores_to_the_first_ones(model_folder, tmp_path):
    def evaluate(*arguments):
        always = ["--samples", "1", "--dtype", "fp32", "--device", "cpu", "--output", tmp_path]
        page = ["--markdown", tmp_path / "page.md"]
        return CliRunner().invoke(
            command, [str(a) for a in (model_folder, *arguments, *always, *page)]
        )

    def table():
        report = json.loads((tmp_path / "results.json").read_text())["harness"]
        return {(unit["task"], unit["length"]) for unit in report["results"]}

    assert evaluate("--tasks", "vt", "--lengths", "600").exit_code == 0
    stored = tmp_path / "tiny" / "ruler_vt-600" / "unit.json"
    other = json.loads(stored.read_text()) | {"task": "ruler_cwe", "fingerprint": "other weights"}
    (tmp_path / "tiny" / "ruler_cwe-600").mkdir()
    (tmp_path / "tiny" / "ruler_cwe-600" / "unit.json").write_text(json.dumps(other))

    assert evaluate("--tasks", "fwe", "--lengths", "1500").exit_code == 0
    assert table() == {("ruler_vt", 600), ("ruler_fwe", 1500)}
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert "| VT | 0.00 | – |" in lines and "| FWE | – | 0.00 |" in lines
    page = (tmp_path / "page.md").read_text()
    assert "FWE" in page and "VT" not in page  # what its command asked for

    before = (tmp_path / "results.md").read_text()
    shown = evaluate("--tasks", "hellaswag,qa_squad", "--lengths", "600")
    assert shown.exit_code == 1
    assert shown.output.count("hellaswag:") == 1  # said once
    assert "(Rowan/hellaswag) is not on this machine; --download fetches it" in shown.output
    assert "Error" not in shown.output
    assert table() == {("ruler_vt", 600), ("ruler_fwe", 1500)}
    after = (tmp_path / "results.md").read_text()
    assert after.split("Not run")[0].strip() == before.split("<!-- end")[0].strip()
    assert (tmp_path / "page.md").read_text() == page


def test_what_one_of_two_snapshots_lacks_is_told_apart(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "other")

    def evaluate(task, *models):
        arguments = [*models, "--tasks", task, "--lengths", 600, "--samples", 1]
        arguments += ["--dtype", "fp32", "--device", "cpu", "--output", tmp_path / "out"]
        arguments += ["--markdown", tmp_path / "page.md"]
        result = CliRunner().invoke(command, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        tables = (tmp_path / "out" / "results.md").read_text().splitlines()
        return tables, (tmp_path / "page.md").read_text()

    evaluate("vt", model_folder)
    tables, page = evaluate("fwe", model_folder, tmp_path / "other")
    assert "| FWE | 0.00 ± 0.00 |" in tables and "| VT | 600 | 0.00 | – |" in tables
    assert "VT" not in page  # what its command asked for
    evaluate("vt", tmp_path / "other")
    tables, _ = evaluate("fwe", model_folder, tmp_path / "other")
    assert "| VT | 0.00 ± 0.00 |" in tables and not any("–" in line for line in tables)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": (4096,)}, "max_position_embeddings = 2,048"),
        ({"device": "cuda"}, "no GPU"),
        ({"lengths": (300,)}, "smallest prompt"),
    ],
)
def test_mistakes_are_named_before_weights_are_read(
    model_folder, tmp_path, monkeypatch, change, message
):
    monkeypatch.setattr("anchorcontext.evaluate.harness.run.open_model", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options = Options(**{"lengths": (600,), "samples": 1, **change})
    with pytest.raises(UserError, match=message):
        run_units(find_targets([model_folder]), ["ruler_vt"], options, tmp_path)


def test_ranks_of_a_launcher_are_refused(model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one process, here are 2 ranks"):
        run_units(find_targets([model_folder]), ["ruler_vt"], Options(), tmp_path)


def test_what_needs_a_download_is_skipped_by_name(model_folder, tmp_path):
    options = Options(lengths=(600,), samples=1)
    tasks = ["hellaswag", "niah_single_2", "ruler_qa_hotpot"]
    findings = run_units(find_targets([model_folder]), tasks, options, tmp_path)
    assert findings.results == []
    assert set(findings.skipped) == set(tasks)
    assert "--haystack" in findings.skipped["niah_single_2"]
    assert set(PRESETS["ruler-13"]) >= {"niah_single_2"}


@pytest.mark.slow
def test_the_stock_command_line_asks_and_answers_the_same(model_folder, tmp_path, monkeypatch):
    """``lm_eval`` itself, with its own task, data and scorer: same prompts, answers and score."""
    from lm_eval.__main__ import cli_evaluate

    options = Options(lengths=(1050,), samples=2, batch_size=2, dtype="fp32", device="cpu")
    run_units(find_targets([model_folder]), ["ruler_vt"], options, tmp_path / "ours")
    arguments = ["lm_eval", "--model", "hf", "--tasks", "ruler_vt", "--limit", "2"]
    arguments += ["--device", "cpu", "--batch_size", "2", "--log_samples"]
    arguments += ["--model_args", f"pretrained={model_folder},dtype=float32"]
    arguments += ["--metadata", '{"max_seq_lengths": [1050]}']
    arguments += ["--output_path", str(tmp_path / "theirs")]
    monkeypatch.setattr("sys.argv", arguments)
    cli_evaluate()
    ours, theirs = (_samples(tmp_path / who) for who in ("ours", "theirs"))
    assert len(ours) == 2
    for key in ("prompt_hash", "resps", "1050"):
        assert [sample[key] for sample in ours] == [sample[key] for sample in theirs], key


def _samples(folder):
    (path,) = folder.rglob("samples_ruler_vt_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]
