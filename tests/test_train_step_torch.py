"""A step equals a slow, obvious one in torch: recorded everywhere, live where torch is."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlhf_jax as rl

DATA = Path(__file__).parent / "data"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def golden():
    with np.load(DATA / "step.npz") as file:
        return dict(file)


def part(golden, prefix):
    return {k.removeprefix(prefix): v for k, v in golden.items() if k.startswith(prefix)}


@pytest.fixture(scope="module")
def ours(golden):
    """Weights after three steps under their Hugging Face names, and each step's metrics."""
    options = {name: float(value) for name, value in part(golden, "options/").items()}
    model, params = rl.models.load(DATA / "golden" / "llama")
    mask = jnp.asarray(golden["mask"])
    batch = rl.Batch(
        tokens=jnp.asarray(golden["tokens"]),
        mask=mask,
        attention_mask=jnp.asarray(golden["attention_mask"]),
        group_ids=jnp.arange(len(mask)),
        advantages=jnp.asarray(golden["advantages"]),
        old_log_probs=jnp.asarray(golden["old_log_probs"]),
        sampler_log_probs=jnp.zeros(mask.shape),
        ref_log_probs=jnp.asarray(golden["ref_log_probs"]),
        denominator=jnp.full(len(mask), mask.sum(), jnp.float32),
        start=int(golden["mask"].any(axis=0).argmax()),
    )

    def loss(output, batch):
        return rl.losses.grpo_loss(
            output.log_probs,
            batch.old_log_probs,
            batch.advantages,
            batch.mask,
            clip_low=options["clip_low"],
            clip_high=options["clip_high"],
            ref_log_probs=batch.ref_log_probs,
            kl_coef=options["kl_coef"],
            aggregation="token_mean",
            denominator=batch.denominator,
        )

    adam = optax.adamw(
        options["learning_rate"],
        b1=options["b1"],
        b2=options["b2"],
        eps=options["eps"],
        weight_decay=options["weight_decay"],
    )
    policy = rl.policy.from_decoder(model, temperature=options["temperature"], chunk_size=24)
    step = rl.make_train_step(policy, loss, adam, max_grad_norm=options["max_grad_norm"])
    state, seen = rl.init_train_state(params, adam), []
    for _ in range(3):
        state, metrics = step(state, batch)
        found = rl.metrics.compute(metrics)
        seen.append([float(found["policy/loss"]), float(found["optim/grad_norm"])])
    return dict(rl.models.to_hf_tensors(model, state.params)), np.array(seen)


def check(ours, theirs, seen):
    weights, metrics = ours
    assert weights.keys() == theirs.keys()
    gaps = {name: np.abs(np.asarray(weights[name]) - theirs[name]).max() for name in theirs}
    assert max(gaps.values()) <= TOLERANCE, gaps
    np.testing.assert_allclose(metrics, seen, rtol=1e-4)


@pytest.mark.fault(59)
def test_three_steps_equal_the_recorded_ones(ours, golden):
    theirs = part(golden, "weights/")
    check(ours, theirs, golden["seen"])
    # The comparison means something: the weights moved, the clip and the norm's bound were at work.
    before = dict(rl.models.to_hf_tensors(*rl.models.load(DATA / "golden" / "llama")))
    for name, value in theirs.items():
        assert np.abs(value - np.asarray(before[name])).max() > 100 * TOLERANCE, name
    assert (golden["seen"][:, 1] > golden["options/max_grad_norm"]).all()


@pytest.mark.parity
def test_three_steps_equal_torch_live(ours, golden):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.data import make_step_golden

    batch = {k: v for k, v in golden.items() if "/" not in k and k != "seen"}
    check(ours, *make_step_golden.three_steps(batch, torch.float32))
