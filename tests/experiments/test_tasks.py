"""The tasks that experiments/grpo.py knows."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import tasks

import rlhf_jax as rl

call = rl.rewards.functions.call


@pytest.fixture(scope="module", params=["sentiment", "addition", "sort"])
def task(request):
    return tasks.build(request.param, seed=3)


def test_held_out_is_apart_and_everything_repeats(task):
    held_out = {row["prompt"] for row in task.held_out}
    assert len(held_out) >= 32
    part = range(0, len(task.train), max(1, len(task.train) // 5000))
    assert not held_out & {task.train[i]["prompt"] for i in part}
    again = tasks.build(task.name, seed=3)
    assert list(again.held_out) == list(task.held_out) and again.train[5] == task.train[5]
    assert list(tasks.build(task.name, seed=4).held_out) != list(task.held_out)


def test_defaults_make_a_batch(task):
    source = rl.data.PromptSource(task.train, batch_size=task.defaults.prompts_per_step, seed=0)
    batch = source.batch(0)
    group = task.defaults.group_size
    texts = [p for p in batch.prompts for _ in range(group)]
    rewards = call(task.reward, texts, [" good"] * len(texts), columns=batch.columns(group))
    assert rewards.shape == (len(texts),) and np.isfinite(rewards).all()


def test_sentiment_orders_texts():
    prompts = ["The soup at the canteen on Wednesdays is"] * 4
    texts = [" wonderful, and I love it.", " made of beans.", " horrible and sad.", "n't good."]
    good, plain, bad, negated = tasks.sentiment(prompts, texts)
    assert good > 0.6 > plain == 0 > bad
    assert negated < 0, "the opening and its continuation are read together"


def test_addition_is_few_shot_and_its_examples_are_no_exercise():
    task = tasks.build("addition", held_out=50)
    assert len(task.held_out) == 50 and len(task.train) == 90 * 90 - 4 - 50
    prompts = {row["prompt"].rpartition("\n")[2] for row in task.train}
    assert len(prompts) == len(task.train)
    assert "12+35=" not in prompts | {row["prompt"].rpartition("\n")[2] for row in task.held_out}
    row = task.train[0]
    a, b = row["prompt"].rpartition("\n")[2].rstrip("=").split("+")
    assert 10 <= int(a) <= 99 and int(a) + int(b) == int(row["answer"])
    wrong = str(int(row["answer"]) + 1)
    got = task.reward([""] * 2, [row["answer"] + "\n1+1=2", wrong], [row["answer"]] * 2)
    assert got == [1.0, 0.0]


def test_sort_prompts_fit_their_bucket():
    task = tasks.build("sort")
    assert task.scratch is not None
    tokenizer = task.scratch.tokenizer()
    assert len(tokenizer) == tasks.SORT_CONFIG["vocab_size"]
    rows = [task.train[i] for i in range(8)]
    encoded = rl.data.encode(
        tokenizer, [row["prompt"] for row in rows], buckets=task.defaults.buckets
    )
    assert encoded.tokens.shape == (8, 8) and encoded.attention_mask.all()
    assert (encoded.tokens[:, 0] == tokenizer.bos_token_id).all()
    assert all(row["answer"] == "".join(sorted(row["prompt"][:-1])) for row in rows)
    answer = tokenizer.encode(rows[0]["answer"], add_special_tokens=False)
    assert len(answer) + 1 == task.defaults.max_new_tokens
    eos = tokenizer.eos_token_id
    assert tokenizer.decode([*answer, eos], skip_special_tokens=True) == rows[0]["answer"]


def test_sort_tokenizer_is_made_in_silence_even_without_torch():
    code = "import sys; sys.modules['torch'] = None; import tasks; tasks.sort_tokenizer()"
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=tasks.HERE, capture_output=True, text=True, check=True
    )
    assert made.stdout == made.stderr == ""


def test_sort_tokenizer_survives_a_folder(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = tasks.sort_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode("314159>") == tokenizer.encode("314159>") == [1, 7, 5, 8, 5, 9, 13, 3]
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)


def test_warmup_shows_right_answers_and_depends_on_seed_and_step_alone():
    batch = tasks.sort_warmup(0, 5, batch_size=16)
    tokenizer = tasks.sort_tokenizer()
    for ids, mask in zip(batch["tokens"], batch["mask"], strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        prompt, _, answer = text.replace(" ", "").partition(">")
        assert len(prompt) == 6 and answer == "".join(sorted(prompt))
        assert mask.tolist() == [False] * 8 + [True] * 7 and ids[-1] == 2
    np.testing.assert_array_equal(tasks.sort_warmup(0, 5, batch_size=16)["tokens"], batch["tokens"])
    assert (tasks.sort_warmup(0, 6, batch_size=16)["tokens"] != batch["tokens"]).any()
    stream = list(tasks.sort_steps(0, 7, batch_size=16))
    np.testing.assert_array_equal(stream[5]["tokens"], batch["tokens"])


def test_prompts_and_reward_of_ones_own(tmp_path, monkeypatch):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"p{i}", "word": "x"}) for i in range(20)))
    (tmp_path / "own_reward_for_this_test.py").write_text(
        "def has_word(prompts, completions, word):\n"
        "    return [w in c for c, w in zip(completions, word)]\n"
    )
    monkeypatch.chdir(tmp_path)
    task = tasks.build(prompts=prompts, reward="own_reward_for_this_test:has_word")
    assert len(task.held_out) == 4 and len(task.train) == 16
    assert call(task.reward, ["p"] * 2, ["x", "y"], columns={"word": ["x", "x"]}).tolist() == [1, 0]
    short = tmp_path / "short.txt"
    short.write_text("only one\n")
    task = tasks.build(prompts=short)
    assert list(task.held_out) == list(task.train)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (dict(name="nope"), ValueError, "unknown; there are sentiment, addition, sort, reasoning"),
        (dict(name="sort:x"), ValueError, "task 'sort:x' is unknown"),
        (dict(prompts="none.txt"), FileNotFoundError, "does not exist"),
        (dict(reward="nope"), ValueError, "write module:function"),
        (dict(held_out=320), ValueError, "leave at least one"),
    ],
)
def test_bad_choices_are_one_clear_line(options, error, match):
    with pytest.raises(error, match=match) as raised:
        tasks.build(**options)
    assert "\n" not in str(raised.value)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match="need the package reasoning-gym"):
        tasks.build("reasoning:chain_sum")
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    tasks._vader.cache_clear()
    with pytest.raises(ImportError, match="needs the package vaderSentiment"):
        tasks.sentiment(["a"], ["b"])


def test_reasoning_uses_the_packages_scorer():
    pytest.importorskip("reasoning_gym")
    task = tasks.build("reasoning:chain_sum", held_out=8)
    row = task.held_out[0]
    right = str(row["entry"]["answer"])
    texts = [f"It is <answer>{right}</answer>", right, "no idea", ""]
    got = call(task.reward, [row["prompt"]] * 4, texts, columns={"entry": [row["entry"]] * 4})
    assert got[0] == got[1] == 1.0 and got[2] < 0.2 and got[3] < 0.2
    assert not {r["prompt"] for r in task.train} & {r["prompt"] for r in task.held_out}
    with pytest.raises(ValueError, match=r"reasoning:chain_sun is unknown.*chain_sum"):
        tasks.build("reasoning:chain_sun")
