"""Prints how far the decoder's logits are from the reference implementation's.

    python experiments/bench/parity.py              # tiny models of each family, from files
    python experiments/bench/parity.py --smollm2    # and the real model, from a file
    python experiments/bench/parity.py --live       # ask torch and transformers now instead

Four ways to the same logits are compared: the full forward pass with right and with left padding,
and prefill + cached decode with both. Rows show the largest difference over valid tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rlhf_jax as rl

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "data" / "golden"
COLUMNS = ("forward, right", "forward, left", "decode, right", "decode, left")
GROUP = 2  # completions of each prompt in the decode comparison: they share one prefix


def families() -> list[str]:
    """The tiny models that have golden files."""
    return sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))


def golden(name: str) -> dict[str, np.ndarray]:
    """Tokens, mask and reference logits of one family."""
    folder = GOLDEN / name
    file = folder / "golden.npz" if folder.is_dir() else GOLDEN / f"{name}.npz"
    with np.load(file, allow_pickle=False) as data:
        return dict(data)


def shift_left(rows: np.ndarray, mask: np.ndarray, extra: int = 0) -> np.ndarray:
    """Right-padded rows as left-padded ones, with `extra` more columns of padding."""
    batch, length = mask.shape
    out = np.zeros((batch, length + extra, *rows.shape[2:]), rows.dtype)
    for row, count in enumerate(mask.sum(axis=1)):
        out[row, length + extra - count :] = rows[row, :count]
    return out


def decoded(model: rl.models.Decoder, params: Any, tokens: Any, mask: Any, suffix: Any) -> Any:
    """Logits after the prompt and after each forced suffix token: [B, G, S + 1, V]."""
    steps = suffix.shape[1]
    hidden, prefix = model.prefill(params, tokens, mask)
    cache = model.init_cache(prefix, group_size=GROUP, max_new_tokens=steps + 3)
    first = jnp.repeat(hidden[:, None], GROUP, axis=1)

    def step(cache: Any, xs: Any) -> Any:
        index, token = xs
        hidden, cache = model.decode(params, jnp.repeat(token[:, None], GROUP, 1), cache, index)
        return cache, hidden

    _, rest = jax.lax.scan(step, cache, (jnp.arange(steps), suffix.T))
    hidden = jnp.concatenate([first[:, :, None], jnp.moveaxis(rest, 0, 2)], axis=2)
    return model.project(params, hidden)


def measure(
    model: rl.models.Decoder,
    params: Any,
    tokens: np.ndarray,
    mask: np.ndarray,
    logits: np.ndarray,
    columns: np.ndarray | None = None,
) -> dict[str, float]:
    """Largest |Δ logit| over valid tokens for the four ways.

    `tokens` and `mask` are right-padded [B, T], `logits` the reference's [B, T, V] or its given
    `columns` of V. For decode, the last third of the shortest row is forced token by token.
    """
    pick = slice(None) if columns is None else columns
    forward, decode = jax.jit(model.logits), jax.jit(decoded, static_argnums=0)
    left = [shift_left(array, mask, extra=3) for array in (tokens, mask, logits)]
    result = {}
    for name, (ids, valid, reference) in zip(
        COLUMNS, ((tokens, mask, logits), left) * 2, strict=True
    ):
        if name.startswith("forward"):
            ours = np.asarray(forward(params, ids, attention_mask=valid))[..., pick]
            result[name] = float(np.abs(ours - reference)[valid].max())
            continue
        lengths = valid.sum(axis=1)
        steps = max(1, int(lengths.min()) // 3)
        ends = [int(np.flatnonzero(row)[-1]) for row in valid]
        prompt, suffix = valid.copy(), np.zeros((len(ids), steps), ids.dtype)
        for row, end in enumerate(ends):
            prompt[row, end - steps + 1 :] = False
            suffix[row] = ids[row, end - steps + 1 : end + 1]
        ours = np.asarray(decode(model, params, ids, prompt, suffix))[..., pick]
        want = np.stack([ref[e - steps : e + 1] for ref, e in zip(reference, ends, strict=True)])
        result[name] = float(np.abs(ours - want[:, None]).max())
    return result


def greedy(
    model: rl.models.Decoder, params: Any, tokens: np.ndarray, mask: np.ndarray, steps: int
) -> np.ndarray:
    """The `steps` most likely tokens after each prompt, one after the other: [B, steps]."""

    @jax.jit
    def run(params: Any, tokens: Any, mask: Any) -> Any:
        hidden, prefix = model.prefill(params, tokens, mask)
        cache = model.init_cache(prefix, group_size=1, max_new_tokens=steps)

        def step(carry: Any, index: Any) -> Any:
            hidden, cache = carry
            token = jnp.argmax(model.project(params, hidden), axis=-1).astype(jnp.int32)
            return model.decode(params, token, cache, index), token[:, 0]

        return jax.lax.scan(step, (hidden[:, None], cache), jnp.arange(steps))[1].T

    return np.asarray(run(params, tokens, mask))


def torch_logits(folder: Path, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The reference's logits, now: torch and transformers read the same folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        ids, valid = torch.tensor(tokens, dtype=torch.long), torch.tensor(mask, dtype=torch.long)
        positions = (valid.cumsum(1) - 1).clamp(min=0)
        out = model.eval()(input_ids=ids, attention_mask=valid, position_ids=positions)
    return out.logits.numpy()


def row(name: str, live: bool) -> dict[str, float]:
    """The four differences of one family, or of ``smollm2``."""
    folder = rl.models.resolve("smollm2-135m") if name == "smollm2" else GOLDEN / name
    model, params = rl.models.load(folder)
    data = golden(name)
    tokens, mask = data["tokens"], data["mask"]
    if live:
        return measure(model, params, tokens, mask, torch_logits(folder, tokens, mask))
    return measure(model, params, tokens, mask, data["logits"], data.get("columns"))


def greedy_matches(model: rl.models.Decoder, params: Any) -> tuple[int, int]:
    """How many of the golden file's prompts the real model continues as there: (equal, all)."""
    data = golden("smollm2")
    ids = greedy(model, params, data["tokens"], data["mask"], data["greedy"].shape[1])
    return int((ids == data["greedy"]).all(axis=1).sum()), len(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--live", action="store_true", help="compare with torch now")
    parser.add_argument("--smollm2", action="store_true", help="also the real model")
    options = parser.parse_args()
    print(f"| model | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    for name in [*families(), *(["smollm2"] if options.smollm2 else [])]:
        found = row(name, options.live)
        print(f"| {name} | {' | '.join(f'{found[key]:.1e}' for key in COLUMNS)} |", flush=True)
    if options.smollm2:
        equal, count = greedy_matches(*rl.models.load("smollm2-135m"))
        prompts = json.loads((GOLDEN / "smollm2.json").read_text(encoding="utf-8"))["prompts"]
        print(
            f"\nGreedy text equal to the reference: {equal} of {count} prompts ({prompts[0]!r} …)"
        )


if __name__ == "__main__":
    main()
