"""A needle is found exactly when greedy decoding of a stock model writes the answer."""

import numpy as np
import pytest
import torch

from anchorcontext.data.tokenizer import train_tokenizer
from anchorcontext.errors import UserError
from anchorcontext.evaluate.needles import hit_rates, needle_excerpts, needle_probes
from anchorcontext.evaluate.probes import Excerpt, packed_alone
from anchorcontext.evaluate.tally import tally
from anchorcontext.model import TrainModel, enable
from anchorcontext.parallel import build_mesh
from anchorcontext.testing.models import tiny_llama

CPU = torch.device("cpu")
ANSWER = 4


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["The secret number of amber is 1234567.\n" * 30], 290)


@torch.no_grad()
def test_hits_are_what_greedy_decoding_of_a_stock_model_writes():
    model = tiny_llama().eval()
    rng, prompts = np.random.default_rng(0), []
    for length in (9, 14, 23):
        prompt = torch.tensor(rng.integers(2, 128, length))[None]
        ids = model.generate(
            prompt, max_new_tokens=ANSWER, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].numpy()
        assert len(ids) == length + ANSWER
        prompts.append(ids)
    excerpts = []
    for ids in prompts:
        for wrong in (None, -ANSWER, -2):  # as decoded, the first token changed, a later one
            changed = ids.copy()
            if wrong is not None:
                changed[wrong] = (changed[wrong] + 1) % 128
            groups = np.full(len(ids), -1)
            groups[-ANSWER:] = len(excerpts)
            excerpts.append(Excerpt(changed, groups))
    probes = packed_alone(excerpts, 64)
    assert 1 < len(probes) < len(excerpts)
    found = tally(TrainModel(enable(model)), probes, 9, build_mesh(1), CPU, {})
    assert found.targets.tolist() == [ANSWER] * 9
    complete = (found.hits == found.targets).tolist()
    assert complete == [True, False, False] * 3
    assert hit_rates(found, [9, 14, 23], 3) == {9: 1 / 3, 14: 1 / 3, 23: 1 / 3}


def test_prompts_have_their_length_their_needle_and_one_answer(tokenizer):
    lengths, samples = [160, 400], 5
    excerpts = needle_excerpts(tokenizer, lengths, samples=samples, bos=7)
    again = needle_excerpts(tokenizer, lengths, samples=samples, bos=7)
    depths, numbers = [], set()
    for group, (length, same) in enumerate(zip(lengths, excerpts, strict=True)):
        for i, (excerpt, twin) in enumerate(zip(same, again[group], strict=True)):
            assert np.array_equal(excerpt.ids, twin.ids)
            assert len(excerpt.ids) == length and excerpt.ids[0] == 7
            counted = excerpt.groups == group * samples + i
            assert (excerpt.groups[~counted] == -1).all()
            answer = tokenizer.decode(excerpt.ids[counted]).strip()
            assert len(answer) == 7 and answer.isdigit()
            assert counted[-counted.sum() :].all()  # the end of the prompt
            text = tokenizer.decode(excerpt.ids[1:])
            assert text.count(answer) == 2  # in the needle and in the answer
            assert f" is {answer}.\n" in text and text.endswith(f" is {answer}")
            depths.append(text.index(answer) / len(text))
            numbers.add(answer)
    assert len(numbers) == 10
    assert depths[:5] == sorted(depths[:5]) and depths[0] < 0.2
    windows = needle_probes(excerpts, 400)
    assert [probe.window.num_tokens for probe in windows] == [320, 320, 160, *[400] * 5]


def test_a_haystack_may_be_given_and_needs_room_for_the_needle(tokenizer):
    hay = np.full(50, 9)
    ((excerpt,),) = needle_excerpts(tokenizer, [200], samples=1, bos=None, haystack=hay)
    assert (excerpt.ids == 9).sum() > 50
    with pytest.raises(UserError, match=r"20 tokens has no room.*at least that"):
        needle_excerpts(tokenizer, [20], samples=1, bos=0)
