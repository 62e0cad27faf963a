"""Secrets are taken out; ordinary configuration is left alone."""

import pytest

from anchorcontext.watch.redact import REDACTED, redact


@pytest.mark.parametrize(
    "name",
    ["api_key", "WANDB_API_KEY", "hf_token", "HF_TOKEN", "password", "clientSecret", "apiKey"],
)
def test_text_under_a_secrets_name_is_redacted(name):
    assert redact({"deep": [{name: "abc"}]}) == {"deep": [{name: REDACTED}]}


def test_ordinary_configuration_is_unchanged():
    config = {
        "data": {"window_tokens": 65536, "tokenizer": "folder", "train_tokenizer": None},
        "model": {"num_key_value_heads": 2, "bos_token": "<s>", "keys": ["a"]},
        "loss": {"chunk_tokens": 1024},
        "parity": {"stock_tokens": 2048},
        "optimizer": {"betas": [0.9, 0.95], "type": "adamw"},
    }
    assert redact(config) == config


def test_well_known_tokens_are_found_under_any_name():
    token = "hf_" + "a1B2" * 8
    assert redact({"note": f"use {token} here"}) == {"note": f"use {REDACTED} here"}
    assert redact({"url": "https://me:pass@host/x"}) == {"url": f"https://me:{REDACTED}@host/x"}


def test_values_of_secret_environment_variables_are_found_in_any_text(monkeypatch):
    monkeypatch.setenv("STORE_PASSWORD", "correct-horse-battery")
    monkeypatch.setenv("EMPTY_TOKEN", "")
    assert redact({"error": "denied: correct-horse-battery"}) == {"error": f"denied: {REDACTED}"}
    assert redact({"text": "plain"}) == {"text": "plain"}
