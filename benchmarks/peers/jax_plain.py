"""Rounds as a user of JAX writes them without jfcl: `vmap(grad)`, flax's convolutions, means. See benchmarks/gpu.py.

Every function returns `round(key, models, x, y) -> models`, of models `[K, ...]` by the names of jfcl's parameters and
examples `[N, M, ...]`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

QUANTILE, THRESHOLD_ROUNDS = 0.2, 10


def dense(p, name, x):
    return x @ p[f"{name}/kernel"] + p[f"{name}/bias"][None]


def convolution(x, kernel, stride=1, padding=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, ((padding,) * 2,) * 2, dimension_numbers=numbers)


def mlp(p, x):
    return dense(p, "Dense_1", jax.nn.relu(dense(p, "Dense_0", x.reshape(len(x), -1))))


def cnn(p, x):
    for name in ("Conv_0", "Conv_1"):
        x = jax.nn.relu(convolution(x, p[f"{name}/kernel"]) + p[f"{name}/bias"][None, None, None])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return dense(p, "Dense_1", jax.nn.relu(dense(p, "Dense_0", x.reshape(len(x), -1))))


def resnet(p, x):
    def layer(x, prefix, i, stride=1):
        kernel = p[f"{prefix}Conv_{i}/kernel"]
        x = convolution(x, kernel, stride, len(kernel) // 2)
        split = x.reshape(*x.shape[:3], math.gcd(32, x.shape[3]), -1)
        mean, var = (f(split, axis=(1, 2, 4), keepdims=True) for f in (jnp.mean, jnp.var))
        x = ((split - mean) * jax.lax.rsqrt(var + 1e-6)).reshape(x.shape)
        scale, bias = (p[f"{prefix}GroupNorm_{i}/{name}"][None, None, None] for name in ("scale", "bias"))
        return x * scale + bias

    x = jax.nn.relu(layer(x, "", 0))
    for block in range(sum(name.endswith("/Conv_0/kernel") for name in p)):
        prefix = f"ResidualBlock_{block}/"
        shrinks = f"{prefix}Conv_2/kernel" in p
        out = layer(jax.nn.relu(layer(x, prefix, 0, 1 + shrinks)), prefix, 1)
        x = jax.nn.relu(out + (layer(x, prefix, 2, 2) if shrinks else x))
    return dense(p, "Dense_0", x.mean(axis=(1, 2)))


MODELS = {"mlp": mlp, "cnn": cnn, "resnet": resnet}


def loss_of(forward):
    def loss(p, x, y):
        logits = jax.nn.log_softmax(forward(p, x))
        return -jnp.take_along_axis(logits, y[:, None], axis=1).mean()

    return loss


def local_training(case, loss):
    """`(key, model, x [M, ...], y [M]) -> model` of one client."""
    batch = case.batch

    def train(key, model, x, y):
        m = len(x)
        rows = None if batch in (None, m) else jax.random.permutation(key, m)

        def step(t, p):
            at = None if rows is None else rows[(t * batch + jnp.arange(batch)) % m]
            grads = jax.grad(loss)(p, x, y) if at is None else jax.grad(loss)(p, x[at], y[at])
            return jax.tree.map(lambda w, g: w - case.lr * g, p, grads)

        return jax.lax.fori_loop(0, case.steps, step, model)

    return train


def fedavg(case):
    train = local_training(case, loss_of(MODELS[case.model]))

    def one_round(key, models, x, y):
        model = jax.tree.map(lambda p: p[0], models)
        trained = jax.vmap(train, (0, None, 0, 0))(jax.random.split(key, len(x)), model, x, y)
        return jax.tree.map(lambda p: p.mean(axis=0, keepdims=True), trained)

    return one_round


def ifca(case):
    loss = loss_of(MODELS[case.model])
    train = local_training(case, loss)

    def one_round(key, models, x, y):
        losses = jax.vmap(jax.vmap(loss, (0, None, None)), (None, 0, 0))(models, x, y)
        chosen = jnp.argmin(losses, axis=1)
        starts = jax.tree.map(lambda p: p[chosen], models)
        trained = jax.vmap(train)(jax.random.split(key, len(x)), starts, x, y)
        members = jax.nn.one_hot(chosen, losses.shape[1]).T
        count = members.sum(axis=1)

        def mean(new, old):
            sums = jnp.tensordot(members / jnp.maximum(count, 1.0)[:, None], new, 1)
            return jnp.where((count > 0).reshape(-1, *[1] * (old.ndim - 1)), sums, old)

        return jax.tree.map(mean, trained, models)

    return one_round


def cfl(case):
    """Without the bipartition, and so what a round without a split needs."""
    train = local_training(case, loss_of(MODELS[case.model]))

    def one_round(key, models, x, y):
        model = jax.tree.map(lambda p: p[0], models)
        trained = jax.vmap(train, (0, None, 0, 0))(jax.random.split(key, len(x)), model, x, y)
        updates = jax.tree.map(lambda p, old: p - old[None], trained, model)
        longest = jnp.sqrt(sum(jnp.square(u).reshape(len(u), -1).sum(axis=1) for u in jax.tree.leaves(updates)).max())
        means = jax.tree.map(lambda u: u.mean(axis=0), updates)
        norm = jnp.sqrt(sum(jnp.square(m).sum() for m in jax.tree.leaves(means)))
        return jax.tree.map(lambda p, m: (p + m)[None], model, means) | {"norms": (longest, norm)}

    return one_round


def federated_clustering(case):
    gradient = jax.grad(loss_of(MODELS[case.model]))

    def one_round(key, models, x, y):
        n, m, batch = *y.shape, case.batch or y.shape[1]
        if batch < m:
            draw = jax.vmap(lambda key: jax.random.permutation(key, m)[:batch])
            rows = draw(jax.random.split(key, n))
            x, y = jax.vmap(lambda a, r: a[r])(x, rows), jax.vmap(lambda a, r: a[r])(y, rows)

        def one(model_and_row):
            model, i = model_and_row
            grads = jax.vmap(gradient, (None, 0, 0))(model, x, y)
            points = jnp.concatenate([g.reshape(n, -1) for g in jax.tree.leaves(grads)], axis=1)

            def move(_, centre):
                distances = jnp.linalg.norm(points - centre[None], axis=1)
                inside = distances <= jnp.quantile(distances, QUANTILE)
                total = jnp.where(inside[:, None], points, 0.0).sum(axis=0)
                return (total + (~inside).sum().astype(jnp.float32) * centre) / n

            centre = jax.lax.fori_loop(0, THRESHOLD_ROUNDS, move, points[i])
            sizes = [g[0].size for g in jax.tree.leaves(grads)]
            ends = [sum(sizes[: j + 1]) for j in range(len(sizes) - 1)]
            parts = jnp.split(centre, ends)
            leaves, structure = jax.tree.flatten(model)
            new = [p - case.lr * c.reshape(p.shape) for p, c in zip(leaves, parts, strict=True)]
            return jax.tree.unflatten(structure, new)

        return jax.lax.map(one, (models, jnp.arange(n)))

    return one_round


ROUNDS = {"ifca": ifca, "cfl": cfl, "federated clustering": federated_clustering, "fedavg": fedavg}
