"""A run's page: whole in itself, true to the metrics, at any moment of a run's life."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from anchorcontext.config import parse_config, save_config
from anchorcontext.errors import UserError
from anchorcontext.watch import run_report
from anchorcontext.watch.history import read_run, seconds_of
from anchorcontext.watch.run_figures import run_figures, spans
from anchorcontext.watch.run_report import run_page, write_run_report

START = {
    "event": "start",
    "time": 1.79e9,
    "step": 0,
    "ranks": 4,
    "device": "cpu",
    "commit": "c0ffee" * 6 + "c0ff",
    "versions": {"torch": "2.99.7"},
}
PARITY = {"event": "parity", "time": 1.79e9, "step": 0, "passed": True}


def record(step, loss=2.0, **changes):
    return {
        "step": step,
        "loss": loss,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens": 100,
        "tokens_per_second": 50.0,
        "peak_memory_bytes": 2**30,
        "bytes_sent": 2**20,
        "bytes_predicted": 2**20,
        "attention_balance": 1.25,
        "seconds": 2.0,
        "seconds_data": 0.125,
        "seconds_exchange": 0.25,
        "seconds_compute": 1.0,
        "seconds_attention": 0.5,
        "seconds_optimizer": 0.5,
        "seconds_other": 0.125,
        "seconds_checkpoint": 0.0,
        "skipped": loss is None,
        **changes,
    }


def write(path, *lines, torn=""):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text + torn)
    return path


def save(path, **scratch):
    values = {
        "run": {"name": path.name},
        "model": {"scratch": {"model_type": "llama", **scratch}},
        "data": {"path": "data", "window_tokens": 64, "tokenizer": "none"},
        "train": {"steps": 9, "windows_per_step": 1},
    }
    save_config(parse_config(values), path / "config.yaml")


class Page(HTMLParser):
    """Tags, addresses and open elements of a page."""

    VOID = ("meta", "path", "use", "rect")

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [v for k, v in attributes if k in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr(run_report, "run_figures", lambda run: {})


def test_the_page_needs_nothing_else_and_shows_everything(tmp_path):
    save(tmp_path)
    checks = [{**PARITY, "step": step, "largest_logit_difference": 1e-6} for step in (0, 4)]
    steps = [record(1), record(2, None), record(3), record(4)]
    again = {**START, "step": 2, "ranks": 2, "superseded": 71, "seconds_down": 3723.4}
    write(tmp_path, START, checks[0], *steps[:2], again, *steps[2:], checks[1])
    write_run_report(tmp_path, tmp_path / "new" / "run.html")
    text = (tmp_path / "new" / "run.html").read_text()
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags) and "http" not in text
    assert page.addresses and all(address.startswith("#") for address in page.addresses)
    assert "url(" not in re.sub(r"url\(#\w+\)", "", text) and "@import" not in text
    assert page.tags.count("svg") == 9
    assert '<meta name="viewport"' in text and "prefers-color-scheme: dark" in text
    assert "2.99.7" in text and START["commit"] in text and "window_tokens: 64" in text
    assert "<td>71</td>" in text and "<td>1:02:03</td>" in text and "1:02:03 in all" in text
    assert "equal to the byte" in text and "step 4 of 9" in text


def test_figures_take_their_colours_from_the_page_and_their_ids_do_not_clash(tmp_path):
    write(tmp_path, START, record(1), record(2), {**PARITY, "largest_logit_difference": 0.0})
    figures = run_figures(read_run(tmp_path))
    ids = [set(re.findall(r'<clipPath id="(\w+)"', svg)) for svg in figures.values()]
    assert sum(map(len, ids)) == len(set().union(*ids))
    for svg in figures.values():
        assert not re.search(r"#01020\w|#0102f\w", svg)
        assert "currentColor" in svg and "var(--c0)" in svg
        assert svg.startswith("<svg ") and " width=" not in svg[: svg.index(">")]


def test_a_run_without_parity_traffic_and_utilisation_has_no_empty_figures(tmp_path):
    write(tmp_path, START, record(1, bytes_sent=0, bytes_predicted=0, attention_balance=None))
    titles = " ".join(run_figures(read_run(tmp_path)))
    assert "Loss" in titles and "Seconds" in titles
    assert not re.search(r"parity|Sent|Busiest", titles)


@pytest.mark.parametrize(
    ("lines", "torn", "state"),
    [
        ([], "", "running, or killed; step 0"),
        ([START], "", "running, or killed; step 0"),
        ([START, record(1), record(2)], '{"step": 3, "lo', "running, or killed; step 2"),
        ([START, record(1), {"event": "stop", "step": 1, "reason": "SIGTERM"}], "", "by SIGTERM"),
        ([START, record(1), {"event": "failed", "step": 1, "error": "E"}], "", "failed; step 1"),
        ([START, record(1), {"event": "end", "step": 1}], "", "done; step 1"),
    ],
)
def test_every_state_of_a_run_has_its_page(tmp_path, no_figures, lines, torn, state):
    text = run_page(read_run(write(tmp_path, *lines, torn=torn)))
    assert state in text and Page(text).open == []
    assert "no config.yaml" in text


def test_a_start_that_came_to_no_end_was_killed_unless_it_is_the_last(tmp_path):
    lines = [START, record(1), START, {"event": "stop", "reason": "SIGUSR1"}, START, record(2)]
    starts = read_run(write(tmp_path, *lines)).starts
    assert [start["ended"] for start in starts] == ["killed", "stopped by SIGUSR1", "-"]


def test_time_between_starts_is_down_time_but_not_after_the_run_was_done(tmp_path):
    end = {"event": "end", "step": 1}
    assert read_run(write(tmp_path, START)).seconds_down is None
    again = [{**START, "seconds_down": seconds} for seconds in (10.0, 20.5, 4000.0)]
    lines = [START, again[0], {"event": "stop"}, again[1], end, again[2], end]
    assert read_run(write(tmp_path, *lines)).seconds_down == 30.5


def test_text_of_events_is_escaped_and_wrong_ones_are_marked(tmp_path, no_figures):
    spike = {"event": "loss_spike", "step": 1, "text": "<b>9</b>", "time": 1.79e9}
    text = run_page(read_run(write(tmp_path, START, spike)))
    assert "&lt;b&gt;9&lt;/b&gt;" in text and "<b>9</b>" not in text
    assert text.count('<tr class="wrong">') == 1


def test_secrets_of_config_and_events_stay_out(tmp_path, no_figures):
    save(tmp_path, hf_token="very-secret-value")
    event = {"event": "failed", "step": 1, "error": "denied: hf_" + "a1B2" * 8}
    text = run_page(read_run(write(tmp_path, START, event)))
    assert "very-secret-value" not in text and "hf_a1B2" not in text
    assert "[redacted]" in text


def test_traffic_that_is_not_as_predicted_is_told_in_bytes(tmp_path, no_figures):
    text = run_page(read_run(write(tmp_path, START, record(1, bytes_sent=2**20 + 3))))
    assert "1.0 MiB, +3 bytes sent" in text


def test_only_the_newest_events_are_listed(tmp_path, no_figures, monkeypatch):
    monkeypatch.setattr(run_report, "MOST_EVENTS", 2)
    saves = [{"event": "checkpoint", "step": step, "path": f"p{step}"} for step in (1, 2, 3)]
    text = run_page(read_run(write(tmp_path, START, *saves)))
    assert "Left out: 2 older ones." in text and "path p3" in text and "path p1" not in text


def test_parts_of_a_step_are_those_recorded_and_the_rest():
    parts = seconds_of(record(1))
    assert list(parts.values()) == [0.125, 0.25, 1.0, 0.5, 0.125]
    older = {"seconds": 2.0, "seconds_data": 0.5, "seconds_exchange": 0.25}
    assert seconds_of(older)["other"] == 1.25


def test_spans_keep_every_peak_and_the_mean():
    values = np.random.default_rng(0).random(1000)
    values[617] = 50.0
    x, mean, least, most = spans(range(1, 1001), values, most=100)
    assert len(x) == 100 and x[-1] == 1000
    assert most.max() == 50.0 and least.min() == values.min()
    np.testing.assert_allclose(mean.mean(), values.mean(), rtol=1e-12)
    np.testing.assert_array_equal(spans([3, 4], [1.0, 2.0])[1], [1.0, 2.0])


def test_a_folder_without_metrics_is_a_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl"):
        write_run_report(tmp_path, tmp_path / "run.html")
