"""Makes the files of tests/data/golden with torch and transformers, the reference.

    python tests/data/make_goldens.py                  # tiny random models of each family
    python tests/data/make_goldens.py --gguf FILE      # and slices of the real SmolLM2
    python -m tests.data.make_goldens --greedy         # only greedy text of the real SmolLM2

Needs torch. ``--gguf`` also needs the packages gguf and accelerate: the reference then reads the
GGUF file by itself, so that the conversion is checked too, not only the decoder. With ``--greedy``
it reads the folder that the conversion wrote.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent / "golden"
LENGTHS = (24, 17, 9)
SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(tie_word_embeddings=False, rms_norm_eps=1e-5)),
    "llama_tied": ("Llama", dict(tie_word_embeddings=True, num_key_value_heads=1)),
    "llama3": ("Llama", dict(tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "llama_linear": (
        "Llama",
        dict(rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=3.0)),
    ),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(tie_word_embeddings=False, head_dim=12)),
    "qwen2_window": (
        "Qwen2",
        dict(
            tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1
        ),
    ),
    "qwen3_window": (
        "Qwen3",
        dict(
            tie_word_embeddings=False,
            head_dim=12,
            use_sliding_window=True,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
}
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "Water boils at 100 degrees",
    "def add(a, b):\n    return",
    "The best thing about this restaurant was",
    "In 1969, the first human",
    "Dear diary, today I",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
)
GREEDY_STEPS = 24
COLUMNS = 48


def make_family(name: str, seed: int) -> None:
    family, options = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **options})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():  # norms and biases too: at 1 and 0 they would hide a mistake
        for key, value in model.named_parameters():
            value.copy_(torch.randn_like(value) * 0.25 + (1.0 if "norm" in key else 0.0))
    rng = np.random.default_rng(seed)
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    tokens = np.where(mask, rng.integers(3, SMALL["vocab_size"], mask.shape), 0).astype(np.int32)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    found = run(model, tokens, mask)
    np.savez_compressed(folder / "golden.npz", tokens=tokens, mask=mask, **found)
    print(name, "max |logit|", np.abs(found["logits"]).max())


def run(model: Any, tokens: np.ndarray, mask: np.ndarray, columns: Any = slice(None)) -> Any:
    """The reference's logits as it computes them in float32, and in double precision."""

    def logits(dtype: torch.dtype, ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            out = model.to(dtype).eval()(
                input_ids=torch.tensor(ids, dtype=torch.long),
                attention_mask=torch.tensor(valid, dtype=torch.long),
            )
        return out.logits.numpy()[..., columns]

    found = {"logits": (logits(torch.float32, tokens, mask) * mask[..., None]).astype(np.float32)}
    # Row by row: in double precision the reference has NaN on padding that sees no token at all.
    found["exact"] = np.zeros_like(found["logits"])
    for row, count in enumerate(mask.sum(axis=1)):
        part = slice(row, row + 1), slice(count)
        found["exact"][part] = logits(torch.float64, tokens[part], mask[part])
    return found


def make_smollm2(gguf: Path) -> None:
    from rlhf_jax.models import load_tokenizer

    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = load_tokenizer("smollm2-135m")
    rows = [tokenizer(text).input_ids for text in PROMPTS]
    mask = np.arange(max(map(len, rows))) < np.array([len(r) for r in rows])[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    for i, ids in enumerate(rows):
        tokens[i, : len(ids)] = ids
    rng = np.random.default_rng(0)
    columns = np.sort(rng.choice(model.config.vocab_size, COLUMNS, replace=False)).astype(np.int32)
    greedy = np.zeros((len(rows), GREEDY_STEPS), np.int32)
    for i, ids in enumerate(rows):
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            min_new_tokens=None,
            max_new_tokens=GREEDY_STEPS,
            eos_token_id=None,
            pad_token_id=0,
        )
        greedy[i] = out[0, len(ids) :].numpy()
    found = run(model, tokens, mask, columns)
    np.savez_compressed(
        HERE / "smollm2.npz",
        tokens=tokens, mask=mask, columns=columns, greedy=greedy, **found,
    )  # fmt: skip
    texts = [tokenizer.decode(ids) for ids in greedy]
    (HERE / "smollm2.json").write_text(
        json.dumps({"prompts": PROMPTS, "greedy": texts}, indent=1, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
    print(*zip(PROMPTS, texts, strict=True), sep="\n")


def make_greedy() -> None:
    """Greedy text after 32 prompts of many lengths, and how sure the reference was."""
    from experiments.bench import greedy
    from rlhf_jax import models

    tokenizer = models.load_tokenizer("smollm2-135m")
    rows = tokenizer(greedy.prompts()).input_ids
    found = greedy.reference(models.resolve("smollm2-135m"), rows)
    np.savez_compressed(HERE / "smollm2_greedy.npz", **dataclasses.asdict(found))
    print("least margin", found.margins.min())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--greedy", action="store_true", help="only the greedy text of SmolLM2")
    options = parser.parse_args()
    HERE.mkdir(exist_ok=True)
    if options.greedy:
        make_greedy()
        return
    for seed, name in enumerate(FAMILIES):
        make_family(name, seed)
    if options.gguf is not None:
        make_smollm2(options.gguf)


if __name__ == "__main__":
    main()
