"""Greedy text of SmolLM2-135M against the PyTorch reference, token for token.

    python -m experiments.bench.greedy            # against recorded tokens
    python -m experiments.bench.greedy --live     # against torch and transformers, now

``rl.generate`` continues all prompts in one batch of mixed lengths, padded left and right; the
reference continues one prompt at a time, in float32. No token ends a text on either side.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import rlhf_jax as rl
from experiments.bench import parity, sampler_gap
from experiments.bench.tables import Table

STEPS = 64
NEAR_TIE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """What the reference wrote.

    Args:
      tokens, mask: its prompts, right-padded int32 and bool ``[P, T]``.
      greedy: int32 ``[P, S]``, the tokens after them.
      margins: float32 ``[P, S]``, the largest logit less the second largest at each.
    """

    tokens: np.ndarray
    mask: np.ndarray
    greedy: np.ndarray
    margins: np.ndarray

    def cut(self, prompts: int, steps: int, longest: int) -> Reference:
        """The first tokens of some of the prompts, spread over those that are not longer."""
        lengths = self.mask.sum(axis=1)
        rows = np.argsort(lengths, kind="stable")[: int((lengths <= longest).sum())]
        rows = rows[np.linspace(0, len(rows) - 1, prompts).astype(int)]
        width = lengths[rows].max()
        return Reference(
            tokens=self.tokens[rows, :width],
            mask=self.mask[rows, :width],
            greedy=self.greedy[rows, :steps],
            margins=self.margins[rows, :steps],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """The first token of a prompt's text that is not the reference's."""

    prompt: int
    step: int
    ours: int
    reference: int
    margin: float

    @property
    def near_tie(self) -> bool:
        """Whether the reference itself all but hesitated."""
        return self.margin < NEAR_TIE


def recorded() -> Reference:
    """The golden file: made by ``tests/data/make_goldens.py --greedy``."""
    return Reference(**parity.golden("smollm2_greedy"))


def prompts(count: int = 32) -> list[str]:
    """One word, the texts of the golden file of logits, and beginnings of many lengths."""
    golden = json.loads((parity.GOLDEN / "smollm2.json").read_text(encoding="utf-8"))
    texts = ["The", *golden["prompts"]]
    return [*texts, *sampler_gap.texts(count - len(texts))]


def reference(folder: Path, rows: Sequence[Sequence[int]], steps: int = STEPS) -> Reference:
    """The reference's greedy tokens after each prompt, by itself: torch reads the same folder."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config = GenerationConfig()  # the folder's own names a token that ends a text
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=steps,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    greedy = np.zeros((len(rows), steps), np.int32)
    margins = np.zeros((len(rows), steps), np.float32)
    for i, ids in enumerate(rows):
        given = torch.tensor([list(ids)])
        out = model.generate(
            given, attention_mask=torch.ones_like(given), generation_config=settings
        )
        greedy[i] = out.sequences[0, len(ids) :].numpy()
        best = torch.stack(out.logits)[:, 0].topk(2, dim=-1).values
        margins[i] = (best[:, 0] - best[:, 1]).numpy()
    tokens, mask = sampler_gap.right_padded(rows)
    return Reference(tokens=tokens, mask=mask, greedy=greedy, margins=margins)


def generated(model: Any, params: Any, wanted: Reference, padding: str) -> np.ndarray:
    """Our greedy tokens ``[P, S]`` for all of its prompts in one batch.

    `padding` is ``"left"``, ``"right"`` or ``"mixed"``: every other row is padded left.
    """
    right = wanted.tokens, wanted.mask
    left = [parity.shift_left(array, wanted.mask) for array in right]
    to_left = {"left": True, "right": False, "mixed": np.arange(len(left[0])) % 2 == 0}[padding]
    choice = np.broadcast_to(to_left, len(left[0]))[:, None]
    tokens, mask = (np.where(choice, *sides) for sides in zip(left, right, strict=True))
    rollout = rl.generate(
        model,
        params,
        tokens,
        mask,
        jax.random.key(0),
        group_size=1,
        max_new_tokens=wanted.greedy.shape[1],
        temperature=0.0,
    )
    return np.asarray(rollout.tokens)[:, rollout.start :]


def splits(ours: np.ndarray, wanted: Reference) -> list[Split]:
    """Where texts part, one entry for every prompt whose text does."""
    found = []
    for i in np.flatnonzero((ours != wanted.greedy).any(axis=1)):
        step = int(np.argmax(ours[i] != wanted.greedy[i]))
        found.append(
            Split(
                prompt=int(i),
                step=step,
                ours=int(ours[i, step]),
                reference=int(wanted.greedy[i, step]),
                margin=float(wanted.margins[i, step]),
            )
        )
    return found


def table(ours: dict[str, np.ndarray], wanted: Reference) -> Table:
    """Equal texts and tokens for each padding, and how near the reference came to a tie."""
    count = wanted.greedy.size
    rows = []
    for padding, tokens in ours.items():
        apart = splits(tokens, wanted)
        rows.append(
            (
                padding,
                f"{len(tokens) - len(apart)} of {len(tokens)}",
                f"{int((tokens == wanted.greedy).sum())} of {count}",
                "; ".join(f"{s.prompt} at {s.step}: {s.margin:.1e}" for s in apart) or "none",
            )
        )
    lengths = wanted.mask.sum(axis=1)
    note = (
        f"Prompts of {lengths.min()} to {lengths.max()} tokens. Least difference of the "
        f"reference's two largest logits: {wanted.margins.min():.1e}; "
        f"{int((wanted.margins < NEAR_TIE).sum())} of {count} are below {NEAR_TIE:g}."
    )
    return Table(
        ("padding", "equal texts", "equal tokens", "first difference (margin)"), rows, note
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--live", action="store_true", help="ask torch now")
    args = parser.parse_args()
    print(f"jax {jax.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores\n")
    wanted = recorded()
    if args.live:
        rows = [ids[valid].tolist() for ids, valid in zip(wanted.tokens, wanted.mask, strict=True)]
        wanted = reference(rl.models.resolve("smollm2-135m"), rows)
    model, params = rl.models.load("smollm2-135m")
    found = {p: generated(model, params, wanted, p) for p in sampler_gap.PADDINGS}
    print(table(found, wanted))


if __name__ == "__main__":
    main()
