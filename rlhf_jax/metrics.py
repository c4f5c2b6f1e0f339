"""Metrics that know how they reduce over micro-batches, devices and rows.

A loss returns sums and weights, not averages, so that the reduction over any split of a batch
gives what the whole batch would have given. Definitions by kind:

- ``mean``: Σx / n, also for shares and other averages;
- ``sum``: Σx, for a loss that was divided by its global denominator already;
- ``max``, ``min``;
- ``std``: √(population variance), merged from means and squared deviations, never from E[x²]−E[x]²;
- ``explained_variance``: 1 − Var(R−V)/Var(R);
- ``ess``: the effective share of samples, (Σw)² / (n·Σw²).

A metric over no entries at all (everything masked) reads 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks

KINDS = ("mean", "sum", "max", "min", "std", "explained_variance", "ess")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, ready to be merged with others of its name.

    Attributes:
      total: float32; a scalar, or [2] (mean, Σ(x−mean)²) for ``std``, [4] (the same of R−V, then
        of R) for ``explained_variance``, [2] (Σw, Σw²) for ``ess``.
      weight: float32 scalar, the number of entries that went in.
      kind: one of ``KINDS``; static.

    Example:
      >>> float(mean(jnp.array([1.0, 3.0])).value())
      2.0
    """

    total: jax.Array
    weight: jax.Array
    kind: str = dataclasses.field(metadata={"static": True})

    def value(self) -> jax.Array:
        """Return the number to log, a scalar; 0 if nothing went in.

        Example:
          >>> float(sum_(jnp.array([1.0, 3.0])).value())
          4.0
        """
        if self.kind == "sum":
            return self.total
        weight = jnp.where(self.weight > 0, self.weight, 1.0)
        return jnp.where(self.weight > 0, _READ[self.kind](self.total, weight), 0.0)


Metrics = dict[str, Metric]


def _read_explained(total: jax.Array, weight: jax.Array) -> jax.Array:
    residual, spread = total[..., 1], total[..., 3]
    return jnp.where(spread > 0, 1.0 - residual / jnp.where(spread > 0, spread, 1.0), 0.0)


def _read_ess(total: jax.Array, weight: jax.Array) -> jax.Array:
    squares = jnp.where(total[..., 1] > 0, total[..., 1], 1.0)
    return jnp.where(total[..., 1] > 0, total[..., 0] ** 2 / (weight * squares), 0.0)


_READ: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "mean": lambda total, weight: total / weight,
    "max": lambda total, weight: total,
    "min": lambda total, weight: total,
    "std": lambda total, weight: jnp.sqrt(total[..., 1] / weight),
    "explained_variance": _read_explained,
    "ess": _read_ess,
}


def _prepare(values: ArrayLike, mask: ArrayLike | None) -> tuple[jax.Array, jax.Array]:
    x = jax.lax.stop_gradient(jnp.asarray(values)).astype(jnp.float32)
    if mask is None:
        return x, jnp.ones(x.shape, bool)
    return x, checks.boolean("mask", mask, like=x, like_name="values")


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.float32)


def mean(values: ArrayLike, mask: ArrayLike | None = None) -> Metric:
    """Average of the masked entries: Σ m·x / Σ m.

    Args:
      values: array of any shape and real dtype; stop-gradient.
      mask: bool, of the same shape; all entries count by default.

    Returns:
      A ``mean`` metric.

    Raises:
      TypeError: if ``mask`` is not bool.
      ValueError: if the shapes differ.

    Example:
      >>> float(mean(jnp.array([1.0, 9.0]), jnp.array([True, False])).value())
      1.0
    """
    x, m = _prepare(values, mask)
    return Metric(total=jnp.sum(jnp.where(m, x, 0.0)), weight=_count(m), kind="mean")


def sum_(values: ArrayLike, mask: ArrayLike | None = None) -> Metric:
    """Sum of the masked entries: Σ m·x. Also for a loss that its global denominator divided.

    Args:
      values: array of any shape and real dtype; stop-gradient.
      mask: bool, of the same shape; all entries count by default.

    Returns:
      A ``sum`` metric.

    Raises:
      TypeError: if ``mask`` is not bool.
      ValueError: if the shapes differ.

    Example:
      >>> float(sum_(jnp.array([1.0, 9.0])).value())
      10.0
    """
    x, m = _prepare(values, mask)
    return Metric(total=jnp.sum(jnp.where(m, x, 0.0)), weight=_count(m), kind="sum")


def maximum(values: ArrayLike, mask: ArrayLike | None = None) -> Metric:
    """Largest masked entry: max over m of x.

    Args:
      values: array of any shape and real dtype; stop-gradient.
      mask: bool, of the same shape; all entries count by default.

    Returns:
      A ``max`` metric; its total is −∞ while nothing went in, its value then 0.

    Raises:
      TypeError: if ``mask`` is not bool.
      ValueError: if the shapes differ.

    Example:
      >>> float(maximum(jnp.array([1.0, 9.0]), jnp.array([True, False])).value())
      1.0
    """
    x, m = _prepare(values, mask)
    return Metric(
        total=jnp.max(jnp.where(m, x, -jnp.inf), initial=-jnp.inf), weight=_count(m), kind="max"
    )


def minimum(values: ArrayLike, mask: ArrayLike | None = None) -> Metric:
    """Smallest masked entry: min over m of x.

    Args:
      values: array of any shape and real dtype; stop-gradient.
      mask: bool, of the same shape; all entries count by default.

    Returns:
      A ``min`` metric; its total is ∞ while nothing went in, its value then 0.

    Raises:
      TypeError: if ``mask`` is not bool.
      ValueError: if the shapes differ.

    Example:
      >>> float(minimum(jnp.array([1.0, 9.0])).value())
      1.0
    """
    x, m = _prepare(values, mask)
    return Metric(
        total=jnp.min(jnp.where(m, x, jnp.inf), initial=jnp.inf), weight=_count(m), kind="min"
    )


def _moments(x: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
    count = jnp.maximum(_count(m), 1.0)
    centre = jnp.sum(jnp.where(m, x, 0.0)) / count
    top = jnp.max(jnp.where(m, x, -jnp.inf), initial=-jnp.inf)
    bottom = jnp.min(jnp.where(m, x, jnp.inf), initial=jnp.inf)
    # The float32 mean of equal entries need not be their value; their spread is 0 all the same.
    equal = top == bottom
    centre = jnp.where(equal, top, centre)
    return centre, jnp.sum(jnp.where(m & ~equal, x - centre, 0.0) ** 2)


def std(values: ArrayLike, mask: ArrayLike | None = None) -> Metric:
    """Population standard deviation of the masked entries: √(Σ m·(x−μ)² / Σ m).

    Args:
      values: array of any shape and real dtype; stop-gradient.
      mask: bool, of the same shape; all entries count by default.

    Returns:
      A ``std`` metric.

    Raises:
      TypeError: if ``mask`` is not bool.
      ValueError: if the shapes differ.

    References:
      Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
      variances", 1979, for the merge.

    Example:
      >>> float(std(jnp.array([1.0, 3.0])).value())
      1.0
    """
    x, m = _prepare(values, mask)
    return Metric(total=jnp.stack(_moments(x, m)), weight=_count(m), kind="std")


def explained_variance(
    returns: ArrayLike, values: ArrayLike, mask: ArrayLike | None = None
) -> Metric:
    """Share of the returns' variance that the values explain: 1 − Var(R−V) / Var(R).

    Args:
      returns: array of any shape and real dtype; stop-gradient.
      values: the same shape; stop-gradient.
      mask: bool, of the same shape; all entries count by default.

    Returns:
      An ``explained_variance`` metric; it reads 0 where the returns do not vary.

    Raises:
      TypeError: if ``mask`` is not bool.
      ValueError: if the shapes differ.

    Example:
      >>> r = jnp.array([0.0, 1.0, 2.0])
      >>> float(explained_variance(r, r).value())
      1.0
    """
    r, m = _prepare(returns, mask)
    checks.shape("values", values, r.shape, like="returns")
    v, _ = _prepare(values, mask)
    total = jnp.stack([*_moments(r - v, m), *_moments(r, m)])
    return Metric(total=total, weight=_count(m), kind="explained_variance")


def effective_share(weights: ArrayLike, mask: ArrayLike | None = None) -> Metric:
    """Effective sample size as a share of the samples: (Σw)² / (n·Σw²).

    Args:
      weights: array of any shape and real dtype, importance weights ≥ 0; stop-gradient.
      mask: bool, of the same shape; all entries count by default.

    Returns:
      An ``ess`` metric.

    Raises:
      TypeError: if ``mask`` is not bool.
      ValueError: if the shapes differ.

    References:
      Kong, "A note on importance sampling using standardized weights", 1992.

    Example:
      >>> float(effective_share(jnp.array([1.0, 1.0, 0.0, 0.0])).value())
      0.5
    """
    w, m = _prepare(weights, mask)
    w = jnp.where(m, w, 0.0)
    return Metric(total=jnp.stack([jnp.sum(w), jnp.sum(w**2)]), weight=_count(m), kind="ess")


def _reduce_moments(total: jax.Array, weight: jax.Array) -> jax.Array:
    # total [N, 2k] holds k pairs (mean, squared deviations); weight [N].
    share = weight / jnp.maximum(jnp.sum(weight), 1.0)
    means, squares = total[:, 0::2], total[:, 1::2]
    # Relative to one part's mean: parts with equal means must not differ from their own average.
    origin = means[jnp.argmax(weight)]
    centre = origin + jnp.sum(share[:, None] * (means - origin), axis=0)
    spread = jnp.sum(squares + weight[:, None] * (means - centre) ** 2, axis=0)
    return jnp.stack([centre, spread], axis=-1).reshape(-1)


def stack_reduce(metrics: Metrics) -> Metrics:
    """Reduce the leading axis of every metric by its kind, as after ``jax.lax.scan``.

    Args:
      metrics: every leaf with a leading axis [N, …], one entry per micro-batch.

    Returns:
      The metrics of all N together.

    Raises:
      ValueError: if a metric is of an unknown kind.

    Example:
      >>> xs = jnp.array([[1.0, 2.0], [3.0, 6.0]])
      >>> out = stack_reduce(jax.vmap(lambda x: {"x": mean(x), "top": maximum(x)})(xs))
      >>> float(out["x"].value()), float(out["top"].value())
      (3.0, 6.0)
    """
    reduced = {}
    for name, metric in metrics.items():
        checks.one_of(f"metrics[{name!r}].kind", metric.kind, KINDS)
        if metric.kind == "max":
            total = jnp.max(metric.total, axis=0)
        elif metric.kind == "min":
            total = jnp.min(metric.total, axis=0)
        elif metric.kind in ("std", "explained_variance"):
            total = _reduce_moments(metric.total, metric.weight)
        else:
            total = jnp.sum(metric.total, axis=0)
        reduced[name] = Metric(total=total, weight=jnp.sum(metric.weight, axis=0), kind=metric.kind)
    return reduced


def merge(a: Metrics, b: Metrics) -> Metrics:
    """Combine the metrics of two parts of a batch, each by its kind.

    Args:
      a: metrics of one part.
      b: metrics of the other; names that only one part has are kept as they are.

    Returns:
      The metrics of both together.

    Raises:
      ValueError: if a name has different kinds in ``a`` and ``b``.

    Example:
      >>> out = merge({"x": mean(jnp.array([1.0]))}, {"x": mean(jnp.array([2.0, 6.0]))})
      >>> float(out["x"].value())
      3.0
    """
    both = {}
    for name in a.keys() & b.keys():
        if a[name].kind != b[name].kind:
            raise ValueError(
                f"metric {name!r} is {a[name].kind!r} in one part and {b[name].kind!r} in the "
                "other. Give the two different names."
            )
        both[name] = jax.tree.map(lambda *leaves: jnp.stack(leaves), a[name], b[name])
    merged = {**a, **b, **stack_reduce(both)}
    return {name: merged[name] for name in (*a, *(n for n in b if n not in a))}


def compute(metrics: Metrics) -> dict[str, jax.Array]:
    """Read every metric: name → scalar.

    Args:
      metrics: merged metrics.

    Returns:
      A dict of float32 scalars, in the same order.

    Example:
      >>> {k: float(v) for k, v in compute({"x": mean(jnp.array([1.0, 2.0]))}).items()}
      {'x': 1.5}
    """
    return {name: metric.value() for name, metric in metrics.items()}
