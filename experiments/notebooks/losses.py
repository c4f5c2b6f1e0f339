# %% [markdown]
# # Policy-gradient losses, seen
#
# Losses here are functions of arrays, so they can be plotted. Three pictures:
#
# 1. PPO's objective against the ratio: where it is flat, and which way it pushes elsewhere.
# 2. The KL estimators: bias, spread, and the gradient each yields as a loss.
# 3. Aggregations: how much one token weighs, by the length of its completion.
#
# Run as a script, it writes PNG files to `$RLHF_JAX_FIGURES` (a temporary folder by default).

# %%
import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import rlhf_jax as rl

FIGURES = Path(os.environ.get("RLHF_JAX_FIGURES") or tempfile.mkdtemp(prefix="rlhf-jax-"))
FIGURES.mkdir(parents=True, exist_ok=True)

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, RED, PURPLE = "#2b6cb0", "#dd6b20", "#2f855a", "#c53030", "#6b46c1"
plt.rcParams.update(
    {
        "figure.dpi": 130,
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titleweight": "bold",
        "axes.titlesize": 11,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "grid.color": GRID,
        "legend.frameon": False,
    }
)


def save(figure: plt.Figure, name: str) -> None:
    path = FIGURES / f"{name}.png"
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    print("wrote", path)


# %% [markdown]
# ## 1. The regions of PPO's objective
#
# `J = min(ρA, clip(ρ, 1−ε, 1+ε)·A)`. `ppo_per_token` returns −J for every token, so a row of ratios
# is a row of tokens, and one `jax.grad` gives every slope.

# %%
EPS = 0.2
CUTS = (1 - EPS, 1 + EPS)


def objective(ratio: jax.Array, advantage: float) -> jax.Array:
    log_probs = jnp.log(ratio)[None]
    return -rl.losses.ppo_per_token(
        log_probs,
        jnp.zeros_like(log_probs),
        jnp.array([advantage], jnp.float32),
        jnp.ones(log_probs.shape, bool),
        clip_low=EPS,
        clip_high=EPS,
    )[0]


def slope(ratio: jax.Array, advantage: float) -> jax.Array:
    return jax.grad(lambda r: objective(r, advantage).sum())(ratio)


# One ratio in each region. (The kinks themselves are left out: both slopes meet there.)
CENTRES = {"ρ < 1−ε": 0.6, "inside": 1.0, "ρ > 1+ε": 1.4}
CARDS = {
    +1: ("J = ρA\n∇J: push up", "J = ρA\n∇J: push up", "J = (1+ε)A\n∇J = 0"),
    -1: ("J = (1−ε)A\n∇J = 0", "J = ρA\n∇J: push down", "J = ρA\n∇J: push down,\nunbounded"),
}
print(f"{'A':>3}  {'region':<8} {'ρ':>4} {'J':>6} {'dJ/dρ':>6}")
for sign in CARDS:
    for region, centre in CENTRES.items():
        at = jnp.array([centre])
        value, gradient = float(objective(at, sign)[0]), float(slope(at, sign)[0])
        print(f"{sign:>3}  {region:<8} {centre:>4} {value:>6.2f} {gradient:>6.2f}")

assert slope(jnp.array([0.6, 1.0, 1.4]), 1.0).tolist() == [1.0, 1.0, 0.0]
assert slope(jnp.array([0.6, 1.0, 1.4]), -1.0).tolist() == [0.0, -1.0, -1.0]

# %%
ratios = jnp.linspace(0.3, 1.75, 2901)
figure, panels = plt.subplots(1, 2, figsize=(11, 4.9), sharex=True)
for panel, (sign, cards), colour in zip(panels, CARDS.items(), (GREEN, RED), strict=True):
    values, flat = np.asarray(objective(ratios, sign)), np.asarray(slope(ratios, sign)) == 0
    panel.axvspan(*CUTS, color=BLUE, alpha=0.08, lw=0)
    panel.plot(ratios, sign * ratios, ls=":", lw=1.2, color=MUTED, label="ρA, not clipped")
    panel.plot(ratios, np.where(flat, np.nan, values), lw=2.6, color=colour, label="J, slope A")
    panel.plot(ratios, np.where(flat, values, np.nan), lw=2.6, color=INK, label="J, gradient 0")
    for cut in CUTS:
        kink = flat.any() and bool(np.isclose(cut, 1 + sign * EPS))
        panel.axvline(cut, lw=0.8, ls="--", color=MUTED)
        if kink:
            panel.plot(cut, sign * cut, "o", ms=7, color="white", mec=INK, mew=1.6, zorder=5)
    panel.plot(1, sign, "o", ms=5, color=colour, zorder=5)
    low, high = (-0.15, 2.25) if sign > 0 else (-2.0, 0.4)
    panel.set(
        title="A > 0: make it likelier" if sign > 0 else "A < 0: make it rarer",
        xlabel="ρ = π / π_old",
        xlim=(0.3, 1.75),
        ylim=(low, high),
        xticks=[0.5, 0.8, 1.0, 1.2, 1.5],
    )
    panel.set_xticklabels(["0.5", "1−ε", "1", "1+ε", "1.5"])
    for centre, card in zip((0.55, 1.0, 1.475), cards, strict=True):
        still = card.endswith("= 0")
        panel.text(
            centre,
            high - 0.04 * (high - low),
            card,
            ha="center",
            va="top",
            fontsize=8.2,
            color=INK if still else colour,
            bbox={"boxstyle": "round,pad=0.35", "fc": "white", "ec": GRID, "lw": 1},
        )
    panel.text(
        1.0, low + 0.02 * (high - low), "trust region", ha="center", color=BLUE, fontsize=8.5
    )
    panel.legend(loc="lower right" if sign > 0 else "lower left", fontsize=8.5)
panels[0].set_ylabel("objective J of one token (|A| = 1)")
figure.suptitle(
    "PPO stops paying once a token has moved far enough the right way; it never stops "
    "correcting one that moved the wrong way",
    fontsize=11.5,
)
figure.tight_layout()
save(figure, "ppo_regions")

# %% [markdown]
# ## 2. KL estimators: bias, spread, gradient
#
# A policy moves away from a uniform reference over eight tokens. Everything is summed over the
# vocabulary, so these are exact expectations and not samples.

# %%
VOCAB = 8
direction = jax.random.normal(jax.random.key(3), (VOCAB,))
ref = jax.nn.log_softmax(jnp.zeros(VOCAB))
NAMES = {"k1": BLUE, "k2": ORANGE, "k3": GREEN}


def policy(logits: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(logits)


def moments(scale: jax.Array, name: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """True KL(π‖ref), the estimator's mean, its standard deviation."""
    log_p = policy(scale * direction)
    p, k = jnp.exp(log_p), rl.kl.estimate(name, log_p, ref)
    mean = jnp.sum(p * k)
    return jnp.sum(p * (log_p - ref)), mean, jnp.sqrt(jnp.sum(p * (k - mean) ** 2))


def cosine(scale: jax.Array, name: str) -> jax.Array:
    """Of the expected gradient as a loss with the gradient of KL(π‖ref)."""
    logits = scale * direction
    p = jax.lax.stop_gradient(jax.nn.softmax(logits))
    got = jax.grad(lambda x: jnp.sum(p * rl.kl.estimate(name, policy(x), ref)))(logits)
    true = jax.grad(lambda x: jnp.sum(jnp.exp(policy(x)) * (policy(x) - ref)))(logits)
    norms = jnp.linalg.norm(got) * jnp.linalg.norm(true)
    return jnp.sum(got * true) / jnp.maximum(norms, 1e-12)


scales = jnp.linspace(0.05, 2.5, 60)
found = {name: jax.vmap(lambda s, n=name: jnp.stack(moments(s, n)))(scales).T for name in NAMES}
angles = {
    name: jax.vmap(lambda s, n=name: cosine(s, n))(scales)
    for name in (*NAMES, "k3_straight_through")
}
truth = found["k1"][0]
assert np.allclose(found["k1"][1], truth, atol=1e-5) and np.allclose(
    found["k3"][1], truth, atol=1e-5
)
assert np.allclose(angles["k2"], 1, atol=1e-4)
print(f"{'KL':>6} " + " ".join(f"{n + ' mean':>9} {n + ' std':>8}" for n in NAMES))
for i in range(9, 60, 10):
    row = " ".join(f"{found[n][1][i]:>9.4f} {found[n][2][i]:>8.4f}" for n in NAMES)
    print(f"{truth[i]:>6.3f} {row}")

# %%
figure, panels = plt.subplots(1, 3, figsize=(13, 4.1))
WIDTHS = {"k1": 4.5, "k2": 2.2, "k3": 2.0}
for name, colour in NAMES.items():
    style = {"color": colour, "lw": WIDTHS[name], "label": name}
    if name == "k1":
        style["alpha"] = 0.45
    panels[0].plot(truth, found[name][1] / truth, **style)
    panels[1].plot(truth, found[name][2], color=colour, lw=2.2, label=name)
panels[0].set(title="Bias: k2's only", ylabel="mean of the estimator / true KL", ylim=(0.9, 1.08))
panels[1].set(title="Spread: k1's is large near the reference", ylabel="standard deviation")
panels[1].set(xscale="log", yscale="log")
LOOK = {
    "k2": {"color": ORANGE, "lw": 5, "alpha": 0.45},
    "k3_straight_through": {"color": PURPLE, "lw": 1.8, "ls": "--"},
    "k3": {"color": GREEN, "lw": 2.2},
}
for name, style in LOOK.items():
    panels[2].plot(truth, angles[name], label=name.replace("_", " "), **style)
panels[2].text(
    0.03,
    0.05,
    "k1 as a loss: 0 in expectation",
    transform=panels[2].transAxes,
    color=BLUE,
    fontsize=9,
)
panels[2].set(title="As a loss: which gradient?", ylabel="cosine with ∇KL(π‖ref)", ylim=(0, 1.06))
for panel in panels:
    panel.set_xlabel("true KL(π‖ref), nats")
    panel.grid(True, which="major", lw=0.6)
    panel.legend(fontsize=9)
figure.tight_layout()
save(figure, "kl_estimators")

# %% [markdown]
# ## 3. What an aggregation does to a token
#
# The gradient of the aggregated loss by each token's own loss is the token's weight. Two prompts,
# four completions of 2, 4, 8 and 16 tokens.

# %%
LENGTHS = np.array([2, 4, 8, 16])
mask = jnp.arange(16)[None] < LENGTHS[:, None]
groups = jnp.array([0, 0, 1, 1])
OPTIONS = {"fixed_length": {"length": 16}, "prompt_mean": {"group_ids": groups}}


def weights(aggregation: str) -> jax.Array:
    return jax.grad(
        lambda x: rl.masked.aggregate(x, mask, aggregation, **OPTIONS.get(aggregation, {}))
    )(jnp.zeros(mask.shape))


table = {name: np.asarray(weights(name)) for name in rl.masked.AGGREGATIONS}
print(f"{'weight of one token':<22}" + "".join(f"{f'length {n}':>12}" for n in LENGTHS))
for name, rows in table.items():
    print(f"{name:<22}" + "".join(f"{row[0]:>12.4f}" for row in rows))
assert np.ptp(table["token_mean"][:, 0]) == 0  # every token alike
assert np.allclose(table["seq_mean_token_mean"].sum(1), 0.25)  # every completion alike

# %%
figure, panels = plt.subplots(1, 2, figsize=(12.5, 4.3))
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED)
places, width = np.arange(len(LENGTHS)), 0.16
for i, (name, rows) in enumerate(table.items()):
    share = rows.sum(1) / rows.sum()
    at = places + (i - 2) * width
    panels[0].plot(places, rows[:, 0], "o-", lw=2, ms=7, color=COLOURS[i], label=name)
    panels[1].bar(at, share, width * 0.92, color=COLOURS[i], label=name)
panels[0].set(
    title="Weight of one token", ylabel="∂loss / ∂(token's loss), log scale", yscale="log"
)
panels[0].set_yticks([1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4], ["1/64", "1/32", "1/16", "1/8", "1/4"])
panels[0].minorticks_off()
panels[1].set(title="Share of a whole completion in the gradient", ylabel="share")
for panel in panels:
    panel.set_xticks(
        places, [f"{n} tokens\nprompt {g + 1}" for n, g in zip(LENGTHS, groups, strict=True)]
    )
    panel.grid(True, axis="y", lw=0.6)
    panel.set_axisbelow(True)
panels[1].legend(fontsize=9)
figure.tight_layout()
save(figure, "aggregation_weights")
