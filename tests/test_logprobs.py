"""Token log-probs and entropy: plain, chunked, sharded."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlhf_jax as rl
from tests import vectors

lp = rl.logprobs
B, T, D, V = 3, 7, 16, 50


def inputs(seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 5)
    hidden = jax.random.normal(keys[0], (B, T, D)).astype(dtype)
    head = jax.random.normal(keys[1], (D, V)).astype(dtype)
    bias = jax.random.normal(keys[2], (V,)).astype(dtype)
    labels = jax.random.randint(keys[3], (B, T), 0, V)
    return hidden, head, bias, labels, jax.random.normal(keys[4], (2, B, T))


def plain(hidden, head, bias, labels, *, temperature=1.0, entropy=False):
    z = jnp.einsum("...d,dv->...v", hidden, head, preferred_element_type=jnp.float32)
    z = z if bias is None else z + bias
    return (
        lp.from_logits(z, labels, temperature=temperature),
        lp.entropy_from_logits(z, temperature=temperature) if entropy else None,
    )


def weighted(outputs, cotangents):
    """A scalar of both outputs, to differentiate."""
    log_probs, entropy = outputs
    total = jnp.sum(log_probs * cotangents[0])
    return total if entropy is None else total + jnp.sum(entropy * cotangents[1])


@pytest.mark.parametrize("name", [n for n in vectors.CASES if n.startswith("token_logprob")])
def test_vector_token_logprob(numerics, name):
    given_, want = vectors.load(name)
    logits, labels = numerics.array(given_["logits"]), jnp.asarray(given_["labels"])
    temperature = given_["temperature"]
    got = numerics.call(lp.from_logits, logits, labels, temperature=temperature)
    numerics.equal(got, want["logprobs"])
    got = numerics.call(lp.entropy_from_logits, logits, temperature=temperature)
    numerics.equal(got, want["entropy"])
    # The chunked form: an identity head turns hidden states into logits.
    got = numerics.call(
        functools.partial(lp.chunked, temperature=temperature, with_entropy=True, chunk_size=2),
        logits,
        jnp.eye(logits.shape[-1], dtype=logits.dtype),
        labels,
    )
    assert got.log_probs.dtype == numerics.dtype
    numerics.equal(got.log_probs, want["logprobs"])
    numerics.equal(got.entropy, want["entropy"])


@pytest.mark.parametrize(
    ("chunk_size", "vocab_chunk", "entropy", "trained", "tied"),
    [
        (None, None, False, (0,), False),
        (6, None, False, (0,), True),
        (6, None, True, (0,), True),
        (6, None, True, (0, 1), False),
        (6, None, False, (0, 1), True),
        (6, None, True, (0, 1, 2), True),
        (6, None, False, (2,), False),
        (1, None, True, (1,), False),
        (None, 16, True, (0, 1, 2), False),
        (6, 16, True, (0, 1), True),
        (6, 25, False, (0,), False),
        (6, 25, False, (0, 1, 2), True),
    ],
)
def test_chunked_equals_plain(chunk_size, vocab_chunk, entropy, trained, tied):
    hidden, head, bias, labels, cotangents = inputs()
    bias = bias if 2 in trained else None

    def value(form, hidden, head, bias):
        return weighted(form(hidden, head, bias), cotangents)

    def chunked(hidden, head, bias):
        out = lp.chunked(
            hidden,
            head.T if tied else head,
            labels,
            temperature=0.7,
            bias=bias,
            head_is_embedding=tied,
            with_entropy=entropy,
            chunk_size=chunk_size,
            vocab_chunk=vocab_chunk,
        )
        return out.log_probs, out.entropy

    reference = functools.partial(plain, labels=labels, temperature=0.7, entropy=entropy)
    want = jax.value_and_grad(functools.partial(value, reference), trained)(hidden, head, bias)
    got = jax.jit(jax.value_and_grad(functools.partial(value, chunked), trained))(
        hidden, head, bias
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-5)
    for g, w in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


def test_chunked_float64_keeps_float64():
    with jax.enable_x64(True):
        hidden, head, _, labels, cotangents = inputs(dtype=jnp.float64)

        def value(form, hidden, head):
            return weighted(form(hidden, head), cotangents)

        def chunked(hidden, head):
            out = lp.chunked(hidden, head, labels, chunk_size=6, with_entropy=True)
            return out.log_probs, out.entropy

        def reference(hidden, head):
            z = hidden @ head
            return lp.from_logits(z, labels), lp.entropy_from_logits(z)

        got = jax.grad(functools.partial(value, chunked), (0, 1))(hidden, head)
        want = jax.grad(functools.partial(value, reference), (0, 1))(hidden, head)
        for g, w in zip(got, want, strict=True):
            assert g.dtype == jnp.float64
            np.testing.assert_allclose(g, w, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("entropy", [False, True])
def test_chunked_bfloat16_accumulates_in_float32(entropy):
    hidden, head, _, labels, cotangents = inputs(dtype=jnp.bfloat16)
    want = plain(hidden, head, None, labels, entropy=entropy)
    got = lp.chunked(hidden, head, labels, chunk_size=6, with_entropy=entropy)
    assert got.log_probs.dtype == jnp.float32
    np.testing.assert_allclose(got.log_probs, want[0], rtol=1e-5, atol=1e-5)

    def chunked(hidden, head):
        out = lp.chunked(hidden, head, labels, chunk_size=6, with_entropy=entropy)
        return weighted((out.log_probs, out.entropy), cotangents)

    def exact(hidden, head):
        return weighted(plain(hidden, head, None, labels, entropy=entropy), cotangents)

    got = jax.grad(chunked, (0, 1))(hidden, head)
    want = jax.grad(exact, (0, 1))(hidden.astype(jnp.float32), head.astype(jnp.float32))
    for g, w in zip(got, want, strict=True):
        assert g.dtype == jnp.bfloat16
        # One rounding of the result and one of its factor, 2⁻⁹ each.
        np.testing.assert_allclose(g.astype(jnp.float32), w, rtol=2**-7, atol=2e-2)


@pytest.mark.long
@pytest.mark.parametrize("vocab_chunk", [None, 100])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("of_hidden", "of_head"),
    [
        ("bfloat16", "bfloat16"),
        pytest.param("bfloat16", "float32", marks=pytest.mark.slow),
        pytest.param("float32", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_bfloat16_gradients_are_as_near_to_the_truth_as_plain_ones(
    of_hidden, of_head, tied, entropy, vocab_chunk
):
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(3), 4)
        hidden = jax.random.normal(keys[0], (2, 32, 32)).astype(of_hidden)
        head = (jax.random.normal(keys[1], (32, 256)) / 3).astype(of_head)
        labels = jax.random.randint(keys[2], (2, 32), 0, 256)
        cotangents = jax.random.normal(keys[3], (2, 2, 32), jnp.float32)

        def exact(hidden, head):
            return weighted(plain(hidden, head, None, labels, entropy=entropy), cotangents)

        def chunked(hidden, head, **options):
            out = lp.chunked(
                hidden,
                head.T if tied else head,
                labels,
                head_is_embedding=tied,
                with_entropy=entropy,
                chunk_size=16,
                vocab_chunk=vocab_chunk,
                **options,
            )
            return weighted((out.log_probs, out.entropy), cotangents)

        double = [x.astype(jnp.float64) for x in (hidden, head)]
        truth = jax.grad(exact, (0, 1))(*double)

        def errors(form, trained):
            got = jax.jit(jax.grad(form, trained))(hidden, head)
            for i, g in zip(trained, got, strict=True):
                assert g.dtype == (hidden, head)[i].dtype
            return [
                float(jnp.linalg.norm((g - truth[i]).ravel()) / jnp.linalg.norm(truth[i].ravel()))
                for i, g in zip(trained, got, strict=True)
            ]

        want = errors(exact, (0, 1))
        # The rounding of a bf16 result, 2⁻⁹ at most; a float32 one keeps float32's digits, where
        # the order of a sum is as good as another.
        for error, dtype in zip(want, (of_hidden, of_head), strict=True):
            assert error < (2**-9 if dtype == "bfloat16" else 3e-6)
        for trained in ((0,), (0, 1)):
            for got, bound in zip(errors(chunked, trained), want, strict=False):
                assert got <= max(1.01 * bound, 1e-6)
        rounded = functools.partial(chunked, gradient_dtype="bfloat16")
        assert all(error < 2**-8 for error in errors(rounded, (0, 1)))
        assert errors(rounded, (0, 1)) != errors(chunked, (0, 1))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.uint16, jnp.int32])
def test_labels_may_be_of_a_narrow_dtype(dtype):
    # Ids past the dtype's range must not alias a label: 5 and 261 are one uint8.
    hidden, _, _, labels, cotangents = inputs()
    head = jax.random.normal(jax.random.key(1), (D, 700))

    def value(hidden, head, labels, vocab_chunk):
        out = lp.chunked(hidden, head, labels, chunk_size=6, vocab_chunk=vocab_chunk)
        return jnp.sum(out.log_probs * cotangents[0])

    run = jax.value_and_grad(value, (0, 1))
    want = run(hidden, head, labels, None)
    for vocab_chunk in (None, 300):
        got = run(hidden, head, labels.astype(dtype), vocab_chunk)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
        for g, w in zip(got[1], want[1], strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(
        lp.from_logits(hidden @ head, labels.astype(dtype)), lp.from_logits(hidden @ head, labels)
    )


def products(function, *arguments) -> int:
    """Products of matrices in the program for this platform, nested ones included."""
    return jax.jit(function).lower(*arguments).as_text().count("stablehlo.dot_general")


def test_frozen_head_costs_no_gradient():
    hidden, head, _, labels, _ = inputs()

    def value(hidden, head):
        return lp.chunked(hidden, head, labels, chunk_size=6).log_probs.sum()

    def stopped(hidden, head):
        return value(hidden, jax.lax.stop_gradient(head))

    # Frozen: logits once, and their slope once, both on the way forward.
    assert products(jax.grad(value, 0), hidden, head) == 2
    assert products(jax.grad(stopped, (0, 1)), hidden, head) == 2
    assert products(jax.grad(value, (0, 1)), hidden, head) == 4


def test_one_block_keeps_its_logits():
    hidden, head, _, labels, _ = inputs()

    def value(hidden, head):
        return lp.chunked(hidden, head, labels, chunk_size=labels.size).log_probs.sum()

    assert products(jax.grad(value, (0, 1)), hidden, head) == 3


def test_chunked_under_remat_and_vmap():
    hidden, head, _, labels, _ = inputs()

    def value(hidden, head, labels):
        return lp.chunked(hidden, head, labels, chunk_size=4).log_probs.sum()

    want = jax.grad(value)(hidden, head, labels)
    got = jax.jit(jax.grad(jax.checkpoint(value)))(hidden, head, labels)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    rows = jax.vmap(jax.grad(value), (0, None, 0))(hidden, head, labels)
    np.testing.assert_allclose(rows, want, rtol=1e-5, atol=1e-6)


def test_chunked_takes_any_leading_axes():
    hidden, head, _, labels, _ = inputs()
    want = plain(hidden, head, None, labels)[0]
    np.testing.assert_allclose(
        lp.chunked(hidden.reshape(-1, D), head, labels.reshape(-1), chunk_size=4).log_probs,
        want.reshape(-1),
        rtol=1e-5,
    )
    one = lp.chunked(hidden[0, 0], head, labels[0, 0])
    np.testing.assert_allclose(one.log_probs, want[0, 0], rtol=1e-5)
    assert lp.chunked(hidden[:, :0], head, labels[:, :0]).log_probs.shape == (B, 0)
    pair = lp.chunked(hidden, (head.T, "vd"), labels)  # as a model's head() gives it
    np.testing.assert_allclose(pair.log_probs, want, rtol=1e-5, atol=1e-6)


# ---- temperature ----


@pytest.mark.fault(37)
@pytest.mark.parametrize("jit", [False, True])
def test_greedy_temperature_means_untempered(jit):
    hidden, head, _, labels, _ = inputs()

    def both(temperature):
        out = lp.chunked(hidden, head, labels, temperature=temperature, with_entropy=True)
        return (
            out.log_probs,
            out.entropy,
            lp.from_logits(hidden @ head, labels, temperature=temperature),
        )

    both = jax.jit(both) if jit else both
    for got, want in zip(both(0.0), both(1.0), strict=True):
        np.testing.assert_array_equal(got, want)
    grad = jax.grad(
        lambda h: lp.chunked(h, head, labels, temperature=jnp.float32(0.0)).log_probs.sum()
    )(hidden)
    assert np.isfinite(grad).all()


def test_temperature_is_traced():
    hidden, head, _, labels, _ = inputs()
    traces = []

    @jax.jit
    def run(temperature):
        traces.append(temperature)
        return lp.chunked(hidden, head, labels, temperature=temperature).log_probs

    for tau in (1.0, 0.7, 0.0):
        run(tau)
    assert len(traces) == 1


def test_temperature_per_row():
    hidden, head, _, labels, _ = inputs()
    taus = jnp.array([0.5, 1.0, 2.0])
    got = lp.chunked(hidden, head, labels, temperature=taus[:, None], chunk_size=6).log_probs
    for row, tau in enumerate(taus):
        want = lp.chunked(hidden[row], head, labels[row], temperature=tau).log_probs
        np.testing.assert_allclose(got[row], want, rtol=1e-5)
    got = lp.from_logits(hidden @ head, labels, temperature=taus[:, None])
    np.testing.assert_allclose(got[0], lp.from_logits(hidden[0] @ head, labels[0], temperature=0.5))


@pytest.mark.fault(32)
def test_one_tempered_path_gives_a_ratio_of_exactly_one():
    # What generation records (a plain form, one token at a time) and what training computes.
    hidden, head, _, labels, _ = inputs()
    sampler = lp.from_logits(hidden @ head, labels, temperature=0.7)
    learner = lp.chunked(hidden, head, labels, temperature=0.7, chunk_size=6).log_probs
    np.testing.assert_allclose(sampler, learner, atol=1e-5)
    again = lp.chunked(hidden, head, labels, temperature=0.7, chunk_size=6).log_probs
    mask = jnp.ones((B, T), bool)
    _, found = rl.losses.ppo_loss(again, learner, jnp.ones(B), mask)
    assert found["policy/ratio_min"].value() == found["policy/ratio_max"].value() == 1.0
    assert found["policy/kl_old"].value() == 0.0
    # A temperature on one side only is visible at once.
    _, found = rl.losses.ppo_loss(
        lp.chunked(hidden, head, labels).log_probs, learner, jnp.ones(B), mask
    )
    assert abs(found["policy/ratio_mean"].value() - 1.0) > 0.05


@pytest.mark.fault(33)
def test_truncated_log_probs_are_told_from_full_ones():
    hidden, head, _, _, _ = inputs()
    logits = hidden @ head
    labels = jnp.argmax(logits, axis=-1)
    top = jax.lax.top_k(logits, 5)[0][..., -1:]
    filtered = jnp.where(logits >= top, logits, -jnp.inf)
    full, truncated = lp.from_logits(logits, labels), lp.from_logits(filtered, labels)
    assert (truncated > full).all()  # renormalised over fewer tokens
    mask = jnp.ones((B, T), bool)
    like, _ = rl.losses.off_policy_weights(full, full, mask)
    np.testing.assert_array_equal(like, 1.0)
    unlike, found = rl.losses.off_policy_weights(full, truncated, mask)
    assert (unlike < 1.0).all() and found["off_policy/logprob_diff_mean"].value() > 0
    # −inf logits: finite value, gradient and entropy.
    for function in (lp.entropy_from_logits, lambda z: lp.from_logits(z, labels)):
        assert np.isfinite(function(filtered)).all()
        assert np.isfinite(jax.grad(lambda z, f=function: f(z).sum())(filtered)).all()


# ---- alignment ----


@pytest.mark.fault(13, 34)
def test_log_probs_belong_to_their_token():
    # A bigram model: the logits after token a favour token a + 1.
    table = jnp.eye(5).at[:].get()[jnp.array([1, 2, 3, 4, 0])] * 9.0
    tokens = jnp.array([[0, 1, 2, 0]])
    got = lp.token_log_probs(table[tokens], tokens)
    likely, unlikely = jax.nn.log_softmax(table[0])[1], jax.nn.log_softmax(table[0])[0]
    np.testing.assert_allclose(got, [[0.0, likely, likely, unlikely]], rtol=1e-6)
    out = lp.policy_log_probs(table[tokens], jnp.eye(5), tokens)
    np.testing.assert_allclose(out.log_probs, got, rtol=1e-6)


@pytest.mark.parametrize("start", [0, 1, 3, T])
def test_policy_log_probs_from_start_on(start):
    hidden, head, _, tokens, _ = inputs()
    whole = lp.token_log_probs(hidden @ head, tokens)
    out = lp.policy_log_probs(hidden, head, tokens, start=start, with_entropy=True)
    first = max(start, 1)
    np.testing.assert_array_equal(out.log_probs[:, :first], 0.0)
    np.testing.assert_array_equal(out.entropy[:, :first], 0.0)
    np.testing.assert_allclose(out.log_probs[:, first:], whole[:, first:], rtol=1e-5, atol=1e-6)
    entropy = lp.entropy_from_logits(hidden @ head)[:, :-1]
    np.testing.assert_allclose(out.entropy[:, first:], entropy[:, first - 1 :], rtol=1e-5)


@pytest.mark.fault(13)
def test_prompt_tokens_have_no_gradient():
    hidden, head, _, tokens, _ = inputs()
    grad = jax.grad(lambda h: lp.policy_log_probs(h, head, tokens, start=4).log_probs.sum())(hidden)
    # hidden[2] would score token 3, the prompt's last; hidden[3] scores the first sampled token.
    np.testing.assert_array_equal(grad[:, :3], 0.0)
    assert (np.abs(grad[:, 3]).sum(-1) > 0).all()


# ---- NaN and infinity at masked positions ----


@pytest.mark.fault(6)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("vocab_chunk", [None, 16])
@pytest.mark.parametrize("trained", [(0,), (0, 1)])
def test_poison_at_masked_positions_stays_there(poison, vocab_chunk, trained):
    hidden, head, _, labels, _ = inputs()
    mask = jnp.arange(T) < 4
    bad = jnp.where(mask[:, None], hidden, poison)

    def value(hidden, head):
        out = lp.chunked(
            hidden, head, labels, chunk_size=6, vocab_chunk=vocab_chunk, with_entropy=True
        )
        return jnp.where(mask, out.log_probs + 0.1 * out.entropy, 0.0).sum()

    got = jax.value_and_grad(value, trained)(bad, head)
    want = jax.value_and_grad(value, trained)(hidden, head)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for g, w in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


@pytest.mark.fault(6)
def test_plain_form_takes_a_mask():
    hidden, head, _, labels, _ = inputs()
    logits = hidden @ head
    mask = jnp.broadcast_to(jnp.arange(T) < 4, (B, T))
    bad = jnp.where(mask[..., None], logits, jnp.nan)
    for function in (
        lambda z: lp.from_logits(z, labels, mask=mask).sum(),
        lambda z: lp.entropy_from_logits(z, mask=mask).sum(),
        # Aligned with the tokens: the logits at 0…3 score the tokens at 1…4.
        lambda z: lp.token_log_probs(z, labels, mask=jnp.roll(mask, 1, axis=1)).sum(),
    ):
        value, grad = jax.value_and_grad(function)(bad)
        assert np.isfinite(value) and np.isfinite(grad).all()
        np.testing.assert_array_equal(grad[:, 4:], 0.0)
        assert np.abs(grad[:, :4]).sum() > 0


@given(seed=st.integers(0, 2**31 - 1), chunk=st.integers(1, 30), piece=st.integers(1, 60))
def test_chunking_never_changes_the_result(seed, chunk, piece):
    hidden, head, bias, labels, _ = inputs(seed)
    want = plain(hidden, head, bias, labels, entropy=True)
    got = lp.chunked(
        hidden, head, labels, bias=bias, with_entropy=True, chunk_size=chunk, vocab_chunk=piece
    )
    np.testing.assert_allclose(got.log_probs, want[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.entropy, want[1], rtol=1e-5, atol=1e-5)


# ---- errors ----


@pytest.mark.parametrize(
    ("kind", "match", "change"),
    [
        (ValueError, "head", {"head": jnp.ones((V, D))}),
        (ValueError, "head", {"head": jnp.ones((D,))}),
        (TypeError, "labels", {"labels": jnp.ones((B, T))}),
        (ValueError, "labels", {"labels": jnp.ones((B, T + 1), int)}),
        (TypeError, "hidden", {"hidden": jnp.ones((B, T, D), int)}),
        (ValueError, "bias", {"bias": jnp.ones(V + 1)}),
        (TypeError, "bias", {"bias": jnp.ones(V, int)}),
        (ValueError, "chunk_size", {"chunk_size": 0}),
        (ValueError, "vocab_chunk", {"vocab_chunk": 0}),
        (ValueError, "layout", {"head": (jnp.ones((D, V)), "xx")}),
    ],
)
def test_chunked_errors(kind, match, change):
    hidden, head, _, labels, _ = inputs()
    arguments = {"hidden": hidden, "head": head, "labels": labels} | change
    with pytest.raises(kind, match=match):
        lp.chunked(**arguments)


def test_plain_errors():
    logits, labels = jnp.ones((B, T, V)), jnp.ones((B, T), int)
    with pytest.raises(TypeError, match="logits"):
        lp.from_logits(logits.astype(int), labels)
    with pytest.raises(ValueError, match="labels"):
        lp.from_logits(logits, labels[:, 1:])
    with pytest.raises(TypeError, match="mask"):
        lp.from_logits(logits, labels, mask=labels)
    with pytest.raises(ValueError, match="logits"):
        lp.token_log_probs(logits[0], labels)
    for tau in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"temperature must be ≥ 0.*greedy"):
            lp.from_logits(logits, labels, temperature=tau)
        with pytest.raises(ValueError, match=r"temperature must be ≥ 0.*greedy"):
            lp.chunked(jnp.ones((B, T, D)), jnp.ones((D, V)), labels, temperature=tau)
    with pytest.raises(ValueError, match="start"):
        lp.policy_log_probs(jnp.ones((B, T, D)), jnp.ones((D, V)), labels, start=T + 1)


def test_bfloat16_logits_are_raised_to_float32_first():
    logits = (jax.random.normal(jax.random.key(0), (4, 50000)) * 3).astype(jnp.bfloat16)
    labels = jnp.zeros(4, int)
    want = lp.from_logits(logits.astype(jnp.float32), labels)
    np.testing.assert_array_equal(lp.from_logits(logits, labels), want)
    naive = jax.nn.log_softmax(logits, axis=-1)[:, 0].astype(jnp.float32)
    assert np.abs(naive - want).max() > 0.01
    assert math.isclose(lp.entropy_from_logits(jnp.zeros(8)), math.log(8), rel_tol=1e-6)
