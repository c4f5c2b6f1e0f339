"""What there is to learn: prompts, a reward and good settings, by name.

    sentiment        a real model's continuations of neutral openings, scored by VADER
    addition         two-digit sums after a few examples, exact match
    sort             six digits in order, by a small model from scratch; nothing is downloaded
    reasoning:NAME   any task of the package reasoning-gym, with its own scorer

`build` puts one together; a file of prompts and a reward function of one's own replace its parts.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_jax import data
from rlhf_jax.rewards import functions, verifiers

HERE = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
    """Settings that suit a task; a flag overrides each."""

    prompts_per_step: int = 4
    group_size: int = 6
    max_new_tokens: int = 16
    temperature: float = 1.0
    learning_rate: float = 2e-4
    kl_coef: float = 0.0
    steps: int = 40
    trainable_layers: int | None = 8  # the last ones; None: all parameters
    stop: tuple[str, ...] = ()  # texts that end a completion, one token each
    buckets: tuple[int, ...] = data.DEFAULT_BUCKETS
    chat: bool = False
    system: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scratch:
    """A model that is not loaded but made: its config, tokenizer and supervised warm-up."""

    config: Mapping[str, Any]  # as a Hugging Face config.json says it
    tokenizer: Callable[[], Any]
    warmup_steps: int
    warmup_learning_rate: float
    warmup_batch: Callable[..., dict[str, np.ndarray]]  # (seed, step) -> tokens, mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Everything that a run needs to know of what is learned."""

    name: str
    train: Sequence[data.Row]
    held_out: Sequence[data.Row]
    reward: functions.RewardFunction
    defaults: Defaults
    scratch: Scratch | None = None


def build(
    name: str = "sentiment",
    *,
    seed: int = 0,
    prompts: str | Path | None = None,
    reward: str | None = None,
    held_out: int | None = None,
) -> Task:
    """Put a task together.

    Args:
      name: a key of `TASKS`, or ``reasoning:NAME``.
      seed: of generated prompts and of the held-out split.
      prompts: a .txt or .jsonl file that replaces the prompts.
      reward: ``module:function`` or ``file.py:function`` that replaces the reward.
      held_out: how many prompts to hold out; by default 32, at most a fifth of a file.

    Raises:
      ValueError, FileNotFoundError, ImportError: one line that says what is wrong.
    """
    kind, _, detail = name.partition(":")
    if kind not in TASKS or (detail and kind != "reasoning"):
        raise ValueError(f"task {name!r} is unknown; there are {', '.join(names())}")
    task = TASKS[kind](detail, seed, 32 if held_out is None else held_out)
    if prompts is not None:
        rows = data.read_prompts(prompts).rows
        different = len({row["prompt"] for row in rows})
        apart = min(32, different // 5) if held_out is None else held_out
        train, test = data.split(rows, held_out=apart, seed=seed)
        # A file too short to hold anything out is evaluated on what it trains on.
        task = dataclasses.replace(task, train=train, held_out=test or train[:32])
    if reward is not None:
        task = dataclasses.replace(task, reward=functions.load(reward))
    return task


def names() -> list[str]:
    """The names that `build` takes."""
    return [name if name != "reasoning" else "reasoning:NAME" for name in TASKS]


# ------------------------------------------------------------------------------------- sentiment


@functools.cache
def _vader() -> Any:
    try:
        module = importlib.import_module("vaderSentiment.vaderSentiment")
    except ImportError:
        raise ImportError(
            "the sentiment task needs the package vaderSentiment: "
            "pip install 'rlhf-jax[experiments]'"
        ) from None
    return module.SentimentIntensityAnalyzer()


def sentiment(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """VADER's compound score in [-1, 1] of the text as a reader sees it, opening included.

    The openings score 0 by themselves, so the score is the continuation's; but read together a
    word that the opening began is whole, and "is" + "n't good" is no praise.
    """
    analyzer = _vader()
    return [
        analyzer.polarity_scores(prompt + completion)["compound"]
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def _sentiment(_: str, seed: int, held_out: int) -> Task:
    rows = data.read_prompts(HERE / "data" / "openings.txt").rows
    train, test = data.split(rows, held_out=held_out, seed=seed)
    return Task(
        name="sentiment",
        train=train,
        held_out=test,
        reward=sentiment,
        defaults=Defaults(
            prompts_per_step=8,
            group_size=6,
            max_new_tokens=10,
            learning_rate=3e-4,
            kl_coef=0.05,
            steps=32,
            buckets=(16, 24, 32, 64, 128),
        ),
    )


# -------------------------------------------------------------------------------------- addition

_SHOTS = ((12, 35), (46, 27), (81, 54), (23, 60))


def _sum_row(index: int) -> data.Row:
    a, b = divmod(index, 90)
    shots = "".join(f"{x}+{y}={x + y}\n" for x, y in _SHOTS)
    return {"prompt": f"{shots}{a + 10}+{b + 10}=", "answer": str(a + b + 20)}


def _addition(_: str, seed: int, held_out: int) -> Task:
    shown = {(x - 10) * 90 + y - 10 for x, y in _SHOTS}  # the examples are no exercise
    order = [int(i) for i in data.permutation(90 * 90, seed=seed) if int(i) not in shown]
    return Task(
        name="addition",
        train=data.GeneratedRows(lambda i: _sum_row(order[held_out + i]), len(order) - held_out),
        held_out=[_sum_row(i) for i in order[:held_out]],
        reward=verifiers.integer_match,
        defaults=Defaults(
            prompts_per_step=6,
            group_size=6,
            max_new_tokens=4,
            stop=("\n",),
            buckets=(32, 48, 64, 96, 128),
        ),
    )


# ------------------------------------------------------------------------------------------ sort

_DIGITS = 6
_VOCABULARY = ("<pad>", "<bos>", "<eos>", ">", *"0123456789")

SORT_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(_VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""About .1M parameters."""


def sort_tokenizer() -> Any:
    """A tokenizer of 14 characters in Hugging Face form: saved and loaded like any other."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    # Without torch transformers advises to install it, which tokenizers have no use for.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(_VOCABULARY)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def _digits(index: int) -> str:
    return f"{index:0{_DIGITS}d}"


def _sort_row(index: int) -> data.Row:
    return {"prompt": _digits(index) + ">", "answer": "".join(sorted(_digits(index)))}


def sort_warmup(seed: int, step: int, *, batch_size: int = 128) -> dict[str, np.ndarray]:
    """Solved examples for the supervised warm-up; (seed, step) alone decide which.

    Returns:
      tokens: int32 [batch_size, 15]: BOS, six digits, ">", the six in order, EOS.
      mask: bool [batch_size, 15]: true on the answer and its EOS.
    """
    words = np.random.Philox(key=np.array([seed, 2**32 + step], np.uint64)).random_raw(batch_size)
    rows = [_sort_row(int(w) % 10**_DIGITS) for w in words]
    ids = {token: i for i, token in enumerate(_VOCABULARY)}
    tokens = np.array(
        [[1, *(ids[c] for c in row["prompt"] + row["answer"]), 2] for row in rows], np.int32
    )
    mask = np.zeros(tokens.shape, bool)
    mask[:, 1 + _DIGITS + 1 :] = True
    return {"tokens": tokens, "mask": mask}


def sort_steps(seed: int, steps: int, **options: Any) -> Iterator[dict[str, np.ndarray]]:
    """The warm-up's batches one after the other."""
    for step in range(steps):
        yield sort_warmup(seed, step, **options)


def _sort(_: str, seed: int, held_out: int) -> Task:
    order = data.permutation(10**_DIGITS, seed=seed)
    apart = max(held_out, 256)
    return Task(
        name="sort",
        train=data.GeneratedRows(lambda i: _sort_row(int(order[apart + i])), len(order) - apart),
        held_out=[_sort_row(int(i)) for i in order[:apart]],
        reward=verifiers.exact_match,
        defaults=Defaults(
            prompts_per_step=32,
            group_size=8,
            max_new_tokens=_DIGITS + 1,
            learning_rate=4e-4,
            steps=200,
            trainable_layers=None,
            buckets=(1 + _DIGITS + 1,),
        ),
        scratch=Scratch(
            config=SORT_CONFIG,
            tokenizer=sort_tokenizer,
            warmup_steps=55,
            warmup_learning_rate=3e-3,
            warmup_batch=sort_warmup,
        ),
    )


# ------------------------------------------------------------------------------------- reasoning

_ASK = "\n\nGive only the final answer, between <answer> and </answer>."


def _reasoning(name: str, seed: int, held_out: int) -> Task:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # in a package that it depends on
            gym = importlib.import_module("reasoning_gym")
    except ImportError:
        raise ImportError(
            "reasoning tasks need the package reasoning-gym: pip install 'rlhf-jax[reasoning]'"
        ) from None
    known = sorted(gym.factory.DATASETS)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or known[:3]
        raise ValueError(
            f"task reasoning:{name} is unknown; reasoning-gym has {len(known)}, "
            f"such as {', '.join(near)}"
        )
    dataset = gym.create_dataset(name, seed=seed, size=2000 + held_out)
    rows = [
        {"prompt": entry["question"] + _ASK, "entry": entry}
        for entry in (dataset[i] for i in range(len(dataset)))
    ]
    apart = min(held_out, len({row["prompt"] for row in rows}) - 1)
    train, test = data.split(rows, held_out=apart, seed=seed)

    def reasoning_score(
        prompts: Sequence[str], completions: Sequence[str], entry: Sequence[Any]
    ) -> list[float]:
        return [
            float(dataset.score_answer(_answer(text), one))
            for text, one in zip(completions, entry, strict=True)
        ]

    return Task(
        name=f"reasoning:{name}",
        train=train,
        held_out=test,
        reward=reasoning_score,
        defaults=Defaults(
            prompts_per_step=4,
            group_size=8,
            max_new_tokens=64,
            chat=True,
            buckets=(64, 128, 256, 512, 1024),
        ),
    )


def _answer(text: str) -> str:
    """What stands between the tags, else the first line: scorers give partial credit for a try."""
    tagged = verifiers.extract_tag(text)
    return tagged if tagged is not None else verifiers.first_line(text)


TASKS: dict[str, Callable[[str, int, int], Task]] = {
    "sentiment": _sentiment,
    "addition": _addition,
    "sort": _sort,
    "reasoning": _reasoning,
}
