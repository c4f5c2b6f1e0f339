"""How far the sampler's log-probs are from the learner's, for the tokens that it sampled.

    python -m experiments.bench.sampler_gap                        # every model
    python -m experiments.bench.sampler_gap qwen3 smollm2 --rows 16 --tokens 32

The tiny models of each family (``tests/data/golden``), one with a query head per key head, and
SmolLM2-135M sample four completions of every ragged prompt, with the prompts padded left and right
and at two temperatures; the learner then scores the same tokens in passes of ``--pass-rows`` rows.
The first table is float32 throughout; the second has bfloat16 matmuls, or float32 ones with a
cache of bfloat16 or int8.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import rlhf_jax as rl
from experiments.bench import parity
from experiments.bench.tables import Table

GROUP = 4
OPENINGS = Path(__file__).resolve().parents[1] / "data" / "openings.txt"
ONE_TO_ONE, SMOLLM2 = "llama_1to1", "smollm2"
LONGEST = 90  # tokens of a tiny model's prompt: past the first bucket of 64, and no multiple of it
PADDINGS = ("left", "right")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """How a model samples: what it computes in and caches, and how its prompts come."""

    compute: str = "float32"
    cache: str = "float32"
    temperature: float = 1.0
    padding: str = "left"

    def of(self, model: rl.models.Decoder) -> rl.models.Decoder:
        """The model with this case's dtypes."""
        return dataclasses.replace(model, dtype=np.dtype(self.compute), kv_dtype=self.cache)

    @property
    def dtypes(self) -> str:
        """How the tables call the dtypes."""
        if self.compute != "float32":
            return f"{self.compute} matmuls"
        return "float32" if self.cache == "float32" else f"{self.cache} cache"


EXACT = tuple(
    Case(temperature=temperature, padding=padding)
    for temperature in (1.0, 0.7)
    for padding in PADDINGS
)
COARSE = tuple(
    Case(compute=compute, cache=cache, temperature=temperature, padding=padding)
    for compute, cache in (("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "int8"))
    for temperature, padding in ((1.0, "left"), (0.7, "right"))
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap:
    """|sampler log-prob − learner log-prob| over the sampled tokens."""

    largest: float
    mean: float
    equal: float
    tokens: int

    @classmethod
    def of(cls, differences: np.ndarray) -> Gap:
        return cls(
            largest=float(differences.max()),
            mean=float(differences.mean()),
            equal=float(np.mean(differences == 0)),
            tokens=differences.size,
        )


def load(name: str) -> tuple[rl.models.Decoder, Any]:
    """A model by its name here."""
    if name == SMOLLM2:
        return rl.models.load("smollm2-135m")
    if name != ONE_TO_ONE:
        return rl.models.load(parity.GOLDEN / name)
    config = rl.models.DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        initializer_range=0.25,
    )
    model = rl.models.Decoder(config)
    return model, model.init(jax.random.key(0))


def texts(count: int) -> list[str]:
    """Beginnings of texts of one to six sentences."""
    lines = OPENINGS.read_text(encoding="utf-8").splitlines()
    return [". ".join(lines[8 * i : 8 * i + 1 + i % 6]) for i in range(count)]


def right_padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as tokens int32 and mask bool ``[P, T]``."""
    mask = np.arange(max(map(len, rows))) < np.array([[len(row)] for row in rows])
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask


def prompts(name: str, vocab_size: int, count: int) -> list[list[int]]:
    """Ids of prompts of many lengths: texts for the real model, random ids for the others."""
    if name == SMOLLM2:
        return rl.models.load_tokenizer("smollm2-135m")(texts(count)).input_ids
    random = np.random.default_rng(0)
    lengths = [LONGEST, 1, *random.integers(1, LONGEST + 1, count)][:count]
    return [random.integers(3, vocab_size, length).tolist() for length in lengths]


@functools.partial(jax.jit, static_argnums=0)
def learned(model: Any, params: Any, rollout: rl.Rollout, temperature: Any) -> jax.Array:
    """The learner's log-probs of a rollout's tokens: float32 ``[B, T]``."""
    return rl.policy.from_decoder(model, temperature=temperature)(params, rollout).log_probs


def differences(
    model: Any, params: Any, rollout: rl.Rollout, temperature: float, pass_rows: int
) -> np.ndarray:
    """|sampler − learner| of every sampled token, row after row."""
    parts = []
    for first in range(0, rollout.tokens.shape[0], pass_rows):
        part = jax.tree.map(
            lambda leaf, first=first: leaf[first : first + pass_rows] if leaf.ndim else leaf,
            rollout,
        )
        gap = np.abs(np.asarray(learned(model, params, part, temperature) - part.log_probs))
        parts.append(gap[np.asarray(part.mask)])
    return np.concatenate(parts)


def measure(
    model: Any,
    params: Any,
    rows: Sequence[Sequence[int]],
    case: Case,
    *,
    new_tokens: int,
    pass_rows: int = 16,
) -> np.ndarray:
    """Sample completions of these prompts, score them, and compare: see :func:`differences`."""
    model = case.of(model)
    tokens, mask = right_padded(rows)
    if case.padding == "left":
        tokens, mask = (parity.shift_left(array, mask) for array in (tokens, mask))
    rollout = rl.generate(
        model,
        params,
        tokens,
        mask,
        jax.random.key(1),
        group_size=GROUP,
        max_new_tokens=new_tokens,
        temperature=case.temperature,
    )
    return differences(model, params, rollout, case.temperature, pass_rows)


Found = dict[tuple[str, Case], np.ndarray]


def pooled(found: Found, name: str, dtypes: str, temperature: float | None = None) -> Gap:
    """One model's gap at these dtypes, over paddings and, without one given, temperatures."""
    return Gap.of(
        np.concatenate(
            [
                values
                for (model, case), values in found.items()
                if (model, case.dtypes) == (name, dtypes)
                and temperature in (None, case.temperature)
            ]
        )
    )


def exact_table(found: Found, names: Sequence[str]) -> Table:
    """float32: largest, mean and the share of equal bits, at both temperatures."""
    temperatures = sorted({case.temperature for case in EXACT}, reverse=True)
    header = ["float32"]
    for temperature in temperatures:
        header += [f"τ = {temperature:g}: largest", "mean", "equal bits"]
    rows = []
    for name in names:
        gaps = [pooled(found, name, "float32", temperature) for temperature in temperatures]
        cells = [(f"{g.largest:.1e}", f"{g.mean:.1e}", f"{100 * g.equal:.1f} %") for g in gaps]
        rows.append([name, *(cell for group in cells for cell in group)])
    return Table(header, rows)


def coarse_table(found: Found, names: Sequence[str]) -> Table:
    """Other dtypes: largest and mean."""
    kinds = list(dict.fromkeys(case.dtypes for case in COARSE))
    rows = []
    for name in names:
        gaps = [pooled(found, name, kind) for kind in kinds]
        rows.append([name, *(f"{g.largest:.1e} / {g.mean:.1e}" for g in gaps)])
    return Table(["largest / mean", *kinds], rows)


def records(found: Found) -> Iterator[dict[str, object]]:
    """Every measurement by itself, for JSON."""
    for (name, case), values in found.items():
        yield {"model": name, **dataclasses.asdict(case), **dataclasses.asdict(Gap.of(values))}


def main() -> None:
    known = [*parity.families(), ONE_TO_ONE, SMOLLM2]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"any of {', '.join(known)}; all when empty")
    parser.add_argument("--rows", type=int, default=64, help=f"completions, {GROUP} of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each")
    parser.add_argument("--pass-rows", type=int, default=16, help="rows of one learner's pass")
    parser.add_argument("--exact-only", action="store_true", help="float32 alone")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    args = parser.parse_args()
    if wrong := sorted(set(args.models) - set(known)):
        parser.error(f"unknown: {', '.join(wrong)}; choose from {', '.join(known)}")
    if args.rows < GROUP or args.rows % GROUP:
        parser.error(f"--rows: got {args.rows}, expected a multiple of {GROUP}")
    print(f"jax {jax.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    names, found = args.models or known, Found()
    for name in names:
        model, params = load(name)
        rows = prompts(name, model.config.vocab_size, args.rows // GROUP)
        for case in EXACT if args.exact_only else (*EXACT, *COARSE):
            found[name, case] = measure(
                model, params, rows, case, new_tokens=args.tokens, pass_rows=args.pass_rows
            )
            print(f"{name}: {case}, largest {found[name, case].max():.1e}", file=sys.stderr)
    print(f"\n{exact_table(found, names)}")
    if not args.exact_only:
        print(f"\n{coarse_table(found, names)}")
    if args.json:
        args.json.write_text(json.dumps(list(records(found)), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
