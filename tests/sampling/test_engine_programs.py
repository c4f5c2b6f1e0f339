"""What the engine compiles, and models with another cache."""

import dataclasses

import jax
import numpy as np
import pytest

import rlhf_jax as rl

from .served import MODEL, VOCAB, engine, generated, prompts


@pytest.mark.long
@pytest.mark.fault(40)
def test_everything_compiles_once_per_bucket():
    """50 batches of random lengths, options, groups and stop ids."""
    sizes = dict(slots=4, max_prompt_tokens=24, max_new_tokens=10, steps_per_round=5)
    server = engine(**sizes)
    before = server.compilations
    random = np.random.default_rng(0)
    shapes = set()
    for batch in range(50):
        for prompt in prompts(random.integers(1, 6), most=24, seed=batch):
            server.submit(
                prompt,
                key=jax.random.key(batch),
                group_size=int(random.integers(1, 4)),
                max_new_tokens=int(random.integers(1, 11)),
                temperature=float(random.choice([0.0, 0.7, 1.0])),
                top_k=int(random.integers(0, 5)),
                stop_ids=random.integers(0, VOCAB, random.integers(0, 4)).tolist(),
            )
        shapes |= {len(group.prompt) for group in server}
    after = server.compilations
    assert len(shapes) == 24
    new = {name: after[name] - before[name] for name in after}
    # widths 16 and 24, counts 1, 2 and 4
    assert new["round"] == 1 and new["prefill"] <= 6 and new["insert"] <= 6, new
    engine(**sizes).submit([1], key=jax.random.key(0))
    assert server.compilations == after


@pytest.mark.slow
def test_an_int8_cache_and_sliding_windows():
    config = dataclasses.replace(
        MODEL.config, architecture="Qwen2ForCausalLM", layer_windows=(0, 7)
    )
    model = rl.models.Decoder(config, kv_dtype="int8")
    server = engine(model=model)
    for i, prompt in enumerate(asked := prompts(4)):
        server.submit(prompt, key=jax.random.key(5), group_id=i, group_size=3)
    for group in server:
        given = dict(key=jax.random.key(5), group_id=group.group_id, model=model)
        for row, expected in zip(group.rows, generated(asked[group.request], **given), strict=True):
            assert row.tokens.tolist() == expected[0].tolist()
            np.testing.assert_allclose(row.log_probs, expected[1], atol=1e-5)
