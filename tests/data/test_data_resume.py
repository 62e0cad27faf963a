"""prepare, ended anywhere and run again: the same bytes; until then nothing looks complete."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from functools import partial

import pytest

from anchorcontext.config import save_config
from anchorcontext.data import WindowDataset, pipeline, prepare, tokenise
from anchorcontext.errors import UserError


def contents(folder):
    """Every file of a prepared folder, but for the seconds that it took."""
    files = {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
    meta = json.loads(files.pop("meta.json"))
    meta["report"].pop("seconds")
    return files, meta


def small_pieces(monkeypatch, chunk_bytes=200, part_tokens=500):
    sizes = {"chunk_bytes": chunk_bytes, "part_tokens": part_tokens, "small_bytes": 0}
    cut = partial(pipeline.tokenise, **sizes)
    monkeypatch.setattr(pipeline, "tokenise", cut)


def test_the_bytes_do_not_depend_on_workers_or_parts(config, tmp_path, monkeypatch):
    whole = prepare(config(path=str(tmp_path / "whole")))
    small_pieces(monkeypatch)
    for name, workers in (("one", 1), ("two", 2)):
        prepare(config(path=str(tmp_path / name), workers=workers))
        assert contents(tmp_path / name) == contents(tmp_path / "whole")
    other = prepare(config(path=str(tmp_path / "other"), add_eos=False))
    assert other.fingerprint != whole.fingerprint


def test_a_full_disk_leaves_the_old_windows_and_what_is_done(config, tmp_path, monkeypatch):
    before = prepare(config()).fingerprint
    fresh = prepare(config(path=str(tmp_path / "fresh"), window_tokens=32))

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "window_records", fail)
        with pytest.raises(UserError, match="no space left on the disk"):
            prepare(config(window_tokens=32), force=True)
    assert WindowDataset(tmp_path / "out").fingerprint == before
    assert sorted(os.listdir(tmp_path)) == ["fresh", "out", "out.incomplete"]

    monkeypatch.setattr(tokenise, "encode_chunks", lambda *args: pytest.fail("tokenises again"))
    assert prepare(config(window_tokens=32), force=True).fingerprint == fresh.fingerprint
    assert sorted(os.listdir(tmp_path)) == ["fresh", "out"]


def test_what_was_done_for_another_request_is_not_used(config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "window_records", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(config())
    assert (tmp_path / "out.incomplete" / "work" / "part-00000.json").is_file()
    without = prepare(config(add_eos=False))
    assert without.eos_added == 0 and sorted(os.listdir(tmp_path)) == ["out"]


def test_an_error_before_anything_is_done_leaves_nothing(config, tmp_path):
    with pytest.raises(UserError, match="broken JSON"):
        (tmp_path / "rows.jsonl").write_text("broken\n")
        prepare(config(sources=[{"path": str(tmp_path / "rows.jsonl")}]))
    assert sorted(os.listdir(tmp_path)) == ["rows.jsonl"]


KILLS = """
import os, random, signal, sys
from functools import partial
from pathlib import Path
from anchorcontext.config import load_config
from anchorcontext.data import builder, pipeline, prepare, tokens

config = load_config(sys.argv[1])
pipeline.tokenise = partial(pipeline.tokenise, chunk_bytes=200, part_tokens=500)
events, deadly = 0, None

def counted(function):
    def call(*args, **options):
        global events
        events += 1
        if events == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)
    return call

for place, name in [
    (tokens.PartWriter, "add"), (tokens, "sync"), (builder, "sync"), (builder, "_record_batch"),
    (builder, "_replace"), (Path, "write_text"), (Path, "replace"), (Path, "rename"),
]:
    setattr(place, name, counted(getattr(place, name)))

def prepare_in(path):
    data = config.data.model_copy(update={"path": path})
    prepare(config.model_copy(update={"data": data}))

def run(path, at=None):
    global events, deadly
    child = os.fork()
    if child == 0:
        events, deadly = 0, at
        prepare_in(path)
        os._exit(0)
    return os.waitpid(child, 0)[1]

prepare_in(sys.argv[2] + "/whole")  # here: every child has the imports that it made
total = events
draws = random.Random(0)
for number in range(10):
    path = f"{sys.argv[2]}/{number}"
    killed = run(path, draws.randint(1, total))
    assert os.WIFSIGNALED(killed), killed
    if Path(path).exists():
        assert Path(path, "meta.json").is_file()  # killed after the rename: complete
    if number % 2 == 0:
        run(path, draws.randint(1, total))
    assert run(path) == 0
"""


def test_a_prepare_killed_anywhere_leaves_nothing_half_and_goes_on_to_the_same_bytes(
    config, tmp_path
):
    own = {"tokenizer": None, "train_tokenizer": {"vocab_size": 300}, "validation_fraction": 0.2}
    save_config(config(**own), tmp_path / "config.yaml")
    out = tmp_path / "kills"
    out.mkdir()
    script = [sys.executable, "-c", KILLS, str(tmp_path / "config.yaml"), str(out)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(script, check=True, env=environment)
    for number in range(10):
        assert contents(out / str(number)) == contents(out / "whole")
    assert sorted(os.listdir(out)) == sorted(["whole", *map(str, range(10))])


def test_a_killed_prepare_looks_like_nothing(config, tmp_path):
    (tmp_path / "out.incomplete").mkdir()
    for path in ("out", "out.incomplete"):
        with pytest.raises(UserError, match="not a prepared folder"):
            WindowDataset(tmp_path / path)
    assert not prepare(config()).reused
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_two_processes_do_not_prepare_one_folder(config, tmp_path):
    with open(tmp_path / "out.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is preparing"):
            prepare(config())
    assert not prepare(config()).reused
