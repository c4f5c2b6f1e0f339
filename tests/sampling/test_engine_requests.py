"""Requests come, wait, stop, are cancelled and refused."""

import jax
import numpy as np
import pytest

import rlhf_jax as rl

from .served import EOS, LARGE, PIECES, SMALL, VOCAB, engine, prompts, tokenizer


@pytest.mark.long
@pytest.mark.fault(42)
def test_a_round_ends_with_the_last_running_row():
    server = engine(**LARGE)
    for length in (1, 3, 5):
        server.submit([1, 2], key=jax.random.key(0), max_new_tokens=length)
    groups = server.step()
    assert [len(group.rows[0].tokens) for group in groups] == [1, 3, 5]
    assert [group.rows[0].reason for group in groups] == ["length"] * 3
    assert server.stats.decode_steps == 5
    assert server.stats.utilisation == pytest.approx(9 / 45)


@pytest.mark.long
@pytest.mark.fault(48)
def test_requests_wait_for_slots_and_enter_row_by_row():
    server = engine(**SMALL)
    lengths = [1, 4, 2, 3, 1]
    for length in lengths:
        server.submit([3], key=jax.random.key(1), max_new_tokens=length)
    group = server.submit([4], key=jax.random.key(1), group_size=3, max_new_tokens=2)
    finished = {}
    for step in range(1, 20):
        finished |= {group.request: step for group in server.step()}
        if not server.pending:
            break
    # slot a: steps 1, 2-3, 4-6, then two rows of the group; slot b: 1-4, 5, then the other row
    assert finished == {0: 1, 1: 4, 2: 3, 3: 6, 4: 5, group: 9}


@pytest.mark.fault(48)
def test_a_full_queue_says_so_and_drops_nothing():
    server = engine(**SMALL, max_waiting=2)
    for _ in range(2):
        server.submit([1], key=jax.random.key(0), max_new_tokens=2)
    with pytest.raises(rl.sampling.QueueFullError, match=r"max_waiting is 2.*engine\.step"):
        server.submit([1], key=jax.random.key(0))
    server.step()
    server.submit([1], key=jax.random.key(0))
    assert [group.request for group in server] == [0, 1, 2]


@pytest.mark.fault(41)
@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([1] * 17, {}, r"prompt_ids: 17 tokens; the engine takes 1 to 16.*max_prompt_tokens=17"),
        ([], {}, "prompt_ids: 0 tokens"),
        ([VOCAB], {}, f"the vocabulary has {VOCAB}"),
        ([0.5], {}, "expected a list of ids"),
        ([1], dict(max_new_tokens=25), r"max_new_tokens: got 25; the engine takes 1 to 24"),
        ([1], dict(max_new_tokens=0), "max_new_tokens: got 0"),
        ([1], dict(temperature=-1.0), "temperature"),
        ([1], dict(temperature=[1.0, 2.0]), "temperature: a request has one value"),
        ([1], dict(stop_ids=range(9)), r"stop_ids: got 9.*max_stop_ids=9"),
        ([1], dict(logit_bias=np.zeros(VOCAB)), "logit_bias=True"),
        ([1], dict(group_size=0), "group_size"),
        ([1], dict(group_size=5, keep=True), r"5 rows to keep in 4 slots.*slots=5"),
        ([1], dict(stop="x"), "make the engine with a tokenizer"),
        ([1], dict(key=jax.random.split(jax.random.key(0), 2)), "one per row"),
        ([1], dict(key=jax.random.key(0, impl="rbg")), "rbg"),
    ],
)
def test_what_does_not_fit_is_refused_with_limit_and_remedy(prompt, options, says):
    server = engine()
    with pytest.raises(ValueError, match=says):
        server.submit(prompt, **(dict(key=jax.random.key(0)) | options))
    assert not list(server) and server.stats.submitted == 0


def test_sizes_and_keys_are_checked():
    with pytest.raises(ValueError, match="slots: expected an int ≥ 1, got 0"):
        engine(slots=0)
    with pytest.raises(TypeError, match="new-style key"):
        engine().submit([1], key=np.zeros(2, np.uint32))


def test_a_logit_bias_per_request():
    server = engine(logit_bias=True)
    only = rl.sampling.forbid([i for i in range(VOCAB) if i != 7], VOCAB)
    server.submit([1], key=jax.random.key(0), logit_bias=only, max_new_tokens=5)
    server.submit([1], key=jax.random.key(0), max_new_tokens=5)
    biased, plain = (group.rows[0] for group in server)
    assert biased.tokens.tolist() == [7] * 5 and (biased.truncated_log_probs == 0).all()
    assert (biased.log_probs < -0.1).any() and len(set(plain.tokens.tolist())) > 1


def test_requests_may_come_while_others_are_answered():
    server = engine()
    for _ in range(3):
        server.submit([1], key=jax.random.key(0), max_new_tokens=4)
    seen = []
    for group in server:
        seen.append(group.request)
        if len(seen) < 6:
            server.submit([2], key=jax.random.key(0), max_new_tokens=2)
    assert sorted(seen) == list(range(8))


def test_leaving_the_loop_loses_nothing():
    server = engine()
    for _ in range(4):
        server.submit([1], key=jax.random.key(0), max_new_tokens=2)
    first = next(iter(server))
    assert [first.request, *(group.request for group in server)] == [0, 1, 2, 3]


def test_cancelled_requests_are_answered_once_with_what_they_have():
    server = engine()
    whole, running, waiting = (
        server.submit([i + 1, 2], key=jax.random.key(0), group_size=3, max_new_tokens=9)
        for i in range(3)
    )
    server.step()  # all rows of the first, one of the second
    assert server.cancel(running) and server.cancel(running) and server.cancel(waiting)
    cancelled = server.step()
    assert [group.request for group in cancelled] == [running, waiting]
    assert [len(row.tokens) for row in cancelled[0].rows] == [4, 0, 0]
    assert [len(row.tokens) for row in cancelled[1].rows] == [0, 0, 0]
    assert {row.reason for group in cancelled for row in group.rows} == {"cancelled"}
    rest = list(server)
    assert [group.request for group in rest] == [whole]
    assert [len(row.tokens) for row in rest[0].rows] == [9, 9, 9]
    assert not server.cancel(whole) and not server.cancel(99)
    assert (server.stats.cancelled, server.stats.finished) == (2, 3)
    again = engine()
    again.submit([2, 2], key=jax.random.key(0), group_id=running, max_new_tokens=4)
    kept = next(iter(again)).rows[0]
    assert cancelled[0].rows[0].tokens.tolist() == kept.tokens.tolist()


@pytest.mark.fault(47)
@pytest.mark.parametrize("sizes", [dict(), SMALL, LARGE])
def test_stop_strings(sizes):
    """Against the whole text of the same rows sampled without stop strings."""
    stops = ("aba", "\n\n\n", "éa", "bca", "€", "dd\n")
    server = engine(**sizes, tokenizer=tokenizer())
    for i, prompt in enumerate(prompts(20, most=6)):
        for group_id, stop in ((i, ()), (i, stops)):
            server.submit(prompt, key=jax.random.key(2), group_id=group_id, stop=stop)
    groups = sorted(server, key=lambda group: group.request)
    reasons = []
    for free, stopped in zip(groups[::2], groups[1::2], strict=True):
        (free,), (stopped,) = free.rows, stopped.rows
        kept, text = first_stop(free.tokens.tolist(), stops)
        assert stopped.tokens.tolist() == free.tokens.tolist()[:kept]
        for name in ("mask", "log_probs", "truncated_log_probs", "versions"):
            assert len(getattr(stopped, name)) == kept
        assert stopped.reason == ("length" if text is None else "stop_string")
        assert stopped.text == (free.text if text is None else text)
        reasons.append(stopped.reason)
    assert set(reasons) == {"length", "stop_string"}


def first_stop(tokens, stops):
    """The naive search: how many tokens stay, and the text before the stop string."""
    raw = [piece if isinstance(piece, bytes) else piece.encode() for piece in PIECES]
    raw += [b""] * (VOCAB - len(raw))
    data = b"".join(raw[token] for token in tokens)
    for end in range(1, len(data) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if data[:end].endswith(stop.encode()):
                count, seen = 0, 0
                while seen < end:
                    seen += len(raw[tokens[count]])
                    count += 1
                return count, data[: end - len(stop.encode())].decode(errors="replace")
    return len(tokens), None


def test_text_leaves_special_tokens_out():
    server = engine(tokenizer=tokenizer())
    server.submit([1], key=jax.random.key(0), group_size=4, stop_ids=[EOS])
    for row in next(iter(server)).rows:
        assert row.reason == ("stop" if row.tokens[-1] == EOS else "length")
        assert "<eos>" not in row.text


@pytest.mark.parametrize("stop", ["", ["a", ""], [1]])
def test_bad_stop_strings(stop):
    with pytest.raises(ValueError, match="stop: expected strings"):
        engine(tokenizer=tokenizer()).submit([1], key=jax.random.key(0), stop=stop)
