"""LoRA: the merged weights, what learns, and how it lies over devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

import rlhf_jax as rl
import sharding
from rlhf_jax import partition, policy

ALL = ("q", "k", "v", "o", "gate", "up", "down")
CONFIG = rl.models.DecoderConfig(  # heads · width is not the hidden size
    vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4,
    num_kv_heads=2, head_dim=6,
)  # fmt: skip
MODEL = rl.models.Decoder(CONFIG, stacks=(3, 1))
LORA = rl.models.LoRA(rank=4, alpha=6, targets=ALL)
# Fewer projections and one stack compile sooner, where it is the step that is tested.
FEW = rl.models.LoRA(rank=4, alpha=6, targets=("q", "o", "down"))
FLAT = rl.models.Decoder(CONFIG)


@pytest.fixture(scope="module")
def base():
    return random_like(MODEL.shapes(), 0.2)


@pytest.fixture(scope="module")
def flat(base):
    return MODEL.restack(base, (4,))


@pytest.fixture(scope="module")
def adapters():
    return random_like(LORA.shapes(MODEL))


@pytest.fixture(scope="module")
def batch():
    """Sixteen rows, padded on both sides, with made-up advantages."""
    rng = np.random.default_rng(0)
    index, start = np.arange(10), 4
    real = (index >= rng.integers(0, 3, (16, 1))) & (index < rng.integers(6, 11, (16, 1)))
    mask = real & (index >= start)
    fields = dict(
        tokens=rng.integers(0, 40, (16, 10)), mask=mask, attention_mask=real,
        group_ids=np.repeat(np.arange(4), 4), advantages=rng.normal(size=16).astype(np.float32),
        old_log_probs=np.zeros((16, 10), np.float32),
        sampler_log_probs=np.zeros((16, 10), np.float32),
        denominator=np.full(16, mask.sum(), np.float32),
    )  # fmt: skip
    return rl.Batch(**jax.tree.map(jnp.asarray, fields), start=start)


def random_like(shapes, scale=0.3):
    """Every leaf, B and norms as well: at 0 and 1 they would hide a mistake."""
    rng = np.random.default_rng(7)

    def draw(path, leaf):
        centre = 1.0 if partition.path_name(path).endswith("scale") else 0.0
        return jnp.asarray(centre + scale * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def same(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))


def close(a, b, tolerance=1e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b
    )


def loss_fn(output, batch):
    per_token = -batch.advantages[:, None] * output.log_probs / batch.denominator[:, None]
    return jnp.sum(jnp.where(batch.mask, per_token, 0.0)), {}


# the description


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(targets=("q", "lm_head")), r"targets: got \['lm_head'\].*q, k, v, o, gate, up, down"),
        (dict(targets=()), "targets: got nothing"),
        (dict(rank=0), "rank: got 0"),
        (dict(rank=2.5), "rank: got 2.5"),
        (dict(alpha=0), "alpha: got 0"),
        (dict(alpha=float("inf")), "alpha: got inf"),
        (dict(init_a="zeros"), "init_a: got 'zeros'.*kaiming"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rl.models.LoRA(**options)


def test_equal_descriptions_are_equal_and_static():
    one = rl.models.LoRA(targets=("down", "q", "q"), layers=[3, 1, 1])
    assert one == rl.models.LoRA(targets=["q", "down"], layers=(1, 3)) and hash(one)
    assert rl.models.LoRA(targets="gate").targets == ("gate",)
    assert rl.models.LoRA(rank=4, alpha=6).scale == 1.5
    assert rl.models.LoRA(rank=4, alpha=6, rank_stabilized=True).scale == 3.0


def test_layers_must_fill_stacks():
    with pytest.raises(ValueError, match=r"layers: got \[4\]; the model's are 0 to 3"):
        rl.models.LoRA(layers=(4,)).shapes(MODEL)
    with pytest.raises(ValueError, match=r"layers: \[2, 3\] are a part of .* 0 to 2.*\(3, 1\)"):
        rl.models.LoRA(layers=(2, 3)).shapes(MODEL)
    assert rl.models.LoRA(layers=(3,)).shapes(MODEL)["layers"][0] == {}


def test_fresh_adapters():
    lora = rl.models.LoRA(rank=64, targets=ALL)
    pairs = lora.init(jax.random.key(0), MODEL)["layers"][0]
    a, b = pairs["attn"]["o"]["a"], pairs["attn"]["o"]["b"]
    assert a.shape == (3, 64, 4, 6) and b.shape == (3, 32, 64)
    assert a.dtype == b.dtype == jnp.float32
    bound = 1 / np.sqrt(24)  # PEFT: kaiming_uniform with a = √5
    assert 0.98 * bound < abs(a).max() <= bound
    assert abs(a.std() - bound / np.sqrt(3)) < 0.02 * bound
    leaves = [x for pair in (*pairs["attn"].values(), *pairs["mlp"].values()) for x in pair["a"]]
    means = [float(x.ravel()[:96].sum()) for x in leaves]
    assert len(set(means)) == len(means), "every layer and projection draws anew"
    other = dataclasses.replace(lora, init_a="gaussian").init(jax.random.key(0), MODEL)
    deviation = other["layers"][0]["mlp"]["up"]["a"].std()
    assert abs(deviation - 1 / 64) < 0.1 / 64  # PEFT: normal with 1/r


# merged weights


def test_a_fresh_adapter_changes_nothing_at_all(flat):
    assert same(FEW.merge(flat, FEW.init(jax.random.key(3), FLAT)), flat)


@pytest.mark.long
def test_adapters_that_are_off_change_nothing_at_all(base, adapters):
    assert same(LORA.merge(base, LORA.off(adapters)), base)


def test_merged_is_unmerged(base, adapters):
    """Each projection alone, against y = x·Wᵀ + (α/r)·(x·Aᵀ)·Bᵀ in double precision."""
    rng = np.random.default_rng(0)
    merged = LORA.merge(base, adapters)
    for stack, plain, pairs in zip(
        merged["layers"], base["layers"], adapters["layers"], strict=True
    ):
        for group, target in [(g, t) for g in pairs for t in pairs[g]]:
            weight, held, pair = (
                jax.tree.map(lambda x: np.asarray(x, np.float64), tree[group][target])
                for tree in (stack, plain, pairs)
            )
            for layer in range(len(weight["weight"])):
                a, b = pair["a"][layer].reshape(4, -1), pair["b"][layer].reshape(-1, 4)
                x = rng.normal(size=(5, a.shape[1]))
                flat = [w["weight"][layer].reshape(len(b), -1) for w in (weight, held)]
                want = x @ flat[1].T + 6 / 4 * (x @ a.T) @ b.T
                np.testing.assert_allclose(x @ flat[0].T, want, atol=1e-5)
                assert abs(want - x @ flat[1].T).max() > 0.1


def test_what_has_no_adapter_is_the_very_array(base):
    lora = rl.models.LoRA(rank=2, targets=("v", "down"), layers=(3,))
    merged = lora.merge(base, random_like(lora.shapes(MODEL)))
    changed = [
        partition.path_name(path)
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(merged), jax.tree.leaves(base), strict=True
        )
        if x is not y
    ]
    assert changed == ["layers/1/attn/v/weight", "layers/1/mlp/down/weight"]


@pytest.mark.parametrize("stacks", [(4,), pytest.param((1, 1, 2), marks=pytest.mark.slow)])
def test_stacking_changes_nothing(base, adapters, stacks):
    other = rl.models.Decoder(CONFIG, stacks=stacks)
    fresh = FEW.init(jax.random.key(3), MODEL)
    assert same(other.restack(fresh, stacks), FEW.init(jax.random.key(3), other))
    restacked = LORA.merge(other.restack(base, stacks), other.restack(adapters, stacks))
    close(MODEL.restack(restacked, (3, 1)), LORA.merge(base, adapters))


def test_the_dtype_is_the_bases_and_rounded_once(base, adapters):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
    merged = LORA.merge(half, adapters)
    assert {x.dtype.name for x in jax.tree.leaves(merged)} == {"bfloat16"}
    wide = LORA.merge(jax.tree.map(lambda x: x.astype(jnp.float32), half), adapters)
    assert same(merged, jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide))


def test_adapters_of_another_shape_are_named(base, adapters):
    other = rl.models.Decoder(CONFIG)
    with pytest.raises(ValueError, match=r"adapters: they have 2 stacks, the base has 1"):
        LORA.merge(other.restack(base, (4,)), adapters)
    with pytest.raises(ValueError, match=r"attn/k has a \(3, 4, 32\).*rank 8 .*\(3, 2, 6, 32\)"):
        dataclasses.replace(LORA, rank=8).merge(base, adapters)
    swapped = {"layers": adapters["layers"][::-1]}
    with pytest.raises(ValueError, match=r"attn/k has a \(1, 4, 32\)"):
        LORA.merge(base, swapped)


# learning


def test_gradient_is_that_of_finite_differences(base):
    lora = rl.models.LoRA(rank=2, alpha=3, targets=("o", "down"), layers=(3,))
    with jax.enable_x64(True):
        trees = (base, random_like(lora.shapes(MODEL)))
        wide, pairs = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), trees)

        @jax.jit
        def total(pairs):
            top = lora.merge(wide, pairs)["layers"][1]
            return jnp.sum(jnp.sin(top["attn"]["o"]["weight"])) + jnp.sum(
                jnp.sin(top["mlp"]["down"]["weight"])
            )

        check_grads(total, (pairs,), order=1, modes=("rev",), rtol=1e-6, atol=1e-6)


def placed(tree, axes, layout, kind):
    layout = sharding.get_layout(layout)
    mesh = sharding.make_mesh(layout)
    types = (getattr(jax.sharding.AxisType, kind),) * len(mesh.axis_names)
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    shardings = sharding.tree_shardings(axes, tree, layout, mesh)
    return jax.device_put(tree, shardings), sharding.row_sharding(layout, mesh)


def run(
    base,
    batch,
    *,
    model=FLAT,
    lora=FEW,
    steps=3,
    layout=None,
    kind="Auto",
    trunk_stacks=0,
    **options,
):
    """Train some steps: the state, the frozen part, the merged parameters, the first state."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    params = {"base": base, "adapters": lora.init(jax.random.key(3), model)}
    shardings = states = first = None
    if layout:
        axes = {"base": model.logical_axes(), "adapters": lora.logical_axes(model)}
        params, rows = placed(params, axes, layout, kind)
        batch = jax.device_put(batch, rows)
    trainable, frozen = partition.split(params, "^adapters/")
    if layout:
        shardings = jax.tree.map(lambda x: x.sharding, trainable)
        states = rl.train_step.state_shardings(trainable, optimizer, shardings)
    state = rl.init_train_state(trainable, optimizer, shardings=shardings)
    policy_fn = lora.adapted(policy.from_decoder(model, trunk_stacks=trunk_stacks))
    step = rl.make_train_step(policy_fn, loss_fn, optimizer, shardings=states, **options)
    for i in range(steps):
        state, _ = step(state, batch, frozen)
        first = first if i else jax.tree.map(np.asarray, state)  # the next call donates it
    return state, frozen, jax.jit(lora.merge)(frozen["base"], state.params["adapters"]), first


@pytest.fixture(scope="module")
def trained(flat, batch):
    return run(flat, batch)


@pytest.mark.long
@pytest.mark.fault(50)
def test_the_step_trains_the_adapters_and_nothing_else(flat, batch, trained):
    state, frozen, merged, _ = trained
    assert same(frozen["base"], flat), "bit for bit"
    assert jax.tree.leaves(state.params["base"]) == []
    moments = partition.count(state.opt_state[0].trace)
    assert moments == partition.count(FEW.shapes(FLAT)) < partition.count(flat) / 4
    moved = {
        partition.path_name(path)
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(merged), jax.tree.leaves(flat), strict=True
        )
        if bool((x != y).any())
    }
    names = ("attn/q", "attn/o", "mlp/down")
    assert moved == {f"layers/0/{name}/weight" for name in names}
    policy_fn = jax.jit(policy.from_decoder(FLAT))
    losses = [loss_fn(policy_fn(p, batch), batch)[0] for p in (flat, merged)]
    assert losses[1] < losses[0] - 0.01


def test_at_the_start_only_b_has_a_gradient(trained):
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained[3].opt_state[0].trace):
        assert bool((leaf != 0).any()) == partition.path_name(path).endswith("/b")
    fresh = FEW.init(jax.random.key(3), FLAT)
    trees = (trained[3].params["adapters"], fresh)
    assert same(*(tree["layers"][0]["mlp"]["down"]["a"] for tree in trees))


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_micro_batches_change_nothing(flat, batch, trained, micro_batches):
    state, *_ = run(flat, batch, micro_batches=micro_batches)
    close(state.params, trained[0].params, 2e-5)


@pytest.mark.parametrize("kind", ["Explicit", pytest.param("Auto", marks=pytest.mark.slow)])
def test_merged_weights_lie_as_the_base_does(flat, kind):
    adapters = random_like(FEW.shapes(FLAT))
    axes = {"base": FLAT.logical_axes(), "adapters": FEW.logical_axes(FLAT)}
    split, _ = placed({"base": flat, "adapters": adapters}, axes, "fsdp_tensor", kind)
    merged = jax.jit(FEW.merge)(split["base"], split["adapters"])
    close(merged, FEW.merge(flat, adapters))
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(merged), jax.tree.leaves(split["base"]), strict=True
    ):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), partition.path_name(path)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("layout", "kind"), [("dp", "Auto"), ("fsdp", "Explicit"), ("fsdp_tensor", "Auto")]
)
def test_layouts_change_nothing(flat, batch, trained, layout, kind, micro_batches):
    state, _, merged, _ = run(flat, batch, layout=layout, kind=kind, micro_batches=micro_batches)
    close(state.params, trained[0].params, 2e-5)
    close(merged, trained[2], 2e-5)


def test_adapters_are_split_as_their_weights_are():
    layout = sharding.get_layout("fsdp_tensor")
    mesh = sharding.make_mesh(layout)
    axes = LORA.logical_axes(MODEL)
    found = sharding.tree_shardings(axes, LORA.shapes(MODEL), layout, mesh)["layers"][1]
    specs = jax.tree.map(lambda s: s.spec, found)
    P = jax.P
    assert specs["attn"]["q"] == {"a": P(None, None, "fsdp"), "b": P(None, "tensor", None, None)}
    assert specs["attn"]["o"] == {"a": P(None, None, "tensor", None), "b": P(None, "fsdp", None)}
    assert specs["mlp"]["down"] == {"a": P(None, None, "tensor"), "b": P(None, "fsdp", None)}


TOP = dataclasses.replace(FEW, layers=(3,))


def test_no_backward_pass_runs_through_the_layers_below(base, batch):
    def loss(adapters):
        params = {"base": base, "adapters": adapters}
        return loss_fn(TOP.adapted(policy.from_decoder(MODEL))(params, batch), batch)[0]

    jaxpr = jax.make_jaxpr(jax.grad(loss))(random_like(TOP.shapes(MODEL))).jaxpr
    scans = [e.params["length"] for e in jaxpr.eqns if e.primitive.name == "scan"]
    assert scans.count(3) == 1, "one forward scan over the lower stack, no reversed one"


@pytest.mark.slow
def test_a_shared_trunk_changes_nothing(base, batch):
    with_trunk = dataclasses.replace(batch, trunk=policy.trunk(MODEL, base, batch, 1))
    whole = run(base, batch, model=MODEL, lora=TOP)
    shared = run(base, with_trunk, model=MODEL, lora=TOP, trunk_stacks=1)
    close(shared[0].params, whole[0].params, 2e-5)


# beside the sampler and the reference


@pytest.mark.slow
def test_sampler_and_learner_share_the_merged_weights(base, adapters):
    merged = LORA.merge(base, adapters)
    tokens = np.arange(12).reshape(4, 3)
    rollout = rl.generate(
        MODEL, merged, tokens, np.ones((4, 3), bool), jax.random.key(1), group_size=2,
        max_new_tokens=8,
    )  # fmt: skip
    params = {"base": base, "adapters": adapters}
    policy_fn = LORA.adapted(policy.from_decoder(MODEL))
    out = jax.jit(policy_fn)(params, rollout)
    gap = jnp.abs(out.log_probs - rollout.log_probs)[rollout.mask]
    assert float(gap.max()) < 2e-5
    plain = policy.from_decoder(MODEL)(base, rollout)
    assert float(jnp.abs(out.log_probs - plain.log_probs)[rollout.mask].max()) > 0.1


@pytest.mark.fault(50)
def test_policy_and_reference_share_one_base(flat, batch, trained):
    """One function and one base for both; at the start their KL is exactly 0."""
    adapters = trained[0].params["adapters"]
    scorer = jax.jit(FEW.adapted(policy.from_decoder(FLAT)))
    fresh = FEW.init(jax.random.key(3), FLAT)
    found = [scorer({"base": flat, "adapters": a}, batch) for a in (fresh, FEW.off(adapters))]
    reference = jax.jit(policy.from_decoder(FLAT))(flat, batch)
    assert same(found[0], reference) and same(found[1], reference), "bit for bit"
    now = scorer({"base": flat, "adapters": adapters}, batch)
    assert float(jnp.abs(now.log_probs - reference.log_probs).max()) > 1e-3
