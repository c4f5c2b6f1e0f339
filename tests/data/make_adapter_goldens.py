"""Makes the folders of tests/data/adapters with torch, transformers and peft, the references.

    python -m tests.data.make_adapter_goldens

Adapters of the tiny models of tests/data/golden, with PEFT's own logits and its gradients of the
mean negative log-likelihood; and a tiny sequence classifier with its scores.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

from tests.data.make_goldens import HERE, SMALL, run

ADAPTERS = HERE.parent / "adapters"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_all": ("qwen3", dict(r=4, lora_alpha=8, target_modules=ALL)),
    "qwen2_last": (
        "qwen2",
        dict(
            r=3,
            lora_alpha=5,
            target_modules=["q_proj", "v_proj"],
            layers_to_transform=[2],
            use_rslora=True,
            lora_dropout=0.1,
        ),
    ),
}


def make_adapters(name: str, seed: int) -> None:
    family, options = CASES[name]
    base = transformers.AutoModelForCausalLM.from_pretrained(
        HERE / family, attn_implementation="eager", dtype=torch.float32
    )
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(seed)
    with torch.no_grad():  # B too: at 0 it would hide A
        for key, value in model.named_parameters():
            if "lora_" in key:
                value.copy_(torch.randn_like(value) * 0.3)
    folder = ADAPTERS / name
    shutil.rmtree(folder, ignore_errors=True)
    model.peft_config["default"].base_model_name_or_path = family
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    data = np.load(HERE / family / "golden.npz")
    tokens, mask = data["tokens"], data["mask"]
    found = run(model, tokens, mask) | gradients(model, tokens, mask)
    np.savez_compressed(folder / "golden.npz", tokens=tokens, mask=mask, **found)
    finish(folder, found)


def gradients(model: Any, tokens: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """∂/∂(A, B) of −Σ log π / Σ mask over the real tokens after the first, in double precision."""
    model = model.to(torch.float64).eval()
    total = torch.zeros((), dtype=torch.float64)
    for row, count in zip(tokens, mask.sum(axis=1), strict=True):
        ids = torch.tensor(row[None, :count], dtype=torch.long)
        log_probs = torch.log_softmax(model(input_ids=ids).logits[:, :-1], dim=-1)
        total = total - log_probs.gather(-1, ids[:, 1:, None]).sum()
    (total / int(mask[:, 1:].sum())).backward()
    return {
        key.replace(".default", ""): value.grad.numpy().astype(np.float32)
        for key, value in model.named_parameters()
        if "lora_" in key
    }


def make_classifier(seed: int) -> None:
    options = dict(num_labels=1, num_hidden_layers=2, tie_word_embeddings=False)
    torch.manual_seed(seed)
    model = transformers.LlamaForSequenceClassification._from_config(
        transformers.LlamaConfig(**{**SMALL, **options}), attn_implementation="eager"
    )
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.copy_(torch.randn_like(value) * 0.25 + (1.0 if "norm" in key else 0.0))
    folder = ADAPTERS / "classifier"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    data = np.load(HERE / "llama" / "golden.npz")
    tokens, mask = data["tokens"], data["mask"]
    found = {
        "scores": np.zeros(len(tokens), np.float32),
        "states": np.zeros(mask.shape, np.float32),
    }
    model = model.to(torch.float64).eval()
    with torch.no_grad():
        for i, count in enumerate(mask.sum(axis=1)):
            ids = torch.tensor(tokens[i : i + 1, :count], dtype=torch.long)
            found["scores"][i] = model(input_ids=ids).logits.numpy()[0, 0]
            hidden = model.model(input_ids=ids).last_hidden_state
            found["states"][i, :count] = model.score(hidden).numpy()[0, :, 0]
    np.savez_compressed(folder / "golden.npz", tokens=tokens, mask=mask, **found)
    finish(folder, found)


def finish(folder: Path, found: dict[str, np.ndarray]) -> None:
    for file in folder.iterdir():
        file.chmod(0o644)
    print(folder.name, {key: float(np.abs(value).max()) for key, value in list(found.items())[:2]})


if __name__ == "__main__":
    for index, case in enumerate(CASES):
        make_adapters(case, seed=index)
    make_classifier(seed=7)
