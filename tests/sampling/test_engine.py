import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl

from .served import EOS, SMALL, engine, generated, params, prompts, rollout

KINDS = [
    dict(),
    dict(temperature=0.0),
    dict(temperature=0.7, top_k=5),
    dict(top_p=0.8, min_new_tokens=4),
    dict(min_p=0.1, repetition_penalty=1.5),
    dict(presence_penalty=0.7, stop_ids=[1, 2], temperature=1.4),
]


def requests(count=9, seed=0):
    """Prompts of all lengths, options of all kinds, caps from 1 to 24."""
    random = np.random.default_rng(seed)
    out = []
    for i, prompt in enumerate(prompts(count, seed=seed)):
        options = dict(stop_ids=[EOS]) | KINDS[i % len(KINDS)]
        options["max_new_tokens"] = int(random.integers(1, 25))
        out.append((prompt, options))
    return out


def answers(asked, order=None, group_size=3, key=5, **sizes):
    """Everything that an engine gives, by group id."""
    server = engine(**sizes)
    for i in range(len(asked)) if order is None else order:
        prompt, options = asked[i]
        server.submit(prompt, key=jax.random.key(key), group_size=group_size, group_id=i, **options)
    found = list(server)
    assert sorted(group.group_id for group in found) == list(range(len(asked)))
    return {group.group_id: group for group in found}, server


@pytest.fixture(scope="module")
def expected():
    return [
        generated(prompt, key=jax.random.key(5), group_id=i, **options)
        for i, (prompt, options) in enumerate(requests())
    ]


@pytest.mark.fault(39)
@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        (dict(), None),
        (dict(prefill_tokens=1), [3, 1, 4, 0, 5, 8, 2, 6, 7]),
        (SMALL, range(8, -1, -1)),
    ],
)
def test_tokens_are_those_of_generate(expected, sizes, order):
    found, _ = answers(requests(), order, **sizes)
    for i, rows in enumerate(expected):
        for row, (tokens, log_probs, truncated) in zip(found[i].rows, rows, strict=True):
            assert row.tokens.tolist() == tokens.tolist()
            np.testing.assert_allclose(row.log_probs, log_probs, atol=1e-5)
            np.testing.assert_allclose(row.truncated_log_probs, truncated, atol=1e-5)
            assert row.mask.all() and (row.versions == 0).all()


def test_finished_groups_become_the_rollout_of_generate():
    asked = [(prompt, dict(stop_ids=[EOS])) for prompt in prompts(3)]
    found, _ = answers(asked)
    same = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5)  # noqa: E731
    kinds = lambda rollout: [(x.shape, x.dtype) for x in jax.tree.leaves(rollout)]  # noqa: E731
    for i, (prompt, options) in enumerate(asked):
        ours = rl.sampling.to_rollout([found[i]], width=16, length=24)
        theirs = rollout(prompt, key=jax.random.key(5), group_id=i, **options)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        assert kinds(ours) == kinds(theirs)
        jax.tree.map(same, ours, theirs)
    both = rl.sampling.to_rollout([found[2], found[0]])
    assert both.group_ids.tolist() == [2, 2, 2, 0, 0, 0]
    assert both.start == max(len(asked[0][0]), len(asked[2][0]))


def test_a_rollout_must_have_room():
    found, _ = answers(requests(2))
    with pytest.raises(ValueError, match=r"width: got 1, but a prompt has \d+ tokens"):
        rl.sampling.to_rollout(list(found.values()), width=1)
    with pytest.raises(ValueError, match="groups: got none"):
        rl.sampling.to_rollout([])


@pytest.mark.fault(43, 49)
def test_a_prompt_is_run_once_for_its_group_and_every_row_is_there():
    found, server = answers(requests(), group_size=6, slots=4)
    assert all(len(group.rows) == 6 for group in found.values())
    stats = server.stats
    assert (stats.prefills, stats.admitted, stats.submitted, stats.finished) == (9, 54, 9, 9)
    assert stats.tokens == sum(len(row.tokens) for g in found.values() for row in g.rows)


def test_one_key_per_row_may_be_given():
    server = engine()
    keys = rl.sampling.row_keys(jax.random.key(5), jnp.array([3]), 2)[0]
    server.submit([1, 2], key=keys, group_size=2, max_new_tokens=6)
    server.submit([1, 2], key=jax.random.key(5), group_id=3, group_size=2, max_new_tokens=6)
    first, second = (np.stack([row.tokens for row in group.rows]) for group in server)
    assert (first == second).all() and (first[0] != first[1]).any()


@pytest.mark.fault(36)
def test_weights_change_between_rounds_and_every_token_says_which():
    server = engine(version=7)
    first = server.submit([1, 2], key=jax.random.key(0), max_new_tokens=9)
    server.step()
    server.update(params(1), 8)
    second = server.submit([1, 2], key=jax.random.key(0), group_id=first, max_new_tokens=6)
    mixed, plain = sorted(server, key=lambda group: group.request)
    groups = {first: mixed.rows[0], second: plain.rows[0]}
    assert groups[first].versions.tolist() == [7] * 4 + [8] * 5
    assert (groups[second].versions == 8).all()
    old, new = (
        generated([1, 2], key=jax.random.key(0), group_id=first, seed=seed)[0] for seed in (0, 1)
    )
    assert groups[first].tokens[:4].tolist() == old[0][:4].tolist()
    assert groups[second].tokens.tolist() == new[0][:6].tolist()
    assert rl.sampling.to_rollout([mixed]).version == 7, "the oldest of its tokens"
    with pytest.raises(ValueError, match="their structure"):
        server.update({}, 9)
    with pytest.raises(ValueError, match="their shapes and dtypes"):
        server.update(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params()), 9)
