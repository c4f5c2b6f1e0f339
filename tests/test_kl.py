"""KL estimators: values, and by enumeration the gradient that each use of them yields."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlhf_jax as rl
from tests import reference

LOGITS = np.array([0.3, -0.7, 1.1, 0.0])
REF = np.array([-0.2, 0.4, 0.1, 0.6])
DIFFERENTIATED = ["k2", "k3", "k3_straight_through"]


def policy_gradient_of(term, logits=LOGITS, ref=REF, sampler=None):
    """∇ of E over samples of term(log π(a), log ref(a)), samples held fixed: 'as a loss'."""
    weights = reference.softmax(logits if sampler is None else sampler)

    def expectation(x):
        values = term(jax.nn.log_softmax(x), jax.nn.log_softmax(jnp.asarray(ref)))
        return jnp.sum(weights * values)

    return np.asarray(jax.grad(expectation)(jnp.asarray(logits)))


def reward_gradient_of(term, logits=LOGITS, ref=REF):
    """E over samples of value·∇ log π: 'in the reward', detached."""
    p = reference.softmax(logits)
    values = np.asarray(term(jnp.log(p), jax.nn.log_softmax(jnp.asarray(ref))))
    return (p * values) @ reference.score(p)


@pytest.fixture
def exact_gradients():
    q = reference.softmax(REF)
    reverse = reference.numeric_gradient(lambda x: reference.kl(reference.softmax(x), q), LOGITS)
    forward = reference.numeric_gradient(lambda x: reference.kl(q, reference.softmax(x)), LOGITS)
    return reverse, forward


@pytest.mark.fault(30, 31)
def test_gradients_by_enumeration(exact_gradients):
    reverse, forward = exact_gradients
    with jax.enable_x64(True):
        tight = {"rtol": 1e-6, "atol": 1e-8}
        np.testing.assert_allclose(policy_gradient_of(rl.kl.k1), 0.0, atol=1e-12)
        np.testing.assert_allclose(policy_gradient_of(rl.kl.k2), reverse, **tight)
        np.testing.assert_allclose(policy_gradient_of(rl.kl.k3), forward, **tight)
        np.testing.assert_allclose(policy_gradient_of(rl.kl.k3_straight_through), reverse, **tight)
        np.testing.assert_allclose(reward_gradient_of(rl.kl.k1), reverse, **tight)
        for wrong in (rl.kl.k2, rl.kl.k3):
            assert np.abs(reward_gradient_of(wrong) - reverse).max() > 0.01
            assert np.abs(reward_gradient_of(wrong) - forward).max() > 0.01


def test_off_policy_k3_is_exact_through_the_ratio(exact_gradients):
    reverse, _ = exact_gradients
    old = np.array([0.0, 0.5, -0.3, 0.2])
    with jax.enable_x64(True):
        old_log_probs = jax.nn.log_softmax(jnp.asarray(old))

        def term(x, ref):
            return rl.kl.k3_off_policy(x, old_log_probs, ref)

        np.testing.assert_allclose(
            policy_gradient_of(term, sampler=old), reverse, rtol=1e-6, atol=1e-8
        )
        values = term(jax.nn.log_softmax(jnp.asarray(LOGITS)), jax.nn.log_softmax(jnp.asarray(REF)))
    want = reference.kl(reference.softmax(LOGITS), reference.softmax(REF))
    assert float(reference.softmax(old) @ np.asarray(values)) == pytest.approx(want, rel=1e-9)


@pytest.mark.fault(31)
@pytest.mark.parametrize("name", ["k1", "k3", "k3_straight_through"])
def test_unbiased_values_have_the_sign_of_the_kl(name):
    p, q = reference.softmax(LOGITS), reference.softmax(REF)
    values = rl.kl.estimate(name, jnp.log(p), jnp.log(q))
    assert float(p @ np.asarray(values)) == pytest.approx(reference.kl(p, q), rel=1e-5)


@pytest.mark.fault(30)
def test_k1_as_a_loss_warns_and_the_others_do_not():
    x = jnp.array([-1.0])
    with pytest.warns(UserWarning, match=r"'k1'.*zero gradient.*'k2'"):
        rl.kl.loss_term("k1", x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in DIFFERENTIATED:
            rl.kl.loss_term(name, x, x)
            assert rl.kl.ESTIMATORS[name] is getattr(rl.kl, name)


@pytest.mark.fault(6, 8)
@pytest.mark.parametrize("name", list(rl.kl.ESTIMATORS))
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_under_the_mask(name, poison):
    mask = jnp.array([True, False])
    x, ref = jnp.array([-1.0, poison]), jnp.array([-1.5, poison])
    value, gradient = jax.value_and_grad(lambda x: rl.kl.estimate(name, x, ref, mask=mask).sum())(x)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert float(gradient[1]) == 0.0
    off = rl.kl.k3_off_policy(x, ref, ref, mask=mask)
    assert float(off[1]) == 0.0


@pytest.mark.fault(35)
def test_far_from_the_reference_everything_stays_finite_with_the_right_sign():
    x = jnp.array([-300.0, -60.0, -1.0])
    ref = jnp.array([-0.1, -0.1, -300.0])
    for name in DIFFERENTIATED:
        value, gradient = jax.value_and_grad(lambda x, n=name: rl.kl.estimate(n, x, ref).sum())(x)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()
        assert (np.asarray(gradient)[:2] < 0).all()  # raise log π towards the reference
    assert np.isfinite(rl.kl.k3_off_policy(ref, x, x)).all()


def test_k3_gradient_keeps_its_digits_near_the_reference():
    u = 1e-5
    gradient = jax.grad(rl.kl.k3)(jnp.float32(-1.0), jnp.float32(-1.0 - u))
    difference = float(np.float32(-1.0) - np.float32(-1.0 - u))
    assert float(gradient) == pytest.approx(-np.expm1(-difference), rel=1e-5)
    assert float(jax.grad(jax.grad(rl.kl.k3))(-1.0, -1.5)) == pytest.approx(np.exp(-0.5), rel=1e-5)


def test_k3_of_a_token_that_the_reference_excludes_is_infinite_not_nan():
    value, gradient = jax.value_and_grad(rl.kl.k3)(-1.0, -jnp.inf)
    assert float(value) == np.inf and float(gradient) == 1.0
    # Past the limit the tangent goes on: e²⁰ − 1 a nat.
    at, past = (float(rl.kl.k3(jnp.float32(u), jnp.float32(0.0))) for u in (-20.0, -25.0))
    assert past - at == pytest.approx(5 * np.expm1(20.0), rel=1e-5)


@given(seed=st.integers(0, 1000))
def test_continuation_is_smooth_and_k3_is_not_negative(seed):
    u = np.random.default_rng(seed).normal(size=8).astype(np.float32) * 15
    values = np.asarray(rl.kl.k3(jnp.asarray(u), jnp.zeros(8)))
    assert (values >= 0).all()
    inside = -u < 20
    exact = np.expm1(-u.astype(np.float64)) + u
    np.testing.assert_allclose(values[inside], exact[inside], rtol=1e-4, atol=1e-6)


def test_bf16_inputs_are_computed_in_float32_and_references_get_no_gradient():
    x, ref = jnp.array([-1.0], jnp.bfloat16), jnp.array([-1.5], jnp.bfloat16)
    for name in rl.kl.ESTIMATORS:
        assert rl.kl.estimate(name, x, ref).dtype == jnp.float32
        gradient = jax.grad(lambda r, n=name: rl.kl.estimate(n, x, r).sum())(ref)
        assert float(gradient[0]) == 0.0


@pytest.mark.fault(32)
def test_identical_models_have_no_kl_at_any_temperature():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 11)).astype(np.float32))
    for temperature in (0.0, 0.7, 1.0):
        np.testing.assert_array_equal(rl.kl.exact(logits, logits, temperature=temperature), 0.0)


@pytest.mark.parametrize("direction", rl.kl.DIRECTIONS)
@pytest.mark.parametrize("shape", [(), (5,), (2, 7)])
@pytest.mark.parametrize("chunk_size", [1, 4, 1024])
def test_exact_kl_agrees_with_enumeration(direction, shape, chunk_size):
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, *shape, 6)).astype(np.float32)
    p, q = (np.apply_along_axis(reference.softmax, -1, x / 0.7) for x in (a, b))
    if direction == "forward":
        p, q = q, p
    want = np.sum(p * np.log(p / q), axis=-1)
    run = jax.jit(
        lambda a, b, t: rl.kl.exact(a, b, temperature=t, direction=direction, chunk_size=chunk_size)
    )
    np.testing.assert_allclose(run(a, b, 0.7), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("direction", rl.kl.DIRECTIONS)
def test_exact_kl_gradient_is_that_of_its_direction(direction, exact_gradients):
    want = exact_gradients[rl.kl.DIRECTIONS.index(direction)]
    got = jax.grad(lambda x: rl.kl.exact(x, jnp.asarray(REF), direction=direction))
    np.testing.assert_allclose(got(jnp.asarray(LOGITS)), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk_size", [3, 1024])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_exact_kl_from_hidden_states(tied, chunk_size, dtype):
    rng = np.random.default_rng(2)
    h = jnp.asarray(rng.normal(size=(2, 5, 4)), dtype)
    ref_h = jnp.asarray(rng.normal(size=(2, 5, 3)), dtype)
    w, ref_w = (jnp.asarray(rng.normal(size=(d, 9)), dtype) for d in (4, 3))

    def plain(h, w):
        return rl.kl.exact(
            jnp.einsum("btd,dv->btv", h, w, preferred_element_type=jnp.float32),
            jnp.einsum("btd,dv->btv", ref_h, ref_w, preferred_element_type=jnp.float32),
            temperature=0.8,
        ).sum()

    def chunked(h, w):
        heads = (w.T, ref_w.T) if tied else (w, ref_w)
        return rl.kl.exact_chunked(
            h,
            heads[0],
            ref_h,
            heads[1],
            temperature=0.8,
            chunk_size=chunk_size,
            head_is_embedding=tied,
        ).sum()

    want, got = (jax.value_and_grad(f, argnums=(0, 1))(h, w) for f in (plain, chunked))
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 2e-2, "atol": 2e-2}
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), **tolerance)


@pytest.mark.parametrize("direction", rl.kl.DIRECTIONS)
@pytest.mark.parametrize("chunk_size", [4, 1024])
@pytest.mark.fault(6)
def test_exact_kl_takes_a_mask(direction, chunk_size):
    rng = np.random.default_rng(5)
    h, ref_h = (jnp.asarray(rng.normal(size=(2, 5, 4)), jnp.float32) for _ in range(2))
    w, ref_w = (jnp.asarray(rng.normal(size=(4, 9)), jnp.float32) for _ in range(2))
    mask = jnp.asarray(rng.random((2, 5)) < 0.6)
    options = {"direction": direction, "chunk_size": chunk_size, "mask": mask}

    def from_logits(h, w, ref_h):
        return rl.kl.exact(h @ w, ref_h @ ref_w, **options)

    def from_hidden(h, w, ref_h):
        return rl.kl.exact_chunked(h, w, ref_h, ref_w, **options)

    for function in (from_logits, from_hidden):
        run = jax.value_and_grad(lambda *a, f=function: f(*a).sum(), (0, 1))
        want = run(h, w, ref_h)
        np.testing.assert_array_equal(np.asarray(function(h, w, ref_h))[~np.asarray(mask)], 0.0)
        assert abs(want[0] - jnp.where(mask, function(h, w, ref_h), 0.0).sum()) < 1e-5
        np.testing.assert_array_equal(np.asarray(want[1][0])[~np.asarray(mask)], 0.0)
        if function is from_hidden:  # poison in the states: it would reach every entry of the head
            for poison in (np.nan, np.inf):
                bad, ref_bad = (jnp.where(mask[..., None], x, poison) for x in (h, ref_h))
                for got, expected in zip(
                    jax.tree.leaves(run(bad, w, ref_bad)), jax.tree.leaves(want), strict=True
                ):
                    np.testing.assert_allclose(got, expected, rtol=1e-6)
    logits = jnp.where(mask[..., None], h @ w, jnp.nan)
    gradient = jax.grad(lambda z: rl.kl.exact(z, ref_h @ ref_w, **options).sum())(logits)
    assert np.isfinite(gradient).all() and np.abs(gradient).sum() > 0
    with pytest.raises(ValueError, match="mask must have shape"):
        rl.kl.exact(h @ w, h @ w, mask=mask[0])


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_exact_kl_multiplies_as_the_chunked_log_probs_do(dtypes):
    # π of exact_chunked is that of logprobs.chunked: the KL to the uniform one is log V − H.
    rng = np.random.default_rng(6)
    h = jnp.asarray(rng.normal(size=(2, 5, 4)), dtypes[0])
    w = jnp.asarray(rng.normal(size=(4, 9)), dtypes[1])
    labels = jnp.zeros((2, 5), int)
    entropy = rl.logprobs.chunked(h, w, labels, with_entropy=True).entropy
    got = rl.kl.exact_chunked(h, (w.T, "vd"), h, (jnp.zeros_like(w), "dv"))
    np.testing.assert_allclose(got, np.log(9) - entropy, rtol=1e-5, atol=1e-6)


def test_exact_kl_of_an_impossible_token():
    logits = jnp.array([0.0, 0.0, -jnp.inf])
    value, gradient = jax.value_and_grad(rl.kl.exact)(logits, jnp.zeros(3))
    assert float(value) == pytest.approx(np.log(1.5), rel=1e-6)
    assert np.isfinite(gradient).all()


def test_exact_kl_never_holds_all_logits():
    tokens, width, vocabulary = 512, 16, 4096

    def total(h, w):
        return rl.kl.exact_chunked(h, w, h + 1.0, w, chunk_size=32).sum()

    shapes = (
        jax.ShapeDtypeStruct((1, tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((width, vocabulary), jnp.float32),
    )
    memory = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < tokens * vocabulary * 4  # one [T, V] of the two


@pytest.mark.fault(38)
def test_the_logged_kl_is_the_trained_kl():
    rng = np.random.default_rng(3)
    log_probs, ref = rng.normal(size=(2, 4, 6)).astype(np.float32)
    mask = rng.random((4, 6)) < 0.7
    mask[:, 0] = True
    rewards = rl.rewards.shaping.kl_in_reward(jnp.zeros(4), log_probs, ref, mask, kl_coef=0.5)
    logged = rl.kl.mean_sequence_kl(log_probs, ref, mask)
    assert float(logged) == pytest.approx(float(-rewards.sum() / 0.5 / 4), rel=1e-5)
    ids = jnp.where(jnp.arange(6)[None] < 3, 0, 1) + jnp.zeros((4, 1), jnp.int32)
    packed = rl.kl.mean_sequence_kl(log_probs, ref, mask, segment_ids=ids)
    count = int(rl.masked.last_valid(mask, ids).sum())
    assert float(packed) == pytest.approx(float(logged) * 4 / count, rel=1e-5)


def test_old_to_new_has_the_sign_of_the_policy_that_sampled():
    old, new = jax.nn.log_softmax(jnp.asarray(LOGITS)), jax.nn.log_softmax(jnp.asarray(REF))
    p, q = np.exp(np.asarray(old)), np.exp(np.asarray(new))
    for name in ("k1", "k3"):
        got = float(p @ np.asarray(rl.kl.old_to_new(name, new, old)))
        assert got == pytest.approx(reference.kl(p, q), rel=1e-5)
    gradient = jax.grad(lambda x: rl.kl.old_to_new("k3", x, old).sum())(new)
    np.testing.assert_array_equal(gradient, 0.0)


def test_controllers_are_pure_and_run_under_jit():
    fixed = rl.kl.FixedKL(coef=0.3)
    assert fixed.update(9.0, 4) is fixed
    adaptive = rl.kl.AdaptiveKL(coef=0.2, target=6.0, horizon=10_000)
    step = jax.jit(lambda c, kl, n: c.update(kl, n))
    assert float(step(adaptive, 9.0, 64).coef) == pytest.approx(0.200256, rel=1e-6)
    assert adaptive.coef == 0.2
    up, down = (float(adaptive.update(x, 64).coef) for x in (1e9, 0.0))
    assert down < 0.2 < up
    assert up == pytest.approx(0.2 * (1 + 0.2 * 64 / 10_000), rel=1e-6)


def test_one_update_never_takes_the_coefficient_below_zero():
    quick = rl.kl.AdaptiveKL(coef=0.2, target=6.0, horizon=10)
    with pytest.raises(ValueError, match=r"horizon must be ≤ 1; got 1.28.*raise horizon"):
        quick.update(0.0, 64)
    traced = jax.jit(lambda c, kl, n: c.update(kl, n))(quick, 0.0, 64)
    assert float(traced.coef) == 0.0


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (
            ValueError,
            "estimator is unknown",
            lambda: rl.kl.estimate("k4", jnp.zeros(1), jnp.zeros(1)),
        ),
        (
            ValueError,
            "estimator is unknown",
            lambda: rl.kl.old_to_new("exact", jnp.zeros(1), jnp.zeros(1)),
        ),
        (ValueError, "ref_log_probs must have shape", lambda: rl.kl.k1(jnp.zeros(1), jnp.zeros(2))),
        (
            TypeError,
            "log_probs must be a floating",
            lambda: rl.kl.k2(jnp.zeros(1, int), jnp.zeros(1)),
        ),
        (
            TypeError,
            "mask must be bool",
            lambda: rl.kl.k3(jnp.zeros(1), jnp.zeros(1), mask=jnp.ones(1, int)),
        ),
        (
            ValueError,
            "direction is unknown",
            lambda: rl.kl.exact(jnp.zeros(3), jnp.zeros(3), direction="up"),
        ),
        (ValueError, "ref_logits must have shape", lambda: rl.kl.exact(jnp.zeros(3), jnp.zeros(4))),
        (
            ValueError,
            "temperature must be",
            lambda: rl.kl.exact(jnp.zeros(3), jnp.zeros(3), temperature=-1.0),
        ),
        (
            ValueError,
            "temperature must be a scalar",
            lambda: rl.kl.exact(jnp.zeros((2, 3)), jnp.zeros((2, 3)), temperature=jnp.ones(2)),
        ),
        (
            ValueError,
            r"logits must be \[..., V\]",
            lambda: rl.kl.exact(jnp.zeros(()), jnp.zeros(())),
        ),
        (
            ValueError,
            "ref_head's layout",
            lambda: rl.kl.exact_chunked(
                jnp.zeros((2, 3)), jnp.zeros((3, 5)), jnp.zeros((2, 3)), (jnp.zeros((3, 5)), "x")
            ),
        ),
        (
            ValueError,
            "ref_head must have shape",
            lambda: rl.kl.exact_chunked(
                jnp.zeros((2, 3)), jnp.zeros((3, 5)), jnp.zeros((2, 3)), jnp.zeros((3, 6))
            ),
        ),
        (
            ValueError,
            "head must have shape",
            lambda: rl.kl.exact_chunked(
                jnp.zeros((2, 3)), jnp.zeros((5, 3)), jnp.zeros((2, 3)), jnp.zeros((5, 3))
            ),
        ),
        (ValueError, "coef must be ≥ 0", lambda: rl.kl.FixedKL(coef=-0.1)),
        (
            ValueError,
            "target must be > 0",
            lambda: rl.kl.AdaptiveKL(coef=0.1, target=0.0, horizon=10),
        ),
    ],
)
def test_errors_name_the_argument_and_the_remedy(error, text, call):
    with pytest.raises(error, match=text):
        call()
