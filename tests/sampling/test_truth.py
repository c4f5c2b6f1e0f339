"""The log-probs that the sampler stores are those that the learner computes for the same tokens.

Prompts are ragged, up to 90 tokens, and completions up to 128: both go past the first length bucket
of 64 and neither prompt width is a multiple of it.
"""

import jax
import numpy as np
import pytest

import rlhf_jax as rl
from experiments.bench import parity, sampler_gap
from experiments.bench.sampler_gap import EXACT, GROUP, ONE_TO_ONE, SMOLLM2, Case

BAR = 2e-5
ROWS, TOKENS = 64, 128
QUICK = "llama_tied"  # four query heads to its one key head; a family costs 15 s of compilation
OTHERS = [name for name in (*parity.families(), ONE_TO_ONE) if name != QUICK]


def sampled(name, cases, tokens=TOKENS, count=ROWS // GROUP, **options):
    model, params = sampler_gap.load(name)
    rows = sampler_gap.prompts(name, model.config.vocab_size, count)
    return {
        case: sampler_gap.measure(model, params, rows, case, new_tokens=tokens, **options)
        for case in cases
    }


@pytest.mark.fault(32, 34)
@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)]
)
def test_float32_log_probs_are_the_learners(name):
    found = sampled(name, EXACT)
    largest = {case: gap.max() for case, gap in found.items()}
    assert max(largest.values()) <= BAR, largest
    assert {gap.size for gap in found.values()} == {ROWS * TOKENS}
    for left, right in zip(EXACT[::2], EXACT[1::2], strict=True):
        assert (left.padding, right.padding) == ("left", "right")
        assert left.temperature == right.temperature
        np.testing.assert_array_equal(found[left], found[right])


@pytest.mark.parametrize(
    "change", [dict(temperature=0.9), pytest.param(dict(pass_rows=ROWS), marks=pytest.mark.slow)]
)
def test_the_measure_sees_another_temperature_and_not_another_split(change):
    model, params = sampler_gap.load(QUICK)
    tokens, mask = sampler_gap.right_padded(sampler_gap.prompts(QUICK, 64, ROWS // GROUP))
    rollout = rl.generate(
        Case().of(model),
        params,
        *(parity.shift_left(array, mask) for array in (tokens, mask)),
        jax.random.key(1),
        group_size=GROUP,
        max_new_tokens=TOKENS,
    )
    how = dict(temperature=1.0, pass_rows=16) | change
    gap = sampler_gap.differences(Case().of(model), params, rollout, **how)
    assert (gap.max() <= BAR) == ("temperature" not in change)
    if "temperature" in change:
        assert gap.max() > 1e3 * BAR


@pytest.mark.slow
@pytest.mark.parametrize(("prompt_width", "tokens"), [(1, 64), (63, 65), (65, 130), (130, 129)])
def test_across_the_edges_of_the_buckets(prompt_width, tokens):
    model, params = sampler_gap.load("llama")
    rows = np.random.default_rng(0).integers(3, 64, (4, prompt_width)).tolist()
    gap = sampler_gap.measure(model, params, rows, Case(), new_tokens=tokens)
    assert gap.size == 4 * GROUP * tokens and gap.max() <= BAR, gap.max()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_engines_log_probs_are_the_learners(temperature):
    model, params = sampler_gap.load("qwen3")
    rows = sampler_gap.prompts("qwen3", model.config.vocab_size, ROWS // GROUP)
    engine = rl.sampling.Engine(
        model,
        params,
        slots=11,  # rows join and leave in the middle of others
        max_prompt_tokens=sampler_gap.LONGEST,
        max_new_tokens=TOKENS,
    )
    for i, ids in enumerate(rows):
        engine.submit(
            ids,
            key=jax.random.key(1),
            group_size=GROUP,
            max_new_tokens=TOKENS - 7 * i,
            temperature=temperature,
        )
    rollout = rl.sampling.to_rollout(sorted(engine, key=lambda group: group.request))
    gap = sampler_gap.differences(model, params, rollout, temperature, 16)
    assert gap.size == GROUP * sum(TOKENS - 7 * i for i in range(len(rows)))
    assert gap.max() <= BAR, gap.max()


@pytest.mark.slow
@pytest.mark.download
def test_the_real_models_log_probs_are_the_learners():
    found = sampled(SMOLLM2, [Case(padding="right"), Case(temperature=0.7)])
    for case, gap in found.items():
        assert gap.size == ROWS * TOKENS and gap.max() <= BAR, (case, gap.max())


@pytest.mark.slow
@pytest.mark.download
def test_the_real_models_log_probs_are_the_learners_for_a_few_rows():
    (gap,) = sampled(SMOLLM2, [Case()], tokens=70, count=2, pass_rows=3).values()
    assert gap.size == 2 * GROUP * 70 and gap.max() <= BAR, gap.max()
