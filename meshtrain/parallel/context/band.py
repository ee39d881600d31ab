"""Sliding-window attention over sequences in zigzag order.

A sequence has 2·cp chunks of c tokens. Each chunk attends to itself and to the D = ceil((window - 1) / c) chunks before
it; the chunk d places earlier is at distance d. All devices have the same mask at the same distance. Only the last one
or two distances need a mask, in which queries begin a fixed number of tokens after the keys. So every device computes
two blocks for each distance below cp, and one block for each larger distance, at which early chunks have no
predecessor. No device idles. Engines skip blocks outside the window. The first d chunks have no chunk at distance d,
and their results are discarded: D (D + 1) / 2 of 2·cp·D blocks if D < cp.

The method (`ring`, `gather`) moves keys to queries by a `ChunkExchange`. Call the functions where `context` is manual.
Lengths T are local: 2 chunks.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.kernels.engine import MASKED, Engine, Mask, Output
from meshtrain.parallel.context.zigzag import (AXIS, add, choose, gather, halves, join, merge, place,
                                               scatter, take)


class Distances(NamedTuple):
    """`length` consecutive distances from `first` on that have the same mask.

    early: whether early chunks also have keys at these distances."""
    first: int
    length: int
    early: bool
    mask: Mask


class ChunkExchange(NamedTuple):
    """How (early, late) pairs of chunk data move between devices.

    start(pair) -> travelling.

    receive(travelling, d, last) -> (data of the chunks at distance d, travelling to d + 1).

    add(sums, pair, d) -> sums, with the gradients of the chunks at distance d added, for d = 1, 2, …. The first sums
    are None.

    collect(sums, D) -> pair: the gradients of each device's own chunks. D: the last distance.
    """
    start: Callable
    receive: Callable
    add: Callable
    collect: Callable


def distances(mask: Mask, chunk: int, cp: int) -> list[Distances]:
    """Return all distances at which any key is visible, nearest first, in groups with the same mask."""
    last = min(-(-(mask.window - 1) // chunk), 2 * cp - 1)
    free = mask.window // chunk - 1         # whole chunks are visible up to this distance

    def mask_at(distance: int) -> tuple[bool, Mask]:
        """Return (whether early chunks have keys at this distance, too; the mask of a query and that chunk)."""
        seen = mask._replace(causal=False, window=0) if distance <= free else mask._replace(
            causal=False, ahead=distance * chunk)
        return distance < cp, seen
    grouped = [(key, list(group)) for key, group in itertools.groupby(range(1, last + 1), mask_at)]
    return [Distances(group[0], len(group), early, seen) for (early, seen), group in grouped]


def forward(engine: Engine, mask: Mask, exchange: ChunkExchange, q_BTNH, k_BTKH, v_BTKH, segments_BT):
    """Return o [B, T, N, H] and lse [B, T, N] of these queries over all visible keys, float32."""
    q, k, v, segments = map(halves, (q_BTNH, k_BTKH, v_BTKH, segments_BT))
    cp, i = lax.axis_size(AXIS), lax.axis_index(AXIS)
    sums = tuple(engine.forward(*own, mask) for own in zip(q, k, v, segments, segments))

    def visit(carry, d, of: Distances, last: bool):
        travelling, sums = carry
        received, travelling = exchange.receive(travelling, d, last)

        def merge_half(half):
            k, v, z = received[half]
            o, lse = engine.forward(q[half], k, v, segments[half], z, of.mask)
            return merge(*sums[half], o, jnp.where(_number(half, i, cp) >= d, lse, MASKED))
        return travelling, (merge_half(0) if of.early else sums[0], merge_half(1))

    steps = distances(mask, q[0].shape[1], cp)
    begun = exchange.start(tuple(zip(k, v, segments))) if steps else None
    _, ((o0, l0), (o1, l1)) = _through(steps, visit, (begun, sums))
    return join(o0, o1), join(l0, l1)


def backward(engine: Engine, mask: Mask, exchange: ChunkExchange, q_BTNH, k_BTKH, v_BTKH, segments_BT, out: Output):
    """Return dq, dk, dv of this device's tokens, float32."""
    q, k, v, segments, o, lse, do = map(halves, (q_BTNH, k_BTKH, v_BTKH, segments_BT, *out))
    cp, i = lax.axis_size(AXIS), lax.axis_index(AXIS)
    own = [engine.backward(*of_half, mask) for of_half in zip(q, k, v, segments, segments, o, lse, do)]
    dq, dkv = tuple(grads[0] for grads in own), [grads[1:] for grads in own]

    def visit(carry, d, of: Distances, last: bool):
        travelling, dq, sums = carry
        received, travelling = exchange.receive(travelling, d, last)

        def summands(half):
            k, v, z = received[half]
            grads = engine.backward(q[half], k, v, segments[half], z, o[half], lse[half], do[half], of.mask)
            # Select, do not multiply: keys that the forward never attended to may give infinities.
            return jax.tree.map(lambda grad: jnp.where(_number(half, i, cp) >= d, grad, 0.0), grads)
        late = summands(1)
        early = summands(0) if of.early else jax.tree.map(jnp.zeros_like, late)
        return (travelling, tuple(total + grads[0] for total, grads in zip(dq, (early, late))),
                exchange.add(sums, (early[1:], late[1:]), d))

    steps = distances(mask, q[0].shape[1], cp)
    if not steps:
        return join(*dq), *(join(*pair) for pair in zip(*dkv))
    _, dq, sums = _through(steps, visit, (exchange.start(tuple(zip(k, v, segments))), dq, None))
    (dk0, dv0), (dk1, dv1) = jax.tree.map(jnp.add, tuple(dkv),
                                          exchange.collect(sums, steps[-1].first + steps[-1].length - 1))
    return join(*dq), join(dk0, dk1), join(dv0, dv1)


def _number(half: int, i, cp: int):
    """Return the index in the sequence of device i's early (half = 0) or late (half = 1) chunk."""
    return 2 * cp - 1 - i if half else i


def _through(steps: list[Distances], visit, carry):
    """Apply visit(carry, d, distances, last) at all distances and return the carry.

    Distances with the same mask are one scan, except for the first distance, which initializes the sums, and the last,
    which sends nothing on.
    """
    last = steps[-1].first + steps[-1].length - 1 if steps else 0
    for of in steps:
        between = range(max(of.first, 2), min(of.first + of.length, last))
        if of.first == 1:
            carry = visit(carry, 1, of, last == 1)
        if between:
            carry, _ = lax.scan(lambda carry, d, of=of: (visit(carry, d, of, False), None), carry, jnp.asarray(between))
        if of is steps[-1] and last > 1:
            carry = visit(carry, last, of, True)
    return carry


# ---- how keys come to queries ----------------------------------------------------------------------------------------


def _receive_from_neighbour(travelling, d, last):
    return travelling, travelling if last else _send_on(travelling)


def _add_travelling(sums, pair, d):
    return pair if sums is None else jax.tree.map(jnp.add, _send_on(sums), pair)


def _return_sums(sums, D):
    back = 2 * lax.axis_size(AXIS) - D
    hop, hops = (_send_on, back) if back < D else (partial(_send_on, back=True), D)
    for _ in range(hops):
        sums = hop(sums)
    return sums


def _send_on(pair, back: bool = False):
    """Send each chunk's data to the device of the next (or previous) chunk. The sequence wraps around."""
    cp, i = lax.axis_size(AXIS), lax.axis_index(AXIS)

    def send(tree, by: int):
        return jax.tree.map(lambda x: lax.ppermute(x, AXIS, [(n, (n + by) % cp) for n in range(cp)]), tree)
    early, late = pair
    ahead, behind = send(early, -1 if back else 1), send(late, 1 if back else -1)
    # The middle two chunks share a device, and so do the first and the last. These pairs swap without communication.
    turn_early, turn_late = (cp - 1, 0) if back else (0, cp - 1)
    return choose(i == turn_early, late, ahead), choose(i == turn_late, early, behind)


# Ring permutes. Keys move to the device of the sequence's next chunk: early chunks go forward, late ones back, and both
# turn around at the ends. Gradient sums travel with their keys and return by the shorter way.
RING = ChunkExchange(_send_on, _receive_from_neighbour, _add_travelling, _return_sums)


def _place(half, d):
    """Return the position in the gathered sequence of the chunk at distance d; without one, of the first chunk."""
    return place(jnp.maximum(_number(half, lax.axis_index(AXIS), lax.axis_size(AXIS)) - d, 0))


def _gather_pair(pair):
    return jax.tree.map(lambda early, late: gather(join(early, late)), *pair)


def _receive_gathered(whole, d, last):
    return tuple(jax.tree.map(lambda x: take(x, _place(half, d)), whole) for half in (0, 1)), whole


def _add_gathered(sums, pair, d):
    if sums is None:
        sums = jax.tree.map(lambda x: jnp.concatenate([jnp.zeros_like(x)] * (2 * lax.axis_size(AXIS)), 1), pair[0])
    for half, summands in enumerate(pair):
        at = _place(half, d)
        sums = jax.tree.map(lambda x, y: add(x, y, at), sums, summands)
    return sums


def _scatter_sums(sums, D):
    return tuple(zip(*jax.tree.map(lambda x: halves(scatter(x)), sums)))


# All-gather the sequence; reduce-scatter its gradients.
GATHERED = ChunkExchange(_gather_pair, _receive_gathered, _add_gathered, _scatter_sums)
