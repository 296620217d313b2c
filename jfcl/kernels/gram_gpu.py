"""Inner products of long rows on an NVIDIA GPU: a Pallas kernel for the upper triangle, in three bfloat16 passes.

A float32 number is `x = h + l + r`, where `h` and `l` are the bfloat16 numbers nearest to `x` and to `x - h`. The
kernel adds `h h' + h l' + l h'`; what it leaves out is at most `3 * 2**-18` of `|x x'|`. Tensor cores round towards
zero: the 96 additions to a sum of 512 columns lose at most `96 * 2**-24` of the sum of all `|x x'|`, as it grows from
zero. Both together, 1.7e-5, are below the error that `similarity_tolerance` allows a product of 8,192 columns.
"""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

LEAST_COLUMNS = 8192  # of fewer, errors may exceed `similarity_tolerance`
TILE = 64  # rows and columns of the result in one program; the measured times are in benchmarks/README.md
BLOCK = 64  # columns of the rows that a program loads at once
SUM = 512  # columns after which a sum goes into a total, as tensor cores round towards zero at each addition
SPLITS = 8  # parts of the columns in programs of their own: 300 rows have 15 tiles, and an H100 has 132 processors
WARPS, STAGES = 4, 3  # of a program


@partial(jax.jit, static_argnames=("splits", "interpret"))
def upper_products(x: jax.Array, *, splits: int = SPLITS, interpret: bool = False) -> jax.Array:
    """Returns `x xᵀ` `[N, N]` float32 of `x` `[N, D]` float32, exactly symmetric.

    Cost: three passes of `N² D / 2` multiplications in bfloat16; memory for `x` once more, and `splits * N²` numbers.
    A JAX without Pallas for Triton, whose end is announced, or with another one multiplies in float32 instead, with a
    warning.
    """
    try:
        return _by_pallas(x, splits, interpret)
    except (ImportError, AttributeError, TypeError) as error:
        why = f"this JAX has no Pallas for Triton as jfcl knows it ({error}): products of long rows take longer"
        warnings.warn(why, stacklevel=2)
        return mirrored(jnp.matmul(x, x.T, precision="float32"))


def _by_pallas(x: jax.Array, splits: int, interpret: bool) -> jax.Array:
    """Returns `upper_products` by the kernel."""
    from jax.experimental import pallas as pl  # half a second, which only users of a GPU spend
    from jax.experimental.pallas import triton

    n, d = x.shape
    tiles = -(-n // TILE)
    rows, columns = (jnp.asarray(i, jnp.int32) for i in np.triu_indices(tiles))
    sums = -(-d // (SUM * splits))  # of one program
    rounded = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # XLA may leave out a conversion and back
    high, low = rounded.astype(jnp.bfloat16), (x - rounded).astype(jnp.bfloat16)

    def kernel(high_ref, low_ref, rows_ref, columns_ref, out_ref):
        pair, split = pl.program_id(0), pl.program_id(1)
        of_rows = rows_ref[pair] * TILE + jnp.arange(TILE)
        of_columns = columns_ref[pair] * TILE + jnp.arange(TILE)

        def halves(at, place):
            inside = (at < n)[:, None] & (place < d)[None, :]
            refs = (ref.at[at[:, None], place[None, :]] for ref in (high_ref, low_ref))
            return [triton.load(ref, mask=inside, other=0.0) for ref in refs]

        def product(a, b):
            return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

        def add(i, total):
            begin = (split * sums + i) * SUM

            def step(j, part):
                place = begin + j * BLOCK + jnp.arange(BLOCK)
                (a, a_low), (b, b_low) = halves(of_rows, place), halves(of_columns, place)
                return part + product(a, b_low) + product(a_low, b) + product(a, b)

            return total + jax.lax.fori_loop(0, SUM // BLOCK, step, jnp.zeros((TILE, TILE), jnp.float32))

        out_ref[...] = jax.lax.fori_loop(0, sums, add, jnp.zeros((TILE, TILE), jnp.float32))

    parts = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((len(rows), splits, TILE, TILE), jnp.float32),
        grid=(len(rows), splits),
        in_specs=[pl.no_block_spec] * 4,
        out_specs=pl.BlockSpec((None, None, TILE, TILE), lambda i, s: (i, s, 0, 0)),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="upper_products",  # by which a plan knows its operations
    )(high, low, rows, columns)
    upper = jnp.zeros((tiles, tiles, TILE, TILE), jnp.float32).at[rows, columns].set(parts.sum(1))
    return mirrored(upper.swapaxes(1, 2).reshape(tiles * TILE, tiles * TILE)[:n, :n])


def mirrored(square: jax.Array) -> jax.Array:
    """Returns a square matrix with its upper triangle in the place of the lower one, too."""
    places = jnp.arange(len(square))
    return jnp.where(places[:, None] <= places[None, :], square, square.T)
