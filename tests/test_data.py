"""Prompts: reading, order, resumption, hosts, buckets, BOS."""

from __future__ import annotations

import json

import numpy as np
import pytest

import rlhf_jax as rl


class Characters:
    """A tokenizer of lower-case letters with a BOS (1) and an EOS (2), as many real ones have."""

    bos_token_id, eos_token_id, pad_token_id = 1, 2, 2
    chat_template = "yes"

    def __init__(self, *, close: bool = False):
        self.close = close

    def encode(self, text, *, add_special_tokens=True):
        pieces = text.replace("<s>", "\x01")
        ids = [1 if c == "\x01" else ord(c) - 86 for c in pieces]
        return [1, *ids, *([2] if self.close else [])] if add_special_tokens else ids

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "<s>" + "".join(m["content"] for m in messages)


def rows(n):
    return [{"prompt": f"p{i}", "answer": i} for i in range(n)]


# ---------------------------------------------------------------------------------------- files


def test_text_file_one_prompt_a_line(tmp_path, caplog):
    path = tmp_path / "p.txt"
    path.write_bytes("Über die Brücke\r\n\n   \nan\u2028other\n".encode())
    file = rl.data.read_prompts(path)
    assert [row["prompt"] for row in file.rows] == ["Über die Brücke", "an\u2028other"]
    assert file.blank_lines == 2
    assert "2 blank lines ignored" in caplog.text


def test_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbfhello\n")
    assert rl.data.read_prompts(path).rows[0]["prompt"] == "hello"


def test_jsonl_keeps_columns(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [{"question": "a", "answer": 1}, {"question": "b", "answer": None}]
    path.write_text("\n".join(map(json.dumps, lines)))
    file = rl.data.read_prompts(path, field="question")
    assert file.rows == ({"answer": 1, "prompt": "a"}, {"answer": None, "prompt": "b"})


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "holds no prompt"),
        (b"\n \n", "holds no prompt"),
        (b"caf\xe9\n", r"not UTF-8 \(byte 3\)"),
    ],
)
def test_bad_text_file_is_one_clear_error(tmp_path, content, match):
    path = tmp_path / "p.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=match) as error:
        rl.data.read_prompts(path)
    assert "\n" not in str(error.value) and "p.txt" in str(error.value)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{oops", "line 2: not JSON"),
        ("[1]", "line 2: a JSON object is wanted, this is a list"),
        ('{"prompt": 3}', "line 2: field 'prompt' must hold a text"),
        ('{"text": "x"}', "fields there: text"),
        ('{"prompt": "  "}', "must hold a text"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path, line, match):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=match):
        rl.data.read_prompts(path)


def test_missing_file():
    with pytest.raises(FileNotFoundError, match=r"'nowhere\.txt' does not exist"):
        rl.data.read_prompts("nowhere.txt")


# ---------------------------------------------------------------------------------------- order


def test_permutation_is_fixed_for_all_time():
    assert rl.data.permutation(8, seed=3, epoch=2).tolist() == [2, 4, 1, 3, 6, 5, 0, 7]
    assert rl.data.permutation(0, seed=0).tolist() == []
    with pytest.raises(ValueError, match="0 or more"):
        rl.data.permutation(3, seed=-1)


@pytest.mark.fault(53)
def test_every_step_resumes_identically():
    whole = rl.data.PromptSource(rows(11), batch_size=3, seed=7)
    batches = [next(whole) for _ in range(9)]
    for position in range(9):
        resumed = rl.data.PromptSource(rows(11), batch_size=3, seed=7, position=position)
        for step in range(position, 9):
            batch = next(resumed)
            assert batch.step == step
            assert batch.prompts == batches[step].prompts
        assert resumed.position == 9


def test_batches_hold_different_prompts_and_an_epoch_repeats_none():
    source = rl.data.PromptSource(rows(10), batch_size=3, seed=0)
    assert source.steps_per_epoch == 3
    for epoch in range(4):
        ids = [i for s in range(3) for i in source.batch(epoch * 3 + s).ids]
        assert len(set(ids)) == 9
    assert source.position == 0  # batch() does not move it


def test_epochs_and_seeds_differ():
    def order(seed, epoch):
        source = rl.data.PromptSource(rows(50), batch_size=50, seed=seed)
        return source.batch(epoch).ids.tolist()

    assert sorted(order(0, 0)) == list(range(50))
    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_hosts_share_the_global_batch():
    options = dict(batch_size=6, seed=1, tokenizer=Characters(), buckets=(2, 4, 8))
    texts = [{"prompt": "a" * (1 + i % 7)} for i in range(20)]
    whole = rl.data.PromptSource(texts, **options)
    hosts = [
        rl.data.PromptSource(texts, process_index=i, process_count=3, **options) for i in range(3)
    ]
    for step in range(6):
        parts = [host.batch(step) for host in hosts]
        wanted = whole.batch(step)
        assert sum((part.prompts for part in parts), ()) == wanted.prompts
        # One bucket on every host, also if a host's own prompts are short.
        np.testing.assert_array_equal(np.concatenate([p.tokens for p in parts]), wanted.tokens)
        np.testing.assert_array_equal(np.concatenate([p.ids for p in parts]), wanted.ids)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(batch_size=9), "the source has 4"),
        (dict(batch_size=0), "batch_size=0"),
        (dict(batch_size=3, process_count=2), "multiple of process_count=2"),
        (dict(batch_size=2, process_count=2, process_index=2), "process_index=2"),
        (dict(batch_size=2, position=-1), "position"),
    ],
)
def test_source_refuses(options, match):
    with pytest.raises(ValueError, match=match):
        rl.data.PromptSource(rows(4), seed=0, **options)


def test_negative_step_is_refused():
    with pytest.raises(ValueError, match="step must be 0 or more"):
        rl.data.PromptSource(rows(4), batch_size=2, seed=0).batch(-1)


def test_columns_repeat_once_a_completion():
    source = rl.data.PromptSource([{"prompt": "a", "x": 1}, {"prompt": "b"}], batch_size=2, seed=0)
    batch = source.batch(0)
    first = [row.get("x") for row in batch.rows]
    assert batch.columns(2) == {"x": [first[0], first[0], first[1], first[1]]}
    assert batch.tokens is None


@pytest.mark.fault(55)
def test_a_long_run_holds_one_permutation():
    source = rl.data.PromptSource(rows(4), batch_size=2, seed=0)
    for _ in range(500):
        next(source)
    assert source._order is not None and source._order[0] == 249


def test_generated_rows_are_a_sequence():
    made = rl.data.GeneratedRows(lambda i: {"prompt": str(i)}, 5)
    assert [row["prompt"] for row in made] == list("01234")
    assert made[-1]["prompt"] == "4" and [r["prompt"] for r in made[1:3]] == ["1", "2"]
    with pytest.raises(IndexError):
        made[5]


# ---------------------------------------------------------------------------------------- split


def test_split_is_disjoint_by_text_and_deterministic():
    doubled = [{"prompt": f"p{i % 10}", "n": i} for i in range(30)]
    train, test = rl.data.split(doubled, held_out=3, seed=5)
    assert len({row["prompt"] for row in test}) == 3
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert sorted(row["n"] for row in train + test) == list(range(30))
    assert rl.data.split(doubled, held_out=3, seed=5) == (train, test)
    assert rl.data.split(doubled, held_out=3, seed=6)[1] != test
    with pytest.raises(ValueError, match="10 different prompts"):
        rl.data.split(doubled, held_out=10)


def test_fingerprint_sees_every_column():
    assert rl.data.fingerprint(rows(3)) == rl.data.fingerprint(tuple(rows(3)))
    changed = rows(3)
    changed[1]["answer"] = 9
    assert rl.data.fingerprint(changed) != rl.data.fingerprint(rows(3))
    assert rl.data.fingerprint(rows(3)[::-1]) != rl.data.fingerprint(rows(3))


# ----------------------------------------------------------------------------------------- ids


def test_left_padding_and_smallest_bucket():
    got = rl.data.encode(Characters(), ["ab", "abcd"], buckets=(16, 5, 8))
    assert got.tokens.tolist() == [[2, 2, 1, 11, 12], [1, 11, 12, 13, 14]]
    assert got.attention_mask.tolist() == [[False, False, True, True, True], [True] * 5]
    assert got.lengths.tolist() == [3, 5] and got.truncated == 0
    assert got.tokens.dtype == np.int32


@pytest.mark.fault(5)
def test_mask_comes_from_lengths_where_pad_is_eos():
    tokenizer = Characters()

    class EndsInEos(Characters):
        def encode(self, text, *, add_special_tokens=True):
            return [2, 2, 11]  # the prompt holds real EOS ids, which is also the pad id

    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    got = rl.data.encode(EndsInEos(), ["x"], buckets=(4,))
    assert got.attention_mask.tolist() == [[False, True, True, True]]


@pytest.mark.fault(46)
@pytest.mark.parametrize("text", ["ab", "<s>ab", "<s><s>ab"])
@pytest.mark.parametrize("chat", [False, True])
def test_one_bos(text, chat):
    got = rl.data.encode(Characters(), [text], buckets=(8,), chat=chat)
    assert got.tokens[0, -int(got.lengths[0]) :].tolist() == [1, 11, 12]


def test_prompt_stays_open_where_the_tokenizer_closes_texts():
    got = rl.data.encode(Characters(close=True), ["ab"], buckets=(8,))
    assert got.tokens[0, -3:].tolist() == [1, 11, 12]


@pytest.mark.fault(41)
def test_over_the_largest_bucket_is_an_error_that_names_the_prompt():
    with pytest.raises(ValueError, match=r"prompt 1 \('abcdef'\) has 7 tokens, over .* 4"):
        rl.data.encode(Characters(), ["ab", "abcdef"], buckets=(2, 4))


@pytest.mark.fault(41)
def test_stated_truncation_keeps_the_bos_and_the_end_and_counts():
    got = rl.data.encode(Characters(), ["ab", "abcdef"], buckets=(4,), truncate_left=True)
    assert got.tokens[1].tolist() == [1, 14, 15, 16]
    assert got.truncated == 1
    source = rl.data.PromptSource(
        [{"prompt": "abcdef"}],
        batch_size=1,
        seed=0,
        tokenizer=Characters(),
        buckets=(4,),
        truncate_left=True,
    )
    assert source.batch(0).truncated == 1


def test_encode_refuses():
    with pytest.raises(ValueError, match="prompts is empty"):
        rl.data.encode(Characters(), [])
    with pytest.raises(ValueError, match="buckets"):
        rl.data.encode(Characters(), ["a"], buckets=())

    class Mute(Characters):
        def encode(self, text, *, add_special_tokens=True):
            return []

    with pytest.raises(ValueError, match=r"prompt 0 \('a'\) has no tokens"):
        rl.data.encode(Mute(), ["a"])


def test_pad_id_falls_back():
    class NoPad(Characters):
        pad_token_id = None

    class Nothing(NoPad):
        eos_token_id = None

    assert rl.data.encode(NoPad(), ["a"], buckets=(3,)).tokens[0, 0] == 2
    assert rl.data.encode(Nothing(), ["a"], buckets=(3,)).tokens[0, 0] == 0


def test_chat_needs_a_template():
    tokenizer = Characters()
    assert rl.data.render_chat(tokenizer, "b", system="a") == "<s>ab"
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        rl.data.encode(tokenizer, ["a"], chat=True)
