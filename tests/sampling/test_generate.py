import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl

from .toy import Bigram

V = 8


@pytest.fixture(scope="module")
def table():
    return jax.random.normal(jax.random.key(0), (V, V)) * 2


def _generate(
    table, *, key=0, prompts=((1, 2), (3, 4)), group_size=3, new=6, model=None, **options
):
    tokens = np.asarray(prompts, np.int32)
    options.setdefault("attention_mask", np.ones(tokens.shape, bool))
    return rl.generate(
        model or Bigram(V),
        table,
        tokens,
        key=jax.random.key(key),
        group_size=group_size,
        max_new_tokens=new,
        **options,
    )


def _log_softmax(x):
    return np.asarray(jax.nn.log_softmax(jnp.asarray(x, jnp.float32), axis=-1))


@pytest.mark.long
@pytest.mark.fault(34)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_log_probs_belong_to_their_tokens(table, temperature):
    rollout = _generate(table, temperature=temperature)
    tokens, logp = np.asarray(rollout.tokens), np.asarray(rollout.log_probs)
    expected = _log_softmax(table / temperature)[tokens[:, :-1], tokens[:, 1:]]
    mask = np.asarray(rollout.mask)
    np.testing.assert_allclose(logp[:, 1:][mask[:, 1:]], expected[mask[:, 1:]], atol=1e-5)
    assert (logp[~mask] == 0).all()


@pytest.mark.fault(39)
def test_the_key_decides_alone(table):
    first, again, other = _generate(table), _generate(table), _generate(table, key=1)
    assert (first.tokens == again.tokens).all()
    assert (first.tokens != other.tokens).any()
    rows = np.asarray(first.tokens)[:3, 2:]
    assert len(np.unique(rows, axis=0)) > 1, "completions of one group must differ"


def test_a_completion_does_not_depend_on_the_other_rows(table):
    both = _generate(table, group_ids=np.array([10, 11]))
    alone = _generate(table, prompts=((3, 4),), group_ids=np.array([11]))
    assert (both.tokens[3:] == alone.tokens).all()


@pytest.mark.fault(9)
def test_padding_side_and_amount_do_not_matter(table):
    plain = _generate(table)
    left = _generate(
        table,
        prompts=((0, 0, 1, 2), (0, 0, 3, 4)),
        attention_mask=np.array([[False, False, True, True]] * 2),
    )
    right = _generate(
        table,
        prompts=((1, 2, 0, 0), (3, 4, 0, 0)),
        attention_mask=np.array([[True, True, False, False]] * 2),
    )
    assert (plain.tokens[:, 2:] == left.tokens[:, 4:]).all()
    assert (left.tokens == right.tokens).all()
    assert (left.attention_mask == right.attention_mask).all()


@pytest.mark.long
@pytest.mark.fault(5)
@pytest.mark.fault(11)
def test_the_stop_id_stays_in_the_mask_even_when_it_is_the_pad_id(table):
    rollout = _generate(table, new=40, group_size=8, stop_ids=[0])
    tokens, mask = np.asarray(rollout.tokens)[:, 2:], np.asarray(rollout.mask)[:, 2:]
    lengths = np.asarray(rollout.lengths)
    ended = np.asarray(rollout.terminated)
    assert ended.any()
    for row in np.flatnonzero(ended):
        assert tokens[row, lengths[row] - 1] == 0
        assert (tokens[row, : lengths[row] - 1] != 0).all()
        assert mask[row].sum() == lengths[row]
    assert (np.asarray(rollout.truncated) == ~ended).all()


@pytest.mark.long
@pytest.mark.fault(42)
def test_decoding_stops_at_the_last_stop_token(table):
    steps = []
    model = Bigram(V, on_decode=lambda step: steps.append(int(step)))
    rollout = _generate(table, model=model, new=64, stop_ids=[0, 1, 2])
    jax.effects_barrier()
    assert rollout.terminated.all()
    assert len(steps) == int(rollout.lengths.max()) - 1
    steps.clear()
    _generate(table, model=model, new=5)
    jax.effects_barrier()
    assert len(steps) == 4, "the prefill gives the first token, so S tokens take S-1 decodes"


@pytest.mark.fault(40)
def test_options_are_traced(table):
    traces = []

    class Traced(Bigram):
        def project(self, params, hidden):
            traces.append(1)
            return super().project(params, hidden)

    model = Traced(V)
    first = _generate(table, model=model, stop_ids=[1], temperature=1.0)
    before = len(traces)
    assert before > 0
    changed = _generate(
        table, model=model, stop_ids=[5], temperature=0.0, top_k=3, top_p=0.5, key=9, version=4
    )
    assert len(traces) == before
    assert (first.tokens != changed.tokens).any(), "changed options take effect"


@pytest.mark.fault(49)
def test_rows_are_prompt_major(table):
    rollout = _generate(table, group_ids=np.array([4, 9]))
    assert rollout.group_ids.tolist() == [4, 4, 4, 9, 9, 9]
    assert rollout.tokens[:, :2].tolist() == [[1, 2]] * 3 + [[3, 4]] * 3
    assert rollout.start == 2


def test_greedy_takes_the_likeliest_token(table):
    rollout = _generate(table, temperature=0.0)
    tokens = np.asarray(rollout.tokens)
    assert (tokens[:, 2:] == np.asarray(table).argmax(-1)[tokens[:, 1:-1]]).all()
    expected = _log_softmax(table)[tokens[:, 1:-1], tokens[:, 2:]]
    np.testing.assert_allclose(np.asarray(rollout.log_probs)[:, 2:], expected, atol=1e-5)


@pytest.mark.fault(33)
def test_both_log_probs_are_recorded_under_a_filter(table):
    rollout = _generate(table, top_k=2)
    tokens, mask = np.asarray(rollout.tokens), np.asarray(rollout.mask)
    kept = np.asarray(table) >= np.sort(np.asarray(table), axis=-1)[:, -2:-1]
    filtered = _log_softmax(np.where(kept, table, -1e30))
    rows, cols = np.nonzero(mask)
    before, token = tokens[rows, cols - 1], tokens[rows, cols]
    np.testing.assert_allclose(
        np.asarray(rollout.truncated_log_probs)[mask], filtered[before, token], atol=1e-5
    )
    np.testing.assert_allclose(
        np.asarray(rollout.log_probs)[mask], _log_softmax(table)[before, token], atol=1e-5
    )
    plain = _generate(table)
    assert (plain.truncated_log_probs == plain.log_probs).all()


@pytest.mark.long
def test_frequencies_of_two_token_completions(table):
    """100k completions against the enumerated distribution of pairs."""
    rollout = _generate(table, prompts=((1, 2),), group_size=100_000, new=2, temperature=1.3)
    pairs = np.asarray(rollout.tokens)[:, 2] * V + np.asarray(rollout.tokens)[:, 3]
    step = np.exp(_log_softmax(table / 1.3)).astype(np.float64)
    probs = (step[2][:, None] * step).reshape(-1)
    expected = probs * len(pairs)
    keep = expected >= 5
    counts = np.bincount(pairs, minlength=V * V)
    statistic = ((counts - expected) ** 2 / expected)[keep].sum()
    assert statistic < keep.sum() + 5 * np.sqrt(2 * keep.sum())


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (dict(attention_mask=np.ones((2, 3), bool)), ValueError, "tokens, attention_mask"),
        (
            dict(attention_mask=np.ones((2, 2), np.int32)),
            TypeError,
            "attention_mask: expected bool",
        ),
        (dict(attention_mask=np.array([[True, True], [False, False]])), ValueError, r"\[1\]"),
        (dict(group_size=0), ValueError, "group_size"),
        (dict(new=0), ValueError, "max_new_tokens"),
        (dict(temperature=-1.0), ValueError, "temperature"),
        (dict(top_p=1.5), ValueError, "top_p"),
        (dict(top_k=-1), ValueError, "top_k"),
    ],
)
def test_bad_input_is_named(table, change, error, says):
    with pytest.raises(error, match=says):
        _generate(table, **change)
