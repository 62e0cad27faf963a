"""The prepared folder: rows come back as written; damage is an error."""

import pickle

import numpy as np
import pytest

from anchorcontext.data import WindowDataset, WindowRecord, build_folder
from anchorcontext.errors import UserError


def write(path, num_windows=10, length=7, **sizes):
    def record(i):
        ids = np.arange(length) + 100 * i
        return WindowRecord(ids, np.array([0, 1, 4, length]), np.array([-1, i, i + 1]), np.zeros(3))

    with build_folder(path) as builder:
        builder.write_documents(
            (["s"] * 2, [f"{i}:a", f"{i}:b"], np.array([3, 4])) for i in range(num_windows)
        )
        builder.write_windows(map(record, range(num_windows)), **sizes)
        builder.write_meta(
            {
                "anchor_id": 0,
                "vocab_size": 1000,
                "window_tokens": length,
                "num_documents": 2 * num_windows,
            }
        )
    return WindowDataset(path)


@pytest.mark.parametrize(
    ("sizes", "files"),
    [({}, 1), ({"shard_tokens": 1}, 10), ({"shard_tokens": 21, "batch_tokens": 14}, 4)],
)
def test_rows_come_back_whatever_the_files(tmp_path, sizes, files):
    dataset = write(tmp_path / "d", **sizes)
    assert len(list((tmp_path / "d").glob("windows-*.arrow"))) == files
    assert len(dataset) == 10
    for i, record in enumerate(dataset):
        assert record.input_ids.tolist() == list(range(100 * i, 100 * i + 7))
        assert record.documents.tolist() == [-1, i, i + 1]
        assert not record.input_ids.flags.writeable
    assert dataset.fingerprint == write(tmp_path / "e").fingerprint
    assert dataset.document(5).name == "2:b" and dataset.document(5).num_tokens == 4
    for index in (-1, 10):
        with pytest.raises(IndexError):
            dataset[index]


def test_segments_of_one_document_are_one_document_of_the_window():
    record = WindowRecord(
        np.arange(6), np.array([0, 1, 3, 4, 6]), np.array([-1, 7, 3, 7]), np.array([0, 0, 0, 2])
    )
    window = record.window("anchor")
    docs = window.doc_ids
    assert docs[1] == docs[4] != docs[3] and docs[0] not in docs[1:]
    assert window.labels.tolist() == [-100, 2, -100, -100, 5, -100]


def test_datasets_opens_the_files_without_us(tmp_path):
    datasets = pytest.importorskip("datasets")
    write(tmp_path / "d")
    rows = datasets.Dataset.from_file(str(tmp_path / "d" / "windows-00000.arrow"))
    assert len(rows) == 10 and rows[3]["input_ids"][0] == 300


def test_a_dataset_travels_to_other_processes(tmp_path):
    dataset = write(tmp_path / "d")
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy[4].input_ids.tolist() == dataset[4].input_ids.tolist()


def test_damage_is_named(tmp_path):
    write(tmp_path / "d", shard_tokens=21)
    shard = tmp_path / "d" / "windows-00001.arrow"
    data = shard.read_bytes()
    for content in (data[: len(data) // 2], b"", b"nonsense"):
        shard.write_bytes(content)
        with pytest.raises(UserError, match="damaged"):
            WindowDataset(tmp_path / "d")
    shard.unlink()
    with pytest.raises(UserError, match=r"windows-00001.arrow is missing or damaged"):
        WindowDataset(tmp_path / "d")
    (tmp_path / "d" / "meta.json").write_text("{")
    with pytest.raises(UserError, match=r"meta.json cannot be read"):
        WindowDataset(tmp_path / "d")


def test_rows_lost_at_a_batch_edge_are_noticed(tmp_path):
    write(tmp_path / "whole", num_windows=10, batch_tokens=7)
    write(tmp_path / "less", num_windows=9, batch_tokens=7)
    file = "windows-00000.arrow"
    (tmp_path / "whole" / file).write_bytes((tmp_path / "less" / file).read_bytes())
    with pytest.raises(UserError, match=r"9 windows on disk, meta.json promises 10"):
        WindowDataset(tmp_path / "whole")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"data\.path = .*file/prepared.* cannot be written"),
        build_folder(tmp_path / "file" / "prepared"),
    ):
        pass


def test_another_format_version_is_refused(tmp_path):
    write(tmp_path / "d")
    meta = tmp_path / "d" / "meta.json"
    meta.write_text(meta.read_text().replace('"version": 3', '"version": 1'))
    with pytest.raises(
        UserError, match="format version 1, this anchorcontext reads 3: prepare again"
    ):
        WindowDataset(tmp_path / "d")
