"""Loops over blocks of rows and columns, products and sums of rows. Rows are a list of matrices `[N, d]`."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.core.platforms import by_platform
from jfcl.kernels.base import PyTree, if_rare, is_computable, row_mask, rows_of, sum_dtype, sum_over_columns
from jfcl.kernels.gram_gpu import LEAST_COLUMNS, mirrored, upper_products

# Full float32 on accelerators too, which by default round operands to TF32 or bfloat16.
HIGHEST = jax.lax.Precision.HIGHEST
matmul = partial(jnp.matmul, precision=HIGHEST)

# Measured on a 2-core CPU (benchmarks/kernels.py): thinner strips save work and are slower products.
NUM_STRIPS = 8  # of the upper triangle: 56 % of the full product's work
STRIP_ROWS = 250  # at least
HIGH_STRIP_ROWS = 1024  # at least, on an accelerator
BLOCK_COLUMNS = 2048  # multiplied at once; half of that for more than 8192 clients
BLOCK_NUMBERS = 2**20  # numbers in a block of rows: 4 MB, which stays in the cache for a second read
SUMMED_ROWS = 1024  # of many rows, as many as clients in a block of `mapping.map_reduce`


def fold_blocks(body: Callable[[Any, int, Any], Any], carry: Any, size: int, block: int) -> Any:
    """Repeats `carry = body(start, length, carry)` for blocks of `0 .. size`: a loop over full blocks, then the last.

    `length` is a Python integer (`block`, in the end `size % block`), so that blocks have static shapes.
    """
    whole, last = divmod(size, block)
    if whole == 1:
        carry = body(0, block, carry)
    elif whole:
        carry = jax.lax.fori_loop(0, whole, lambda i, c: body(i * block, block, c), carry)
    return body(whole * block, last, carry) if last else carry


def fold_columns(body: Callable[[jax.Array, int, Any, Any], Any], carry: Any, rows: list[jax.Array], block: int) -> Any:
    """Repeats `carry = body(rows[leaf][:, start : start + block], leaf, start, carry)` over all matrices."""
    for leaf, x in enumerate(rows):

        def on_block(start, length, carry, x=x, leaf=leaf):
            return body(jax.lax.dynamic_slice_in_dim(x, start, length, axis=1), leaf, start, carry)

        carry = fold_blocks(on_block, carry, x.shape[1], block)
    return carry


def product_of_rows(x: jax.Array, y: jax.Array, dtype: Any = None) -> jax.Array:
    """Returns `x yᵀ` `[n, m]` for `[n, d]` and `[m, d]`, summed in `dtype`."""
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, precision=HIGHEST, preferred_element_type=dtype)


@jax.jit
def squared_norms(rows: list[jax.Array]) -> jax.Array:
    """Returns `[N]`, the sum of squares of every row over all matrices, in one pass at memory speed.

    It is a batched product, because XLA's CPU backend adds the terms of a row reduction one by one, 15 times slower.
    """
    return sum_over_columns(squares_of_share(rows))


def squares_of_share(rows: list[jax.Array]) -> jax.Array:
    """Returns `squared_norms` without the columns of other devices, for sums in a loop."""
    dims = (((1,), (1,)), ((0,), (0,)))
    return sum(jax.lax.dot_general(x, x, dims, HIGHEST, preferred_element_type=sum_dtype(x)) for x in rows)


def fold_rows(body: Callable[[list[jax.Array], Any, int, Any], Any], carry: Any, rows: list[jax.Array]) -> Any:
    """Repeats `carry = body(parts, start, length, carry)` for blocks of rows; `parts` are those of all matrices."""
    count, width = len(rows[0]), sum(x.shape[1] for x in rows)

    def on_block(start, length, carry):
        return body([jax.lax.dynamic_slice_in_dim(x, start, length) for x in rows], start, length, carry)

    return fold_blocks(on_block, carry, count, min(count, max(1, BLOCK_NUMBERS // max(width, 1))))


def product_over_rows(product: Callable[..., jax.Array], weights: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `product(weights [..., N], x [N, ...])`, a sum over the rows; of many rows, blocks are summed apart.

    XLA's CPU backend adds row after row: a float32 mean of a million equal rows would be off by 1e-2.
    """

    def add(start, length, total):
        some = jax.lax.dynamic_slice_in_dim(weights, start, length, axis=weights.ndim - 1)
        return total + product(some, jax.lax.dynamic_slice_in_dim(x, start, length))

    if len(x) <= 8 * SUMMED_ROWS:
        return product(weights, x)
    like = jax.eval_shape(product, weights, x)
    return fold_blocks(add, jnp.zeros(like.shape, like.dtype), len(x), SUMMED_ROWS)


def distances_from(rows: list[jax.Array], point: list[jax.Array], usable: jax.Array) -> jax.Array:
    """Returns `[N]` distances of the rows from one point (a vector `[d]` for each matrix); `inf` for unusable rows.

    They are computed from differences, and so exact for a point near the rows and far from zero.
    """

    def measure(parts, start, length, squares):
        some = squares_of_share([x - p[None, :] for x, p in zip(parts, point, strict=True)])
        return jax.lax.dynamic_update_slice_in_dim(squares, some, start, axis=0)

    squares = sum_over_columns(fold_rows(measure, jnp.zeros(len(usable), sum_dtype(*rows)), rows))
    return jnp.where(usable, jnp.sqrt(squares), jnp.inf)


@jax.jit
def finite_rows(rows: list[jax.Array]) -> jax.Array:
    """Returns `[N]` bool: rows without NaN and infinity in all of the matrices."""
    # A finite sum of squares proves it in one fast pass. Only otherwise is every number checked, which is slow.
    norms = squared_norms(rows)

    def check_all():
        every = jnp.ones(norms.shape, bool)
        ok = fold_columns(lambda part, leaf, start, ok: ok & jnp.isfinite(part).all(axis=1), every, rows, 4096)
        return sum_over_columns((~ok).astype(jnp.int32)) == 0

    return if_rare(~jnp.isfinite(norms).all(), check_all, lambda: jnp.ones(norms.shape, bool))


def checked_rows(
    points: PyTree, mask: jax.Array | None, name: str = "points", mask_name: str = "mask"
) -> tuple[list[jax.Array], jax.Array]:
    """Returns `rows_of(points)` and `[N]` bool, the rows that count; outside `jit`, these must be finite."""
    rows = rows_of(points, name=name)
    mask = row_mask(mask, len(rows[0]), name=mask_name)
    refuse_nonfinite(rows, name, mask)
    return rows, mask


def refuse_nonfinite(rows: list[jax.Array], name: str, rows_that_count: jax.Array | None = None) -> None:
    """Raises `ValueError` with the number of rows with NaN or infinity; does nothing inside `jit`."""
    if is_computable(rows, rows_that_count):
        num_bad = int(_num_nonfinite(rows, rows_that_count))
        check(num_bad == 0, name, f"NaN or infinity in {num_bad} row(s)", "finite")


@jax.jit
def _num_nonfinite(rows, rows_that_count):
    bad = ~finite_rows(rows)
    return (bad if rows_that_count is None else bad & rows_that_count).sum()


def usable_rows(x: jax.Array, usable: jax.Array) -> jax.Array:
    """Returns `x` with zeros in the rows that are not usable, also where those hold NaN."""
    return jnp.where(usable[:, None], x, jnp.zeros((), x.dtype))


@jax.jit
def weighted_sum(x: jax.Array, weights: jax.Array, usable: jax.Array) -> jax.Array:
    """Returns `weights` `[N]` or `[K, N]` times the usable rows of `x` `[N, d]`; the others may hold NaN.

    The result has the type of `x`. Products and sums of 16-bit numbers are float32: float16 has no `1/N` for large N.
    """
    dtype = sum_dtype(x)
    weights = weights.astype(dtype)

    def cleaned():
        def put(part, leaf, start, out):
            sums = product_over_rows(matmul, weights, usable_rows(part, usable).astype(dtype))
            return jax.lax.dynamic_update_slice_in_dim(out, sums.astype(x.dtype), start, axis=-1)

        return fold_columns(put, jnp.zeros((*weights.shape[:-1], x.shape[1]), x.dtype), [x], BLOCK_COLUMNS)

    if x.dtype != dtype:  # block by block, without a copy of all of `x` in float32
        return cleaned()
    total = product_over_rows(matmul, weights, x)
    # 0 · NaN is NaN: then the sum is computed again without the unusable rows.
    return if_rare(~jnp.isfinite(total).all(), cleaned, lambda: total)


def column_block(count: int) -> int:
    """Returns the number of columns of `count` rows that are multiplied at once."""
    return BLOCK_COLUMNS if count <= 8192 else BLOCK_COLUMNS // 2


def symmetric_product(rows: list[jax.Array], prepare: Callable[[jax.Array, int, Any], jax.Array]) -> jax.Array:
    """Returns `[N, N]`, the sum of `P Pᵀ` over blocks of columns, with `P = prepare(part, leaf, start)`.

    The upper triangle is computed in strips and mirrored: half of the work, and exactly symmetric. On an accelerator,
    all columns are one block, and strips are high; on an NVIDIA GPU, `gram_gpu.upper_products` multiplies long rows.
    """
    widest = max(1, *(x.shape[1] for x in rows))

    def high_strips(rows, prepare=prepare):
        return _sum_of_strips(rows, prepare, HIGH_STRIP_ROWS, widest)

    def by_leaves(rows):
        total = jnp.zeros((len(rows[0]),) * 2, sum_dtype(*rows))
        for leaf, x in enumerate(rows):
            of_leaf = lambda part, _, start, leaf=leaf: prepare(part, leaf, start)  # noqa: E731
            product = upper_products(prepare(x, leaf, 0)) if is_long(x) else high_strips([x], of_leaf)
            total += product.astype(total.dtype)
        return total

    strips = lambda rows: _sum_of_strips(rows, prepare, STRIP_ROWS, column_block(len(rows[0])))  # noqa: E731
    return sum_over_columns(by_platform(rows, cpu=strips, accelerator=high_strips, cuda=by_leaves))


def is_long(x: jax.Array) -> bool:
    """Returns whether rows `[N, ...]` are long enough for `upper_products`, and of its type."""
    return x.dtype == jnp.float32 and math.prod(x.shape[1:]) >= LEAST_COLUMNS


def _sum_of_strips(rows, prepare, least_height, block_size):
    """Returns `symmetric_product` by strips of at least that height, in blocks of `block_size` columns."""
    count = len(rows[0])
    height = max(least_height, -(-count // NUM_STRIPS))
    starts = list(range(0, count, height))
    dtype = sum_dtype(*rows)

    def add(part, leaf, start, strips):
        p = prepare(part, leaf, start)
        return [s + product_of_rows(p[i : i + height], p[i:], dtype) for i, s in zip(starts, strips, strict=True)]

    zeros = [jnp.zeros((min(height, count - i), count - i), dtype) for i in starts]
    product = jnp.zeros((count, count), dtype)
    for i, strip in zip(starts, fold_columns(add, zeros, rows, block_size), strict=True):
        size = len(strip)
        strip = strip.at[:, :size].set(mirrored(strip[:, :size]))
        product = jax.lax.dynamic_update_slice(product, strip, (i, i))
        product = jax.lax.dynamic_update_slice(product, strip[:, size:].T, (i + size, i))
    return product
