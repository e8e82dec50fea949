"""JAX: GPipe by shard_map and ppermute, a process a rank, with gloo between them.

All ranks run one program, so each has the same number of blocks.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks.peers.job import Job
from benchmarks.peers.model import RATE, Setting, batch, weights


def norm(x, w, b):
    """LayerNorm, with statistics in float32."""
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * w + b


def block(p, x, heads):
    """A block of GPT-2."""
    rows, length, width = x.shape
    h = norm(x, p["norm1"], p["bias1"]) @ p["qkv"].T + p["bqkv"]
    q, k, v = (t.reshape(rows, length, heads, -1) for t in jnp.split(h, 3, -1))
    a = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(rows, length, width)
    x = x + a @ p["proj"].T + p["bproj"]
    h = norm(x, p["norm2"], p["bias2"]) @ p["up"].T + p["bup"]
    return x + jax.nn.gelu(h, approximate=True) @ p["down"].T + p["bdown"]


def norm_of(value: np.ndarray) -> float:
    """The norm, summed in float64 as those of the others."""
    return float(np.sqrt(np.square(value, dtype=np.float64).sum()))


def build(setting: Setting, rank: int) -> Job:
    """A step as one compiled program: microbatches in a scan, gradients by jax.grad."""
    ranks, count = setting.ranks, setting.microbatches
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{int(os.environ['MASTER_PORT'])}"
    jax.distributed.initialize(address, ranks, rank)
    mesh = Mesh(np.array(jax.devices()), ("stage",))
    layers, width, heads, _ = setting.shape
    each = layers // ranks
    kind = jnp.dtype(setting.dtype)

    def shared(value, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_process_local_data(sharding, value)

    def own(names):
        """One entry a rank, with this rank's."""
        mine = [weights(setting, name) for name in names]
        return {
            k: shared(np.stack([m[k] for m in mine])[None].astype(kind), P("stage"))
            for k in mine[0]
        }

    params = {
        "embedding": own(["embedding"]),
        "blocks": own([f"block{i}" for i in range(rank * each, rank * each + each)]),
        "head": own(["head"]),
    }
    x, t = batch(setting)
    size = (count, setting.rows, setting.tokens)
    xs, ts = (shared(a.reshape(size).astype(np.int32), P()) for a in (x, t))
    forward = [(i, i + 1) for i in range(ranks - 1)]

    def local(p, xs, ts):
        me = jax.lax.axis_index("stage")
        p = jax.tree.map(lambda leaf: leaf[0], p)

        def embed(tokens):
            return p["embedding"]["wte"][0][tokens] + p["embedding"]["wpe"][0]

        def one(h, q):
            return block(q, h, heads), None

        if setting.recompute:
            one = jax.checkpoint(one)

        def value(h, targets):
            h = norm(h, p["head"]["norm"][0], p["head"]["bias"][0])
            logits = (h @ p["head"]["out"][0].T).astype(jnp.float32)
            picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
            return (jax.nn.logsumexp(logits, -1) - picked).mean()

        def tick(carry, k):
            got, total = carry
            tokens = xs[jnp.clip(k, 0, count - 1)]
            h = jax.lax.cond(me == 0, lambda: embed(tokens), lambda: got)
            busy = (k >= me) & (k < count + me)
            h = jax.lax.cond(busy, lambda h: jax.lax.scan(one, h, p["blocks"])[0], lambda h: h, h)
            done = k - (ranks - 1)
            targets = ts[jnp.clip(done, 0, count - 1)]
            last = (me == ranks - 1) & (done >= 0)
            total += jax.lax.cond(
                last, lambda: value(h, targets), lambda: 0.0 * h.sum().astype(jnp.float32)
            )
            return (jax.lax.ppermute(h, "stage", forward), total), None

        start = jnp.zeros((setting.rows, setting.tokens, width), kind) + 0 * p["blocks"]["bproj"][0]
        (_, total), _ = jax.lax.scan(
            tick, (start, 0.0 * start.sum().astype(jnp.float32)), jnp.arange(count + ranks - 1)
        )
        return jax.lax.psum(total, "stage") / count

    spec = (P("stage"), P(), P())
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P())

    def update(params, xs, ts):
        value, grads = jax.value_and_grad(mapped)(params, xs, ts)
        return (
            value,
            jax.tree.map(lambda p, g: (p - RATE * g).astype(p.dtype), params, grads),
            grads,
        )

    first = jax.jit(update)
    train = jax.jit(lambda *a: update(*a)[:2], donate_argnums=0)
    kept = [params]
    seen: dict[str, float] = {}

    def step() -> float:
        if not seen:
            value, kept[0], grads = first(kept[0], xs, ts)
            mine = jax.tree.map(lambda a: np.asarray(a.addressable_data(0), np.float32)[0], grads)
            for k, v in mine["blocks"].items():
                seen.update({f"block{rank * each + i}.{k}": norm_of(v[i]) for i in range(each)})
            for name, home in (("embedding", 0), ("head", ranks - 1)):
                if rank == home:
                    seen.update({f"{name}.{k}": norm_of(v[0]) for k, v in mine[name].items()})
            return float(value)
        value, kept[0] = train(kept[0], xs, ts)
        return float(value)

    return Job(step, seen)
