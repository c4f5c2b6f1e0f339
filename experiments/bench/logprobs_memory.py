"""Peak temporaries of token log-probs: chunked against plain, by XLA's own analysis.

Nothing is executed: each program is compiled for the shapes given and asked for its plan of memory.

    python -m experiments.bench.logprobs_memory
    python -m experiments.bench.logprobs_memory --vocab 49152 --features 576 --dtype float32
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp

import rlhf_jax as rl

GIB = 2**30


def plain(hidden: jax.Array, head: jax.Array, tokens: jax.Array) -> jax.Array:
    logits = jnp.einsum("btd,dv->btv", hidden, head, preferred_element_type=jnp.float32)
    return rl.logprobs.token_log_probs(logits, tokens)


def chunked(hidden: jax.Array, head: jax.Array, tokens: jax.Array) -> jax.Array:
    return rl.logprobs.policy_log_probs(hidden, head, tokens).log_probs


def pieces(hidden: jax.Array, head: jax.Array, tokens: jax.Array) -> jax.Array:
    out = rl.logprobs.policy_log_probs(hidden, head, tokens, vocab_chunk=16384)
    return out.log_probs


def temporaries(function: Callable[..., object], *shapes: jax.ShapeDtypeStruct) -> int:
    """Bytes that the compiled program holds besides its inputs and outputs."""
    plan = jax.jit(function).lower(*shapes).compile().memory_analysis()
    if plan is None:
        raise RuntimeError(f"the {jax.default_backend()} backend has no memory analysis")
    return plan.temp_size_in_bytes


def measure(
    batch: int, length: int, features: int, vocab: int, dtype: str = "bfloat16"
) -> dict[str, dict[str, int]]:
    """Temporaries in bytes: pass → form → bytes."""
    hidden = jax.ShapeDtypeStruct((batch, length, features), dtype)
    head = jax.ShapeDtypeStruct((features, vocab), dtype)
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def total(form):
        return lambda *args: form(*args).sum()

    forms = {"plain": plain, "chunked": chunked, "chunked, vocabulary too": pieces}
    passes = {
        "forward": lambda form: form,
        "forward + backward, frozen head": lambda form: jax.value_and_grad(total(form)),
        "forward + backward, head trained": lambda form: jax.value_and_grad(total(form), (0, 1)),
    }
    return {
        what: {
            name: temporaries(transform(form), hidden, head, tokens) for name, form in forms.items()
        }
        for what, transform in passes.items()
    }


def table(found: dict[str, dict[str, int]]) -> str:
    names = list(next(iter(found.values())))
    lines = ["| pass | " + " | ".join(f"{name} (GiB)" for name in names) + " | plain / chunked |"]
    lines.append("|---|" + "---:|" * (len(names) + 1))
    for what, row in found.items():
        cells = " | ".join(f"{row[name] / GIB:.3f}" for name in names)
        lines.append(f"| {what} | {cells} | {row['plain'] / row['chunked']:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("batch", 8), ("length", 1024), ("features", 1024), ("vocab", 131072)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    print(
        f"jax {jax.__version__}, {jax.default_backend()}: B={args.batch} T={args.length} "
        f"D={args.features} V={args.vocab} {args.dtype}; temporaries by memory_analysis()\n"
    )
    print(table(measure(args.batch, args.length, args.features, args.vocab, args.dtype)))


if __name__ == "__main__":
    main()
