"""The benchmark of sampler against learner: what its tables pool, and its prompts."""

import numpy as np
import pytest

from experiments.bench import parity, sampler_gap
from experiments.bench.sampler_gap import COARSE, EXACT, Case


def test_tables_pool_paddings_and_the_coarse_one_temperatures_too():
    found = {("m", case): np.array([0.0, 0.0]) for case in (*EXACT, *COARSE)}
    found["m", Case(padding="right")] = np.array([0.5, 0.0])
    found["m", Case(temperature=0.7)] = np.array([0.0, 0.25])
    found["m", Case(cache="int8", temperature=0.7, padding="right")] = np.array([1.0, 3.0])
    found["other", Case()] = np.array([9.0])
    (exact,) = sampler_gap.exact_table(found, ["m"]).rows
    assert exact == ["m", "5.0e-01", "1.2e-01", "75.0 %", "2.5e-01", "6.2e-02", "75.0 %"]
    table = sampler_gap.coarse_table(found, ["m"])
    assert table.header[1:] == ["bfloat16 matmuls", "bfloat16 cache", "int8 cache"]
    assert table.rows == [["m", *["0.0e+00 / 0.0e+00"] * 2, "3.0e+00 / 1.0e+00"]]
    records = list(sampler_gap.records(found))
    assert len(records) == len(EXACT) + len(COARSE) + 1
    assert records[-1] == {
        **dict(model="other", compute="float32", cache="float32", temperature=1.0),
        **dict(padding="left", largest=9.0, mean=9.0, equal=0.0, tokens=1),
    }


def test_a_case_sets_the_models_dtypes():
    model, _ = sampler_gap.load("llama")
    coarse = Case(compute="bfloat16", cache="int8").of(model)
    assert (np.dtype(coarse.dtype).name, coarse.kv_dtype) == ("bfloat16", "int8")
    assert Case().of(model).dtype == np.float32


def test_prompts_are_ragged_and_cross_a_bucket():
    lengths = [len(ids) for ids in sampler_gap.prompts("llama", 64, 16)]
    assert (len(lengths), max(lengths), min(lengths)) == (16, sampler_gap.LONGEST, 1)
    texts = sampler_gap.texts(24)
    assert len(set(texts)) == 24 and [text.count(". ") for text in texts[:7]] == [*range(6), 0]
    tokens, mask = sampler_gap.right_padded([[5], [6, 7, 8]])
    assert tokens.tolist() == [[5, 0, 0], [6, 7, 8]] and mask.sum(axis=1).tolist() == [1, 3]
    assert parity.shift_left(tokens, mask).tolist() == [[0, 0, 5], [6, 7, 8]]


def test_bad_arguments_are_one_line(monkeypatch, capsys):
    for arguments, message in ((["nobody"], "unknown: nobody"), (["--rows", "6"], "multiple of 4")):
        monkeypatch.setattr("sys.argv", ["sampler_gap", *arguments])
        with pytest.raises(SystemExit) as stop:
            sampler_gap.main()
        assert stop.value.code == 2 and message in capsys.readouterr().err
