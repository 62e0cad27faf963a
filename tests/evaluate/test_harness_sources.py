"""Local texts for RULER: what is read of them, and what is refused."""

import json

import pytest

from anchorcontext.errors import UserError
from anchorcontext.evaluate.harness.sources import Sources


def written(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def squad(*contexts):
    paragraphs = [
        {
            "context": context,
            "qas": [
                {"question": f"Which is {i}?", "answers": [{"text": context}]},
                {"question": "Why?", "answers": [], "is_impossible": True},
            ],
        }
        for i, context in enumerate(contexts)
    ]
    return {"data": [{"paragraphs": paragraphs}]}


def test_a_haystack_is_words_of_a_file_or_of_all_texts_in_a_folder(tmp_path):
    written(tmp_path / "b.md", "three\n\nfour")
    file = written(tmp_path / "a.txt", " one  two\n")
    written(tmp_path / "c.json", "{}")
    assert Sources(file).words == ["one", "two"]
    assert Sources(tmp_path).words == ["one", "two", "three", "four"]


def test_squad_documents_are_sorted_and_impossible_questions_left_out(tmp_path):
    questions, documents = Sources(qa=[written(tmp_path / "s.json", squad("b", "a", "b"))]).squad
    assert documents == ["a", "b"]
    assert [q["context"] for q in questions] == [[1], [0], [1]]
    assert questions[0]["more_context"] == [0]
    assert questions[1]["outputs"] == ["a"]


def test_hotpotqa_documents_are_titles_and_sentences(tmp_path):
    sample = {"question": "?", "answer": "yes", "context": [["T", ["one. ", "two."]], ["A", ["x"]]]}
    questions, documents = Sources(qa=[written(tmp_path / "h.json", [sample])]).hotpotqa
    assert documents == ["A\nx", "T\none. two."]
    assert questions == [{"query": "?", "outputs": ["yes"], "context": [1, 0]}]


def test_another_text_is_another_source(tmp_path):
    file = written(tmp_path / "a.txt", "one two")
    before = Sources(file).describe("haystack")
    written(file, "one three")
    assert Sources(file).describe("haystack") != before
    assert before["haystack"] == "a.txt"


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not a JSON file"), ({"rows": []}, "neither SQuAD"), (squad(), "holds no question")],
)
def test_a_file_without_questions_is_refused(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        Sources(qa=[written(tmp_path / "q.json", content)]).load("squad")


def test_two_files_of_one_kind_are_refused(tmp_path):
    files = [written(tmp_path / name, squad("a")) for name in ("1.json", "2.json")]
    with pytest.raises(UserError, match="squad file too"):
        Sources(qa=files).load("squad")


def test_a_haystack_that_is_none_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        Sources(tmp_path / "missing.txt")
    with pytest.raises(UserError, match="holds no text"):
        Sources(written(tmp_path / "empty.txt", " \n")).load("haystack")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-8"):
        Sources(tmp_path / "binary.txt").load("haystack")
