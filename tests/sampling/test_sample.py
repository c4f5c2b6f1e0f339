"""The sampling function against transformers' logits processors and enumerated distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from rlhf_jax.sampling import History, SamplingOptions
from rlhf_jax.sampling.sample import _change

V = 40
PROMPT = np.array([[3, 5, 5, 7]], np.int32)
WRITTEN = np.array([[[9, 3, 11]]], np.int32)


def logits_of(seed, rows=4):
    return np.random.default_rng(seed).normal(0, 3, (rows, V)).astype(np.float32)


def history(rows=1, length=3):
    return History(
        prompt=jnp.asarray(np.repeat(PROMPT, rows, 0)),
        prompt_mask=jnp.ones((rows, PROMPT.shape[1]), bool),
        tokens=jnp.asarray(np.repeat(WRITTEN, rows, 0)),
        lengths=jnp.full((rows, 1), length),
    )


sample = jax.jit(rl.sampling.sample)


@jax.jit
def filtered(logits, index, options, history):
    """log-probs of the distribution that is drawn from: the parts of ``sample``, in its order."""
    kept = _change(logits, index, options, history)
    kept = rl.sampling.temper(kept, options.temperature[..., None])
    kept = rl.sampling.top_k_top_p(kept, options.top_k, options.top_p)
    return jax.nn.log_softmax(rl.sampling.min_p(kept, options.min_p), axis=-1)


def distribution(logits, index=3, **options):
    rows = len(logits)
    made = SamplingOptions.make(max_new_tokens=9, **options)
    keys = jax.random.split(jax.random.key(0), (rows, 1))
    logits = jnp.asarray(logits)[:, None]
    log_probs = filtered(logits, index, made, history(rows))
    drawn = sample(logits, keys, index, made, history(rows))
    np.testing.assert_allclose(
        drawn.truncated_log_prob,
        jnp.take_along_axis(log_probs, drawn.token[..., None], -1)[..., 0],
        atol=1e-5,
    )
    return np.asarray(log_probs)[:, 0]


CASES = {
    "temperature": dict(temperature=0.7),
    "top_k": dict(top_k=5),
    "top_k_and_temperature": dict(top_k=3, temperature=1.9),
    "top_p": dict(top_p=0.8),
    "top_p_small": dict(top_p=0.05),
    "min_p": dict(min_p=0.1),
    "all_filters": dict(temperature=1.4, top_k=20, top_p=0.9, min_p=0.03),
    "repetition": dict(repetition_penalty=1.7),
    "repetition_below_one": dict(repetition_penalty=0.6, temperature=0.8),
    "min_new_tokens": dict(min_new_tokens=5, stop_ids=[2, 9]),
    "bias": dict(logit_bias=np.linspace(-2, 2, V, dtype=np.float32)),
    "everything": dict(
        temperature=0.9,
        top_k=12,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.3,
        min_new_tokens=9,
        stop_ids=[0, 1],
        logit_bias=np.linspace(1, -1, V, dtype=np.float32),
    ),
}


def transformers_scores(logits, *, index=3, **options):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as lp

    ids = torch.tensor(np.concatenate([PROMPT, WRITTEN[:, 0]], 1)).long().repeat(len(logits), 1)
    steps = []
    if "logit_bias" in options:
        bias = {(i,): float(b) for i, b in enumerate(options["logit_bias"])}
        steps.append(lp.SequenceBiasLogitsProcessor(bias))
    if "repetition_penalty" in options:
        steps.append(lp.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if "min_new_tokens" in options:
        steps.append(
            lp.MinNewTokensLengthLogitsProcessor(
                PROMPT.shape[1],
                options["min_new_tokens"],
                torch.tensor(options["stop_ids"]),
                device="cpu",
            )
        )
    for name, warper in (
        ("temperature", lp.TemperatureLogitsWarper),
        ("top_k", lp.TopKLogitsWarper),
        ("top_p", lp.TopPLogitsWarper),
        ("min_p", lp.MinPLogitsWarper),
    ):
        if name in options:
            steps.append(warper(options[name]))
    scores = torch.tensor(logits)
    for step in steps:
        scores = step(ids, scores)
    return torch.log_softmax(scores, dim=-1).numpy()


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_filters_equal_transformers_processors(case):
    for seed in range(5):
        logits = logits_of(seed)
        ours = distribution(logits, **CASES[case])
        theirs = transformers_scores(logits, **CASES[case])
        kept = np.isfinite(theirs)
        assert ((ours > -1e20) == kept).all()
        np.testing.assert_allclose(ours[kept], theirs[kept], atol=2e-5)


def test_presence_penalty_counts_the_completion_only():
    logits = logits_of(0, rows=1)
    ours = distribution(logits, presence_penalty=2.5)
    changed = logits.copy()
    changed[0, [9, 3, 11]] -= 2.5
    np.testing.assert_allclose(ours, jax.nn.log_softmax(changed, axis=-1), atol=1e-5)


def test_tokens_after_the_length_are_not_seen():
    logits = jnp.asarray(logits_of(1, rows=1))[:, None]
    keys = jax.random.split(jax.random.key(3), (1, 1))
    made = SamplingOptions.make(max_new_tokens=9, presence_penalty=50.0, temperature=0.0)
    best = int(jnp.argmax(logits))
    past = history()._replace(tokens=jnp.full((1, 1, 3), best))
    zero, one = (past._replace(lengths=jnp.int32(n)) for n in (0, 1))
    assert sample(logits, keys, 0, made, zero).token == best
    assert sample(logits, keys, 1, made, one).token != best


TABLE = np.array([2.0, 1.2, 1.0, 0.1, -0.3, -1.0, -1.1, -2.5], np.float32)


def enumerated(*, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution over TABLE, by sorting and adding up in float64."""
    probs = np.exp(TABLE.astype(np.float64) / temperature)
    probs /= probs.sum()
    order = np.argsort(-probs)
    kept = list(order[: top_k or None])
    if top_p < 1:
        total, mass, nucleus = probs[kept].sum(), 0.0, []
        for token in kept:
            if nucleus and mass >= top_p:
                break
            nucleus.append(token)
            mass += probs[token] / total
        kept = nucleus
    kept = [token for token in kept if probs[token] >= min_p * probs.max()]
    out = np.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(temperature=0.5),
        dict(temperature=3.0),
        dict(top_k=3),
        dict(top_p=0.75),
        dict(min_p=0.2),
        dict(temperature=1.5, top_k=6, top_p=0.9, min_p=0.12),
    ],
    ids=str,
)
def test_frequencies_of_100k_draws(options):
    rows = 100_000
    keys = jax.random.split(jax.random.key(7), (1, rows))
    logits = jnp.broadcast_to(TABLE, (1, rows, len(TABLE)))
    none = jnp.zeros((1, 1), jnp.int32)
    past = History(none, none > 0, jnp.zeros((1, rows, 1), jnp.int32), jnp.int32(0))
    made = SamplingOptions.make(max_new_tokens=1, **options)
    drawn = sample(logits, keys, 0, made, past)
    counts = np.bincount(np.asarray(drawn.token).reshape(-1), minlength=len(TABLE))
    probs = enumerated(**options)
    assert (counts[probs == 0] == 0).all()
    expected = probs[probs > 0] * rows
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    free = len(expected) - 1
    assert statistic < free + 4 * np.sqrt(2 * free) + 4, (counts, expected)  # p below 1e-4
    chosen = probs[np.asarray(drawn.token)]
    np.testing.assert_allclose(np.exp(drawn.truncated_log_prob), chosen, rtol=1e-4)


def test_options_of_each_row_are_its_own():
    """Rows of different options in one call give what each gives alone."""
    logits = jnp.asarray(logits_of(4, rows=5))[:, None]
    keys = jax.random.split(jax.random.key(1), (5, 1))
    mixed = dict(
        temperature=[1.0, 0.0, 2.0, 1.0, 1.0],
        top_k=[0, 0, 4, 0, 0],
        top_p=[1.0, 1.0, 1.0, 0.5, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.3],
        repetition_penalty=[1.0, 1.0, 1.5, 1.0, 1.0],
        min_new_tokens=[0, 9, 0, 0, 0],
    )
    stops = np.arange(10).reshape(5, 2)
    made = SamplingOptions.make(
        max_new_tokens=9, stop_ids=stops, **{k: np.array(v) for k, v in mixed.items()}
    )
    together = sample(logits, keys, 3, made, history(5))
    for row in range(5):
        own = {name: values[row] for name, values in mixed.items()}
        made = SamplingOptions.make(max_new_tokens=9, stop_ids=stops[row], **own)
        alone = sample(logits[row : row + 1], keys[row : row + 1], 3, made, history())
        assert alone.token[0, 0] == together.token[row, 0]
        for name in ("log_prob", "truncated_log_prob"):
            np.testing.assert_allclose(
                getattr(alone, name)[0, 0], getattr(together, name)[row, 0], atol=2e-6
            )


def test_a_forbidden_token_is_never_drawn():
    bias = rl.sampling.forbid([0, 1, 2], 4)
    made = SamplingOptions.make(max_new_tokens=1, logit_bias=bias, temperature=5.0)
    keys = jax.random.split(jax.random.key(0), (1, 50))
    logits = jnp.broadcast_to(jnp.array([9.0, 9.0, 9.0, -9.0]), (1, 50, 4))
    none = jnp.zeros((1, 1), jnp.int32)
    past = History(none, none > 0, jnp.zeros((1, 50, 1), jnp.int32), jnp.int32(0))
    drawn = sample(logits, keys, 0, made, past)
    assert (drawn.token == 3).all() and (drawn.truncated_log_prob == 0).all()
    assert (drawn.log_prob < -3).all()
    with pytest.raises(ValueError, match="leave at least one"):
        rl.sampling.forbid(range(4), 4)
    with pytest.raises(ValueError, match=r"\[0, 4\)"):
        rl.sampling.forbid([4], 4)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("min_new_tokens", -1),
        ("temperature", np.array([1.0, -1.0])),
        ("temperature", np.nan),
    ],
)
def test_options_out_of_range_are_named(option, value):
    with pytest.raises(ValueError, match=option):
        SamplingOptions.make(max_new_tokens=1, **{option: value})


def test_the_number_of_stop_ids_keeps_its_shape():
    widths = {
        SamplingOptions.make(max_new_tokens=1, stop_ids=range(n)).stop_ids.shape for n in range(9)
    }
    assert widths == {(8,)}
    assert SamplingOptions.make(max_new_tokens=1, stop_ids=range(9)).stop_ids.shape == (16,)
