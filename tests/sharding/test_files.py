import dataclasses

import pytest

import sharding

POD = """
[pod]
axes = { slice = 2, fsdp = -1, tensor = 4 }
rows = ["slice", "fsdp"]

[pod.rules]
embed = "fsdp"
heads = "tensor"
vocab = ["fsdp", "tensor"]

[long]
axes = { sequence = -1 }
rows = []
tokens = ["sequence"]
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.toml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_file_holds_layouts(write):
    path = write(POD)
    pod = sharding.Layout(
        name="pod",
        axes=(("slice", 2), ("fsdp", -1), ("tensor", 4)),
        rules={"embed": "fsdp", "heads": "tensor", "vocab": ("fsdp", "tensor")},
        rows=("slice", "fsdp"),
    )
    found = sharding.load_layouts(path)
    assert list(found) == ["pod", "long"] and found["pod"] == pod
    assert found["long"].tokens == ("sequence",)
    assert sharding.get_layout(f"{path}:pod") == pod
    assert sharding.get_layout(f"{path}:pod:tensor=2,slice=4") == pod.with_sizes(tensor=2, slice=4)


def test_the_only_layout_of_a_file_needs_no_name(write):
    path = write('[a]\naxes = { data = -1 }\nrows = ["data"]\n')
    assert sharding.get_layout(str(path)).name == "a"
    with pytest.raises(ValueError, match=r"which of them\? .* holds: pod, long; give .*:NAME"):
        sharding.get_layout(str(write(POD)))
    with pytest.raises(ValueError, match=r"there is no 'pot'; .* holds: pod, long"):
        sharding.get_layout(f"{write(POD)}:pot")


def test_layouts_are_written_as_they_are_read(write):
    odd = dataclasses.replace(
        sharding.get_layout("hsdp"), name="v5e.2x", rules={"mlp": (), "embed": ("slice", "fsdp")}
    )
    layouts = {**sharding.LAYOUTS, odd.name: odd}
    assert sharding.load_layouts(write(sharding.to_toml(*layouts.values()))) == layouts
    with pytest.raises(ValueError, match="'hsdp' is given twice"):
        sharding.to_toml(sharding.get_layout("hsdp"), sharding.get_layout("hsdp"))


def test_a_foreign_models_axes_are_declared(write):
    path = write('[a]\naxes = { data = -1 }\nrows = ["data"]\nrules = { state = "data" }\n')
    with pytest.raises(ValueError, match=r"'a': a rule for 'state', which is no logical axis"):
        sharding.load_layouts(path)
    known = (*sharding.LOGICAL_AXES, "state")
    assert sharding.load_layouts(path, logical_axes=known)["a"].rules == {"state": "data"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no layout"),
        ("a = 1\n", "'a' stands outside a layout"),
        ("[a\n", r"is no valid TOML: .*line 1"),
        ("axes = { fsdp = -1 }\n", "'axes' stands outside a layout"),
        ('[a]\naxes = { fsdp = -1 }\nrow = ["fsdp"]\n', "layout 'a': unknown key 'row'; .*: axes"),
        ("[a]\naxes = { fsdp = -1 }\n", "layout 'a': no rows"),
        ("[a]\nrows = []\n", "layout 'a': no axes"),
        ("[a]\nrows = []\naxes = 3\n", "layout 'a': axes is no table but 3"),
        ("[a]\nrows = 3\naxes = { fsdp = -1 }\n", "layout 'a': rows is 3; give a mesh axis"),
        ("[a]\nrows = [3]\naxes = { fsdp = -1 }\n", r"layout 'a': rows is \[3\]"),
        ("[a]\nrows = []\naxes = { fdsp = -1 }\n", "layout 'a': unknown mesh axis 'fdsp'"),
        ("[a]\nrows = []\naxes = { fsdp = 0 }\n", "'fsdp' has size 0"),
        ("[a]\nrows = []\naxes = { fsdp = 'x' }\n", "'fsdp' has size 'x'"),
        ("[a]\nrows = []\naxes = { fsdp = -1, data = -1 }\n", "only one mesh axis"),
        (
            "[a]\nrows = []\naxes = { fsdp = -1 }\nrules = { embd = 'fsdp' }\n",
            "layout 'a': a rule for 'embd', which is no logical axis; choose from: layers",
        ),
        (
            "[a]\nrows = []\naxes = { fsdp = -1 }\nrules = { embed = 'data' }\n",
            "rule for 'embed': no mesh axis 'data'",
        ),
        (
            "[a]\nrows = []\naxes = { fsdp = -1 }\nrules = { embed = 1 }\n",
            "layout 'a': embed is 1; give a mesh axis",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named(write, text, message):
    with pytest.raises(ValueError, match=rf"mine.toml.*{message}"):
        sharding.load_layouts(write(text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*none.toml: No such file"):
        sharding.get_layout(f"{tmp_path}/none.toml:a")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bytes.toml is no valid TOML"):
        sharding.get_layout(f"{tmp_path}/bytes.toml:a")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fsdp:tensor=2", "'fsdp' has no mesh axis 'tensor'"),
        ("fsdp_tensor:tensor=two", "sizes 'tensor=two' are not of the form"),
        ("fsdp_tensor:tensor=0", "'tensor' has size 0"),
        ("fsdp_tensor:tensor=2,", "are not of the form"),
        ("fsdp_tensor:tensor=2, tensor=4", "'tensor' is given twice in 'tensor=2, tensor=4'"),
        ("fsdp:self=4", "'fsdp' has no mesh axis 'self'"),
        ("fsdp_tensor:tensor", "unknown name 'fsdp_tensor:tensor'"),
        (":tensor=2", "unknown name ':tensor=2'|unknown name ''"),
    ],
)
def test_sizes_that_do_not_fit_a_name(name, message):
    with pytest.raises(ValueError, match=message):
        sharding.get_layout(name)
