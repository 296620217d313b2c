"""Threshold-Clustering (Provably Personalized and Robust Federated Learning, Algorithm 3)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jfcl.core.checks import check, check_count
from jfcl.core.platforms import by_platform
from jfcl.kernels import blocks
from jfcl.kernels.base import PyTree, check_values, if_rare, like, rows_of, shares_columns, sum_dtype, sum_over_columns
from jfcl.kernels.distances import Coefficients, Products, at_start, center_distances, inner_products, moved, positions
from jfcl.kernels.gram_gpu import mirrored, upper_products
from jfcl.kernels.robust import check_weights, shares

FORMS = ("auto", "direct", "gram")
QUANTILE_RULES = ("linear", "index", "index_shrunk", "index_strict")
THREE_MEANS = "three_means"


def threshold_clustering(
    points: PyTree,
    centers: PyTree | None = None,
    *,
    radius: Any = None,
    quantile: Any = None,
    num_rounds: int,
    weights: jax.Array | None = None,
    mask: jax.Array | None = None,
    quantile_rule: str = "linear",
    form: str = "auto",
) -> PyTree:
    """Moves every centre to the mean of the points, where points beyond its radius count as the centre itself.

    For round `l` and centre `k` (equation 24 of the paper):

        v_{k,l} = (1/N) Σ_i ( z_i · 1{‖z_i − v_{k,l−1}‖ ≤ τ_{k,l}} + v_{k,l−1} · 1{‖z_i − v_{k,l−1}‖ > τ_{k,l}} )

    Args:
      points: `[N, D]`, or a pytree of arrays stacked on a leading axis.
      centers: `[K, D]`, or such a pytree: the first centres; default: every point (`K = N`).
      radius: `τ`: a number, `[K]`, or `[num_rounds, K]`; or `"three_means"`: 3-means on each centre's distances, and
        the mean of the two larger means (a rule of the authors' code).
      quantile: instead of `radius`, in the same shapes, within [0, 1]: `τ` is this quantile of the distances to that
        centre in that round.
      num_rounds: `L`, at least 1.
      weights: `[N]`, at least 0: the points' weights in the mean instead of `1/N`; scaled to sum to 1.
      mask: `[N]` bool, points that count; the others are not part of `N`, and as starts they give zeros.
      quantile_rule: `"linear"`: NumPy's, with points at the radius inside. The authors' code sorts the distances and
        takes number `⌊N q⌋`: `"index"` (CIFAR), `"index_shrunk"`, times 0.99 (MNIST), `"index_strict"`, with points at
        the radius outside (synthetic data).
      form: `"direct"`: distances from the points in every round. `"gram"`: from inner products, with the centres as
        coefficients over the points; where these have too few digits for a radius, as for narrow clusters far apart,
        the direct form. `"auto"`: the form with less work.

    Returns:
      `[K, D]`; a pytree for a pytree. Inside `jit`, points with NaN or infinity count as masked.

    Cost: direct: two passes over the points for every centre and round. Gram: `N² D + 2 K N D` operations once, then
    `2 K N²` a round; `O(N² + K N)` memory.

    Example:
      >>> import jax.numpy as jnp
      >>> points = jnp.array([[0.0], [1.0], [9.0]])
      >>> print(threshold_clustering(points, jnp.array([[0.0]]), radius=2.0, num_rounds=1).round(3))
      [[0.333]]
    """
    rows, mask = blocks.checked_rows(points, mask)
    dtype = sum_dtype(*rows)  # of distances and quantiles: float16 cannot represent indices of 5,000 points
    starts, num_centers = None, len(mask)
    if centers is not None:
        trees = jax.tree.structure(centers), jax.tree.structure(points)
        check(trees[0] == trees[1], "centers", trees[0], "a tree like points")
        shapes, wanted = ([jnp.shape(leaf)[1:] for leaf in jax.tree.leaves(tree)] for tree in (centers, points))
        check(shapes == wanted, "centers", shapes, f"[K, ...] with the shapes {wanted}, as the points have")
        starts = [c.astype(x.dtype) for c, x in zip(rows_of(centers, name="centers"), rows, strict=True)]
        blocks.refuse_nonfinite(starts, "centers")
        num_centers = len(starts[0])
    check(form in FORMS, "form", form, f"one of {FORMS}")
    limits, rule = _limits(num_centers, dtype, num_rounds, quantile_rule, radius, quantile)
    if form == "auto":
        form = "gram" if gram_is_cheaper(len(mask), num_centers, num_rounds) else "direct"
    run = _gram if form == "gram" else _direct
    usable = mask & blocks.finite_rows(rows)
    ends = run(rows, starts, limits, check_weights(weights, rows), usable, rule=rule)
    return like(points, [blocks.usable_rows(v, usable) for v in ends] if starts is None else ends)


def center_from_row(points: PyTree, row: jax.Array, *, weights: jax.Array, mask: jax.Array, **options: Any) -> PyTree:
    """Returns `threshold_clustering` with one centre, which starts at point `row` `[]`; fast on a GPU or TPU.

    Distances follow from the inner products of the points, with an error of `eps` times the squared norms of the
    points. Where that is too much for the radius, or a point is not finite, the centre is computed again in the direct
    form. `options` are `radius` or `quantile`, `num_rounds` and `quantile_rule`.
    """
    leaves, structure = jax.tree.flatten(points)
    limits, rule = _limits(1, sum_dtype(*leaves), **options)
    products = Products(sum(map(all_products, leaves)), jnp.zeros_like(mask), None, None)
    start = Coefficients(jax.nn.one_hot(row, len(mask), dtype=limits.dtype)[None], jnp.zeros(1, limits.dtype))
    (coefficients, _), rough = _after_rounds(products, start, limits, weights, mask, rule)

    def direct():
        rows = rows_of(points)
        starts, usable = [x[row][None] for x in rows], mask & blocks.finite_rows(rows)
        return like(points, _direct(rows, starts, limits, weights, usable, rule=rule))

    def combined():
        sums = [jnp.tensordot(coefficients, x.astype(coefficients.dtype), 1, precision=blocks.HIGHEST) for x in leaves]
        return jax.tree.unflatten(structure, [s.astype(x.dtype) for s, x in zip(sums, leaves, strict=True)])

    return if_rare(rough | ~jnp.isfinite(jnp.diagonal(products.points)).all(), direct, combined)


def all_products(x: jax.Array) -> jax.Array:
    """Returns `[N, N]`, the inner products of the rows of `x` `[N, ...]`, exactly symmetric."""

    def plain(x):
        inner = tuple(range(1, x.ndim))
        return mirrored(jax.lax.dot_general(x, x, ((inner, inner), ((), ())), blocks.HIGHEST, sum_dtype(x)))

    def flat(x, product=plain):
        return product(x.reshape(len(x), -1))

    # A TPU would copy a leaf [N, a, b] into the form [N, a b]; a GPU transposes it, unless it has that form.
    by_kernel = partial(flat, product=upper_products if blocks.is_long(x) else plain)
    return by_platform(x, cpu=flat, accelerator=flat, tpu=plain, cuda=by_kernel)


def _limits(num_centers, dtype, num_rounds, quantile_rule="linear", radius=None, quantile=None):
    """Returns radii or quantiles `[num_rounds, K]`, and the rule by which they are used, after a check of them."""
    check_count("num_rounds", num_rounds)
    if (radius is None) == (quantile is None):
        raise ValueError(f"give radius or quantile, and not both, got {radius} and {quantile}")
    check(quantile_rule in QUANTILE_RULES, "quantile_rule", quantile_rule, f"one of {QUANTILE_RULES}")
    rule = quantile_rule if radius is None else "radius"
    if isinstance(radius, str):
        check(radius == THREE_MEANS, "radius", radius, f'a number, an array or "{THREE_MEANS}"')
        rule, radius = THREE_MEANS, 0.0
    name, limit = ("radius", radius) if quantile is None else ("quantile", quantile)
    limit = jnp.asarray(limit, dtype)
    accepted = ((), (num_centers,), (num_rounds, num_centers))
    check(limit.shape in accepted, name, limit.shape, f"of one of the shapes {accepted}")
    check_values(name, limit, lambda limit: limit >= 0, "at least 0, and not NaN")
    check_values(name, limit, lambda limit: (name == "radius") | (limit <= 1), "within [0, 1]")
    return jnp.broadcast_to(limit if limit.ndim == 2 else jnp.atleast_1d(limit)[None, :], accepted[2]), rule


def gram_is_cheaper(count: int, num_centers: int, num_rounds: int) -> bool:
    """Returns whether `N² D + 2 K N D` operations are faster than two passes over `N D` numbers per centre and round.

    A product does about 20 multiplications while one number is read, finding the origin takes as long as 60 (2 cores).
    """
    return count / 2 + num_centers + 60 <= 20 * num_centers * num_rounds


def _radii(distances: jax.Array, usable: jax.Array, limit: jax.Array, rule: str) -> jax.Array:
    """Returns `[K]` radii from `[K, N]` distances (`inf` where not usable) and `[K]` radii or quantiles."""
    if rule == "radius":
        return limit
    ordered, count = jnp.sort(distances, axis=1), usable.sum()
    if rule == THREE_MEANS:
        return _three_means(ordered)

    def pick(place):
        place = jnp.clip(place.astype(jnp.int32), 0, jnp.maximum(count - 1, 0))
        return jnp.take_along_axis(ordered, place[:, None], axis=1)[:, 0]

    place = limit * (count - 1 if rule == "linear" else count).astype(limit.dtype)
    whole = jnp.round(place)  # 0.53 times 100 is 53, also in float32
    place = jnp.where(jnp.abs(place - whole) <= 4 * jnp.finfo(limit.dtype).eps * place, whole, place)
    low = jnp.floor(place)
    if rule == "linear":
        part = place - low
        below, above = pick(low), pick(low + 1.0)
        return jnp.where((part > 0) & (below < above), below + part * (above - below), below)
    return 0.99 * pick(low) if rule == "index_shrunk" else pick(low)


def _three_means(ordered: jax.Array, num_iters: int = 50) -> jax.Array:
    """Returns `[K]`, the mean of the two larger of 3 means of each row's finite numbers (Lloyd from its sextiles)."""
    usable = jnp.isfinite(ordered)
    values = jnp.where(usable, ordered, 0.0)
    last = jnp.maximum(usable.sum(axis=1) - 1, 0)
    starts = jnp.array([1, 3, 5])[None, :] * last[:, None] // 6

    def lloyd(_, means):  # [K, 3]
        nearest = jnp.argmin(jnp.abs(values[:, :, None] - means[:, None, :]), axis=2)
        members = ((nearest[:, :, None] == jnp.arange(3)[None, None, :]) & usable[:, :, None]).astype(values.dtype)
        sizes = members.sum(axis=1)
        sums = (members * values[:, :, None]).sum(axis=1)
        return jnp.where(sizes > 0, sums / jnp.maximum(sizes, 1.0), means)

    means = jax.lax.fori_loop(0, num_iters, lloyd, jnp.take_along_axis(values, starts, axis=1))
    return (means.sum(axis=1) - means.min(axis=1)) / 2.0


def is_rough(distances: jax.Array, norms: jax.Array, norm: jax.Array, radius: jax.Array) -> jax.Array:
    """Returns `[]` bool: the radius is not much above the error of `distances` `[N]` from inner products.

    That error is `eps` times the squared norms, `norms` `[N]` of the points near the centre and `norm` of the centre.
    """
    near = jnp.maximum(jnp.where(distances <= 2.0 * radius, norms, 0.0).max(), norm)
    return ~(radius * radius > 1e-3 * near)


def _inside(distances, usable, limit, rule):
    """Returns `[K, N]` floats, 1 for the points inside each centre's radius, and the radii `[K]`."""
    radii = _radii(distances, usable, limit, rule)
    inside = distances < radii[:, None] if rule == "index_strict" else distances <= radii[:, None]
    # A distance that overflows is far from all.
    return (inside & usable[None, :] & jnp.isfinite(distances)).astype(distances.dtype), radii


@partial(jax.jit, static_argnames="rule")
def _gram(rows, starts, limits, weights, usable, *, rule):
    ends, rough = _by_products(rows, starts, limits, weights, usable, rule)

    def exact():
        if not shares_columns():
            return _direct(rows, starts, limits, weights, usable, rule=rule)

        # Relative to each centre's own start, near which the products are exact: no sums over columns in loops.
        def one(start, limit):
            return _by_products(rows, [s[None] for s in start], limit[:, None], weights, usable, rule)[0]

        return [v[:, 0] for v in jax.vmap(one, (0, 1))(_starts(rows, starts, usable), limits)]

    return if_rare(rough, exact, lambda: ends)


def _by_products(rows, starts, limits, weights, usable, rule):
    """Returns the centres as vectors, and whether a distance was too rough, as `_after_rounds`."""
    products = inner_products(rows, starts, usable)
    centers, rough = _after_rounds(products, at_start(products), limits, weights, usable, rule)
    return positions(centers, rows, starts, usable), rough


def _after_rounds(products, centers, limits, weights, usable, rule):
    """Returns the centres after all rounds, and `[]` bool: whether the distances of one of them were `is_rough`."""
    share, norms = shares(weights, usable).astype(limits.dtype), jnp.diagonal(products.points)

    def move(carry, limit):
        centers, rough = carry
        distances, center_norms = center_distances(products, centers)
        distances = jnp.where(usable[None, :], distances, jnp.inf)
        inside, radii = _inside(distances, usable, limit, rule)
        finite = jnp.isfinite(distances).any(axis=1)
        rough |= (jax.vmap(is_rough, (0, None, 0, 0))(distances, norms, center_norms, radii) & finite).any()
        return (moved(centers, inside * share[None, :]), rough), None

    return jax.lax.scan(move, (centers, jnp.zeros((), bool)), limits)[0]


@partial(jax.jit, static_argnames="rule")
def _direct(rows, starts, limits, weights, usable, *, rule):
    share, norms = shares(weights, usable).astype(limits.dtype), blocks.squared_norms(rows)

    def measure(center, limit):
        """Returns distances from one centre; where those from inner products are rough, from differences."""
        product = partial(blocks.matmul, preferred_element_type=norms.dtype)
        norm, cross = sum_over_columns(
            (sum(product(c, c) for c in center), sum(product(x, c) for x, c in zip(rows, center, strict=True)))
        )
        quick = jnp.where(usable, jnp.sqrt(jnp.maximum(norms - 2.0 * cross + norm, 0.0)), jnp.inf)
        radius = _radii(quick[None, :], usable, limit[None], rule)[0]
        rough = is_rough(quick, norms, norm, radius)
        exact = if_rare(rough, lambda: blocks.distances_from(rows, center, usable).astype(quick.dtype), lambda: quick)
        return exact.astype(limit.dtype)

    def one(start_and_limits):
        def move(center, limit):
            inside = _inside(measure(center, limit)[None, :], usable, limit[None], rule)[0][0] * share
            stay = 1.0 - inside.sum()
            pairs = zip(rows, center, strict=True)
            return [blocks.weighted_sum(x, inside, usable) + stay.astype(c.dtype) * c for x, c in pairs], None

        return jax.lax.scan(move, *start_and_limits)[0]

    return jax.lax.map(one, (_starts(rows, starts, usable), limits.T))


def _starts(rows, starts, usable):
    return [blocks.usable_rows(x, usable) for x in rows] if starts is None else starts
