"""Conversations that go on from their cache, with tokens that nobody sampled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl

from .served import EOS, LARGE, MODEL, PIECES, SMALL, VOCAB, engine, params, tokenizer

KEY = jax.random.key(3)


def ask(server, prompt=(1, 2, 3), **options):
    options = dict(key=KEY, max_new_tokens=6, keep=True) | options
    number = server.submit(list(prompt), **options)
    return next(group for group in server if group.request == number)


def fresh(model, params, group, row):
    """log π of a row's tokens from one forward pass over the whole conversation."""
    ids = np.concatenate([group.prompt, row.tokens])
    padded = np.zeros((1, 64 * -(-len(ids) // 64)), np.int32)
    padded[0, : len(ids)] = ids
    logits = jax.jit(model.logits)(params, jnp.asarray(padded))[0]
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    index = np.arange(len(group.prompt) - 1, len(ids) - 1)
    return np.asarray(log_probs)[index, row.tokens]


@pytest.mark.long
@pytest.mark.fault(12, 45)
@pytest.mark.parametrize(
    "sizes", [SMALL, *(pytest.param(s, marks=pytest.mark.slow) for s in (dict(), LARGE))]
)
def test_log_probs_after_forced_tokens_are_those_of_the_whole_conversation(sizes):
    server = engine(**sizes)
    first = ask(server, group_size=2)
    server.extend(first.request, [[7, 8, 9, 1], [EOS]], max_new_tokens=5)
    (second,) = list(server)
    assert second.request == first.request
    server.extend(first.request, [[4], [5, 6]], max_new_tokens=3)
    (third,) = list(server)
    for i, forced in enumerate([[6, 7, 8, 9, 15], [6, 12, 13]]):
        before, row = first.rows[i].tokens, third.rows[i]
        assert row.tokens[:6].tolist() == before.tolist()
        assert np.flatnonzero(~row.mask).tolist() == forced
        assert row.tokens[forced].tolist() == [[7, 8, 9, 1, 4], [EOS, 5, 6]][i]
        assert (row.log_probs[~row.mask] == 0).all()
        assert (row.truncated_log_probs[~row.mask] == 0).all()
        expected = fresh(MODEL, params(), third, row)
        np.testing.assert_allclose(row.log_probs[row.mask], expected[row.mask], atol=1e-5)
        assert len(row.tokens) == (19, 17)[i] and row.reason == "length"


def test_turns_do_not_depend_on_the_round_size_or_on_other_requests():
    found = []
    for sizes, others in ((SMALL, 0), ({}, 2), (LARGE, 1)):
        server = engine(**sizes)
        first = ask(server, group_id=9)
        for _ in range(others):
            server.submit([5], key=KEY, max_new_tokens=11)
        server.extend(first.request, [[7, 8]], max_new_tokens=9)
        found += [g.rows[0].tokens.tolist() for g in server if g.request == first.request]
    assert found[0] == found[1] == found[2] and len(found[0]) == 17


def test_a_rollout_keeps_forced_tokens_out_of_the_mask():
    server = engine()
    first = ask(server)
    server.extend(first.request, [[7, 8]], max_new_tokens=2)
    rollout = rl.sampling.to_rollout(list(server), width=4, length=12)
    assert (
        rollout.mask[0].tolist()
        == [False] * 4 + [True] * 6 + [False] * 2 + [True] * 2 + [False] * 2
    )
    assert rollout.attention_mask[0].tolist() == [False] + [True] * 13 + [False] * 2
    assert rollout.lengths.tolist() == [10]


def test_a_row_cut_at_a_stop_string_goes_on_from_there():
    """Tokens that the round made beyond the cut leave no trace in the cache."""
    server = engine(**LARGE, tokenizer=tokenizer())
    first = ask(server, stop=["a", "b", "c", "d"], max_new_tokens=24, group_size=4)
    cut = [len(row.tokens) for row in first.rows]
    assert all(row.reason == "stop_string" for row in first.rows) and min(cut) < 24
    server.extend(first.request, [[EOS, 5]] * 4, max_new_tokens=24 - 2 - max(cut))
    (second,) = list(server)
    for length, row in zip(cut, second.rows, strict=True):
        assert row.mask[length : length + 3].tolist() == [False, False, True]
        expected = fresh(MODEL, params(), second, row)
        np.testing.assert_allclose(row.log_probs[row.mask], expected[row.mask], atol=1e-5)


@pytest.mark.fault(47)
def test_stop_strings_are_found_in_sampled_text_only():
    """Forced text holds the stop string, and half of one that sampled text would complete."""
    table = rl.models.token_bytes(tokenizer())
    server = engine(tokenizer=tokenizer(), logit_bias=True)
    only = rl.sampling.forbid([i for i in range(VOCAB) if i != PIECES.index("b")], VOCAB)
    first = ask(server, stop=["ab"], logit_bias=only, max_new_tokens=2)
    forced = [PIECES.index("ab"), PIECES.index("a")]
    server.extend(first.request, [forced], max_new_tokens=3)
    (row,) = next(iter(server)).rows
    assert b"".join(table[i] for i in row.tokens) == b"bbabab" + b"bb"
    assert (row.reason, row.text) == ("length", "bbb")


def test_some_rows_of_a_group_may_go_on():
    server = engine()
    first = ask(server, group_size=3)
    server.extend(first.request, [None, [7], None], max_new_tokens=2)
    (second,) = list(server)
    assert [len(row.tokens) for row in second.rows] == [6, 9, 6]
    assert second.rows[0].tokens.tolist() == first.rows[0].tokens.tolist()


def test_kept_slots_are_held_until_they_are_released():
    server = engine(**SMALL)
    first = ask(server, group_size=2)
    waiting = server.submit([1], key=KEY, max_new_tokens=2)
    with pytest.raises(RuntimeError, match=r"1 requests wait, but kept requests \[0\] hold all 2"):
        server.step()
    server.release(first.request)
    assert [group.request for group in server] == [waiting]
    for call in (
        lambda: server.release(first.request),
        lambda: server.extend(first.request, [[1]], max_new_tokens=1),
    ):
        with pytest.raises(ValueError, match="request: 0 is not kept"):
            call()


def test_a_running_request_may_be_released_or_cancelled():
    server = engine(**SMALL)
    for stop in (server.release, server.cancel):
        number = server.submit([1], key=KEY, keep=True, max_new_tokens=3)
        server.step()
        with pytest.raises(ValueError, match="not answered yet"):
            server.extend(number, [[1]], max_new_tokens=1)
        stop(number)
        assert [group.request for group in server] == [number]
    server.submit([2], key=KEY, max_new_tokens=1, group_size=2, keep=True)
    assert len(list(server)) == 1, "the slots are free again"


@pytest.mark.parametrize(
    ("forced", "new", "says"),
    [
        ([[1]], 1, "for each of the 2 rows"),
        ([None, None], 1, "for one at least"),
        ([[1], [VOCAB]], 1, "the vocabulary has"),
        ([[1], [1] * 10], 9, "6 tokens, 10 forced and 9 new ones; there is room for 24"),
        ([[1], [1]], 0, "0 new ones"),
    ],
)
def test_extensions_that_do_not_fit_change_nothing(forced, new, says):
    server = engine()
    first = ask(server, group_size=2)
    with pytest.raises(ValueError, match=says):
        server.extend(first.request, forced, max_new_tokens=new)
    server.extend(first.request, [[1], [1]], max_new_tokens=1)
    assert [len(row.tokens) for row in next(iter(server)).rows] == [8, 8]


@pytest.mark.slow
@pytest.mark.download
@pytest.mark.fault(45, 46)
def test_a_chat_with_smollm2_goes_on_from_its_cache():
    model, weights = rl.models.load("smollm2-135m")
    chat = rl.models.load_tokenizer("smollm2-135m")
    sizes = dict(max_prompt_tokens=64, max_new_tokens=96, steps_per_round=16)
    server = rl.sampling.Engine(model, weights, slots=2, tokenizer=chat, **sizes)
    question = rl.data.render_chat(chat, "Name three colours.")
    prompt = chat.encode(question, add_special_tokens=False)
    stops = [chat.eos_token_id]
    first = ask(server, prompt, group_size=2, stop_ids=stops, max_new_tokens=24)
    said = [{"role": "user", "content": "And three animals?"}]
    last = [row.tokens[-1] if row.reason == "stop" else None for row in first.rows]
    forced = [rl.data.turn_ids(chat, said, stop_id=stop_id) for stop_id in last]
    server.extend(first.request, forced, max_new_tokens=24)
    (second,) = list(server)
    for before, row in zip(first.rows, second.rows, strict=True):
        expected = fresh(model, weights, second, row)
        np.testing.assert_allclose(row.log_probs[row.mask], expected[row.mask], atol=2e-4)
        ids = [*prompt, *row.tokens.tolist()]
        turns = [i for i, token in enumerate(ids) if token == chat.bos_token_id]
        assert len(turns) == 5  # system, user, assistant, user, assistant: none begins twice
        assert all(ids[i + 1] != chat.bos_token_id for i in turns)
        assert row.tokens[: len(before.tokens)].tolist() == before.tokens.tolist()
        text = chat.decode(ids)
        assert text.count("<|im_end|>\n<|im_start|>user\nAnd three animals?<|im_end|>\n") == 1
        assert row.text == chat.decode(row.tokens[row.mask][len(before.tokens) :], True)
