"""Reading collectives from HLO, and generation under sharded layouts as the compilers plan it."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest

import rlhf_jax as rl
import sharding
from experiments.bench import hlo, tpu_decode

CONFIG = rl.models.DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=16,
    num_kv_heads=8,
    head_dim=8,
    tie_embeddings=False,
)
SIZES = tpu_decode.Sizes(prompts=8, group=2, prompt_length=8, new_tokens=16)
TEXT = """HloModule made_up, is_scheduled=true

%layer (l: (s32[], bf16[8,4], bf16[2,8,2])) -> (s32[], bf16[8,4], bf16[2,8,2]) {
  %l = (s32[], bf16[8,4]{1,0:T(8,128)(2,1)}, bf16[2,8,2]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%l), index=0
  %x = bf16[8,4]{1,0} get-tuple-element(%l), index=1
  %w = bf16[2,8,2]{2,1,0} get-tuple-element(%l), index=2
  %cut = bf16[1,8,2]{2,1,0} fusion(%w, %i), kind=kLoop, calls=%slice_of
  %whole-start = (bf16[1,8,2]{2,1,0}, bf16[1,8,8]{2,1,0}) all-gather-start(%cut), dimensions={2}
  %whole = bf16[1,8,8]{2,1,0} all-gather-done(%whole-start)
  %y = bf16[8,4]{1,0} all-reduce(%x), to_apply=%sum
  ROOT %out = (s32[], bf16[8,4]{1,0}, /*index=2*/bf16[2,8,2]{2,1,0}) tuple(%i, %y, %w)
}

%slice_of (a: bf16[2,8,2], b: s32[]) -> bf16[1,8,2] {
  %a = bf16[2,8,2]{2,1,0} parameter(0)
  %b = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %d = bf16[1,8,2]{2,1,0} dynamic-slice(%a, %b, %zero, %zero), dynamic_slice_sizes={1,8,2}
}

%step (t: (s32[], bf16[8,4], bf16[2,8,2])) -> (s32[], bf16[8,4], bf16[2,8,2]) {
  %t = (s32[], bf16[8,4]{1,0}, bf16[2,8,2]{2,1,0}) parameter(0)
  ROOT %scan = (s32[], bf16[8,4]{1,0}, bf16[2,8,2]{2,1,0}) while(%t), condition=%less, TRIPS
}

%less (m: (s32[], bf16[8,4], bf16[2,8,2])) -> pred[] {
  %m = (s32[], bf16[8,4]{1,0}, bf16[2,8,2]{2,1,0}) parameter(0)
  %n = s32[] constant(2)
  %j = s32[] get-tuple-element(%m), index=0
  ROOT %lt = pred[] compare(%j, %n), direction=LT
}

%c (k: (s32[], bf16[8,4], bf16[2,8,2])) -> pred[] {
  %k = (s32[], bf16[8,4]{1,0}, bf16[2,8,2]{2,1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (p: bf16[8,4], q: bf16[2,8,2]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0} parameter(0), metadata={op_name="tokens"}
  %q = bf16[2,8,2]{2,1,0} parameter(1), metadata={op_name="params[\\'w\\']"}
  %zero.1 = s32[] constant(0)
  %start = (s32[], bf16[8,4]{1,0}, bf16[2,8,2]{2,1,0}) tuple(%zero.1, %p, %q)
  %loop = (s32[], bf16[8,4]{1,0}, bf16[2,8,2]{2,1,0}) while(%start), condition=%c, body=%step
  ROOT %r = bf16[8,4]{1,0} get-tuple-element(%loop), index=1
}
""".replace("TRIPS", 'body=%layer, backend_config={"known_trip_count":{"n":"2"}}')


@pytest.mark.parametrize("noted", [True, False])
def test_collectives_are_read_counted_and_traced_to_parameters(noted):
    text = TEXT if noted else TEXT.replace(', backend_config={"known_trip_count":{"n":"2"}}', "")
    # without the compiler's note a scan's condition tells how often it runs
    module = hlo.parse(text)
    loop = hlo.outer_loop(module)
    assert loop.name == "loop"
    assert hlo.summary(hlo.transfers(module, loop.body)) == {
        "all-gather": (2, 2 * 8 * 8 * 2),
        "all-reduce": (2, 2 * 8 * 4 * 2),
    }
    (moved,) = hlo.carried_parameters(module, loop.body, "params")
    assert (moved.kind, moved.shape) == ("all-gather", "bf16[1,8,8]")
    assert moved.sources == ("params['w']",)


def test_a_program_without_an_open_loop_says_so():
    compiled = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile()
    with pytest.raises(ValueError, match="no while loop"):
        hlo.outer_loop(hlo.parse(compiled.as_text()))


@pytest.mark.parametrize("whole", [False, True])
def test_weights_gathered_in_a_loop_are_found(whole):
    mesh = jax.make_mesh((8,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P(None, None, "m"))
    columns, everywhere = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((None, "m"), ()))

    def run(params, x):
        def layer(x, w):
            if whole:
                w = jax.lax.with_sharding_constraint(w, everywhere)
            y = jnp.tanh(jax.lax.with_sharding_constraint(x @ w, columns))
            return jax.lax.with_sharding_constraint(y, everywhere), None

        return jax.lax.while_loop(
            lambda x: jnp.sum(x) < 9, lambda x: jax.lax.scan(layer, x, params["w"])[0], x
        )

    w = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32, sharding=split)
    x = jax.ShapeDtypeStruct((4, 16), jnp.float32, sharding=everywhere)
    module = hlo.parse(jax.jit(run).lower({"w": w}, x).compile().as_text())
    body = hlo.outer_loop(module).body
    moved = hlo.carried_parameters(module, body, "params")
    assert bool(moved) == whole
    activations = 4 * 16 * 4
    _, count = hlo.summary(hlo.transfers(module, body))["all-gather"]
    assert count == 3 * (activations + sum(one.bytes for one in moved))


@pytest.mark.long
@pytest.mark.fault(57)
def test_tensor_layout_moves_no_weights_in_the_loop_and_splits_the_cache():
    layout = sharding.get_layout("tensor")
    placed = tpu_decode.place(CONFIG, layout, jax.devices(), SIZES, jnp.float32)
    found = tpu_decode.measure(placed)
    tpu_decode.check_no_weights_move(found)
    assert found["whole"] == []
    for program in ("generate", "round"):
        figures = found["cache"][program]
        assert figures["cache"] * 8 == figures["cache of all chips"]
        # the embedding's lookup, and two sums a layer
        runs, _ = found["traffic"][f"{program}, a token"]["all-reduce"]
        assert runs >= 1 + 2 * CONFIG.num_layers
    assert "Collectives of weights in the decode loops: none." in tpu_decode.report(found)


def test_a_failing_layout_names_the_weights():
    moved = dict(program="round", kind="all-gather", shape="bf16[8,8]", sources=["params['w']"])
    with pytest.raises(AssertionError, match=r"all-gather bf16\[8,8\] of params\['w'\]"):
        tpu_decode.check_no_weights_move({"layout": "tensor", "moved weights": [moved]})


def test_a_loop_that_copies_its_cache_is_named():
    figures = {"cache": 2**30, "cache of all chips": 2**34, "copied a token": 0}
    tpu_decode.check_cache_stays({"layout": "tensor", "cache": {"round": figures}})
    figures["copied a token"] = 2**31
    with pytest.raises(AssertionError, match="round copies 2,048 MiB a token"):
        tpu_decode.check_cache_stays({"layout": "tensor", "cache": {"round": figures}})


def test_heads_that_do_not_divide_stay_whole():
    config = dataclasses.replace(CONFIG, num_kv_heads=4)
    layout = sharding.get_layout("tensor")
    mesh = sharding.make_mesh(layout)
    assert set(layout.rules) - set(tpu_decode.fitted(layout, config, mesh).rules) == {"kv_heads"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_the_tpu_compiler_moves_no_weights_in_the_loop():
    config = dataclasses.replace(
        CONFIG, hidden_size=1024, intermediate_size=2048, vocab_size=2048, head_dim=128
    )
    try:
        devices = tpu_decode.topology()
    except jax.errors.JaxRuntimeError as error:
        if "lockfile" in str(error):
            pytest.skip("another process has libtpu open")
        raise
    placed = tpu_decode.place(config, sharding.get_layout("tensor"), devices, SIZES)
    found = tpu_decode.measure(placed)
    tpu_decode.check_no_weights_move(found)
    assert (
        found["cache"]["generate"]["cache"] * 8 == found["cache"]["generate"]["cache of all chips"]
    )
