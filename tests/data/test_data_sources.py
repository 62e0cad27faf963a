"""Sources give documents in one order and name whatever is none."""

import gzip
import json
import os
import zlib

import pyarrow as pa
import pytest

from anchorcontext.config.sections import SourceSection
from anchorcontext.data.sources import (
    Document,
    ProblemLog,
    StandardLibrary,
    list_files,
    open_source,
    open_sources,
    read_documents,
)
from anchorcontext.data.sources.files import READ_ERRORS, read_pieces
from anchorcontext.errors import UserError


def entry(path=None, kind="auto", name="corpus", **options):
    section = SourceSection(name=name, path=None if path is None else str(path), **options)
    return section.model_copy(update={"kind": kind})


def read(source, on_error="stop"):
    log = ProblemLog(on_error)
    return list(read_documents([source], log)), log


def test_text_folder_gives_each_file_unchanged_in_path_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.py").write_bytes(b"x = 1\r\n\tend\n")
    (tmp_path / "a.py").write_bytes(b"\xef\xbb\xbfprint()\n")
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / "notes.md").write_bytes("é\n".encode())
    documents, log = read(open_source(entry(tmp_path)))
    assert documents == [
        Document("corpus", "a.py", "print()\n"),
        Document("corpus", "b/a.py", "x = 1\r\n\tend\n"),
        Document("corpus", "notes.md", "é\n"),
    ]
    assert log.problems == []


def test_patterns_match_names_or_paths(tmp_path):
    for name in ("a.py", "x/b.py", "x/y/c.py", "x/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("t")

    def found(pattern):
        return [path.relative_to(tmp_path).as_posix() for path in list_files(tmp_path, pattern)]

    assert found("*.py") == found("**/*.py") == ["a.py", "x/b.py", "x/y/c.py"]
    assert found("x/*.py") == ["x/b.py", "x/y/c.py"]
    assert found("d.*") == ["x/d.txt"]


def test_linked_folders_are_read_once_even_in_a_circle(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("a")
    (tmp_path / "root").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "root" / "one")
    os.symlink(tmp_path / "elsewhere", tmp_path / "root" / "two")
    os.symlink(tmp_path / "root", tmp_path / "elsewhere" / "back")
    assert list_files(tmp_path / "root") == [tmp_path / "root" / "one" / "a.txt"]


def packed(data, name):
    if name.endswith(".zst"):
        return pa.compress(data, codec="zstd", asbytes=True)
    return gzip.compress(data) if name.endswith(".gz") else data


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_jsonl_documents_are_named_by_file_and_line(tmp_path, suffix):
    text = '{"body": "one\\nline"}\n\n{"body": "two", "id": 3}'
    file = tmp_path / f"rows{suffix}"
    file.write_bytes(packed(text.encode(), file.name))
    documents, _ = read(open_source(entry(file, text_field="body")))
    assert documents == [
        Document("corpus", f"rows{suffix}:1", "one\nline"),
        Document("corpus", f"rows{suffix}:3", "two"),
    ]


BROKEN = [
    (b'{"text": "ok"}', None),
    (b'{"text": "cut', "broken JSON"),
    (b'["text"]', "not a JSON object"),
    (b'{"txt": "a"}', "no text field"),
    (b'{"text": null}', "text is not a string"),
    (b'{"text": " \\n"}', "empty document"),
    (b'{"text": "\xff"}', "invalid UTF-8"),
    (b'{"text": "a\\u0000b"}', "NUL character"),
    (b'{"text": "\\ud800"}', "lone surrogate"),
    (b"[" * 100_000, "broken JSON"),
    (b'{"text": "last"}', None),
]


def test_every_broken_line_is_counted_and_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join(line for line, _ in BROKEN) + b"\n")
    source = open_source(entry(file))
    documents, log = read(source, "skip")
    assert [document.text for document in documents] == ["ok", "last"]
    expected = [(f"{file}:{i}", kind) for i, (_, kind) in enumerate(BROKEN, 1) if kind]
    assert [(problem.location, problem.kind) for problem in log.problems] == expected
    assert log.counts["broken JSON"] == 2

    with pytest.raises(UserError) as error:
        read(source)
    for location, kind in expected:
        assert f"{location}: {kind}" in str(error.value)
    assert "data.on_error=skip" in str(error.value)


def test_broken_text_files_are_named(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes(b"fine\ncaf\xe9\n")
    (tmp_path / "nul.txt").write_bytes(b"a\0b")
    os.symlink(tmp_path / "nowhere", tmp_path / "link.txt")
    (tmp_path / "ok.txt").write_bytes(b"ok")
    documents, log = read(open_source(entry(tmp_path)), "skip")
    assert [document.name for document in documents] == ["ok.txt"]
    assert [(problem.location, problem.kind) for problem in log.problems] == [
        (str(tmp_path / "empty.txt"), "empty document"),
        (f"{tmp_path / 'latin.txt'}:2", "invalid UTF-8"),
        (str(tmp_path / "link.txt"), "unreadable file"),
        (str(tmp_path / "nul.txt"), "NUL character"),
    ]


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_a_truncated_file_keeps_what_was_read_and_names_the_line(tmp_path, suffix):
    rows = "".join(json.dumps({"text": f"{i} {os.urandom(64).hex()}"}) + "\n" for i in range(5000))
    file = tmp_path / f"rows{suffix}"
    whole = packed(rows.encode(), file.name)
    file.write_bytes(whole[: len(whole) * 4 // 5])
    documents, log = read(open_source(entry(file)), "skip")
    assert 0 < len(documents) < 5000
    assert [problem.kind for problem in log.problems] == ["unreadable file"]
    assert log.problems[0].location == f"{file}:{len(documents) + 1}"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_nothing_before_a_damage_is_lost_with_it(tmp_path, suffix):
    """Neither where reads of many bytes meet the damage, nor where reading goes on at an offset."""
    data = b"".join(b"%d %s\n" % (i, os.urandom(20).hex().encode()) for i in range(5000))
    file = tmp_path / f"rows{suffix}"
    file.write_bytes(packed(data, file.name) + b"no frame")
    for offset in (0, 1000, 100_000, len(data) - 1, len(data)):
        found = b""
        with pytest.raises(READ_ERRORS):
            for piece in read_pieces(file, offset):
                found += piece
        assert found == data[offset:]


def test_a_cut_gzip_file_gives_all_that_can_be_unpacked(tmp_path):
    data = b"".join(b"%d %s\n" % (i, os.urandom(20).hex().encode()) for i in range(5000))
    file = tmp_path / "rows.gz"
    file.write_bytes(packed(data, file.name)[:50_000])
    found = b""
    with pytest.raises(EOFError):
        for piece in read_pieces(file):
            found += piece
    assert found == zlib.decompressobj(wbits=31).decompress(file.read_bytes())


def test_several_packed_frames_are_one_file(tmp_path):
    lines = [json.dumps({"text": str(i)}).encode() + b"\n" for i in range(4)]
    for suffix in (".gz", ".zst"):
        file = tmp_path / f"rows.jsonl{suffix}"
        file.write_bytes(b"".join(packed(line, file.name) for line in lines))
        documents, _ = read(open_source(entry(file)))
        assert [document.text for document in documents] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
@pytest.mark.parametrize("chunk_bytes", [1, 40, 1 << 20])
def test_chunks_are_cut_at_lines_and_go_on_where_one_ends(tmp_path, suffix, chunk_bytes):
    lines = ['{"text": "%s"}' % ("x" * (7 * i % 90)) for i in range(1, 40)]
    for name, part in (("a", lines[:25]), ("b", lines[25:])):
        data = "\n".join(part) + ("\n" if name == "a" else "")
        (tmp_path / (name + suffix)).write_bytes(packed(data.encode(), name + suffix))
    source = open_source(entry(tmp_path))
    chunks = list(source.chunks((), chunk_bytes))
    whole = [item for chunk in chunks for item in chunk.items()]
    assert [item.name for item in whole] == [
        *(f"a{suffix}:{i}" for i in range(1, 26)),
        *(f"b{suffix}:{i}" for i in range(1, 15)),
    ]
    for number in range(len(chunks)):
        rest = source.chunks(chunks[number].after, chunk_bytes)
        assert [chunk.data for chunk in rest] == [chunk.data for chunk in chunks[number + 1 :]]


def test_a_line_of_50_mb_is_one_document_in_one_pass(tmp_path):
    text = "word " * 10_000_000
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "%s"}\n{"text": "b"}\n' % text)  # noqa: UP031
    documents, log = read(open_source(entry(tmp_path / "rows.jsonl")))
    assert [len(document.text) for document in documents] == [1, len(text), 1]
    assert log.problems == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "nowhere"}, "no such file"),
        ({}, "path is not set"),
        ({"path": ".", "pattern": "*.none"}, "no file matches pattern '*.none'"),
        ({"path": ".", "kind": "csv"}, "must be one of"),
        ({"path": "."}, "1 of kind jsonl and 1 of kind text"),
    ],
)
def test_sources_that_cannot_be_read_are_refused(tmp_path, monkeypatch, settings, message):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "b.txt").write_text("b")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        open_source(entry(**settings))


def test_endings_that_say_too_little_are_asked_for(tmp_path):
    """A .json file may hold lines; read as text it would be one document of JSON."""
    file = tmp_path / "v1.2.json"
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(UserError, match=r"source.kind=jsonl, or source.kind=text"):
        open_source(entry(file))
    with pytest.raises(UserError, match=r"source.kind=jsonl and source.pattern='\*.json', or"):
        open_source(entry(tmp_path))
    for settings in ({"path": file}, {"path": tmp_path, "pattern": "*.json"}):
        documents, _ = read(open_source(entry(**settings, kind="jsonl")))
        assert [document.text for document in documents] == ["a", "b"]
    (tmp_path / "code.py").write_text("x = 1\n")
    assert len(read(open_source(entry(tmp_path)))[0]) == 2, "code with its settings is text"


def test_two_sources_of_one_name_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match=r"2 of data.sources are called 'corpus'"):
        open_sources([entry(tmp_path), entry(tmp_path)])


def test_standard_library_is_code_and_prose_without_tests():
    items, log = read(StandardLibrary("py"))
    assert log.problems == []
    names = {
        source: [i.name for i in items if i.source == source] for source in ("py/code", "py/prose")
    }
    assert len(names["py/code"]) > 200 and "json/decoder.py" in names["py/code"]
    assert len(names["py/prose"]) > 50 and "topics/lambda" in names["py/prose"]
    assert not any(
        {"test", "site-packages", "pydoc_data"} & set(n.split("/")) for n in names["py/code"]
    )
    assert names["py/code"] == sorted(names["py/code"])


def test_standard_library_pattern_selects_documents():
    def names(pattern):
        return [item.name for item in read(StandardLibrary("", pattern))[0]]

    assert "json/encoder.py" in names("json/*")
    assert names("topics/lambda") == ["topics/lambda"]
