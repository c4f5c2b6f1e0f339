"""Makes tests/data/step.npz with torch and transformers: three GRPO steps, written out plainly.

    python -m tests.data.make_step_golden

It starts from the tiny Llama of tests/data/golden. The file holds the batch and the weights after
three steps in double precision, so that all rounding in a comparison is the other side's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
START, WIDTH = 5, 18
OPTIONS: dict[str, float] = dict(
    temperature=0.8,
    clip_low=0.2,
    clip_high=0.3,
    kl_coef=0.05,
    max_grad_norm=0.5,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.95,
    # Adam makes a whole step of a gradient that is 0 up to rounding, unless ε is above rounding;
    # the gradients here are about 1e-3, and known to about 1e-9.
    eps=1e-5,
    weight_decay=0.1,
)


def load(dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        HERE / "golden" / "llama", attn_implementation="eager", dtype=dtype
    ).train()


def token_log_probs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """log π of every token of one sequence after its first, at the temperature."""
    logits = model(input_ids=ids[None]).logits[0, :-1] / OPTIONS["temperature"]
    return torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[:, 0]


def make_batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Left-padded prompts, ragged completions (one is empty), old log-probs near the policy's."""
    rng = np.random.default_rng(seed)
    lengths, prompts = np.array([13, 7, 1, 0, 10, 4]), np.array([5, 2, 4, 3, 1, 5])
    column = np.arange(WIDTH)
    mask = (column >= START) & (column < START + lengths[:, None])
    real = mask | ((column < START) & (column >= START - prompts[:, None]))
    tokens = np.where(real, rng.integers(3, 64, real.shape), 0)
    old, ref = np.zeros((2, *real.shape))
    model = load(torch.float64)
    for row, kept in enumerate(real):
        with torch.no_grad():
            now = token_log_probs(model, torch.tensor(tokens[row, kept])).numpy()
        places = np.flatnonzero(kept)[1:]
        old[row, places] = now + 0.2 * rng.normal(size=len(now))
        ref[row, places] = now + 0.4 * rng.normal(size=len(now))
    return dict(
        tokens=tokens.astype(np.int32),
        mask=mask,
        attention_mask=real,
        old_log_probs=(old * mask).astype(np.float32),
        ref_log_probs=(ref * mask).astype(np.float32),
        advantages=rng.normal(size=len(mask)).astype(np.float32),
    )


def loss_of(model: Any, batch: dict[str, np.ndarray]) -> torch.Tensor:
    """Σ over sampled tokens of max(−ρA, −clip(ρ)·A) + β·k3, over their number. Row by row."""
    total = torch.zeros((), dtype=model.dtype)
    for row, kept in enumerate(batch["attention_mask"]):
        log_probs = token_log_probs(model, torch.tensor(batch["tokens"][row, kept]).long())
        sampled = torch.tensor(batch["mask"][row, kept][1:])
        old = torch.tensor(batch["old_log_probs"][row, kept][1:], dtype=model.dtype)
        ref = torch.tensor(batch["ref_log_probs"][row, kept][1:], dtype=model.dtype)
        ratio = torch.exp(log_probs - old)
        clipped = torch.clamp(ratio, 1 - OPTIONS["clip_low"], 1 + OPTIONS["clip_high"])
        advantage = float(batch["advantages"][row])
        surrogate = torch.maximum(-ratio * advantage, -clipped * advantage)
        kl = torch.exp(ref - log_probs) - 1 - (ref - log_probs)
        total = total + (surrogate + OPTIONS["kl_coef"] * kl)[sampled].sum()
    return total / int(batch["mask"].sum())


def three_steps(
    batch: dict[str, np.ndarray], dtype: torch.dtype
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The weights after three steps, and each step's loss and gradient norm."""
    model = load(dtype)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIONS["learning_rate"],
        betas=(OPTIONS["b1"], OPTIONS["b2"]),
        eps=OPTIONS["eps"],
        weight_decay=OPTIONS["weight_decay"],
    )
    seen = []
    for _ in range(3):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIONS["max_grad_norm"])
        optimizer.step()
        seen.append((float(loss.detach()), float(norm)))
    weights = {name: p.detach().numpy().astype(np.float32) for name, p in model.named_parameters()}
    return weights, np.array(seen)


def main() -> None:
    batch = make_batch()
    weights, seen = three_steps(batch, torch.float64)
    named = {f"weights/{name}": value for name, value in weights.items()}
    options = {f"options/{name}": np.float64(value) for name, value in OPTIONS.items()}
    np.savez_compressed(HERE / "step.npz", seen=seen, **batch, **options, **named)
    single, _ = three_steps(batch, torch.float32)
    gap = max(np.abs(single[name] - weights[name]).max() for name in weights)
    print("loss, gradient norm:", seen.tolist(), "largest gap of torch in float32:", gap)


if __name__ == "__main__":
    main()
