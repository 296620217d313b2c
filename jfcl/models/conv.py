"""Convolutions that stay fast when every client has its own weights, and pooling to match.

`conv` has the interface of `jax.lax.conv_general_dilated`, for `conv_general_dilated=conv` of `flax.linen.Conv` and
`flax.nnx.Conv`. It computes the same numbers in a form that depends on the platform, and on a CPU on the mapping of
clients:

* One client at a time on a CPU: XLA does not rearrange convolutions inside a loop for its fast kernels (jax issue
  12868), so the gradients of `lax.conv`, transposed convolutions, run at a twentieth of the speed. Here both gradients
  are plain NHWC x HWIO convolutions.
* Under `vmap` over clients with their own weights, for which a CPU has no fast kernel: patches times weights, one
  batched matrix product. With shared weights, clients join the batch axis.
* On a TPU: `lax.conv_general_dilated` with the gradients of JAX. The compiler predicts that it is the fastest form
  there: patches move many times as many bytes.
* On a GPU, too, except in four cases under `vmap` with own weights, in which cuDNN's groups are slow (measured on an
  H100 and an H200). Inputs of few channels, and layers of many channels at few places, become a batched matrix product
  of windows of the input; gradients with respect to weights one of shifted copies of the input and of the output's
  gradient. Before 2 x 2 pooling, a layer of up to 64 channels with its gradients is a product of windows for blocks of
  2 x 2 outputs, of which the maximum is taken at once: the papers' CNN trains 1.7 times as fast.

A 1 x 1 convolution is a matrix product everywhere. A depthwise convolution (a kernel per channel) is, on a CPU, a sum
of shifted images, each times a number per channel.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jfcl.core import by_platform, check, check_count

NHWC = ("NHWC", "HWIO", "NHWC")
# Of a group's inputs and output's gradient, in the gradient with respect to weights; half of them where the inputs are
# images. With half for all layers, a CNN on both cores of a CPU as one device takes 1.2 times as long.
GROUP_BYTES = 620_000
IMAGE = 4  # the most channels of an image
# The most channels in blocks. Measured on an H200: the papers' CNN, with 32, and a 3 x 3 layer alone beside cuDNN,
# which takes twice as long with 64 channels, and less with 256.
IN_BLOCKS = 64
# From so many channels on, windows at few places are small beside the weights. Measured on an H200, 20 clients, 3 x 3:
# with 512 channels at 50 x 4 x 4 places 0.69 ms by windows and 1.01 by cuDNN, in bfloat16 0.38 and 0.83; with 256
# channels at 50 x 8 x 8 places cuDNN takes 0.50, windows 0.99.
WIDE = 512
UNROLLED = 8  # groups in an unrolled loop; more groups are a loop, so that programs do not grow with the batch
Padding = tuple[tuple[int, int], tuple[int, int]]


def _plain(x, w, strides, padding, **dilation):
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=NHWC, **dilation)


def _padded(x, padding):
    """Pads `[B, H, W, C]` with zeros; where `padding` is negative, rows or columns are removed."""
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *((*pair, 0) for pair in padding), (0, 0, 0)))


def _windows(x, kernel: tuple[int, int], strides: tuple[int, int]) -> list[jax.Array]:
    """Returns, for each place of the kernel, row by row, what it is multiplied with: `kh * kw` of `[B, H', W', C]`."""

    def spans(size, side, stride):
        return [slice(i, i + (size - side) // stride * stride + 1, stride) for i in range(side)]

    rows, columns = map(spans, x.shape[1:3], kernel, strides)
    return [x[:, i, j] for i in rows for j in columns]


def patches(x: jax.Array, kernel: tuple[int, int], strides: tuple[int, int], padding: Padding) -> jax.Array:
    """Returns the windows of `x` `[B, H, W, C]` that a convolution multiplies: `[B, H', W', kh * kw * C]`."""
    return jnp.concatenate(_windows(_padded(x, padding), kernel, strides), axis=-1)


def _input_gradient(g, w, shape, strides, padding, convolve=_plain):
    """Returns d loss / d x, as a convolution, by `convolve`, of the output's gradient with the mirrored kernel.

    With more rows in `x` than in `g`, many of the products would be with zeros outside `g`. Then every row of `g` is
    multiplied by every row of the kernel once, and the products are added at their places.
    """
    kh, kw, channels, _ = w.shape

    def pads(size, side, stride, out, low):
        return side - 1 - low, size - (out - 1) * stride - 1 + low

    (top, _), (left, _) = padding
    rows, columns = map(pads, shape, (kh, kw), strides, g.shape[1:3], (top, left))
    if strides != (1, 1) or shape[0] <= g.shape[1]:
        mirrored = w[::-1, ::-1].transpose(0, 1, 3, 2)
        dilation = {} if strides == (1, 1) else {"lhs_dilation": strides}
        return convolve(g, mirrored, (1, 1), (rows, columns), **dilation)
    by_row = w[:, ::-1].transpose(1, 3, 0, 2).reshape(1, kw, -1, kh * channels)
    products = _plain(g, by_row, (1, 1), ((0, 0), columns)).reshape(*g.shape[:2], shape[1], kh, channels)
    below = shape[0] - g.shape[1] + top
    return sum(_padded(products[:, :, :, i], ((i - top, below - i), (0, 0))) for i in range(kh))


def _weight_gradient(x, g, kernel, strides, padding):
    """Returns d loss / d w, as a convolution in which input channels are the batch, and the batch the channels.

    Its kernel is `g` of all examples: 1.3 MB for 100 of them in the papers' CNN. A few examples at a time stay, with
    their inputs, in a core's cache, which is several times as fast. Every group adds to the whole gradient, so where
    that is large the groups are, too. An odd number of channels is slow, so examples are padded to pairs.
    """
    if not len(x):
        return jnp.zeros((*kernel, x.shape[-1], g.shape[-1]), x.dtype)
    (kh, kw), (sh, sw) = kernel, strides
    x = jnp.pad(_padded(x, padding), ((0, len(x) % 2), (0, 0), (0, 0), (0, 0)))
    g = jnp.pad(g, ((0, len(g) % 2), (0, 0), (0, 0), (0, 0)))
    x = x[:, : (g.shape[1] - 1) * sh + kh, : (g.shape[2] - 1) * sw + kw]  # the rest is in no window

    def of_group(x, g):
        turned, as_kernel = x.transpose(3, 1, 2, 0), g.transpose(1, 2, 0, 3)
        return _plain(turned, as_kernel, (1, 1), ((0, 0), (0, 0)), rhs_dilation=strides).astype(wide)

    wide = jnp.float32 if x.dtype.itemsize < 4 else x.dtype  # a sum of many groups needs more digits than one
    numbers = max(math.prod(x.shape[1:]) + math.prod(g.shape[1:]), 1)  # of an example
    weights = math.prod(kernel) * x.shape[-1] * g.shape[-1]
    most = GROUP_BYTES // g.dtype.itemsize // (2 if x.shape[-1] <= IMAGE else 1)
    fit = max(most, weights // 4) // numbers // 2 * 2  # an even number
    size = min(max(fit, 2), len(x))
    groups = len(x) // size
    tail = slice(groups * size, None)
    total = of_group(x[tail], g[tail]) if len(x) % size else jnp.zeros((x.shape[-1], *kernel, g.shape[-1]), wide)

    def add(i, total):
        group = (lax.dynamic_slice_in_dim(v, i * size, size) for v in (x, g))
        return total + of_group(*group)

    total = lax.fori_loop(0, groups, add, total, unroll=max(min(groups, UNROLLED), 1))
    return total.transpose(1, 2, 0, 3).astype(x.dtype)


def _of_patches(x, w, strides, padding):
    return patches(x, w.shape[:2], strides, padding) @ w.reshape(-1, w.shape[-1])


def _of_few_channels(x, w, strides, padding):
    """Convolves `x` of few channels as patches times weights.

    The patches, `[kh * kw * C, B * H' * W']`, lie in memory by place of the kernel: whole rows of images are copied.
    """
    windows = jnp.stack(_windows(_padded(x, padding), w.shape[:2], strides))
    rows, weights = math.prod(windows.shape[1:4]), w.reshape(-1, w.shape[-1])
    columns = windows.transpose(0, 4, 1, 2, 3).reshape(len(weights), rows)
    return (columns.T @ weights).reshape(*windows.shape[1:4], w.shape[-1])


def _weights_by_places(x, g, kernel, padding):
    """Returns d loss / d w, for strides of 1: each column of the kernel times each row, over all places.

    Copies of `x`, shifted by column, `[kw, B, H, W', C]`, times copies of `g`, shifted by row, `[kh, B, H, W', O]`: for
    a 5 x 5 kernel 5 copies of both, not 25 of `x`.
    """
    (kh, kw), (rows, columns) = kernel, padding
    wide = _padded(x, ((0, 0), columns))
    shifted_x = jnp.stack([wide[:, :, j : j + g.shape[2]] for j in range(kw)])
    ends = [(i - rows[0], x.shape[1] - g.shape[1] - i + rows[0]) for i in range(kh)]
    shifted_g = jnp.stack([_padded(g, (pad, (0, 0))) for pad in ends])
    return jnp.einsum("jpc,ipo->ijco", shifted_x.reshape(kw, -1, x.shape[-1]), shifted_g.reshape(kh, -1, g.shape[-1]))


def _fewer_by_places(x, g, kernel):
    """Returns whether the copies of `_weights_by_places` have fewer numbers than the windows of `x`."""
    (kh, kw), channels, features = kernel, x.shape[-1], g.shape[-1]
    return (kw * channels + kh * features) * x.shape[1] < kh * kw * channels * g.shape[1]


def _of_blocks(x, w, padding):
    """Convolves, with strides of 1, as windows times weights for blocks of 2 x 2 outputs: `4 * O` columns at once.

    The outputs of a block read `(kh + 1) * (kw + 1)` inputs together, so the windows are `(kh + 1) * (kw + 1) / 4`
    copies of the input, not `kh * kw`. In the weights of an output, zeros stand for inputs of its neighbours. Inputs
    lie in blocks as well, if they have more than a few channels: a window is a few long rows of memory.
    """
    (kh, kw, channels, features), taps = w.shape, [(side + 2) // 2 for side in w.shape[:2]]
    out = [n + sum(pad) - side + 1 for n, pad, side in zip(x.shape[1:3], padding, w.shape[:2], strict=True)]
    rows, columns = ((n + 1) // 2 for n in out)
    blocks = rows + taps[0] - 1, columns + taps[1] - 1
    ends = tuple((low, 2 * n - size - low) for n, size, (low, _) in zip(blocks, x.shape[1:3], padding, strict=True))

    def shifted(i, j):
        return jnp.pad(w, ((i, 2 * taps[0] - kh - i), (j, 2 * taps[1] - kw - j), (0, 0), (0, 0)))

    w = jnp.concatenate([shifted(i, j) for i in (0, 1) for j in (0, 1)], axis=3)
    if channels <= IMAGE:
        y = _of_few_channels(x, w, (2, 2), ends)
    else:
        x = _padded(x, ends).reshape(-1, blocks[0], 2, blocks[1], 2, channels)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, *blocks, 4 * channels)
        w = w.reshape(taps[0], 2, taps[1], 2, channels, 4 * features).transpose(0, 2, 1, 3, 4, 5)
        y = jnp.concatenate(_windows(x, taps, (1, 1)), axis=-1) @ w.reshape(-1, 4 * features)
    y = y.reshape(-1, rows, columns, 2, 2, features).transpose(0, 1, 3, 2, 4, 5)
    return y.reshape(-1, 2 * rows, 2 * columns, features)[:, : out[0], : out[1]]


def _by_mapping(alone: Callable, together: Callable, joins: Callable | None = None) -> Callable:
    """Returns `alone` for one client, and `together` vmapped for many; `joins(batched)`: clients share a batch axis."""
    function = custom_vmap(alone)

    @function.def_vmap
    def rule(size, batched, a, b):
        if joins is not None and joins(batched):
            out = function(a.reshape(-1, *a.shape[2:]), b)  # vmapped again, the rule applies again
            return out.reshape(size, -1, *out.shape[1:]), True
        return jax.vmap(together, in_axes=[0 if flag else None for flag in batched])(a, b), True

    return function


def _transpose(linear: Callable, like: tuple[int, ...], g: jax.Array) -> jax.Array:
    """Returns the gradient with respect to the argument, of shape `like`, of a linear function."""
    return jax.linear_transpose(linear, jax.ShapeDtypeStruct(like, g.dtype))(g)[0]


def _of_input(form: Callable, shape: tuple[int, int], g: jax.Array, w: jax.Array) -> jax.Array:
    """Returns the gradient with respect to the input, of height and width `shape`, as `form` convolves."""
    return _transpose(lambda x: form(x, w), (len(g), *shape, w.shape[2]), g)


def _of_weights(form: Callable, kernel: tuple[int, int], x: jax.Array, g: jax.Array) -> jax.Array:
    """Returns the gradient with respect to the weights, as `form` convolves."""
    return _transpose(lambda w: form(x, w), (*kernel, x.shape[-1], g.shape[-1]), g)


def _divided(x: jax.Array, parts: int) -> jax.Array:
    return x.reshape(parts, len(x) // parts, *x.shape[1:])


def _of_parts(form: Callable, *parts: jax.Array) -> jax.Array:
    """Returns `jax.vmap(form)(*parts)`, in a program without an axis of size 1."""
    return form(*(x[0] for x in parts))[None] if len(parts[0]) == 1 else jax.vmap(form)(*parts)


def _for_a_gpu(
    shape: tuple[int, int], kernel: tuple[int, int], strides: tuple[int, int], padding: Padding, pooled: bool
) -> tuple[Callable, Callable, Callable]:
    """Returns `(x, w) -> y`, `(g, w) -> d loss / d x` and `(x, g) -> d loss / d w` for clients with own weights."""
    geometry = {"strides": strides, "padding": padding}
    plain, of_patches, of_few_channels = (partial(f, **geometry) for f in (_plain, _of_patches, _of_few_channels))
    blocks = partial(_of_blocks, padding=padding)

    def in_blocks(channels):
        return pooled and strides == (1, 1) and channels <= IN_BLOCKS

    def few(channels, features):  # windows of an image are not much larger than the layer's output
        return channels <= IMAGE and 2 * features >= kernel[0] * kernel[1] * channels

    def few_places(count, channels, features):  # of `count` inputs
        return strides == (1, 1) and channels >= WIDE and count * math.prod(shape) <= 2 * features

    def parts_of(x):  # equal in both passes, so that they read one copy of the windows
        # XLA divides a sum over the places of all images itself, and first copies them to a length that it can divide.
        return 1 if x.shape[-1] > IMAGE else next(n for n in (5, 4, 3, 2, 1) if len(x) % n == 0)

    def forward(x, w):
        if in_blocks(x.shape[-1]):
            parts = parts_of(x)
            y = _of_parts(blocks, _divided(x, parts), jnp.broadcast_to(w, (parts, *w.shape)))
            return y.reshape(-1, *y.shape[2:])
        if few_places(len(x), *w.shape[2:]):
            return of_patches(x, w)
        return (of_few_channels if few(x.shape[-1], w.shape[-1]) else plain)(x, w)

    def input_gradient(g, w):
        if few_places(len(g), w.shape[3], w.shape[2]):
            return _input_gradient(g, w, shape, strides, padding, _of_patches)
        return _of_input(forward if pooled else plain, shape, g, w)

    def weight_gradient(x, g):
        if in_blocks(x.shape[-1]):
            parts = parts_of(x)
            return _of_parts(partial(_of_weights, blocks, kernel), _divided(x, parts), _divided(g, parts)).sum(axis=0)
        if few(x.shape[-1], g.shape[-1]):
            return _of_weights(of_few_channels, kernel, x, g)
        if strides == (1, 1) and _fewer_by_places(x, g, kernel):
            return _weights_by_places(x, g, kernel, padding)
        return _of_weights(of_patches, kernel, x, g)

    return forward, input_gradient, weight_gradient


@lru_cache(maxsize=256)
def _canonical(
    shape: tuple[int, int], kernel: tuple[int, int], strides: tuple[int, int], padding: Padding, pooled: bool = False
) -> Callable:
    """Returns the convolution of one geometry: input height and width, kernel, strides, padding, pooling or not."""
    geometry = {"strides": strides, "padding": padding}
    plain, of_patches = partial(_plain, **geometry), partial(_of_patches, **geometry)

    def to_weights_of_patches(x, g):
        rows, columns = patches(x, kernel, strides, padding), g.reshape(-1, g.shape[-1])
        return (rows.reshape(-1, rows.shape[-1]).T @ columns).reshape(*kernel, x.shape[-1], g.shape[-1])

    def choose(cpu, tpu, gpu):
        return lambda a, b: by_platform(a, b, cpu=cpu, accelerator=gpu, tpu=tpu)

    shared = lambda batched: batched[0] and not batched[1]  # noqa: E731
    forward_gpu, input_gpu, weight_gpu = _for_a_gpu(shape, kernel, strides, padding, pooled)
    forward = choose(_by_mapping(plain, of_patches, shared), plain, _by_mapping(plain, forward_gpu, shared))
    # On a CPU, of many clients the transpose of "patches times weights": products, added where patches overlap.
    alone, together = partial(_input_gradient, shape=shape, **geometry), partial(_of_input, of_patches, shape)
    of_plain = partial(_of_input, plain, shape)
    on_cpu, on_gpu = _by_mapping(alone, together, shared), _by_mapping(of_plain, input_gpu, shared)
    input_gradient = choose(on_cpu, of_plain, on_gpu)
    alone, of_plain = partial(_weight_gradient, kernel=kernel, **geometry), partial(_of_weights, plain, kernel)
    on_cpu, on_gpu = _by_mapping(alone, to_weights_of_patches), _by_mapping(of_plain, weight_gpu)
    weight_gradient = choose(on_cpu, of_plain, on_gpu)
    convolve = jax.custom_vjp(forward)
    convolve.defvjp(
        lambda x, w: (forward(x, w), (x, w)),
        lambda saved, g: (input_gradient(g, saved[1]), weight_gradient(saved[0], g)),
    )
    return convolve


def _depthwise(x, w, strides, padding):
    """Returns the convolution in which output `o` has the channel `o // m` alone, `w` `[kh, kw, 1, C * m]`."""

    def shifted(x, w):
        x = jnp.repeat(_padded(x, padding), w.shape[-1] // x.shape[-1], axis=-1)
        factors = w.reshape(-1, 1, 1, 1, w.shape[-1])
        return sum(part * factor for part, factor in zip(_windows(x, w.shape[:2], strides), factors, strict=True))

    def grouped(x, w):
        return _plain(x, w, strides, padding, feature_group_count=x.shape[-1])

    return by_platform(x, w, cpu=shifted, accelerator=grouped)


def conv(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides,
    padding,
    lhs_dilation=None,
    rhs_dilation=None,
    dimension_numbers=None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    *,
    pooled: bool = False,
    **options,
) -> jax.Array:
    """Convolves as `jax.lax.conv_general_dilated`, with fast gradients and vmaps for clients with their own weights.

    Two-dimensional NHWC x HWIO convolutions without dilation, and without groups or with one per input channel, take
    the forms described above, with any strides; all others are those of `lax`. Reverse-mode derivatives only, except
    for 1 x 1 and depthwise ones.

    Args:
      lhs: `[B, H, W, C]`; rhs: `[kh, kw, C, O]`; window_strides, padding, ...: as in `lax.conv_general_dilated`.
      pooled: whether 2 x 2 pooling follows. The result is the same; on a GPU it is computed in blocks of 2 x 2.

    Returns:
      `[B, H', W', O]`. Memory under `vmap` with own weights: at most `kh * kw` copies of the input (none for 1 x 1 and
      depthwise kernels).

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> layer = nn.Conv(4, (3, 3), conv_general_dilated=conv)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 8, 8, 1)))[0].shape
      (2, 8, 8, 4)
    """
    dilated = any(d != 1 for d in (*(lhs_dilation or ()), *(rhs_dilation or ())))
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    canonical = lhs.ndim == 4 and numbers == lax.conv_dimension_numbers(lhs.shape, rhs.shape, NHWC)
    plain_types = lhs.dtype == rhs.dtype and all(option is None for option in options.values())
    depthwise = feature_group_count == lhs.shape[-1] > 1
    grouped = (feature_group_count != 1 and not depthwise) or batch_group_count != 1
    if not canonical or dilated or grouped or not plain_types:
        layout = lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, batch_group_count
        return lax.conv_general_dilated(lhs, rhs, window_strides, padding, *layout, **options)
    strides = tuple(int(s) for s in window_strides)
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(lhs.shape[1:3], rhs.shape[:2], strides, padding)
    pads = tuple((int(a), int(b)) for a, b in padding)
    if depthwise:
        return _depthwise(lhs, rhs, strides, pads)
    if tuple(rhs.shape[:2]) == (1, 1):  # a matrix product
        return _padded(lhs, pads)[:, :: strides[0], :: strides[1]] @ rhs[0, 0]
    return _canonical(tuple(lhs.shape[1:3]), tuple(rhs.shape[:2]), strides, pads, pooled)(lhs, rhs)


def max_pool(x: jax.Array, window: int) -> jax.Array:
    """Max-pools in squares of side `window`, without padding: `[B, H, W, C]` to `[B, H // window, W // window, C]`.

    It is a reshape and a maximum, with a gradient that is far cheaper than that of `lax.reduce_window`; on a TPU it is
    `lax.reduce_window`. In both the first of equal largest values receives the gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> max_pool(jnp.arange(25.0).reshape(1, 5, 5, 1), 2)[0, :, :, 0].tolist()
      [[6.0, 8.0], [16.0, 18.0]]
    """
    check_count("window", window)
    check(x.ndim == 4, "x", x.shape, "of shape [B, H, W, C]")
    b, h, w, c = x.shape
    if min(h, w) < window:
        raise ValueError(f"images are too small for this model: {h} x {w} is left where {window} x {window} is pooled")

    def tiles(x):
        rows, columns = h // window, w // window
        return _largest(x[:, : rows * window, : columns * window].reshape(b, rows, window, columns, window, c))

    def windows(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, window, window, 1), "VALID")

    return by_platform(x, cpu=tiles, accelerator=tiles, tpu=windows)


@jax.custom_jvp
def _largest(tiles: jax.Array) -> jax.Array:
    """Returns the maximum over axes 2 and 4 of `[B, H, k, W, k, C]`."""
    return _first_largest(tiles)[0]


def _first_largest(tiles: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the maximum, and the index of the first of the `k * k` values that equals it."""
    k = tiles.shape[2]
    values = [tiles[:, :, i, :, j] for i in range(k) for j in range(k)]
    largest = reduce(jnp.maximum, values)
    place = jnp.full(largest.shape, k * k - 1, jnp.int32)
    for i in reversed(range(k * k - 1)):
        place = jnp.where(values[i] == largest, i, place)
    return largest, place


def _with_byte_places(tiles: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `_first_largest(tiles)` in a form that keeps indices of one byte, not the tiles, for the gradient.

    Otherwise XLA would keep the tiles, 16 times as many bytes for 2 x 2 of float32, and compare them again.
    """
    largest, place = _first_largest(tiles)
    small = jnp.int8 if tiles.shape[2] ** 2 <= 128 else jnp.int32
    largest, place = lax.optimization_barrier((largest, place.astype(small)))
    return largest, place.astype(jnp.int32)


@_largest.defjvp
def _largest_jvp(primals, tangents):
    (tiles,), (moved,) = primals, tangents
    largest, place = by_platform(tiles, cpu=_first_largest, accelerator=_with_byte_places)
    k = tiles.shape[2]
    index = jnp.arange(k * k, dtype=jnp.int32).reshape(1, 1, k, 1, k, 1)
    return largest, jnp.where(place[:, :, None, :, None] == index, moved, jnp.zeros_like(moved)).sum(axis=(2, 4))
