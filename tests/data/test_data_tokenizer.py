"""A trained tokenizer loses nothing; anchors and EOS stand where they are wanted, once."""

import json
import subprocess
import sys

import numpy as np
import pytest

from anchorcontext.data.encode import Encoder
from anchorcontext.data.tokenizer import (
    check_vocabulary,
    load_tokenizer,
    resolve_anchor,
    tokenizer_digest,
    train_tokenizer,
)
from anchorcontext.errors import UserError

TEXTS = [f"def function_{i}(x):\n    return x + {i}\n" for i in range(50)] + ["Prose, too. " * 20]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 280)


def without(tokenizer, *tokens):
    from copy import deepcopy

    changed = deepcopy(tokenizer)
    for token in tokens:
        setattr(changed, token, None)
    return changed


@pytest.mark.parametrize(
    "text", [TEXTS[0], "naïve ☃ \U0001f600\r\n\t  end  ", " ", "\x01\x7f", "<s></s>"]
)
def test_any_text_comes_back_unchanged(tokenizer, text):
    (ids,) = Encoder(tokenizer, tokenizer.bos_token_id, add_eos=False).encode([text])
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids.tolist()) == text


def test_saved_tokenizer_loads_as_an_auto_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    plain = load_tokenizer(tmp_path)
    # An exported model folder has a config.json, which must not change what is loaded.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for loaded in (plain, load_tokenizer(tmp_path)):
        assert loaded(TEXTS[0]).input_ids == tokenizer(TEXTS[0]).input_ids
        assert loaded(TEXTS[0]).input_ids[0] == loaded.bos_token_id
        assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 1, 2)
        assert tokenizer_digest(loaded) == tokenizer_digest(tokenizer)


def test_training_is_deterministic_across_processes(tokenizer):
    script = (
        "from anchorcontext.data.tokenizer import train_tokenizer, tokenizer_digest;"
        f"print(tokenizer_digest(train_tokenizer({TEXTS!r}, 280)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == tokenizer_digest(tokenizer)


def test_vocabulary_size_is_a_limit(tokenizer):
    assert len(tokenizer) == 280
    assert len(train_tokenizer(["ab"], 5000)) < 270
    with pytest.raises(UserError, match="vocab_size = 258: at least 259"):
        train_tokenizer(TEXTS, 258)


def test_documents_get_no_bos_from_a_tokenizer_that_adds_it(tokenizer):
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id
    (ids,) = Encoder(tokenizer, tokenizer.bos_token_id, add_eos=False).encode(["x"])
    assert tokenizer.bos_token_id not in ids


def test_a_rendered_anchor_is_removed_and_counted_only_in_front(tokenizer):
    bos = tokenizer.bos_token
    encoder = Encoder(tokenizer, tokenizer.bos_token_id, add_eos=False)
    rendered, inside, plain = encoder.encode([f"{bos}x", f"x{bos}", "x"])
    assert rendered.tolist() == plain.tolist()
    assert inside.tolist() == [*plain.tolist(), tokenizer.bos_token_id]
    assert encoder.num_rendered_anchors == 1


def test_eos_ends_every_document_once(tokenizer):
    eos = tokenizer.eos_token_id
    encoder = Encoder(tokenizer, None, add_eos=True)
    first, second = encoder.encode(["x", f"x{tokenizer.eos_token}"])
    assert first.tolist() == second.tolist() and first[-1] == eos
    assert encoder.num_eos_added == 1
    with pytest.raises(UserError, match=r"data.add_eos: .* no EOS"):
        Encoder(without(tokenizer, "eos_token"), None, add_eos=True)


def test_anchor_choices(tokenizer):
    assert resolve_anchor(tokenizer, "auto") == resolve_anchor(tokenizer, "bos") == 0
    assert resolve_anchor(tokenizer, "eos") == 1
    assert resolve_anchor(tokenizer, "none") is None
    assert resolve_anchor(tokenizer, 270) == 270
    assert resolve_anchor(without(tokenizer, "bos_token"), "auto") == 1
    for changed, anchor, message in [
        (without(tokenizer, "bos_token"), "bos", "no BOS"),
        (without(tokenizer, "bos_token", "eos_token"), "auto", "neither BOS nor EOS"),
        (tokenizer, 280, "ids 0 to 279"),
    ]:
        with pytest.raises(UserError, match=message):
            resolve_anchor(changed, anchor)


def test_a_tokenizer_larger_than_the_model_is_refused():
    check_vocabulary(280, 280)
    check_vocabulary(280, None)
    with pytest.raises(UserError, match="tokenizer has 281 tokens, the model's vocabulary 280"):
        check_vocabulary(281, 280)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a Hugging Face tokenizer folder"):
        load_tokenizer(tmp_path)


def test_model_max_length_of_a_tokenizer_does_not_cut_documents(tokenizer):
    from copy import deepcopy

    short = deepcopy(tokenizer)
    short.backend_tokenizer.enable_truncation(4)
    (ids,) = Encoder(short, None, add_eos=False).encode([TEXTS[-1]])
    assert tokenizer.decode(ids.tolist()) == TEXTS[-1]
