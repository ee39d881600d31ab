"""A mixture-of-experts transformer written a second time, on one device: every expert sees every token, in a Python
loop.

Imports nothing of meshtrain. m: the settings of [model], e: those of [experts], as plain dicts, and
the shares [L, E] of the experts in the step before, if the batch is to be balanced.
"""
import jax
import jax.numpy as jnp
import numpy as np
import reference


def top(scores, k):
    """The k largest, of equals the first; numpy's order, not lax.top_k's."""
    return np.argsort(-np.asarray(scores), -1, kind="stable")[..., :k]


def chosen(m, scores, bias, real):
    """[B, T, K] and the smallest gap between what is chosen last and what is not chosen first, of tokens that are
    real."""
    scores = np.asarray(scores) + (0 if bias is None else np.asarray(bias))
    if m["router_groups"]:
        count, limit = m["router_groups"]
        groups = scores.reshape(*scores.shape[:-1], count, -1)
        kept = top(np.sort(groups, -1)[..., -2:].sum(-1), limit)
        open_to = (np.arange(count) == kept[..., None]).any(-2)
        scores = np.where(open_to[..., None], groups, -np.inf).reshape(scores.shape)
    ranked = np.sort(scores, -1)[..., ::-1]
    K = m["experts_per_token"]
    return top(scores, K), np.min((ranked[..., K - 1] - ranked[..., K])[real]) if K < m["num_experts"] else np.inf


def activation(m, gate, up):
    return {"swiglu": lambda: gate / (1 + jnp.exp(-gate)) * up, "geglu": lambda: jax.nn.gelu(gate) * up,
            "gelu": lambda: jax.nn.gelu(up)}[m["activation"]]()


def moe(m, e, p, x, choice, real, shares):
    """(y, balance losses summed, counts [E], gap); choice: [B, T, K], or None to choose. Tokens that are not real [B,
    T] have no expert, and count for nothing. shares: f of all sequences [E]; None: each has its own."""
    logits = x @ p["router"]
    scores = jax.nn.softmax(logits, -1) if m["router_score"] == "softmax" else 1 / (1 + jnp.exp(-logits))
    gap = None
    if choice is None:
        choice, gap = chosen(m, scores, p.get("bias"), real)
    picked = (choice[..., None] == np.arange(m["num_experts"])).any(-2) & real[..., None]       # [B, T, E]
    weight = scores * picked
    if m["router_normalize"]:
        weight = weight / jnp.where(real[..., None], weight.sum(-1, keepdims=True), 1)
    y = 0
    for n in range(m["num_experts"]):
        gate = x @ p["gate"][n] if "gate" in p else None
        y = y + weight[..., n:n + 1] * m["router_scale"] * (activation(m, gate, x @ p["up"][n]) @ p["down"][n])
    if m["shared_expert_dim"]:
        y = y + reference.mlp(m, p["shared"], x)
    share = scores if m["router_score"] == "softmax" else scores / scores.sum(-1, keepdims=True)
    f = picked.sum(1) / np.maximum(real.sum(1) * m["experts_per_token"], 1)[:, None]             # [B, E]
    f = f if shares is None else np.asarray(shares)[None]
    aux = e["aux_loss"] * m["num_experts"] * jnp.sum(f * (share * real[..., None]).sum(1))
    aux += e["z_loss"] * jnp.sum((real * jnp.log(jnp.exp(logits).sum(-1))) ** 2)
    return y, aux, picked.sum((0, 1)), choice, gap


def layer_weights(m, params, number):
    layers, dense = params["layers"], m["mlps"].count("d")
    if dense:
        layers, number = (layers["dense_layers"], number) if number < dense else (layers["layers"], number - dense)
    return jax.tree.map(lambda leaf: leaf[number], layers)


def objective(m, e, params, batch, choices):
    """((objective, ), (nll, counts [L, E], choices, gap)) of the whole step: nll a mean over tokens with a target, the
    balance losses over those that are no padding (segment 0)."""
    real = np.asarray(batch["segments"]) != 0
    x = params["embedding"]["table"][batch["tokens"]]
    aux, counts, gaps, made = 0, [], [], []
    for number in range(m["num_layers"]):
        p = layer_weights(m, params, number)
        x = x + reference.attention(m, p["attention"], reference.norm(m, p["attention_norm"], x),
                                    batch["positions"], batch["segments"])
        h = reference.norm(m, p["mlp_norm"], x)
        if "mlp" in p:
            x = x + reference.mlp(m, p["mlp"], h)
            continue
        y, more, count, choice, gap = moe(m, e, p["moe"], h, choices[len(made)] if choices else None, real,
                                        e["shares"][number] if "shares" in e else None)
        x, aux = x + y, aux + more
        counts.append(count), gaps.append(gap), made.append(choice)
    x = reference.norm(m, params["final_norm"], x)
    scores = (x @ params["head"]["kernel"])[..., :m["vocab_size"]]
    has = batch["targets"] >= 0
    nll = jax.nn.logsumexp(scores, -1) - jnp.take_along_axis(scores, jnp.maximum(batch["targets"], 0)[..., None], -1)[
        ..., 0]
    nll = jnp.where(has, nll, 0).sum() / has.sum()
    return nll + aux / real.sum(), (nll, np.stack(counts), made, gaps)


def gradients(m, e, params, batch):
    """(nll, gradients, counts of each layer with experts [L, E], smallest gap). The biases' gradients are the
    counts."""
    _, (_, counts, choices, gaps) = objective(m, e, params, batch, None)
    counts = counts.astype(np.float32)
    (_,
     nll), grads = jax.jit(jax.value_and_grad(lambda p: (lambda o: (o[0], o[1][0]))(objective(m, e, p, batch, choices)),
                                                 has_aux=True))(params)
    layers = grads["layers"].get("layers", grads["layers"])
    if "bias" in layers["moe"]:
        layers["moe"]["bias"] = counts
    return float(nll), grads, counts, float(min(gaps))
