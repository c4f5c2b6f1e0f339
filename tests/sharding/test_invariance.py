"""No layout and no kind of mesh axes changes what is computed, for a tiny model of each family.

The reference is one device and one micro-batch. Logits, loss and gradients agree to 1e-5; sampled
tokens are the same tokens, from ``generate`` and from the engine. And everything lies where the
layout's rules put it: an array that a rule splits is nowhere whole.
"""

import dataclasses
import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlhf_jax as rl
import sharding
from experiments.bench import parity
from sharding.benchmarking.placement import misplaced, whole

PROMPTS, GROUP, WIDTH, NEW = 8, 2, 6, 10
STOP = (3, 11, 40)
OPTIMIZER = optax.adam(1e-3, b1=0.5)
# One family and two layouts in every run; test_sharded.py and test_engine_sharded.py sample in it.
QUICK = {("qwen3", "fsdp_tensor", "Explicit"), ("qwen3", "hsdp", "Auto")}


def cases(quick=frozenset()):
    """All families under all layouts and kinds of mesh axes, most of them in the slow run."""
    return pytest.mark.parametrize(
        ("family", "layout", "kind"),
        [
            pytest.param(*case, marks=[] if case in quick else [pytest.mark.slow])
            for case in itertools.product(parity.families(), sharding.LAYOUTS, ("Auto", "Explicit"))
        ],
    )


@pytest.fixture(scope="module", autouse=True)
def _quick_to_compile():
    """XLA's passes, the partitioner among them, are what is tested here; LLVM's are not."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def model_of(family):
    """The family's golden config with heads for eight devices (or one key head, where it has one).

    Its weights are wide, so that distributions are far from uniform.
    """
    config = rl.models.DecoderConfig.from_hf(parity.GOLDEN / family)
    config = dataclasses.replace(
        config,
        num_heads=16,
        num_kv_heads=8 if config.num_kv_heads > 1 else 1,
        head_dim=4,
        initializer_range=0.2,
    )
    return rl.models.Decoder(config)


@functools.cache
def params_of(family):
    """Random weights on the host: no scale is 1, no bias is 0."""
    random = np.random.default_rng(0)

    def draw(path, leaf):
        centre = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return random.normal(centre, 0.2, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, model_of(family).shapes())


def prompts():
    random = np.random.default_rng(1)
    tokens = random.integers(4, 64, (PROMPTS, WIDTH)).astype(np.int32)
    return tokens, np.arange(WIDTH) < np.array([6, 3, 1, 5, 6, 2, 4, 6])[:, None]


def batch_of(model, params):
    """Ragged rows with random advantages and earlier log-probs near the model's; and its logits."""
    random, rows, length = np.random.default_rng(2), PROMPTS * GROUP, WIDTH + NEW
    tokens = random.integers(0, 64, (rows, length)).astype(np.int32)
    begins, ends = random.integers(0, WIDTH, rows), random.integers(WIDTH, length + 1, rows)
    column = np.arange(length)
    real = (column >= begins[:, None]) & (column < ends[:, None])
    mask = real & (column >= WIDTH)
    logits = jax.jit(model.logits)(params, tokens, attention_mask=real)
    now = np.asarray(rl.logprobs.token_log_probs(logits, tokens))
    old, ref = (now + random.normal(0, x, now.shape).astype(np.float32) for x in (0.2, 0.5))
    batch = rl.Batch(
        tokens=tokens,
        mask=mask,
        attention_mask=real,
        group_ids=np.arange(rows) // GROUP,
        advantages=random.normal(size=rows).astype(np.float32),
        old_log_probs=old,
        sampler_log_probs=old,
        ref_log_probs=ref,
        denominator=np.full(rows, mask.sum(), np.float32),
        start=WIDTH,
    )
    return batch, np.asarray(logits)


def loss_fn(output, batch):
    value, found = rl.losses.grpo_loss(
        output.log_probs,
        batch.old_log_probs,
        batch.advantages,
        batch.mask,
        ref_log_probs=batch.ref_log_probs,
        kl_coef=0.1,
        denominator=batch.denominator,
    )
    entropy, total = output.entropy, batch.denominator
    bonus = rl.masked.aggregate(entropy, batch.mask, "token_mean", denominator=total)
    return value - 0.01 * bonus, found


def rollout_of(model, params, tokens, mask):
    return rl.generate(
        model,
        params,
        tokens,
        mask,
        jax.random.key(5),
        group_size=GROUP,
        max_new_tokens=NEW,
        stop_ids=STOP,
    )


def learned(model, params, batch, micro_batches=1, places=None):
    """One train step: the state after it, its loss, and the gradients (Adam's first moments)."""
    states = places and rl.train_step.state_shardings(params, OPTIMIZER, places)
    step = rl.make_train_step(
        rl.policy.from_decoder(model, chunk_size=16),
        loss_fn,
        OPTIMIZER,
        micro_batches=micro_batches,
        max_grad_norm=None,
        shardings=states,
    )
    state = rl.init_train_state(params, OPTIMIZER, shardings=places)
    state, metrics = step(state, batch)
    moments = state.opt_state[0]
    grads = jax.tree.map(lambda mu: np.asarray(mu) / 0.5, moments.mu)
    loss = float(rl.metrics.compute(metrics)["policy/loss"])
    return types.SimpleNamespace(state=state, moments=moments, grads=grads, loss=loss)


@functools.cache
def learner_reference(family):
    """What one device learns."""
    model, params = model_of(family), params_of(family)
    batch, logits = batch_of(model, params)
    found = learned(model, params, batch)
    return types.SimpleNamespace(batch=batch, logits=logits, loss=found.loss, grads=found.grads)


@functools.cache
def sampler_reference(family):
    """What one device samples."""
    rollout = jax.device_get(rollout_of(model_of(family), params_of(family), *prompts()))
    assert 0 < rollout.terminated.sum() < PROMPTS * GROUP, "some rows stop, some are cut"
    return rollout


class Placed:
    """A family's model and parameters under a layout."""

    def __init__(self, family, name, kind, placement=True):
        model = model_of(family)
        layout = sharding.get_layout(name)
        self.mesh = sharding.make_mesh(layout, explicit=kind == "Explicit")
        self.layout = sharding.fitted(layout, model.config, self.mesh)
        self.axes = model.logical_axes()
        self.places = sharding.tree_shardings(self.axes, model.shapes(), self.layout, self.mesh)
        self.params = jax.device_put(params_of(family), self.places)
        if placement and self.mesh.size > 1:
            model = dataclasses.replace(
                model,
                placement=sharding.activation_sharding(self.layout, self.mesh),
                decode_placement=sharding.decode_sharding(self.layout, self.mesh),
            )
        self.model = model

    def rows(self, tree):
        """Row-first arrays on the mesh."""
        return jax.device_put(tree, sharding.row_sharding(self.layout, self.mesh))

    def parts(self, names):
        """Into how many parts the rules split an array with these logical axes."""
        axes = [axis for name in names for axis in self.layout.targets(name)]
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def row_parts(self):
        return math.prod(self.mesh.shape[axis] for axis in self.layout.rows)


def share(array):
    """How many elements of an array there are for each that one device holds."""
    return array.size // math.prod(array.sharding.shard_shape(array.shape))


def named(tree, is_leaf=None):
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def check_places(placed, tree):
    """Every weight, or moment, is split into as many parts as the rules say."""
    logical = named(placed.axes, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], str))
    held = named(tree)
    assert held.keys() == logical.keys()
    for name, leaf in held.items():
        assert share(leaf) == placed.parts(logical[name]), name
    unruled = {name for name, axes in logical.items() if placed.parts(axes) == 1}
    assert whole(tree).keys() == (unruled if placed.mesh.size > 1 else set())
    assert misplaced(tree, placed.places) == []


def close(found, expected):
    """‖a − b‖ and the largest difference within 1e-5 of the norm and of the largest entry."""
    for name, b in named(expected).items():
        a = np.asarray(named(found)[name])
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b), name
        assert np.abs(a - b).max() <= 1e-5 * max(np.abs(b).max(), 1e-3), name


def check_learner(placed, want):
    batch = placed.rows(want.batch)
    for name, leaf in named(batch).items():
        assert share(leaf) == placed.row_parts, name
    score = jax.jit(placed.model.logits)
    logits = score(placed.params, batch.tokens, attention_mask=batch.attention_mask)
    real = want.batch.attention_mask
    close({"logits": np.asarray(logits)[real]}, {"logits": want.logits[real]})
    found = learned(placed.model, placed.params, batch, 2, placed.places)
    assert found.loss == pytest.approx(want.loss, rel=1e-5, abs=1e-6)
    close(found.grads, want.grads)
    for tree in (placed.params, found.state.params, found.moments.mu, found.moments.nu):
        check_places(placed, tree)


@pytest.mark.long
@pytest.mark.fault(57, 58)
@cases(QUICK)
def test_a_train_step_is_the_same(family, layout, kind):
    check_learner(Placed(family, layout, kind), learner_reference(family))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "tensor", "fsdp_tensor", "hsdp"])
def test_explicit_axes_need_no_placement(layout):
    placed = Placed("llama", layout, "Explicit", placement=False)
    check_learner(placed, learner_reference("llama"))


@cases()
def test_generate_samples_the_same_tokens(family, layout, kind):
    placed, want = Placed(family, layout, kind), sampler_reference(family)
    rollout = rollout_of(placed.model, placed.params, *placed.rows(prompts()))
    for field in ("tokens", "mask", "lengths", "terminated"):
        np.testing.assert_array_equal(getattr(rollout, field), getattr(want, field))
    np.testing.assert_allclose(rollout.log_probs, want.log_probs, atol=1e-5)
    for field in ("tokens", "mask", "log_probs", "lengths"):
        assert share(getattr(rollout, field)) == placed.row_parts, field


@cases()
def test_the_engine_samples_the_same_tokens(family, layout, kind):
    placed, want = Placed(family, layout, kind), sampler_reference(family)
    server = rl.sampling.Engine(
        placed.model,
        placed.params,
        slots=PROMPTS,
        max_prompt_tokens=WIDTH,
        max_new_tokens=NEW,
        steps_per_round=4,
        row_sharding=sharding.row_sharding(placed.layout, placed.mesh),
    )
    for i, (tokens, mask) in enumerate(zip(*prompts(), strict=True)):
        options = dict(group_size=GROUP, group_id=i, stop_ids=STOP)
        server.submit(tokens[mask], key=jax.random.key(5), **options)
    groups = {group.request: group for group in server}
    found = [row.tokens.tolist() for i in range(PROMPTS) for row in groups[i].rows]
    expected = zip(want.tokens, want.mask, strict=True)
    assert found == [row[mask].tolist() for row, mask in expected]
    cache = server._pool._state.rows.cache
    for leaf in jax.tree.leaves((cache.keys, cache.values, cache.prefix.keys, cache.prefix.values)):
        assert share(leaf) == placed.row_parts * placed.parts(["kv_heads"])


def test_whole_names_what_every_device_holds():
    """Or the tests above would see no replication."""
    placed = Placed("llama", "fsdp", "Auto")
    everywhere = jax.NamedSharding(placed.mesh, jax.P())
    weight = placed.params["embed"]["weight"]
    whole_one, small = (jax.device_put(x, everywhere) for x in (weight, jnp.ones(2)))
    tree = {"split": weight, "whole": whole_one, "small": small}
    assert whole(tree) == {"small": 8, "whole": 64 * 32 * 4}
    assert whole(tree, least=9) == {"whole": 64 * 32 * 4}
    lying = "whole [64, 32] lies as (), not as (None, 'fsdp')"
    two = {"split": weight, "whole": whole_one}
    assert misplaced(two, dict.fromkeys(two, weight.sharding)) == [lying]
