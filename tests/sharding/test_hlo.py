"""Reading a compiled program: what runs how often, who exchanges what, what it costs."""

import jax
import jax.numpy as jnp
import pytest

from sharding import hlo
from sharding.planner import measure

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
  %one = s32[] constant(1)
  %i.1 = s32[] add(%i, %one)
  ROOT %out = (s32[], bf16[8,4]{1,0}, /*index=2*/bf16[2,8,2]{2,1,0}) tuple(%i.1, %y, %w)
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


LOGITS = """HloModule logits

ENTRY %main (p: f32[64,16]) -> f32[3,8] {
  %p = f32[64,16]{1,0} parameter(0)
  %head = f32[64,8]{1,0} slice(%p)
  %halves = bf16[64,32]{1,0} concatenate(%head, %head)
  %piece = f32[5,64]{1,0} custom-call(%halves)
  %split = bf16[7,32]{1,0} custom-call(%piece)
  ROOT %out = f32[3,8]{1,0} custom-call(%split)
}
"""


def test_logits_are_told_from_weights():
    found = measure.vocabulary_arrays(hlo.parse(LOGITS), 64, {16, 32, 8}, 2)
    assert found == [7 * 32, 5 * 64]


# what the TPU's compiler writes

HIDDEN = """HloModule hidden, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%start (s: bf16[8,4]) -> (bf16[8,4], bf16[8,16], s32[2]) {
  %s = bf16[8,4]{1,0} parameter(0)
  %g.0 = bf16[8,16]{1,0} all-gather(%s), channel_id=3, replica_groups=[1,4]<=[4], dimensions={1}, \
backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %begin = (bf16[8,4]{1,0}, bf16[8,16]{1,0}, s32[2]{0:S(4)}) custom-call(%g.0), \
custom_call_target="AsyncCollectiveStart"
}

%beside (r: bf16[8,4], t: bf16[8,16], x: bf16[8,8], y: bf16[8,16]) -> (bf16[8,16], bf16[8,16]) {
  %r = bf16[8,4]{1,0} parameter(0)
  %t = bf16[8,16]{1,0} parameter(1)
  %x = bf16[8,8]{1,0} parameter(2)
  %y = bf16[8,16]{1,0} parameter(3)
  %p = bf16[8,16]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %g.1 = bf16[8,16]{1,0} all-gather(%r), channel_id=3, replica_groups=[1,4]<=[4], dimensions={1}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %both = (bf16[8,16]{1,0}, bf16[8,16]{1,0}) tuple(%p, %t)
}

%done (u: bf16[8,4], v: bf16[8,16]) -> bf16[8,16] {
  %u = bf16[8,4]{1,0} parameter(0)
  %v = bf16[8,16]{1,0} parameter(1)
  %g.2 = bf16[8,16]{1,0} all-gather(%u), channel_id=3, replica_groups=[1,4]<=[4], dimensions={1}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %end = bf16[8,16]{1,0} custom-call(%u, %v, %g.2), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter (w: f32[8,16]) -> f32[8,4] {
  %w = f32[8,16]{1,0} parameter(0)
  %sum = f32[8,16]{1,0} all-reduce(%w), replica_groups={{0,1,2,3}}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %part = f32[8,4]{1,0} dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={8,4}
}

%wide.windowed_dot_general_body_ag (m: (u32[], bf16[4,4])) -> (u32[], bf16[4,4]) {
  %m = (u32[], bf16[4,4]{1,0}) parameter(0)
  %i = u32[] get-tuple-element(%m), index=0
  %k = bf16[4,4]{1,0} get-tuple-element(%m), index=1
  %two = u32[] constant(2)
  %on = u32[] add(%i, %two)
  %k.1 = bf16[4,4]{1,0} collective-permute(%k), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  ROOT %o = (u32[], bf16[4,4]{1,0}) tuple(%on, %k.1)
}

%cond (n: (u32[], bf16[4,4])) -> pred[] {
  %n = (u32[], bf16[4,4]{1,0}) parameter(0)
  %j = u32[] get-tuple-element(%n), index=0
  %eight = u32[] constant(8)
  ROOT %less = pred[] compare(%j, %eight), direction=LT
}

ENTRY %main (p0: bf16[8,4], p1: bf16[8,8], p2: bf16[8,16], p3: f32[8,16]) -> f32[8,4] {
  %p0 = bf16[8,4]{1,0} parameter(0)
  %p1 = bf16[8,8]{1,0} parameter(1)
  %p2 = bf16[8,16]{1,0} parameter(2)
  %p3 = f32[8,16]{1,0} parameter(3)
  %p4 = bf16[4,4]{1,0} parameter(4)
  %f0 = (bf16[8,4]{1,0}, bf16[8,16]{1,0}, s32[2]{0:S(4)}) fusion(%p0), kind=kCustom, calls=%start
  %h0 = bf16[8,4]{1,0} get-tuple-element(%f0), index=0
  %h1 = bf16[8,16]{1,0} get-tuple-element(%f0), index=1
  %f1 = (bf16[8,16]{1,0}, bf16[8,16]{1,0}) fusion(%h0, %h1, %p1, %p2), kind=kOutput, calls=%beside
  %kernel = (bf16[2,128,64]{2,1,0}, f32[2,128]{1,0}) custom-call(%p1), \
custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"note":"{\\"braces\\": 1}"
}}, metadata={op_name="kernel"}
  %h2 = bf16[8,16]{1,0} get-tuple-element(%f1), index=1
  %f2 = bf16[8,16]{1,0} fusion(%h0, %h2), kind=kCustom, calls=%done
  %one = u32[] constant(0)
  %t0 = (u32[], bf16[4,4]{1,0}) tuple(%one, %p4)
  %loop = (u32[], bf16[4,4]{1,0}) while(%t0), condition=%cond, \
body=%wide.windowed_dot_general_body_ag
  ROOT %f3 = f32[8,4]{1,0} fusion(%p3), kind=kCustom, calls=%all-reduce-scatter
}
""".replace("\\\n", "")


def test_a_collective_that_is_cut_up_counts_once_and_nothing_is_lost_behind_a_kernel():
    module = hlo.parse(HIDDEN)
    assert module.devices == 4
    found = {one.kind: one for one in hlo.transfers(module, module.entry)}
    assert hlo.summary(list(found.values())) == {
        "all-gather": (1, 8 * 16 * 2),
        "reduce-scatter": (1, 8 * 4 * 4),
        "collective-permute": (4, 4 * 4 * 4 * 2),  # from 0 to 8 by 2
    }
    # what one of four devices receives
    assert found["all-gather"].wire == 3 * 8 * 4 * 2
    assert found["reduce-scatter"].wire == 3 * 8 * 4 * 4
    assert found["collective-permute"].wire == 4 * 4 * 2
    assert found["collective-permute"].stands_for == "all-gather"


def test_of_a_collective_beside_a_product_the_product_counts_and_unknown_kernels_are_named():
    cost = hlo.costs.count(hlo.parse(HIDDEN))
    assert cost.flops == 2 * 8 * 8 * 16
    assert cost.unknown == (("tpu_custom_call", 1),)


def test_without_a_start_the_copies_count():
    module = hlo.parse(HIDDEN.replace('"flag_start":"-1"', '"flag_start":"2"'))
    gathers = [one for one in hlo.transfers(module, module.entry) if one.kind == "all-gather"]
    assert len(gathers) == 3  # too many rather than silently none


SUMS = """HloModule sums, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%own (q: f32[8,4], i: s32[]) -> f32[8,16] {
  %q = f32[8,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %none = f32[] constant(0)
  %zeros = f32[8,16]{1,0} broadcast(%none), dimensions={}
  %at = s32[] constant(0)
  ROOT %put = f32[8,16]{1,0} dynamic-update-slice(%zeros, %q, %at, %i)
}

%cut (z: f32[8,16], j: s32[]) -> f32[8,4] {
  %z = f32[8,16]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %at.1 = s32[] constant(0)
  ROOT %keep = f32[8,4]{1,0} dynamic-slice(%z, %at.1, %j), dynamic_slice_sizes={8,4}
}

ENTRY %main (p: f32[8,4], n: s32[], full: f32[8,16]) -> (f32[8,16], f32[8,4], f32[8,16]) {
  %p = f32[8,4]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %full = f32[8,16]{1,0} parameter(2)
  %mine = f32[8,16]{1,0} fusion(%p, %n), kind=kLoop, calls=%own
  %three = (f32[8,16]{1,0}, f32[8,16]{1,0}, f32[8,16]{1,0}) all-reduce(%mine, %full, %full), \
replica_groups={{0,1,2,3}}, to_apply=%add
  %r0 = f32[8,16]{1,0} get-tuple-element(%three), index=0
  %r1 = f32[8,16]{1,0} get-tuple-element(%three), index=1
  %r2 = f32[8,16]{1,0} get-tuple-element(%three), index=2
  %part = f32[8,4]{1,0} fusion(%r1, %n), kind=kLoop, calls=%cut
  ROOT %out = (f32[8,16]{1,0}, f32[8,4]{1,0}, f32[8,16]{1,0}) tuple(%r0, %part, %r2)
}
""".replace("\\\n", "")


def test_sums_that_stand_for_gathers_and_scatters_are_told_from_sums():
    module = hlo.parse(SUMS)
    found = hlo.transfers(module, module.entry)
    assert {one.stands_for for one in found} == {"all-gather", "reduce-scatter", ""}
    assert {one.wire for one in found} == {2 * 3 * 8 * 4 * 4}  # each at twice its bytes


# groups


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("{}", (tuple(range(8)),)),
        ("mesh['a'=4,'b'=2] {'a'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=4,'b'=2] {'b','a'}", ((0, 2, 4, 6, 1, 3, 5, 7),)),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,0,2) {'a'}", ((3, 0), (1, 2))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", ((0, 1), (2, 3))),
        # a part of an axis, as XLA's own tests spell it out
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("@mesh<a=8> {a:(1)2,a:(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_every_spelling_of_groups(text, groups):
    assert hlo.groups.groups_of(text, 8) == groups


def test_an_unknown_spelling_is_an_error():
    with pytest.raises(ValueError, match="unknown spelling"):
        hlo.groups.groups_of("<<0,1>>", 2)


def mesh_of(*sizes, names=("a", "b")):
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names[: len(sizes)], axis_types=kinds)


def test_collectives_of_a_real_program_by_hand():
    """Three trips of a loop, 4 × 2 devices, [16, 8] float32 on each: kinds, axes and bytes."""
    mesh = mesh_of(4, 2)

    def inside(x):
        def body(_, x):
            x = x + jnp.sum(jax.lax.all_gather(jnp.sin(x), "a"), 0)
            x = x + jnp.tile(jax.lax.psum_scatter(jnp.cos(x), "b", tiled=True), (2, 1))
            x = jax.lax.ppermute(x * 2, "b", [(0, 1), (1, 0)])
            return jax.lax.psum(x, ("a", "b")) / 8

        return jax.lax.fori_loop(0, 3, body, x)

    run = jax.shard_map(inside, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    text = jax.jit(run).lower(jnp.ones((16, 8))).compile().as_text()
    module, size = hlo.parse(text), 16 * 8 * 4
    found = {
        (one.kind, hlo.groups.axes_of(one.groups, mesh.shape)): (one.times, one.bytes, one.wire)
        for one in hlo.transfers(module, module.entry)
    }
    assert found == {
        ("all-gather", ("a",)): (3, 4 * size, 3 * size),
        ("reduce-scatter", ("b",)): (3, size // 2, size // 2),
        ("collective-permute", ("b",)): (3, size, size),
        ("all-reduce", ("a", "b")): (3, size, 2 * size * 7 // 8),
    }


# work


def cost_of(function, *shapes, **options):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    module = hlo.parse(jax.jit(function).lower(*args).compile().as_text())
    return hlo.costs.count(module, **options)


def test_a_product_in_a_scan_counts_as_often_as_it_runs():
    def run(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    cost = cost_of(run, (16, 32), (5, 32, 32))
    assert cost.flops == 5 * 2 * 16 * 32 * 32
    assert cost.bytes >= 5 * 32 * 32 * 4  # every weight is read once
    assert cost.bytes < 3 * 5 * 32 * 32 * 4 + 5 * 10 * 16 * 32 * 4, "a slice is not the whole stack"


def test_batched_products_and_the_dearest_branch():
    assert cost_of(jnp.matmul, (3, 8, 16), (3, 16, 4)).flops == 3 * 2 * 8 * 16 * 4

    def run(flag, x):
        return jax.lax.cond(flag[0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert cost_of(run, (1,), (32, 32)).flops == 2 * 2 * 32**3


def test_of_branches_without_products_either_can_count():
    def run(flag, x):
        return jax.lax.cond(flag[0] > 0, lambda x: jnp.sort(jnp.sort(x, 0), 1), lambda x: x + 1, x)

    most, least = (cost_of(run, (1,), (64, 64), dearest=dearest) for dearest in (True, False))
    assert most.flops == least.flops == 0
    assert most.bytes >= least.bytes + 2 * 64 * 64 * 4


CONVOLUTION = """HloModule conv

ENTRY %main (l: bf16[LEFT], r: bf16[RIGHT]) -> bf16[OUT] {
  %l = bf16[LEFT]{0} parameter(0)
  %r = bf16[RIGHT]{0} parameter(1)
  ROOT %c = bf16[OUT]{0} convolution(%l, %r), window={WINDOW}, dim_labels=LABELS
}
"""


@pytest.mark.parametrize(
    ("left", "right", "out", "window", "labels", "flops"),
    [
        # products as a TPU's compiler writes them: [4·4096, 4096] × [4096, 4096]
        ("4,4096,4096", "4096,4096,1", "4,4096,4096", "size=1", "0bf_oi0->0bf", 2 * 2**14 * 2**24),
        # a padded window over heads, each of which meets the input once: [2^14, 512] × [512, 1024]
        (
            *("4,4096,2,256,1", "8,128,2,256,1", "4,4096,8,128,1"),
            "size=1x8x2 pad=0_0x7_7x0_0 rhs_reversal=0x1x0",
            *("0b2f1_1o2i0->0b1f2", 2 * 2**14 * 512 * 1024),
        ),
        # one that sums over four rows: [32064, 2048] × [2048, 4096]
        ("4,512,32064", "4,512,4096", "32064,4096,1", "size=4", "0fb_0io->bf0", 2 * 32064 * 2**23),
        # an ordinary one: 3 × 3 on 8 × 8 without padding, 6 × 6 results, 5 → 7 features
        ("2,8,8,5", "3,3,5,7", "2,6,6,7", "size=3x3", "b01f_01io->b01f", 2 * 2 * 36 * 9 * 5 * 7),
        # padded by one, two apart: along each axis 2 + 3 + 3 + 3 of the 12 places lie inside
        (
            *("1,8,8,1", "3,3,1,1", "1,4,4,1"),
            *("size=3x3 stride=2x2 pad=1_1x1_1", "b01f_01io->b01f", 2 * 11 * 11),
        ),
    ],
)
def test_convolutions(left, right, out, window, labels, flops):
    text = CONVOLUTION
    for name, value in zip(
        ("LEFT", "RIGHT", "OUT", "WINDOW", "LABELS"),
        (left, right, out, window, labels),
        strict=True,
    ):
        text = text.replace(name, value)
    assert hlo.costs.count(hlo.parse(text)).flops == flops


@pytest.mark.parametrize(("name", "products"), [("fwd_segmented", 2), ("dkv_no", 4), ("dq_no", 3)])
def test_splash_kernels_by_formula(name, products):
    text = f"""HloModule kernel

ENTRY %main (q: bf16[2,8,1024,128], k: bf16[2,1024,128]) -> bf16[2,8,1024,128] {{
  %m = s8[1,2,2]{{2,1,0}} constant({{...}})
  %q = bf16[2,8,1024,128]{{3,2,1,0}} parameter(0)
  %k = bf16[2,1024,128]{{2,1,0}} parameter(1)
  ROOT %splash_mqa_{name} = bf16[2,8,1024,128]{{3,2,1,0}} custom-call(%m, %q, %k), \
custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q\\": 512, \\"block_kv\\": 512}}"
}}}}
}}
""".replace("\\\n", "")
    cost = hlo.costs.count(hlo.parse(text))
    # of 2 × 2 blocks of 512 the one above the diagonal is left out
    assert cost.flops == cost.kernels == products * 2 * 16 * 3 * 512**2 * 128
    assert cost.unknown == ()


def test_an_array_in_fast_memory_costs_no_traffic():
    text = """HloModule fast

ENTRY %main (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %y = f32[64,64]{1,0:T(8,128)S(1)} negate(%x)
  ROOT %z = f32[64,64]{1,0:T(8,128)} negate(%y)
}
"""
    assert hlo.costs.count(hlo.parse(text)).bytes == 2 * 64 * 64 * 4


QUARTERS = """HloModule quarters

ENTRY %main (x: bf16[2048,2048]) -> bf16[512,2048] {
  %x = bf16[2048,2048]{1,0:T(8,128)(2,1)} parameter(0)
  %slice-start = ((bf16[2048,2048]{1,0:T(8,128)(2,1)}), bf16[512,2048]{1,0:T(8,128)(2,1)S(1)}, \
s32[]{:S(2)}) slice-start(%x), slice={[0:512], [0:2048]}
  %slice-done = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} slice-done(%slice-start)
  %slice-start.1 = ((bf16[2048,2048]{1,0:T(8,128)(2,1)}), bf16[512,2048]{1,0:T(8,128)(2,1)}, \
s32[]{:S(2)}) slice-start(%x), slice={[512:1024], [0:2048]}
  ROOT %slice-done.1 = bf16[512,2048]{1,0:T(8,128)(2,1)} slice-done(%slice-start.1)
}
""".replace("\\\n", "")


def test_an_asynchronous_slice_reads_its_piece_and_writes_only_to_memory():
    piece = 512 * 2048 * 2
    assert hlo.costs.count(hlo.parse(QUARTERS)).bytes == piece + 2 * piece


@pytest.mark.parametrize(("to", "of"), [("S(1)", ""), ("", "S(1)"), ("", "")])
def test_an_asynchronous_copy_counts_each_side_by_its_memory(to, of):
    text = f"""HloModule copied

ENTRY %main (x: f32[1,1024]) -> f32[1,1024] {{
  %x = f32[1,1024]{{1,0:T(1,128){of}}} parameter(0)
  %copy-start = (f32[1,1024]{{1,0:T(1,128){to}}}, f32[1,1024]{{1,0:T(1,128){of}}}, \
u32[]{{:S(2)}}) copy-start(%x)
  ROOT %copy-done = f32[1,1024]{{1,0:T(1,128){to}}} copy-done(%copy-start)
}}
"""
    assert hlo.costs.count(hlo.parse(text)).bytes == (2 - (to + of).count("S")) * 1024 * 4


COMBINED = """HloModule combined, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (p: f32[1024], q: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  %q = f32[1024]{0} parameter(1)
  %s = STARTED(%p, %q), replica_groups={{0,1,2,3}}, REST
  ROOT %r = f32[1024]{0} negate(%p)
}
"""


TWO, WIDE, PART = (f"(f32[{size}]{{0}}, f32[{size}]{{0}})" for size in (1024, 4096, 256))


@pytest.mark.parametrize(
    ("started", "rest", "result", "wire"),
    [
        (f"{TWO} all-reduce-start", "to_apply=%add", 2, 2 * 2 * 3 / 4),
        (f"({TWO}, {WIDE}, u32[], u32[]) all-gather-start", "dimensions={0}", 8, 6),
        (f"({TWO}, {PART}, u32[]) reduce-scatter-start", "dimensions={0}", 1 / 2, 3 / 2),
    ],
)
def test_a_combined_asynchronous_collective_counts_all_its_results(started, rest, result, wire):
    """In units of one of the two operands of 4 KiB."""
    module = hlo.parse(COMBINED.replace("STARTED", started).replace("REST", rest))
    (found,) = hlo.transfers(module, module.entry)
    assert found.bytes == result * 4096 and found.wire == wire * 4096
    assert hlo.costs.count(module).bytes == (2 + result + 2) * 4096
