import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl

CONFIG = rl.models.DecoderConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    initializer_range=0.2,
)
MODEL = rl.models.Decoder(CONFIG, stacks=(3, 1))


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (3, 10), 0, CONFIG.vocab_size)


@jax.jit(static_argnums=0)
def logits_of(model, params, tokens, **options):
    return model.logits(params, tokens, **options)


@jax.jit(static_argnums=0, static_argnames=("from_stack", "to_stack"))
def hidden_of(model, params, tokens, **options):
    return model.hidden(params, tokens, **options)


def flops(function, *args):
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


@pytest.mark.long
def test_parameters_are_plain_and_named(params):
    assert set(params) == {"embed", "layers", "final_norm"}
    assert isinstance(params["layers"], tuple)
    assert [stack["mlp"]["up"]["weight"].shape for stack in params["layers"]] == [
        (3, 48, 32),
        (1, 48, 32),
    ]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    untied = rl.models.Decoder(dataclasses.replace(CONFIG, tie_embeddings=False))
    assert untied.shapes()["head"]["weight"].shape == (40, 32)
    matrix, layout = MODEL.head(params)
    assert layout == "vd" and matrix is params["embed"]["weight"]


def test_logical_axes_fit_every_leaf():
    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        config = dataclasses.replace(CONFIG, architecture=architecture, tie_embeddings=False)
        model = rl.models.Decoder(config, stacks=(3, 1))
        sizes = {"vocab": 40, "embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 48}

        def check(leaf, names, sizes=sizes):
            for size, name in zip(leaf.shape, names, strict=True):
                assert name == "layers" or sizes[name] == size

        jax.tree.map(check, model.shapes(), model.logical_axes())


def test_decoder_is_static_and_cheap():
    same = rl.models.Decoder(CONFIG, stacks=[3, 1], dtype="float32")
    assert same == MODEL and hash(same) == hash(MODEL)
    assert rl.models.Decoder(CONFIG).stacks == (4,)
    with pytest.raises(ValueError, match=r"stacks.*\(3, 2\).*4 layers"):
        rl.models.Decoder(CONFIG, stacks=(3, 2))
    with pytest.raises(ValueError, match=r"remat.*'some'"):
        rl.models.Decoder(CONFIG, remat="some")


@pytest.mark.long
@pytest.mark.parametrize("stacks", [pytest.param((4,), marks=pytest.mark.slow), (1, 1, 2)])
def test_stacking_changes_nothing(params, tokens, stacks):
    other = rl.models.Decoder(CONFIG, stacks=stacks)
    restacked = MODEL.restack(params, stacks)
    for a, b in zip(
        jax.tree.leaves(restacked), jax.tree.leaves(other.init(jax.random.key(0))), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(
        logits_of(other, restacked, tokens), logits_of(MODEL, params, tokens), atol=1e-5
    )
    back = MODEL.restack(restacked, (3, 1))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), back, params)))


@pytest.mark.long
def test_no_backward_pass_runs_through_frozen_leading_stacks(tokens):
    config = dataclasses.replace(CONFIG, num_layers=6)
    model = rl.models.Decoder(config, stacks=(5, 1))
    params = model.init(jax.random.key(0))

    def loss(stacks, params):
        hidden = model.hidden({**params, "layers": stacks}, tokens)
        return jnp.sum(hidden**2)

    def last(stack, params):
        return loss((*params["layers"][:-1], stack), params)

    forward = flops(loss, params["layers"], params)
    top = flops(jax.grad(last), params["layers"][-1], params)
    whole = flops(jax.grad(loss), params["layers"], params)
    # XLA counts a scan's body once; so its number of passes is read from the jaxpr
    scans = [
        equation.params["length"]
        for equation in jax.make_jaxpr(jax.grad(last))(params["layers"][-1], params).jaxpr.eqns
        if equation.primitive.name == "scan"
    ]
    assert scans == [5], "one forward scan over the frozen stack, no reversed one"
    assert forward < top < whole


def test_trunk_then_top_is_the_whole(params, tokens):
    trunk = hidden_of(MODEL, params, tokens, to_stack=1)
    whole = hidden_of(MODEL, params, tokens)
    np.testing.assert_array_equal(hidden_of(MODEL, params, None, inputs=trunk, from_stack=1), whole)
    assert abs(trunk - whole).max() > 0.1


@pytest.mark.long
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_gives_the_same_gradient(params, tokens, remat):
    def loss(model):
        return jax.jit(jax.grad(lambda p: jnp.sum(model.logits(p, tokens) ** 2)))(params)

    other = dataclasses.replace(MODEL, remat=remat)
    for a, b in zip(jax.tree.leaves(loss(MODEL)), jax.tree.leaves(loss(other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.fault(9)
@pytest.mark.parametrize(("before", "after"), [(5, 0), (0, 5), (2, 4)])
def test_padding_on_any_side_agrees_on_valid_tokens(params, tokens, before, after):
    width = ((0, 0), (before, after))
    padded = jnp.pad(tokens, width, constant_values=7)
    mask = jnp.pad(jnp.ones_like(tokens, bool), width)
    logits = logits_of(MODEL, params, padded, attention_mask=mask)
    assert np.isfinite(logits).all()
    end = before + tokens.shape[1]
    np.testing.assert_allclose(logits[:, before:end], logits_of(MODEL, params, tokens), atol=2e-5)


@pytest.mark.long
@pytest.mark.fault(6)
def test_fully_masked_rows_are_finite_in_value_and_gradient(params, tokens):
    mask = jnp.ones_like(tokens, bool).at[1].set(False)

    def loss(params):
        logits = MODEL.logits(params, tokens, attention_mask=mask)
        return jnp.sum(jnp.where(mask[..., None], logits, 0.0)), logits

    (_, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert np.isfinite(logits).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.long
def test_packed_rows_equal_rows_of_their_own(params, tokens):
    packed = jnp.concatenate([tokens[0, :4], tokens[1, :3], jnp.zeros(2, int), tokens[2]])[None]
    ids = jnp.array([[9] * 4 + [2] * 3 + [9] * 2 + [5] * 10])
    mask = jnp.array([[True] * 7 + [False] * 2 + [True] * 10])
    logits = logits_of(MODEL, params, packed, attention_mask=mask, segment_ids=ids)[0]
    for row, start, length in ((0, 0, 4), (1, 4, 3), (2, 9, 10)):
        alone = logits_of(MODEL, params, tokens[row : row + 1, :length])[0]
        np.testing.assert_allclose(logits[start : start + length], alone, atol=2e-5)


def test_positions_can_be_given(params, tokens):
    positions = jnp.broadcast_to(jnp.arange(10), tokens.shape)
    default = logits_of(MODEL, params, tokens)
    np.testing.assert_array_equal(logits_of(MODEL, params, tokens, positions=positions), default)
    shifted = logits_of(MODEL, params, tokens, positions=positions + 17)
    np.testing.assert_allclose(shifted, default, atol=5e-5)  # rotary positions are relative
    assert abs(logits_of(MODEL, params, tokens, positions=2 * positions) - default).max() > 1e-2


@pytest.mark.long
def test_bf16_compute_keeps_float32_logits_and_is_close(params, tokens):
    model = dataclasses.replace(MODEL, dtype=jnp.bfloat16)
    logits = logits_of(model, params, tokens)
    assert logits.dtype == jnp.float32
    assert hidden_of(model, params, tokens).dtype == jnp.bfloat16
    exact = logits_of(MODEL, params, tokens)
    assert abs(logits - exact).mean() < 0.02 * abs(exact).mean()


@pytest.mark.long
def test_compute_dtype_does_not_leak_into_gradients(params, tokens):
    model = dataclasses.replace(MODEL, dtype=jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda p: model.logits(p, tokens).sum()))(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(tokens=None), "tokens, inputs"),
        (dict(inputs=jnp.zeros((3, 10, 32))), "tokens, inputs"),
        (dict(tokens=None, inputs=jnp.zeros((3, 10, 8)), from_stack=1), "inputs: shape"),
        (dict(from_stack=3), "have 2 stacks"),
        (dict(tokens=jnp.zeros(10, int)), r"tokens: got .*\[10\]"),
        (dict(tokens=jnp.zeros((3, 10))), "integers"),
        (dict(attention_mask=jnp.ones((3, 9), bool)), r"attention_mask: shape \(3, 9\)"),
        (dict(segment_ids=jnp.ones((1, 10), int)), "segment_ids"),
        (dict(positions=jnp.ones((3, 1), int)), "positions"),
    ],
)
def test_bad_input_is_named(params, tokens, options, words):
    ids = options.pop("tokens", tokens)
    with pytest.raises(ValueError, match=words):
        MODEL.hidden(params, ids, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("Explicit", "tensor"),
        ("Auto", "fsdp"),
        pytest.param("Auto", "tensor", marks=pytest.mark.slow),
        pytest.param("Explicit", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_sharded_results_equal_single_device_results(params, tokens, kind, layout):
    kinds = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=kinds)
    where = {"embed": "data"}
    if layout == "tensor":
        where = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "tensor")

    def generate(params, tokens):
        _, prefix = MODEL.prefill(params, tokens)
        cache = MODEL.init_cache(prefix, group_size=2, max_new_tokens=2)
        return MODEL.logits(params, tokens), MODEL.decode(params, tokens[:, :2], cache, 0)[0]

    ids = jnp.tile(tokens, (2, 1))
    expected = jax.jit(generate)(params, ids)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(
            lambda leaf, names: jax.device_put(
                leaf, jax.NamedSharding(mesh, jax.P(*(where.get(name) for name in names)))
            ),
            params,
            MODEL.logical_axes(),
        )
        rows = jax.device_put(ids, jax.NamedSharding(mesh, jax.P("data")))
        found = jax.jit(generate)(placed, rows)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-5)
