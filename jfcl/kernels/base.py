"""Parts that the kernels share: checks of input, stacked pytrees as matrices, loops over blocks, products of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfcl.core.checks import check
from jfcl.core.platforms import by_platform
from jfcl.kernels.gram_gpu import LEAST_COLUMNS, upper_products

PyTree = Any
FORMS = ("auto", "direct", "gram")  # of kernels that can use inner products of the rows
_ONE = np.float32(1)
# Full float32 on accelerators too, which by default round operands to TF32 or bfloat16.
HIGHEST = jax.lax.Precision.HIGHEST

# Measured on a 2-core CPU (benchmarks/kernels.py): thinner strips save work and are slower products.
NUM_STRIPS = 8  # of the upper triangle: 56 % of the full product's work
STRIP_ROWS = 250  # at least
HIGH_STRIP_ROWS = 1024  # at least, on an accelerator
DENSE_UP_TO = 4096  # clients, up to which a method may have an [N, N] on every device: 64 MB
BLOCK_COLUMNS = 2048  # multiplied at once; half of that for more than 8192 clients


def is_computable(*values: Any) -> bool:
    """Returns whether results computed from `values` are concrete: no tracers, and no program is being traced.

    Inside `jit` a constant is no tracer, but every result computed from it is.
    """
    leaves = jax.tree.leaves(values)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return False
    arrays = any(isinstance(leaf, jax.Array) for leaf in leaves)
    return not (arrays and isinstance(jax.lax.add(_ONE, _ONE), jax.core.Tracer))


def check_whole(argument: str, value: Any, least: int, most: int, why: str) -> None:
    """Checks that a number, unless it is traced, is a whole one from `least` to `most`, the reason of which is `why`.

    Raises:
      ValueError: it is not.
    """
    if is_computable(value):
        fits = bool(np.ndim(value) == 0 and least <= value <= most and value == int(value))
        check(fits, argument, value, f"a whole number from {least} to {most} ({why})")


def num_rows(updates: PyTree, *, name: str = "updates") -> int:
    """Returns `N` of stacked `updates` (`[N, ...]` each), after a check of their shapes and types; nothing is copied.

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
    """Returns the leaves of stacked `updates` (`[N, ...]` each) as matrices `[N, d]` of floats, not concatenated.

    Raises:
      ValueError: as `num_rows`.
    """
    count = num_rows(updates, name=name)
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(updates)]
    leaves = [leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(jnp.float32) for leaf in leaves]
    return [leaf if leaf.ndim == 2 else leaf.reshape(count, -1) for leaf in leaves]


def sum_dtype(*arrays: jax.Array) -> Any:
    """Returns the type of sums over `arrays`: float64 if one of them is, else float32."""
    return jnp.float64 if any(x.dtype == jnp.float64 for x in arrays) else jnp.float32


def if_rare(happens: jax.Array, rare: Callable[[], PyTree], usual: Callable[[], PyTree]) -> PyTree:
    """Returns `rare()` where `happens` `[]` bool, else `usual()`, as `jax.lax.cond`; both may use outer arrays.

    `jax.vmap` turns `lax.cond` into a selection, for which both branches are computed. Under `if_rare`, `rare` is
    computed only if it happens in at least one element of the batch.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> jax.vmap(lambda x: if_rare(x < 0, lambda: -x, lambda: x))(jnp.array([3.0, -2.0])).tolist()
      [3.0, 2.0]
    """
    (rare, tree, of_rare), (usual, usual_tree, of_usual) = (_with_operands(branch) for branch in (rare, usual))
    assert tree == usual_tree, (tree, usual_tree)

    @jax.custom_batching.custom_vmap
    def choose(happens, of_rare, of_usual):
        return jax.lax.cond(happens, lambda: rare(of_rare), lambda: usual(of_usual))

    @choose.def_vmap
    def choose_batched(size, batched, happens, of_rare, of_usual):
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)

        def usual_of_all():
            return jax.vmap(usual, axes[2:], axis_size=size)(of_usual)

        def rare_of_some():
            found = jax.vmap(rare, axes[1:2], axis_size=size)(of_rare)
            return jax.vmap(_select, (axes[0], 0, 0))(happens, found, usual_of_all())

        out = if_rare(happens.any(), rare_of_some, usual_of_all)
        return out, jax.tree.map(lambda _: True, out)

    return jax.tree.unflatten(tree, choose(happens, of_rare, of_usual))


def _select(condition: jax.Array, x: PyTree, y: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), x, y)


def _with_operands(branch: Callable[[], PyTree]) -> tuple[Callable[[list], list], Any, list]:
    """Returns `branch` as a function of the outer arrays that it uses, the structure of its result, and these arrays.

    The result of the function is a list of leaves.
    """
    traced, shapes = jax.make_jaxpr(branch, return_shape=True)()
    return partial(jax.core.eval_jaxpr, traced.jaxpr), jax.tree.structure(shapes), traced.consts


COLUMNS = "columns_of_updates"  # the axis of a mesh on which each device has all rows, and a share of their columns


def sum_over_columns(x: PyTree) -> PyTree:
    """Returns sums over columns `x`; of devices that have a share of the columns each, the total of theirs.

    Kernels sum over columns by this function, once behind their loops. So a kernel can run inside a `shard_map` over
    the axis `COLUMNS`: its inputs are shares of the columns, results without columns are those of all.
    """
    return jax.lax.psum(x, COLUMNS) if shares_columns() else x


def max_over_columns(x: jax.Array) -> jax.Array:
    """Returns maxima over columns, as `sum_over_columns`."""
    return jax.lax.pmax(x, COLUMNS) if shares_columns() else x


def key_of_share(key: jax.Array) -> jax.Array:
    """Returns `key`, a different one for each device that has a share of the columns."""
    return jax.random.fold_in(key, jax.lax.axis_index(COLUMNS)) if shares_columns() else key


def shares_columns() -> bool:
    """Returns whether a kernel runs on a device that has a share of the columns."""
    try:
        jax.lax.axis_size(COLUMNS)
    except NameError:
        return False
    return True


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


def row_mask(mask: jax.Array | None, count: int, *, name: str = "mask") -> jax.Array:
    """Returns `mask` as `[N]` bool, all True for `None`."""
    if mask is None:
        return jnp.ones(count, bool)
    mask = jnp.asarray(mask)
    check(mask.shape == (count,) and mask.dtype == bool, name, (mask.shape, mask.dtype), f"bool of shape ({count},)")
    return mask


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


BLOCK_NUMBERS = 2**20  # numbers in a block of rows: 4 MB, which stays in the cache for a second read


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


def symmetric_product(
    rows: list[jax.Array], prepare: Callable[[jax.Array, int, Any], jax.Array], block_size: int | None
) -> jax.Array:
    """Returns `[N, N]`, the sum of `P Pᵀ` over blocks of columns, with `P = prepare(part, leaf, start)`.

    The upper triangle is computed in strips and mirrored: half of the work, and exactly symmetric. Leaves are not
    concatenated, and no copy of all rows is held. On an accelerator, all columns are one block, and strips are high; on
    an NVIDIA GPU, long rows are multiplied by `gram_gpu.upper_products`.
    """
    blocks = block_size or column_block(len(rows[0]))
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
