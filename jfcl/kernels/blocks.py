"""Loops over blocks of rows and columns, products and sums of rows. Rows are a list of matrices `[N, d]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check
from jfcl.core.platforms import by_platform
from jfcl.kernels.base import if_rare, is_computable, sum_dtype, sum_over_columns
from jfcl.kernels.gram_gpu import LEAST_COLUMNS, upper_products

# Full float32 on accelerators too, which by default round operands to TF32 or bfloat16.
HIGHEST = jax.lax.Precision.HIGHEST

# Measured on a 2-core CPU (benchmarks/kernels.py): thinner strips save work and are slower products.
NUM_STRIPS = 8  # of the upper triangle: 56 % of the full product's work
STRIP_ROWS = 250  # at least
HIGH_STRIP_ROWS = 1024  # at least, on an accelerator
BLOCK_COLUMNS = 2048  # multiplied at once; half of that for more than 8192 clients
BLOCK_NUMBERS = 2**20  # numbers in a block of rows: 4 MB, which stays in the cache for a second read


def fold_blocks(body: Callable[[Any, int, Any], Any], carry: Any, size: int, block: int) -> Any:
    """Repeats `carry = body(start, length, carry)` for blocks of `0 .. size`: a loop over full blocks, then the rest.

    `length` is a Python integer (`block`, in the end `size % block`), so that blocks have static shapes.
    """
    whole = size // block
    if whole == 1:
        carry = body(0, block, carry)
    elif whole:
        carry = jax.lax.fori_loop(0, whole, lambda i, c: body(i * block, block, c), carry)
    rest = size - whole * block
    return body(whole * block, rest, carry) if rest else carry


def fold_columns(body: Callable[[jax.Array, int, Any, Any], Any], carry: Any, rows: list[jax.Array], block: int) -> Any:
    """Repeats `carry = body(part, leaf, start, carry)` for blocks of columns of all matrices.

    `part` is `rows[leaf][:, start : start + block]`.
    """
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
    """Returns `squared_norms` without those columns that other devices have; their sum follows behind a loop."""
    return sum(_dot(x, x) for x in rows)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    dims = (((1,), (1,)), ((0,), (0,)))
    return jax.lax.dot_general(x, y, dims, precision=HIGHEST, preferred_element_type=sum_dtype(x))


def fold_rows(body: Callable[[list[jax.Array], Any, int, Any], Any], carry: Any, rows: list[jax.Array]) -> Any:
    """Repeats `carry = body(parts, start, length, carry)` for blocks of rows; `parts` are those of all matrices."""
    count, width = len(rows[0]), sum(x.shape[1] for x in rows)

    def on_block(start, length, carry):
        return body([jax.lax.dynamic_slice_in_dim(x, start, length) for x in rows], start, length, carry)

    return fold_blocks(on_block, carry, count, min(count, max(1, BLOCK_NUMBERS // max(width, 1))))


def distances_from(rows: list[jax.Array], point: list[jax.Array], usable: jax.Array) -> jax.Array:
    """Returns `[N]` distances of the rows from one point (a vector `[d]` for each matrix); `inf` for unusable rows.

    They are computed from the differences, block by block, so that they are exact for a point near the rows and far
    from zero.
    """

    def measure(parts, start, length, found):
        squares = squares_of_share([x - p[None, :] for x, p in zip(parts, point, strict=True)])
        return jax.lax.dynamic_update_slice_in_dim(found, squares, start, axis=0)

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


def refuse_nonfinite(rows: list[jax.Array], *, name: str = "updates", rows_that_count: jax.Array | None = None) -> None:
    """Raises `ValueError` with the number of rows with NaN or infinity; does nothing inside `jit`."""
    if not is_computable(rows, rows_that_count):
        return
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

    The result has the type of `x`. Products and sums of 16-bit numbers are float32, because float16 cannot represent
    `1/N` for large N.
    """
    dtype = sum_dtype(x)
    weights = weights.astype(dtype)

    def cleaned():
        def put(part, leaf, start, out):
            sums = jnp.matmul(weights, usable_rows(part, usable).astype(dtype), precision=HIGHEST)
            return jax.lax.dynamic_update_slice_in_dim(out, sums.astype(x.dtype), start, axis=-1)

        return fold_columns(put, jnp.zeros((*weights.shape[:-1], x.shape[1]), x.dtype), [x], BLOCK_COLUMNS)

    if x.dtype != dtype:  # block by block, without a copy of all of `x` in float32
        return cleaned()
    total = jnp.matmul(weights, x, precision=HIGHEST)
    # 0 · NaN is NaN. In that case, the sum is computed again without the unusable rows.
    return if_rare(~jnp.isfinite(total).all(), cleaned, lambda: total)


def column_block(count: int) -> int:
    """Returns the number of columns of `count` rows that are multiplied at once."""
    return BLOCK_COLUMNS if count <= 8192 else BLOCK_COLUMNS // 2


def symmetric_product(rows: list[jax.Array], prepare: Callable[[jax.Array, int, Any], jax.Array]) -> jax.Array:
    """Returns `[N, N]`, the sum of `P Pᵀ` over blocks of columns, with `P = prepare(part, leaf, start)`.

    The upper triangle is computed in strips and mirrored: half of the work, and exactly symmetric. Leaves are not
    concatenated, and no copy of all rows is held. On an accelerator, all columns are one block, and strips are high; on
    an NVIDIA GPU, long rows are multiplied by `gram_gpu.upper_products`.
    """
    blocks = column_block(len(rows[0]))
    widest = max(1, *(x.shape[1] for x in rows))
    product = by_platform(
        rows,
        cpu=lambda rows: _sum_of_strips(rows, prepare, STRIP_ROWS, blocks),
        accelerator=lambda rows: _sum_of_strips(rows, prepare, HIGH_STRIP_ROWS, widest),
        cuda=lambda rows: _sum_of_leaves(rows, prepare, widest),
    )
    return sum_over_columns(product)


def _sum_of_leaves(rows, prepare, widest):
    """Returns `symmetric_product` of each matrix for itself: long ones by a kernel for GPUs."""
    total = jnp.zeros((len(rows[0]),) * 2, sum_dtype(*rows))
    for leaf, x in enumerate(rows):
        if is_long(x):
            total += upper_products(prepare(x, leaf, 0)).astype(total.dtype)
            continue
        of_leaf = lambda part, _, start, leaf=leaf: prepare(part, leaf, start)  # noqa: E731
        total += _sum_of_strips([x], of_leaf, HIGH_STRIP_ROWS, widest)
    return total


def is_long(x: jax.Array) -> bool:
    """Returns whether rows `[N, D]` are long enough for `upper_products`, and of its type."""
    return x.dtype == jnp.float32 and x.shape[1] >= LEAST_COLUMNS


def _sum_of_strips(rows, prepare, least_height, block_size):
    """Returns `symmetric_product` with strips of at least that height, and blocks of that number of columns."""
    count = len(rows[0])
    height = max(least_height, -(-count // NUM_STRIPS))
    starts = list(range(0, count, height))
    dtype = sum_dtype(*rows)

    def add(part, leaf, start, strips):
        p = prepare(part, leaf, start)
        return [s + product_of_rows(p[i : i + height], p[i:], dtype) for i, s in zip(starts, strips, strict=True)]

    strips = [jnp.zeros((min(height, count - i), count - i), dtype) for i in starts]
    strips = fold_columns(add, strips, rows, block_size)

    product = jnp.zeros((count, count), dtype)
    for i, strip in zip(starts, strips, strict=True):
        size = len(strip)
        square = strip[:, :size]
        upper = jnp.arange(size)[:, None] <= jnp.arange(size)[None, :]
        strip = strip.at[:, :size].set(jnp.where(upper, square, square.T))
        product = jax.lax.dynamic_update_slice(product, strip, (i, i))
        product = jax.lax.dynamic_update_slice(product, strip[:, size:].T, (i + size, i))
    return product
