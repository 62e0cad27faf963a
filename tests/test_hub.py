"""A hub that cannot be reached is asked once, shortly, and only for names that are on it."""

import pytest
from huggingface_hub import constants, utils

from anchorcontext.data import load_tokenizer
from anchorcontext.errors import UserError
from anchorcontext.hub import offline_without_hub


@pytest.fixture
def asked(monkeypatch):
    """Requests to a hub that is out of reach."""
    made = []

    class Session:
        def head(self, url, timeout):
            made.append((url, timeout))
            raise ConnectionError("no route to host")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(utils, "get_session", Session)
    return made


def test_a_name_of_the_hub_goes_offline_after_one_short_request(asked, caplog):
    offline_without_hub("owner/name")
    assert constants.HF_HUB_OFFLINE and len(asked) == 1 and asked[0][1] <= 10
    assert "no route to host" in caplog.text and "owner/name" in caplog.text
    offline_without_hub("owner/other")
    assert len(asked) == 1


def test_paths_ask_nobody(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    for path in ("owner/name", "./missing", "/missing", "~/missing"):
        offline_without_hub(path)
    assert not asked and not constants.HF_HUB_OFFLINE


def test_a_tokenizer_of_the_hub_is_named_as_missing_at_once(asked):
    with pytest.raises(UserError, match="tokenizer 'owner/name'"):
        load_tokenizer("owner/name")
    assert len(asked) == 1
