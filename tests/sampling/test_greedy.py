"""Greedy text of the real model is the PyTorch reference's, token for token."""

import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from experiments.bench import greedy, sampler_gap


@pytest.fixture(scope="module")
def smollm2():
    return rl.models.load("smollm2-135m")


def explained(apart):
    """The failure's text: where texts part, and whether the reference itself hesitated there."""
    return "\n".join(f"{split} {'a near tie' if split.near_tie else 'no tie'}" for split in apart)


def compare(smollm2, wanted, paddings=sampler_gap.PADDINGS):
    """The reference's text, however the prompts are padded."""
    for padding in paddings:
        apart = greedy.splits(greedy.generated(*smollm2, wanted, padding), wanted)
        assert not apart, f"padded {padding}:\n{explained(apart)}"


def test_the_recorded_texts_are_long_and_mixed_and_one_token_was_nearly_a_tie():
    wanted = greedy.recorded()
    lengths = wanted.mask.sum(axis=1)
    assert wanted.greedy.shape == wanted.margins.shape == (32, greedy.STEPS)
    assert wanted.greedy.dtype == np.int32 and (lengths.min(), lengths.max() > 64) == (1, True)
    assert len(set(lengths.tolist())) > 16
    assert np.argwhere(wanted.margins < greedy.NEAR_TIE).tolist() == [[17, 33]]  # by 9.5e-5


def test_splits_name_the_first_token_that_differs():
    wanted = greedy.Reference(
        tokens=np.ones((2, 1), np.int32),
        mask=np.ones((2, 1), bool),
        greedy=np.array([[5, 6, 7], [5, 6, 7]], np.int32),
        margins=np.array([[1, 1, 1], [1, 5e-5, 1]], np.float32),
    )
    assert greedy.splits(wanted.greedy, wanted) == []
    (split,) = greedy.splits(np.array([[5, 6, 7], [5, 9, 8]]), wanted)
    assert (split.prompt, split.step, split.ours, split.reference) == (1, 1, 9, 6)
    assert split.near_tie and split.margin == np.float32(5e-5)
    table = greedy.table({"left": np.array([[5, 6, 7], [5, 9, 8]])}, wanted)
    assert table.records()[0] == {
        "padding": "left",
        "equal texts": "1 of 2",
        "equal tokens": "4 of 6",
        "first difference (margin)": "1 at 1: 5.0e-05",
    }


@pytest.mark.long
@pytest.mark.fault(9, 59)
@pytest.mark.download
def test_the_first_tokens_of_eight_texts(smollm2):
    wanted = greedy.recorded().cut(prompts=8, steps=16, longest=32)
    assert wanted.mask.sum(axis=1).tolist() == sorted({*wanted.mask.sum(axis=1)})  # all differ
    compare(smollm2, wanted, ["mixed"])


@pytest.mark.slow
@pytest.mark.download
def test_a_wrong_weight_is_seen(smollm2):
    model, params = smollm2
    wanted = greedy.recorded().cut(prompts=8, steps=16, longest=32)
    wrong = params | {"final_norm": {"scale": jnp.flip(params["final_norm"]["scale"])}}
    assert len(greedy.splits(greedy.generated(model, wrong, wanted, "left"), wanted)) == 8


@pytest.mark.slow
@pytest.mark.download
def test_all_texts(smollm2):
    compare(smollm2, greedy.recorded())


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.download
@pytest.mark.filterwarnings("ignore")
def test_live_texts(smollm2):
    pytest.importorskip("torch")
    folder = rl.models.resolve("smollm2-135m")
    rows = rl.models.load_tokenizer(folder)(greedy.prompts()).input_ids
    wanted = greedy.reference(folder, rows)
    np.testing.assert_array_equal(wanted.tokens, greedy.recorded().tokens)
    compare(smollm2, wanted)
