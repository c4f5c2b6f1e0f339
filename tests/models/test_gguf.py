import struct

import numpy as np
import pytest

import rlhf_jax as rl


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_bytes(tensors, metadata=b"", pairs=0, *, version=3, align=32):
    """A GGUF file of (name, dims fastest first, storage type, payload)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), pairs) + metadata
    payload = b""
    for name, dims, kind, raw in tensors:
        head += text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        head += struct.pack("<IQ", kind, len(payload))
        payload += raw + b"\0" * (-len(raw) % align)
    return head + b"\0" * (-len(head) % align) + payload


@pytest.fixture
def write(tmp_path):
    def make(*args, **options):
        path = tmp_path / "a.gguf"
        path.write_bytes(gguf_bytes(*args, **options))
        return path

    return make


def test_float_tensors_and_their_shape_order(write):
    values = np.arange(6, dtype=np.float32)
    path = write(
        [
            ("wide", (3, 2), 0, values.tobytes()),
            ("half", (6,), 1, values.astype(np.float16).tobytes()),
        ],
        version=2,
    )
    gguf = rl.models.read_gguf(path)
    assert isinstance(gguf, rl.models.GGUF)
    np.testing.assert_array_equal(gguf.tensor("wide"), values.reshape(2, 3))
    np.testing.assert_array_equal(gguf.tensor("half"), values)
    assert gguf.tensors["wide"].shape == (2, 3)


def test_quantised_blocks_by_hand(write):
    rng = np.random.default_rng(0)
    scales, lows = np.float16([0.5, -0.25]), np.float16([1.0, -2.0])
    eight = rng.integers(-128, 128, (2, 32)).astype(np.int8)
    four = rng.integers(0, 16, (2, 32)).astype(np.uint8)
    q8 = b"".join(scales[i].tobytes() + eight[i].tobytes() for i in range(2))
    q4 = b"".join(
        scales[i].tobytes() + lows[i].tobytes() + (four[i, :16] | four[i, 16:] << 4).tobytes()
        for i in range(2)
    )
    gguf = rl.models.read_gguf(write([("q8", (32, 2), 8, q8), ("q4", (64,), 3, q4)]))
    wide = scales.astype(np.float32)[:, None]
    np.testing.assert_array_equal(gguf.tensor("q8"), wide * eight)
    expected = wide * four + lows.astype(np.float32)[:, None]
    np.testing.assert_array_equal(gguf.tensor("q4"), expected.reshape(-1))


def test_metadata_of_every_kind(write):
    pairs = [
        ("u8", struct.pack("<IB", 0, 7), 7),
        ("i16", struct.pack("<Ih", 3, -5), -5),
        ("f32", struct.pack("<If", 6, 0.5), 0.5),
        ("yes", struct.pack("<I?", 7, True), True),
        ("name", struct.pack("<I", 8) + text("grün"), "grün"),
        ("u64", struct.pack("<IQ", 10, 1 << 40), 1 << 40),
        ("numbers", struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3), [1, -2, 3]),
        ("flags", struct.pack("<IIQ2?", 9, 7, 2, True, False), [True, False]),
        ("words", struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"), ["a", "b"]),
    ]
    raw = b"".join(text(name) + value for name, value, _ in pairs)
    gguf = rl.models.read_gguf(write([], raw, len(pairs)))
    assert dict(gguf.metadata) == {name: value for name, _, value in pairs}


def test_alignment_of_its_own(write):
    raw = text("general.alignment") + struct.pack("<II", 4, 64)
    one = np.ones(3, np.float32).tobytes()
    path = write([("a", (3,), 0, one), ("b", (3,), 0, one)], raw, 1, align=64)
    assert rl.models.read_gguf(path).tensor("b").tolist() == [1, 1, 1]


def test_bad_files_are_said_clearly(tmp_path, write):
    path = tmp_path / "b.gguf"
    with pytest.raises(ValueError, match="no GGUF file"):
        rl.models.read_gguf(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="too short"):
        rl.models.read_gguf(path)
    path.write_bytes(b"PK\3\4" + b"\0" * 40)
    with pytest.raises(ValueError, match="starts with"):
        rl.models.read_gguf(path)
    with pytest.raises(ValueError, match="version 1"):
        rl.models.read_gguf(write([], version=1))
    with pytest.raises(ValueError, match="storage type 2; supported: F32, F16, Q4_1, Q8_0"):
        rl.models.read_gguf(write([("w", (32,), 2, b"\0" * 18)]))
    whole = gguf_bytes([("w", (64,), 0, np.ones(64, np.float32).tobytes())])
    for cut, words in ((len(whole) - 40, "ends after"), (40, "inside its header")):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=words):
            rl.models.read_gguf(path)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"no tensor 'v'; it has \['w'\]"):
        rl.models.read_gguf(path).tensor("v")
