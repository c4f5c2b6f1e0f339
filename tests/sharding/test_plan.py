"""The planner: its counts against hand arithmetic, its refusals, its files."""

import dataclasses
import importlib.util
import json
import sys

import jax
import numpy as np
import pytest

import rlhf_jax as rl
import sharding
from sharding import hardware, hlo, plan, planner

CONFIG = rl.models.DecoderConfig(
    vocab_size=1040,
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    tie_embeddings=False,
)
SIZES = plan.Sizes(rows=16, length=192, prompt=64, group=2, chunk=16, micro_batches=2)
REQUEST = plan.Request(
    name="tiny",
    config=CONFIG,
    topology="cpu:8",
    layout=sharding.get_layout("fsdp_tensor"),
    sizes=SIZES,
    programs=("train",),
)
LAYER = 64 * (8 * (2 * 8 + 2 * 4) + 3 * 128)  # weights that are multiplied
HEAD = 1040 * 64


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A plan of a train step, and the folder that keeps it."""
    folder = tmp_path_factory.mktemp("plans")
    return plan.make(REQUEST, folder), folder


def weights(config):
    norms = config.hidden_size * (2 * config.num_layers + 1)
    return config.num_layers * LAYER + 2 * HEAD + norms


@pytest.mark.long
def test_parameters_and_optimizer_are_those_of_hand_arithmetic(trained):
    held = trained[0]["held"]["train"]
    # split over fsdp 4 × tensor 2; norms are split over fsdp alone
    norms = 64 * 7 * 4 // 4
    split = (weights(CONFIG) - 64 * 7) * 4 // 8
    assert held["parameters"] == split + norms
    assert held["optimizer"] == 2 * held["parameters"] + 3 * 4  # two moments, three counters


@pytest.mark.long
def test_flops_of_a_train_step_are_those_of_hand_arithmetic(trained):
    found = trained[0]["programs"]["train"]
    tokens, new, rows = 16 * 192, 16 * 128, 16
    body = 2 * 3 * LAYER * tokens
    # forward, again for the backward pass but for a layer's last product, and twice backward
    body = 4 * body - 2 * 3 * 64 * 128 * tokens
    # scores and values, as often: prompts see each other, completions everything
    attention = 4 * (2 * 2 * 3 * 64 * rows * (64 * 64 + 128 * 192))
    head = 6 * 2 * HEAD * new  # forward, again, and two gradients in two terms each
    assert found["flops"] == (body + attention + head) / 8
    # 6·N·T and half a square: nothing twice
    model = 6 * (3 * LAYER * tokens + HEAD * new) + 3 * (2 * 2 * 3 * 64 * rows * 192**2) / 2
    assert found["model flops"] == model / 8
    assert found["not counted"] == {}


@pytest.mark.long
def test_a_step_is_planned_as_it_must_be(trained):
    made, _ = trained
    found = made["programs"]["train"]
    assert found["updated in place"]
    assert 0 < found["largest logits"] <= found["all logits"] / 4
    axes = {(one["kind"], tuple(one["axes"])) for one in found["collectives"]}
    assert {("all-gather", ("fsdp",)), ("all-reduce", ("tensor",))} <= axes
    assert all(one["received"] > 0 for one in found["collectives"])
    sizes = found["memory"]
    # of a device's rows; the step takes neither group ids nor the sampler's log-probs
    batch = 16 // 4 * (192 * (4 + 1 + 1 + 2 * 4) + 2 * 4)
    assert sizes["arguments"] == made["state"] + batch
    assert sizes["temporaries"] > 0
    assert "fits" not in found and made["hbm"] is None  # nothing is known of host devices
    least = made["least exchange"]
    # per micro-batch two gathers of what fsdp splits, but for the embedding; bfloat16; 3 of 4 parts
    own = (weights(CONFIG) - 64 * 7) // 2 + 64 * 7
    assert least["scattered"] == own * 2 * 3 // 4
    assert least["gathered"] == 2 * 2 * (own - HEAD // 2) * 2 * 3 // 4


@pytest.mark.long
def test_tables_files_and_the_picture(trained, tmp_path, monkeypatch):
    made, folder = trained
    text = planner.report.text(made)
    assert "fsdp=4, tensor=2 (8 × cpu)" in text
    assert "| train step: all-gather | fsdp |" in text
    assert "Host devices: their memory, bandwidth and links are not known" in text
    planner.report.draw(made, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
    # what is kept is not compiled again
    monkeypatch.setattr(planner.programs, "compile_train", None)
    assert plan.make(REQUEST, folder) == json.loads(json.dumps(made))
    other = dataclasses.replace(REQUEST, remat="none")
    assert other.key() != REQUEST.key()


@pytest.mark.slow
@pytest.mark.fault(57)
def test_generation_by_hand_and_no_weights_move_under_tensor():
    layout = sharding.get_layout("tensor").with_sizes(tensor=4)
    request = dataclasses.replace(
        REQUEST, layout=layout, programs=("prefill", "generate", "round"), topology="cpu:4"
    )
    made = plan.make(request)
    prompts, pairs = 8, 2 * 2 * 3 * 64
    prefill = 2 * 3 * LAYER * prompts * 64 + pairs * prompts * 64**2
    assert made["programs"]["prefill"]["flops"] == prefill / 4
    token = 16 * (2 * (3 * LAYER + HEAD) + pairs * 192)
    for name in ("generate", "round"):
        found = made["programs"][name]
        assert found["flops"] == token / 4
        assert found["moved weights"] == []
        assert found["copied a token"] == 0
        assert made["held"][name]["cache"] * 4 == found["cache of all"]
        sums = [one for one in found["collectives"] if one["kind"] == "all-reduce"]
        # the embedding's lookup, and two sums a layer
        assert sum(one["runs"] for one in sums) >= 1 + 2 * CONFIG.num_layers
        assert all(one["axes"] == ["tensor"] for one in found["collectives"])
    assert made["programs"]["prefill"]["memory"]["peak"] > made["held"]["prefill"]["parameters"]


def run(capsys, *flags):
    code = plan.main([str(flag) for flag in flags])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    return tmp_path


@pytest.mark.long
def test_the_command_line(capsys, model, tmp_path):
    flags = ("--model", model, "--topology", "cpu:8", "--layout", "fsdp", "--programs", "prefill")
    sizes = ("--rows", 32, "--group", 4, "--length", 48, "--prompt", 16)
    file = tmp_path / "out" / "plan.json"
    code, out, err = run(capsys, *flags, *sizes, "--json", file)
    assert (code, err) == (0, "")
    assert "| prefill |" in out
    assert json.loads(file.read_text())["programs"]["prefill"]["flops"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topology", "v9:4x4"], "unknown chip 'v9' in 'v9:4x4'; known: v4, v5e"),
        (["--topology", "v5e"], "got 'v5e'; write chip and shape"),
        (["--topology", "cpu:512"], "'cpu:512', but jax has 8 host devices; set XLA_FLAGS"),
        (["--layout", "nonsense"], "unknown name 'nonsense'; known layouts: "),
        (["--layout", "dp", "--tensor", "2"], "layout 'dp' has no mesh axis 'tensor'"),
        (["--layout", "tensor"], "axis 'kv_heads' has size 4, which mesh axis 'tensor' of size 8"),
        (["--rows", "4", "--group", "1", "--layout", "dp"], "4 do not divide over data = 8"),
        (["--micro-batches", "8", "--layout", "dp"], "(of a micro-batch): 2 do not divide"),
        (["--micro-batches", "3"], "--micro-batches: 3 does not divide --rows 16"),
        (["--prompt", "64"], "--prompt: 64 of --length 32 tokens"),
        (["--rows", "0"], "--rows: got 0; it must be at least 1"),
        (["--tensor", "0"], "--tensor: got 0"),
        (["--slices", "2"], "--slices: host devices are one slice"),
        (["--slices", "0"], "--slices: got 0"),
        (["--programs", "train,nothing"], "--programs: unknown nothing; known: train"),
        (["--model", "no/such/folder"], "no file or folder 'no/such/folder'"),
        (["--search"], "--layout: --search chooses that itself"),
        (["--topology", "cpu:0"], "got 'cpu:0'; write chip and shape"),
        (["--layout", "fsdp:self=4"], "layout 'fsdp' has no mesh axis 'self'"),
        (["--rows", "many"], "argument --rows: invalid int value: 'many'"),
        (["--try-micro-batches", "2,0"], "--try-micro-batches: got 0; it must be at least 1"),
        (["--compile", "0"], "--compile: got 0; it must be at least 1"),
        (["--json", "."], "--json: . is a folder; name a file"),
        (["--plot", "plan.xyz"], "--plot: plan.xyz has none of the known endings: "),
        (["--cache", __file__], "test_plan.py is no folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, model, flags, message):
    base = ("--model", model, "--topology", "cpu:8", "--layout", "fsdp_tensor")
    sizes = ("--rows", 16, "--group", 2, "--length", 32, "--prompt", 16)
    code, out, err = run(capsys, *base, *sizes, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    "flags",
    [
        ("--tensor", 2),
        ("--programs", "train"),
        ("--remat", "full"),
        ("--micro-batches", 2),
    ],
)
def test_a_search_takes_no_flag_that_it_would_not_heed(capsys, model, flags):
    code, _, err = run(capsys, "--model", model, "--topology", "cpu:8", "--search", *flags)
    assert code == 2 and f"{flags[0]}: --search chooses that itself" in err


def test_a_search_on_host_devices_says_what_is_missing(capsys, model):
    code, _, err = run(capsys, "--model", model, "--topology", "cpu:8", "--search")
    assert code == 2 and "of 'cpu:8' neither memory nor speed is known" in err


def test_a_file_that_cannot_be_written_is_one_line(capsys, model, monkeypatch):
    monkeypatch.setattr(plan, "make", lambda *_: {})
    monkeypatch.setattr(planner.report, "text", str)
    code, _, err = run(capsys, "--model", model, "--json", model / "config.json" / "plan.json")
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1


def test_figures_are_written_before_the_picture(capsys, model, monkeypatch):
    def fails(*_):
        raise OSError("no space left")

    monkeypatch.setattr(plan, "make", lambda *_: {"figures": 1})
    monkeypatch.setattr(planner.report, "text", str)
    monkeypatch.setattr(planner.report, "draw", fails)
    files = ("--json", model / "new" / "plan.json", "--plot", model / "plan.png")
    code, _, err = run(capsys, "--model", model, *files)
    assert (code, err) == (2, "error: no space left\n")
    assert json.loads((model / "new" / "plan.json").read_text()) == {"figures": 1}


def refused(monkeypatch, reason):
    def fails(*_):
        raise jax.errors.JaxRuntimeError(reason)

    monkeypatch.setattr(planner.programs, "compile_train", fails)


def test_a_result_that_was_broken_off_is_made_again(tmp_path, monkeypatch):
    refused(monkeypatch, "RESOURCE_EXHAUSTED: Used 23.47G of 15.75G hbm")
    file = tmp_path / f"{REQUEST.key()}.json"
    file.write_text('{"model": "ti')
    made = plan.make(REQUEST, tmp_path)
    assert json.loads(file.read_text()) == json.loads(json.dumps(made))
    assert [one.name for one in tmp_path.iterdir()] == [file.name]


def test_a_failure_that_is_not_of_memory_is_not_kept(tmp_path, monkeypatch):
    refused(monkeypatch, "INTERNAL: something else")
    assert "failed" in plan.make(REQUEST, tmp_path)["programs"]["train"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["LIBTPU_INIT_ARGS", "XLA_FLAGS"])
def test_compiler_flags_give_another_result(monkeypatch, name):
    before = REQUEST.key()
    monkeypatch.setenv(name, "--xla_something=1")
    assert REQUEST.key() != before


def test_without_libtpu_it_says_so(capsys, model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = run(capsys, "--model", model, "--topology", "v5e:4x8")
    assert code == 2
    assert "'v5e:4x8' needs libtpu, which is not installed" in err


def test_without_matplotlib_the_plot_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="matplotlib is not installed"):
        planner.report.draw({}, tmp_path / "plan.png")


@pytest.mark.parametrize("name", plan.MODELS)
def test_built_in_models_have_the_parameters_of_their_names(name):
    count = rl.partition.count(rl.models.Decoder(plan.model_of(name)).shapes())
    published = {"llama3-8b": 8.03e9, "qwen3-8b": 8.19e9, "llama3-70b": 70.6e9}
    assert count == pytest.approx(published[name], rel=2e-3)


def test_a_step_of_an_8b_model_by_its_parameters():
    """6·N·T without attention, to a few percent: the embedding is looked up, not multiplied."""
    flops = planner.measure.model_flops(
        plan.MODELS["llama3-8b"], plan.Sizes(rows=64, length=512, prompt=1)
    )
    assert flops["train"] == pytest.approx(6 * 7.5e9 * 64 * 512, rel=0.03)
    assert flops["token"] == pytest.approx(2 * 7.5e9 * 64, rel=0.03)


@pytest.mark.parametrize(
    "told",
    [
        "hbm. Used 23.47G of 15.75G hbm. Exceeded hbm capacity by 7.72G.",
        "the total memory required for HLO temporaries (23.47G) exceeds available HBM (15.75G).",
    ],
)
def test_what_does_not_fit_says_what_it_needs(told):
    found = planner.measure.refusal(
        jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: E1000: {told}")
    )
    assert found["needs"] == int(23.47 * 2**30) and found["of"] == int(15.75 * 2**30)
    assert found["failed"].startswith("RESOURCE_EXHAUSTED")
    assert "needs" not in planner.measure.refusal(RuntimeError("something else\nlong"))


# time


class Chip:
    """A device description with a place."""

    platform, device_kind = "tpu", "made up"

    def __init__(self, coords, slice_index=0):
        self.coords, self.slice_index = coords, slice_index


BETWEEN = """HloModule apart, num_partitions=4

ENTRY %main (x: f32[1024,4]) -> f32[1024,4] {
  %x = f32[1024,4]{1,0} parameter(0)
  %t = token[] after-all()
  %s = (f32[1024,4]{1,0}, u32[], token[]) send(%x, %t), is_host_transfer=true, \
frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %r = (f32[1024,4]{1,0}, u32[], token[]) recv(%t), is_host_transfer=true, \
frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %d = (f32[1024,4]{1,0}, token[]) recv-done(%r), is_host_transfer=true
  ROOT %y = f32[1024,4]{1,0} get-tuple-element(%d), index=0
}
""".replace("\\\n", "")


def test_the_roofline_by_hand():
    """An all-gather of 64 KiB on 4 × 4 chips: along one torus axis half of the links carry it."""
    text = """HloModule gather, num_partitions=16

ENTRY %main (x: f32[1024,4]) -> f32[1024,16] {
  %x = f32[1024,4]{1,0} parameter(0)
  ROOT %y = f32[1024,16]{1,0} all-gather(%x), replica_groups=GROUPS, dimensions={1}
}
"""
    chip = hardware.CHIPS["v5e"]
    mesh = type("Mesh", (), {})()
    places = [(i // 4, i % 4, 0) for i in range(16)]

    class Devices(list):
        @property
        def flat(self):
            return self

    mesh.devices = Devices(Chip(place) for place in places)
    received = 3 * 1024 * 4 * 4
    one_axis = hlo.parse(text.replace("GROUPS", "[4,4]<=[16]"))
    both = hlo.parse(text.replace("GROUPS", "{{0,1,4,5},{2,3,6,7},{8,9,12,13},{10,11,14,15}}"))
    cost = hlo.costs.count(one_axis)
    assert cost.bytes == 5 * 1024 * 4 * 4
    clocks = planner.measure.clocks(one_axis, cost, chip, mesh)
    assert clocks.ici == pytest.approx(received / 100e9)
    assert clocks.memory == pytest.approx(cost.bytes / 819e9)
    assert clocks.network == clocks.arithmetic == 0
    assert planner.measure.clocks(both, cost, chip, mesh).ici == pytest.approx(received / 200e9)
    # what another slice sends comes through the host's runtime
    apart = hlo.parse(BETWEEN)
    found = planner.measure.clocks(apart, hlo.costs.count(apart), chip, mesh)
    assert found.ici == 0
    assert found.network == pytest.approx(1024 * 4 * 4 / (25e9 / 8))
    assert found.bound_by == "network"
    # v4's is not documented: no clock rather than none of the time
    unknown = planner.measure.clocks(apart, hlo.costs.count(apart), hardware.CHIPS["v4"], mesh)
    assert unknown.network is None
    assert unknown.longest == unknown.together == unknown.memory


def test_between_slices_is_an_axis_of_the_mesh():
    mesh = type("Mesh", (), {})()
    mesh.axis_names, mesh.shape = ("data", "fsdp"), {"data": 2, "fsdp": 4}
    mesh.devices = np.array([[Chip((i, 0, 0), slice) for i in range(4)] for slice in range(2)])
    (found,) = planner.measure.exchanges(hlo.parse(BETWEEN), mesh)
    assert (found["kind"], found["axes"], found["runs"]) == ("all-reduce", ["data"], 1)
    assert found["received"] == 1024 * 4 * 4


def test_a_loop_whose_trips_are_not_known_is_told():
    def run(x):
        def halved(x):
            return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)

        return jax.lax.fori_loop(0, 3, lambda _, x: halved(x) * 2, x)

    compiled = jax.jit(run).lower(jax.ShapeDtypeStruct((8, 8), np.float32)).compile()
    mesh = sharding.make_mesh(sharding.LAYOUTS["dp"], jax.devices()[:1])
    found, module = planner.measure.program_figures(compiled, mesh, None)
    (name,) = found["open loops"]
    assert name == hlo.outer_loop(module).name
    made = {"remarks": [], "programs": {"train": found}}
    assert any(name in line and "once" in line for line in planner.report._remarks(made))


def test_half_a_chip_is_a_device_of_v4():
    devices = [Chip((0, 0, 0)), Chip((0, 0, 0)), Chip((1, 0, 0)), Chip((1, 0, 0))]
    assert plan.known_of("v4:2x1x1", devices).hbm == 16 * 2**30
    assert plan.known_of("v5e:2x2", devices[::2]).hbm == 16 * 2**30


@pytest.mark.parametrize(
    ("failed", "peak", "fits"), [(False, 5.7, True), (False, 5.8, False), (True, 5.7, False)]
)
def test_generation_fits_beside_the_state_if_all_of_it_does(monkeypatch, failed, peak, fits):
    """10 GiB of state on a v5e, of whose 16 GiB the compiler grants 15.75."""

    def generated(placed, name, chip, flops):
        if failed and name == "round":
            return {"failed": "RESOURCE_EXHAUSTED"}, 0
        return {"memory": {"peak": int(peak * 2**30)}}, 0

    def trained(*_):
        return {"figures": {}, "held": {}, "state": 10 * 2**30}

    monkeypatch.setattr(planner.make, "_generation", generated)
    monkeypatch.setattr(planner.make, "_train", trained)
    monkeypatch.setattr(planner.make, "devices_of", lambda *_: jax.devices()[:8])
    monkeypatch.setattr(planner.make, "known_of", lambda *_: hardware.CHIPS["v5e"])
    request = dataclasses.replace(REQUEST, topology="v5e:2x4")
    made = plan.make(dataclasses.replace(request, programs=("train", "prefill", "round")))
    assert made["fits beside the state"] is fits


# the search


def test_the_search_leaves_out_what_cannot_work():
    base = dataclasses.replace(
        REQUEST, sizes=dataclasses.replace(SIZES, micro_batches=1), topology="v5e:2x4"
    )
    chip = dataclasses.replace(hardware.CHIPS["v5e"], granted=4 * 2**20)
    found, left_out = planner.search.candidates(
        base, jax.devices()[:8], chip, micro=(1, 2, 4), remat=("full",)
    )
    ways = {(one.request.layout.name, one.request.sizes.micro_batches) for one in found}
    assert ("fsdp", 2) in ways
    assert ("fsdp", 4) not in ways  # 4 rows over 8 devices
    reasons = dict(left_out)
    assert any("do not divide" in why for why in reasons.values())
    assert any("'kv_heads' has size 4" in why for why in reasons.values())  # tensor 8
    assert len(found) > 2
    assert [one.rough for one in found] == sorted(one.rough for one in found)
    tight = dataclasses.replace(chip, granted=2**18)
    found, left_out = planner.search.candidates(
        base, jax.devices()[:8], tight, micro=(1,), remat=("full",)
    )
    assert found == [] and any("needs at least" in why for _, why in left_out)


def candidates(base, **choices):
    devices, chip = jax.devices()[:8], hardware.CHIPS["v5e"]
    found, left_out = planner.search.candidates(base, devices, chip, micro=(1,), **choices)
    return {f"{one.request.layout.name} {one.request.remat}": one for one in found}, left_out


def test_what_the_search_needs_at_least_is_a_lower_bound():
    """State and kept inputs of the layers: a part of a row where tokens are split over devices."""
    base = dataclasses.replace(
        REQUEST, sizes=dataclasses.replace(SIZES, micro_batches=1), topology="v5e:2x4"
    )
    found, _ = candidates(base, remat=("full", "offload"))
    rows, inputs = SIZES.rows, 2 * 3 * 192 * 64
    assert found["fsdp full"].least == found["fsdp full"].state + rows // 8 * inputs
    assert found["sequence full"].least == found["sequence full"].state + rows // 4 * inputs // 2
    assert found["fsdp offload"].least == found["fsdp offload"].state  # they lie in host memory


def test_least_exchange_where_weights_are_copied_and_where_tokens_are_split():
    def least(name):
        placed = planner.programs.place_train(
            CONFIG, sharding.LAYOUTS[name], jax.devices()[:8], dataclasses.replace(SIZES, rows=32)
        )
        return planner.measure.least_exchange(placed)

    count, looked_up = weights(CONFIG), HEAD
    # hsdp: 3 of 4 parts come from the slice, and the own part's sum with the other slice
    assert least("hsdp") == {
        "gathered": 2 * 2 * 2 * (count - looked_up) * 3 // 4,
        "scattered": 2 * count * 3 // 4 + 2 * 2 * count // 4 // 2,
    }
    # sequence: weights lie over all eight devices
    assert least("sequence") == {
        "gathered": 2 * 2 * 2 * (count - looked_up) * 7 // 8,
        "scattered": 2 * count * 7 // 8,
    }


@pytest.mark.parametrize("whole", [False, True])
def test_the_search_can_lay_heads_whole(whole):
    base = dataclasses.replace(
        REQUEST,
        sizes=dataclasses.replace(SIZES, micro_batches=1),
        topology="v5e:2x4",
        whole_heads=whole,
    )
    found, left_out = candidates(base, remat=("full",))
    assert ("tensor full" in found) == whole
    assert any("'kv_heads' has size 4" in why for _, why in left_out) == (not whole)


def test_tokens_that_are_split_take_plain_attention():
    config = dataclasses.replace(CONFIG, head_dim=128)
    base = dataclasses.replace(REQUEST, config=config, topology="v5e:2x4")
    assert base.kernel() == "splash"
    split = dataclasses.replace(base, layout=sharding.get_layout("sequence"))
    assert split.kernel() == "xla"


def test_the_search_ranks_what_fits_by_its_estimate(monkeypatch):
    """Compiling is stood in for: every way takes as long as its name says."""
    seconds = {"fsdp": 2.0, "dp": 1.0, "fsdp_tensor": 3.0, "tensor": 4.0}

    def made(request, cache):
        name = request.layout.name
        train = {
            "fits": name != "dp",
            "estimate": seconds[name],
            "without overlap": seconds[name],
            "bound by": "ici",
            "estimated mfu": 0.5,
            "memory": {"peak": 2**30},
        }
        return {"programs": {"train": train}}

    known = {name: sharding.LAYOUTS[name] for name in seconds}
    monkeypatch.setattr(sharding, "LAYOUTS", known)
    monkeypatch.setattr(planner.search, "make", made)
    monkeypatch.setattr(planner.search, "devices_of", lambda *_: jax.devices()[:8])
    monkeypatch.setattr(planner.search, "known_of", lambda *_: hardware.CHIPS["v5e"])
    told = []
    options = dict(micro=(1,), remat=("full",), tell=told.append)
    found = planner.search.ranked(dataclasses.replace(REQUEST, topology="v5e:2x4"), **options)
    names = [one["told"].split(",")[0] for one in found["ranked"]]
    assert names == ["fsdp", "fsdp_tensor tensor 2", "fsdp_tensor tensor 4"]
    assert [one["told"].split(",")[0] for one in found["misfits"]] == ["dp"]
    assert "1. fsdp" in planner.search.table(found)
    assert "Does not fit: dp" in planner.search.table(found)
    assert told
    few = planner.search.ranked(dataclasses.replace(REQUEST, topology="v5e:2x4"), **options, most=1)
    assert len(few["waiting"]) == 3


# with the TPU's compiler


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_the_tpu_compiler_agrees():
    """FLOPs by hand, memory as the compiler says, no weights in the loop of a tensor layout."""
    config = dataclasses.replace(
        CONFIG,
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=2048,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
    )
    request = dataclasses.replace(
        REQUEST,
        config=config,
        topology="v5e:2x4",
        layout=sharding.get_layout("tensor"),
        sizes=plan.Sizes(rows=16, length=512, prompt=256, group=2),
        programs=("train", "round"),
    )
    try:
        made = plan.make(request)
    except ValueError as error:
        if "libtpu open" in str(error):
            pytest.skip("another process has libtpu open")
        raise
    train, token = made["programs"]["train"], made["programs"]["round"]
    layer = 1024 * (128 * (2 * 16 + 2 * 8) + 3 * 2048)
    body = (4 * layer - 1024 * 2048) * 2 * 3 * 16 * 512
    head = 6 * 2 * 2048 * 1024 * 16 * 256
    assert train["flops"] - train["kernel flops"] == pytest.approx((body + head) / 8, rel=0.03)
    assert train["kernel flops"] == 11 * 2 * 3 * 16 * 16 * 512**2 * 128 / 8
    assert train["fits"] and train["estimate"] > 0 and 0 < train["estimated mfu"] < 1
    assert train["updated in place"]
    assert token["moved weights"] == [] and token["copied a token"] == 0
    weights_read = made["held"]["round"]["parameters"]
    assert weights_read * 0.8 < token["bytes"]
    assert made["generation beside the state"] > made["state"]
    assert "by formula" in planner.report.text(made)
