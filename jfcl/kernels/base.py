"""What the kernels share: bad input, stacked pytrees as matrices, rows that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core.checks import check

PyTree = Any
FORMS = ("auto", "direct", "gram")  # of the kernels that can work on inner products of the rows instead
_ONE = np.float32(1)
# Plain float32 on an accelerator too, where the default rounds operands to TF32 or bf16.
HIGHEST = jax.lax.Precision.HIGHEST

# Measured on a 2-core CPU (benchmarks/kernels.py): thinner strips save work and are slower products.
NUM_STRIPS = 8  # of the upper triangle: 56 % of the full product's work
STRIP_ROWS = 250  # at least
BLOCK_COLUMNS = 2048  # multiplied at once; half of that for more than 8192 clients


def is_computable(*values: Any) -> bool:
    """Whether results computed from `values` have values: not if one is a tracer, and not while a program is traced.

    Inside `jit` a constant is no tracer, but all that is computed from it is.
    """
    leaves = jax.tree.leaves(values)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return False
    arrays = any(isinstance(leaf, jax.Array) for leaf in leaves)
    return not (arrays and isinstance(jax.lax.add(_ONE, _ONE), jax.core.Tracer))


def num_rows(updates: PyTree, *, name: str = "updates") -> int:
    """`N` of stacked `updates` (`[N, ...]` each), after a look at their shapes and types; nothing is copied.

    Raises:
      ValueError: no leaves, a leaf without a client axis, different or zero lengths, values that are not real numbers.
    """
    leaves = jax.tree.leaves(updates)
    check(len(leaves) > 0, name, updates, "an array [N, D] or a pytree of arrays stacked on a leading client axis")
    shapes = [jnp.shape(leaf) for leaf in leaves]
    single = len(leaves) == 1 and not isinstance(updates, (dict, list, tuple))
    stacked = all(len(s) >= 1 and s[0] == shapes[0][0] for s in shapes)
    check(stacked, name, shapes, "stacked on one leading client axis [N, ...]")
    check(not single or len(shapes[0]) == 2, name, shapes[0], "of shape [N, D]")
    check(shapes[0][0] > 0, name, shapes[0], "of at least one client (N = 0)")
    types = [leaf.dtype for leaf in leaves]
    real = all(jnp.issubdtype(t, jnp.floating) or jnp.issubdtype(t, jnp.integer) for t in types)
    check(real, name, types, "of real numbers")
    return shapes[0][0]


def rows_of(updates: PyTree, *, name: str = "updates") -> list[jax.Array]:
    """The leaves of stacked `updates` (`[N, ...]` each) as matrices `[N, d]` of floats; nothing is concatenated.

    Raises:
      ValueError: what `num_rows` refuses.
    """
    count = num_rows(updates, name=name)
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(updates)]
    leaves = [leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(jnp.float32) for leaf in leaves]
    return [leaf if leaf.ndim == 2 else leaf.reshape(count, -1) for leaf in leaves]


def sum_dtype(*arrays: jax.Array) -> Any:
    """What sums over `arrays` are kept in: float64 if one of them is, else float32."""
    return jnp.float64 if any(x.dtype == jnp.float64 for x in arrays) else jnp.float32


@jax.jit
def finite_rows(rows: list[jax.Array]) -> jax.Array:
    """`[N]` bool: rows without NaN and infinity in any of the matrices."""
    # A finite sum of squares proves it in one fast pass; the slow look at every number is for the rest.
    norms = squared_norms(rows)

    def look():
        every = jnp.ones(norms.shape, bool)
        return fold_columns(lambda part, leaf, start, ok: ok & jnp.isfinite(part).all(axis=1), every, rows, 4096)

    return jax.lax.cond(jnp.isfinite(norms).all(), lambda: jnp.ones(norms.shape, bool), look)


def refuse_nonfinite(rows: list[jax.Array], *, name: str = "updates", rows_that_count: jax.Array | None = None) -> None:
    """Outside `jit`: a `ValueError` that counts the rows with NaN or infinity; inside, nothing."""
    if not is_computable(rows, rows_that_count):
        return
    num_bad = int(_num_nonfinite(rows, rows_that_count))
    check(num_bad == 0, name, f"NaN or infinity in {num_bad} row(s)", "finite")


@jax.jit
def _num_nonfinite(rows, rows_that_count):
    bad = ~finite_rows(rows)
    return (bad if rows_that_count is None else bad & rows_that_count).sum()


def row_mask(mask: jax.Array | None, count: int, *, name: str = "mask") -> jax.Array:
    """`mask` as `[N]` bool, all True for `None`."""
    if mask is None:
        return jnp.ones(count, bool)
    mask = jnp.asarray(mask)
    check(mask.shape == (count,) and mask.dtype == bool, name, (mask.shape, mask.dtype), f"bool of shape ({count},)")
    return mask


def fold_blocks(body: Callable[[Any, int, Any], Any], carry: Any, size: int, block: int) -> Any:
    """`carry = body(start, length, carry)` for blocks of `0 .. size`: a loop over the whole ones, then the rest.

    `length` is a Python integer (`block`, at last `size % block`), so that blocks have static shapes.
    """
    whole = size // block
    if whole == 1:
        carry = body(0, block, carry)
    elif whole:
        carry = jax.lax.fori_loop(0, whole, lambda i, c: body(i * block, block, c), carry)
    rest = size - whole * block
    return body(whole * block, rest, carry) if rest else carry


def fold_columns(body: Callable[[jax.Array, int, Any, Any], Any], carry: Any, rows: list[jax.Array], block: int) -> Any:
    """`carry = body(part, leaf, start, carry)` for blocks of columns of all matrices; `part` is `rows[leaf][:, start:]`
    up to `block` columns."""
    for leaf, x in enumerate(rows):

        def on_block(start, length, carry, x=x, leaf=leaf):
            return body(jax.lax.dynamic_slice_in_dim(x, start, length, axis=1), leaf, start, carry)

        carry = fold_blocks(on_block, carry, x.shape[1], block)
    return carry


def product_of_rows(x: jax.Array, y: jax.Array, dtype: Any = None) -> jax.Array:
    """`[n, m]`: `x yᵀ` for `[n, d]` and `[m, d]`, added up in `dtype`."""
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, precision=HIGHEST, preferred_element_type=dtype)


@jax.jit
def squared_norms(rows: list[jax.Array]) -> jax.Array:
    """`[N]`: the sum of squares of every row over all matrices; one pass at memory speed.

    A batched product, because XLA's CPU backend adds the terms of a row reduction one by one, 15 times slower.
    """
    return sum(_dot(x, x) for x in rows)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    dims = (((1,), (1,)), ((0,), (0,)))
    return jax.lax.dot_general(x, y, dims, precision=HIGHEST, preferred_element_type=sum_dtype(x))


BLOCK_NUMBERS = 2**20  # numbers in a block of rows: 4 MB, near enough to the processor to be read twice


def fold_rows(body: Callable[[list[jax.Array], Any, int, Any], Any], carry: Any, rows: list[jax.Array]) -> Any:
    """`carry = body(parts, start, length, carry)` for blocks of rows, `parts` the same rows of all matrices."""
    count, width = len(rows[0]), sum(x.shape[1] for x in rows)

    def on_block(start, length, carry):
        return body([jax.lax.dynamic_slice_in_dim(x, start, length) for x in rows], start, length, carry)

    return fold_blocks(on_block, carry, count, min(count, max(1, BLOCK_NUMBERS // max(width, 1))))


def distances_from(rows: list[jax.Array], point: list[jax.Array], usable: jax.Array) -> jax.Array:
    """`[N]` distances of the rows from one point (a vector `[d]` for each matrix); `inf` for unusable rows.

    From the differences themselves, block by block: exact for a point near the rows and far from zero.
    """

    def measure(parts, start, length, found):
        squares = squared_norms([x - p[None, :] for x, p in zip(parts, point, strict=True)])
        return jax.lax.dynamic_update_slice_in_dim(found, jnp.sqrt(squares), start, axis=0)

    return jnp.where(usable, fold_rows(measure, jnp.zeros(len(usable), sum_dtype(*rows)), rows), jnp.inf)


def usable_rows(x: jax.Array, usable: jax.Array) -> jax.Array:
    """`x` with zeros in the rows that are not usable, NaN or not."""
    return jnp.where(usable[:, None], x, jnp.zeros((), x.dtype))


@jax.jit
def weighted_sum(x: jax.Array, weights: jax.Array, usable: jax.Array) -> jax.Array:
    """`weights` `[N]` or `[K, N]` times the usable rows of `x` `[N, d]`, NaN or not in the others.

    In the type of `x`, the products and sums of 16-bit numbers in float32: a share of 1/N is no float16 for large N.
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
    # 0 · NaN is NaN: where that has happened, again without the unusable rows
    return jax.lax.cond(jnp.isfinite(total).all(), lambda: total, cleaned)


def column_block(count: int) -> int:
    return BLOCK_COLUMNS if count <= 8192 else BLOCK_COLUMNS // 2


def symmetric_product(
    rows: list[jax.Array], prepare: Callable[[jax.Array, int, Any], jax.Array], block_size: int | None
) -> jax.Array:
    """`[N, N]`: the sum of `P Pᵀ` over blocks of columns, `P = prepare(part, leaf, start)`."""
    count = len(rows[0])
    height = max(STRIP_ROWS, -(-count // NUM_STRIPS))
    starts = list(range(0, count, height))
    dtype = sum_dtype(*rows)

    def add(part, leaf, start, strips):
        p = prepare(part, leaf, start)
        return [s + product_of_rows(p[i : i + height], p[i:], dtype) for i, s in zip(starts, strips, strict=True)]

    strips = [jnp.zeros((min(height, count - i), count - i), dtype) for i in starts]
    strips = fold_columns(add, strips, rows, block_size or column_block(count))

    product = jnp.zeros((count, count), dtype)
    for i, strip in zip(starts, strips, strict=True):
        size = len(strip)
        square = strip[:, :size]
        upper = jnp.arange(size)[:, None] <= jnp.arange(size)[None, :]
        strip = strip.at[:, :size].set(jnp.where(upper, square, square.T))
        product = jax.lax.dynamic_update_slice(product, strip, (i, i))
        product = jax.lax.dynamic_update_slice(product, strip[:, size:].T, (i + size, i))
    return product
