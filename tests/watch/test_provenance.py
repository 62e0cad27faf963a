"""The commit of the code: of a checkout, and of nothing else."""

import subprocess

import pytest

from anchorcontext.watch.provenance import git_commit


@pytest.fixture
def checkout(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    git("tag", "v1")
    return tmp_path, git("rev-parse", "HEAD")


def test_the_commit_of_a_checkout_and_whether_files_differ(checkout):
    folder, commit = checkout
    assert git_commit(folder / "package") == commit
    (folder / "package" / "code.py").write_text("2")
    assert git_commit(folder / "package") == f"{commit}-dirty"


def test_a_package_that_only_lies_inside_a_checkout_has_none(checkout):
    folder, _ = checkout
    (folder / "venv").mkdir()
    (folder / "venv" / "code.py").write_text("1")
    assert git_commit(folder / "venv") is None


def test_without_git_there_is_none(tmp_path, monkeypatch):
    assert git_commit(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert git_commit(tmp_path) is None
