"""A training step written a second time, from the papers' formulas and as plainly as they stand: one device, whole
scores, whole logits, a Python loop over layers, the optimizers in numpy at float64.

It imports nothing of meshtrain and reads a run's settings as a dict of plain numbers, so a fault of ours cannot be
here, too. Parameters are a nested dict named as ours: matrices [L, in…, out…], tables [rows, D].
Sources: arXiv:2302.13971 (Llama), 2407.21783 (rope scaling), 1711.05101 (AdamW), 2302.06675 (Lion), 1804.04235 with
2106.04560 (Adafactor), 2502.16982 (Muon), 2404.06395 (warm-up, stable, decay), 2010.06192 (stochastic rounding).
"""
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

# ---- forward ---------------------------------------------------------------------------------------------------------


def norm(m, p, x):
    """RMSNorm, or LayerNorm where the settings say so."""
    if m["norm"] == "layernorm":
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + m["norm_eps"]) * p["scale"] + p[
            "bias"]
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + m["norm_eps"]) * p["scale"]


def frequencies(m) -> np.ndarray:
    """Rotation per token of each pair of dims, scaled as in the code published with Llama 3.1."""
    out = []
    for pair in range(m["head_dim"] // 2):
        freq = m["rope_theta"] ** (-2 * pair / m["head_dim"])
        scaling = m["rope_scaling"]
        if scaling["rope_type"] == "default":
            out.append(freq)
            continue
        wavelength, original = 2 * math.pi / freq, scaling["original_max_position_embeddings"]
        low, high, factor = (scaling[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
        if wavelength < original / high:
            out.append(freq)
        elif wavelength > original / low:
            out.append(freq / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * freq / factor + smooth * freq)
    return np.array(out)


def rotate(m, x, positions):
    """x [B, T, heads, H]: dims i and i + H/2 are turned together (a complex number times e^(i angle))."""
    half = m["head_dim"] // 2
    angle = positions[..., None, None] * frequencies(m).astype(np.float32)
    turned = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)
    return jnp.concatenate([turned.real, turned.imag], -1)


def linear(p, x, dims=1):
    """x [B, T, in…] times a kernel [in…, out…], plus the bias where there is one."""
    return jnp.tensordot(x, p["kernel"], dims) + p.get("bias", 0.0)


def attention(m, p, x, positions, segments):
    q, k, v = (linear(p[name], x) for name in ("query", "key", "value"))
    if m["qk_norm"] != "off":
        q, k = norm({**m, "norm": "rmsnorm"}, p["query_norm"], q), norm({**m, "norm": "rmsnorm"}, p["key_norm"], k)
    if m["position"] == "rope":
        q, k = rotate(m, q, positions), rotate(m, k, positions)
    group = m["num_heads"] // m["num_kv_heads"]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)      # query head n reads key head n // group
    T = x.shape[1]
    seen = np.tril(np.ones((T, T), bool)) & (segments[:, :, None] == segments[:, None, :])
    scores = jnp.where(seen[:, None], jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(m["head_dim"]), -1e30)
    return linear(p["out"], jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), v), 2)


def mlp(m, p, x):
    if m["activation"] == "swiglu":
        gate = linear(p["gate"], x)
        return linear(p["down"], gate / (1 + jnp.exp(-gate)) * linear(p["up"], x))
    h = linear(p["up"], x)
    return linear(p["down"], h / 2 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))))


def logits(m, params, batch):
    """[B, T, vocab_size] of tokens, positions and segments [B, T]."""
    x = params["embedding"]["table"][batch["tokens"]]
    if m["position"] == "learned":
        x = x + params["position"]["table"][batch["positions"]]
    for number in range(m["num_layers"]):
        p = jax.tree.map(lambda leaf: leaf[number], params["layers"])
        x = x + attention(m, p["attention"], norm(m, p["attention_norm"], x), batch["positions"], batch["segments"])
        x = x + mlp(m, p["mlp"], norm(m, p["mlp_norm"], x))
    x = norm(m, params["final_norm"], x)
    head = params["embedding"]["table"].T if m["tie_embeddings"] else params["head"]["kernel"]
    return (x @ head)[..., : m["vocab_size"]]


def loss(m, z_loss, params, batch):
    """(nll + z_loss · log-partition², nll): means over the tokens with a target (-1 is none) of the whole step."""
    scores, targets = logits(m, params, batch), batch["targets"]
    log_partition = jnp.log(jnp.exp(scores - scores.max(-1, keepdims=True)).sum(-1)) + scores.max(-1)
    nll = log_partition - jnp.take_along_axis(scores, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    has = targets >= 0
    mean = lambda x: jnp.where(has, x, 0.0).sum() / has.sum()
    return mean(nll + z_loss * log_partition**2), mean(nll)


# ---- update ----------------------------------------------------------------------------------------------------------


def learning_rate(o, steps: int, step: int) -> float:
    """Of step number `step`, from 1."""
    warmup = min(o["warmup_steps"], steps)
    rise = step / warmup if step < warmup else 1.0
    decay = min(o["decay_steps"], steps - warmup) if o["schedule"] == "wsd" else steps - warmup
    begin = steps - decay                                           # the last step at the peak
    progress = (step - begin) / decay if step > begin else 0.0
    fall = {"cosine": (1 - math.cos(math.pi * progress)) / 2, "constant": 0.0}.get(o["schedule"], progress)
    return o["learning_rate"] * rise * (1 - (1 - o["final_fraction"]) * fall)


def is_vector(path) -> bool:
    """Norm scales and biases: never decayed, never factored or orthogonalized."""
    return path[-1] in ("scale", "bias")


def as_matrices(path, x):
    """[layers, fan-in, fan-out]; a table or the head is one matrix."""
    if path[0] != "layers":
        return x[None]
    inputs = 2 if path[-2] == "out" else 1
    return x.reshape(x.shape[0], math.prod(x.shape[1 : 1 + inputs]), -1)


def adam(o, state, g, count):
    state["m"] = o["b1"] * state.get("m", 0) + (1 - o["b1"]) * g
    state["v"] = o["b2"] * state.get("v", 0) + (1 - o["b2"]) * g**2
    return state["m"] / (1 - o["b1"] ** count) / (np.sqrt(state["v"] / (1 - o["b2"] ** count)) + o["eps"])


def lion(o, state, g, count):
    m = state.get("m", np.zeros_like(g))
    state["m"] = o["b2"] * m + (1 - o["b2"]) * g
    return np.sign(o["b1"] * m + (1 - o["b1"]) * g)


def adafactor(o, state, g, count, path):
    """No first moment, no scaling by the parameter's size; every matrix, or a layer's vector, is clipped alone."""
    decay = min(o["b2"], 1 - count**-0.8)
    average = lambda name, new: state.update({name: decay * state.get(name, 0) + (1 - decay) * new})
    if is_vector(path):
        blocks = g.reshape(g.shape[0] if path[0] == "layers" else 1, 1, -1)
        average("v", blocks**2 + 1e-30)
        v = state["v"]
    else:
        blocks = as_matrices(path, g)
        average("row", (blocks**2 + 1e-30).mean(2, keepdims=True))
        average("column", (blocks**2 + 1e-30).mean(1, keepdims=True))
        v = state["row"] * state["column"] / state["row"].mean(1, keepdims=True)
    update = blocks / np.sqrt(v)
    update /= np.maximum(1, np.sqrt((update**2).mean((1, 2), keepdims=True)))
    return update.reshape(g.shape)


def muon(o, state, g, count, path):
    """Nesterov momentum 0.95, orthogonalized by five Newton–Schulz steps, at the RMS of AdamW's updates.

    Deviates from the paper as optax does: the two terms of the Nesterov sum are bias-corrected (as in NAdam).
    """
    if is_vector(path) or path[0] != "layers":
        return adam(o, state, g, count)
    g_LIO = as_matrices(path, g)
    state["m"] = 0.95 * state.get("m", 0) + 0.05 * g_LIO
    update = 0.95 * state["m"] / (1 - 0.95 ** (count + 1)) + 0.05 * g_LIO / (1 - 0.95**count)
    for layer, x in enumerate(update):
        x = x / np.linalg.norm(x)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        update[layer] = 0.2 * math.sqrt(max(x.shape)) * x
    return update.reshape(g.shape)


def stochastically(x, seed: int, step: int, path):
    """x rounded to one of its two neighbours in bfloat16, by the run's own 16 random bits an element: away from zero
    where they exceed the distance to that neighbour, in 65,536ths of the distance of both."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0x726F756E), step)
    bits = jax.random.bits(jax.random.fold_in(key, zlib.crc32("/".join(path).encode())), x.shape, np.uint16)
    near = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    far = ((x.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    share = (x - near).astype(np.float64) / (far - near)
    return np.where(np.asarray(bits) >= 65536 * (1 - share), far, near).astype(jnp.bfloat16)


def leaves(tree, path=()):
    """[(path, leaf)] of a nested dict."""
    if not isinstance(tree, dict):
        return [(path, tree)]
    return [pair for key, sub in sorted(tree.items()) for pair in leaves(sub, (*path, key))]


class Training:
    """A run of the settings `run` (sections of plain numbers) from `params`; `step` makes one update."""

    def __init__(self, run: dict, params):
        self.run, self.params, self.step_number, self.count = run, params, 0, 0
        self.state = {path: {} for path, _ in leaves(params)}
        objective = lambda p, batch: loss(run["model"], run["training"]["z_loss"], p, batch)
        self.gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))

    def step(self, batch) -> dict:
        """batch: the whole step's sequences [B, T]. Returns what a run logs; a step that is not finite changes no
        weight."""
        o, t = self.run["optimizer"], self.run["training"]
        (_, nll), grads = self.gradients(jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), self.params), batch)
        norm = math.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for _, g in leaves(grads)))
        self.step_number += 1
        rate = learning_rate(o, t["steps"], self.step_number)
        finite = math.isfinite(nll) and math.isfinite(norm)
        if finite:
            self.count += 1                                       # what bias corrections count
            scale = min(1.0, t["grad_clip"] / norm) if t["grad_clip"] else 1.0
            by_path = dict(leaves(grads))
            update = lambda path, p: self._update(o, path, p, scale * np.asarray(by_path[path], np.float64), rate)
            self.params = _map(update, self.params)
        return {"loss": float(nll), "grad_norm": norm, "learning_rate": rate, "skipped": not finite,
                "tokens": int((batch["targets"] >= 0).sum())}

    def _update(self, o, path, p, g, rate):
        rule = {"adamw": adam, "lion": lion, "adafactor": adafactor, "muon": muon}[o["name"]]
        extra = (path,) if rule in (adafactor, muon) else ()
        update = rule(o, self.state[path], g, self.count, *extra)
        exact = np.asarray(p, np.float64)
        decay = 0.0 if is_vector(path) else o["weight_decay"]
        new = exact - rate * (update + decay * exact)
        if p.dtype == np.float32:
            return new.astype(p.dtype)
        return stochastically(new.astype(np.float32), self.run["run"]["seed"], self.step_number - 1, path)


def _map(f, tree, path=()):
    return {k: _map(f, v, (*path, k)) for k, v in tree.items()} if isinstance(tree, dict) else f(path, tree)
