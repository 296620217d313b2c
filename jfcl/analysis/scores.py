"""Metrics of one client's outputs, `(outputs, batch, real) -> []`, for `jfcl.evaluate` and `jfcl.simulate(metrics=…)`.

`outputs` `[M, C]` are logits, `batch["y"]` `[M]` labels, and `real` `[M]` marks the examples that are no padding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jfcl.core import Batch

BINS = 15  # of equal width, of the probability of the predicted class


def confusion_matrix(logits: jax.Array, batch: Batch, real: jax.Array) -> jax.Array:
    """Returns the numbers of examples by label (rows) and predicted class (columns), `[C, C]` float32.

    Example:
      >>> logits = jnp.array([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
      >>> confusion_matrix(logits, {"y": jnp.array([0, 1, 1])}, jnp.array([True, True, True])).tolist()
      [[1.0, 0.0], [1.0, 1.0]]
    """
    count = logits.shape[-1]
    true, predicted = (jax.nn.one_hot(k, count) for k in (batch["y"], jnp.argmax(logits, axis=-1)))
    return jnp.matmul((true * real[:, None].astype(true.dtype)).T, predicted, precision=jax.lax.Precision.HIGHEST)


def macro_f1(logits: jax.Array, batch: Batch, real: jax.Array) -> jax.Array:
    """Returns the mean of the classes' F1, `[]`, over the classes that are labels or predictions of the client.

    That is `sklearn.metrics.f1_score(average="macro")`.

    Example:
      >>> logits = jnp.array([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
      >>> round(float(macro_f1(logits, {"y": jnp.array([0, 1, 1])}, jnp.array([True, True, True]))), 4)
      0.6667
    """
    table = confusion_matrix(logits, batch, real)
    right, counted = jnp.diagonal(table), table.sum(axis=0) + table.sum(axis=1)
    f1 = 2 * right / jnp.maximum(counted, 1)
    return f1.sum() / jnp.maximum((counted > 0).sum(), 1).astype(f1.dtype)


def auc(logits: jax.Array, batch: Batch, real: jax.Array) -> jax.Array:
    """Returns the area under the ROC curve, `[]`, of two classes: the probability that a positive example ranks higher.

    Ties count one half. NaN for a client with examples of one class only; means over clients leave it out.

    Raises:
      ValueError: other than two classes.

    Cost: `O(M²)`.

    Example:
      >>> logits = jnp.array([[0.0, 1.0], [0.0, 2.0], [0.0, 0.0]])
      >>> float(auc(logits, {"y": jnp.array([0, 1, 1])}, jnp.array([True, True, True])))
      0.5
    """
    if logits.shape[-1] != 2:
        raise ValueError(f"auc needs logits of two classes, got {logits.shape[-1]}; macro_f1 takes any number")
    score = logits[:, 1] - logits[:, 0]
    positive, negative = (((batch["y"] == k) & real).astype(score.dtype) for k in (1, 0))
    ahead = (score[:, None] > score[None, :]).astype(score.dtype)
    ahead += 0.5 * (score[:, None] == score[None, :]).astype(score.dtype)
    pairs = positive.sum() * negative.sum()
    return jnp.where(pairs > 0, (positive[:, None] * negative[None, :] * ahead).sum() / pairs, jnp.nan)


def calibration_error(logits: jax.Array, batch: Batch, real: jax.Array) -> jax.Array:
    """Returns the expected calibration error, `[]` (Guo, Pleiss, Sun, Weinberger 2017): 15 bins of equal width.

    It is the mean, over examples, of the distance between accuracy and mean probability in the bin of the example.

    Example:
      >>> logits = jnp.log(jnp.array([[0.8, 0.2], [0.8, 0.2]]))
      >>> round(float(calibration_error(logits, {"y": jnp.array([0, 1])}, jnp.array([True, True]))), 4)
      0.3
    """
    probability = jax.nn.softmax(logits).max(axis=-1)
    right = (jnp.argmax(logits, axis=-1) == batch["y"]).astype(probability.dtype)
    place = jnp.clip(jnp.ceil(probability * BINS).astype(jnp.int32) - 1, 0, BINS - 1)
    inside = jax.nn.one_hot(place, BINS, dtype=probability.dtype) * real[:, None].astype(probability.dtype)
    gaps = jnp.abs(((right - probability)[:, None] * inside).sum(axis=0))
    return gaps.sum() / jnp.maximum(real.sum(), 1).astype(gaps.dtype)
