"""The kernels against what a user would take instead: SciPy, NumPy's BLAS, scikit-learn, ByzFL, the obvious form.

    python benchmarks/kernels.py [--only NAME] [--quick]

Each pair is timed in turn in one process (ByzFL in its own, see `make peers`); seconds are medians after one call that
compiles. `times` is how often ours fits into the reference. Writes `results/kernels-<device>.json` and the growth of
`bipartition_of_updates` as a picture.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import RESULTS, report, run_peer
from jax import lax
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform
from sklearn.cluster import KMeans
from sklearn.cluster._spectral import cluster_qr
from sklearn.manifold import spectral_embedding
from sklearn.metrics import davies_bouldin_score

from jfcl import kernels, mapping
from jfcl.kernels import robust_vectors
from jfcl.models import conv
from jfcl.models.conv import patches

Row = dict[str, Any]


def timed(fn: Callable[[], Any], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(fn())
        seconds.append(time.perf_counter() - started)
    return seconds


def in_turn(named: dict[str, Callable[[], Any]], repeats: int = 5) -> dict[str, float]:
    """Median seconds of each, one after the other in every repetition; the first call of each is not counted."""
    for fn in named.values():
        timed(fn, 1)
    runs: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(repeats):
        for name, fn in named.items():
            runs[name] += timed(fn, 1)
    return {name: statistics.median(r) for name, r in runs.items()}


def rows_of(kernel: str, size: str, seconds: dict[str, float], flop: float = 0.0, gigabytes: float = 0.0) -> list[Row]:
    """One row for each; the first is the reference."""
    reference = next(iter(seconds.values()))
    rows = []
    for i, (what, s) in enumerate(seconds.items()):
        row = {"kernel": kernel, "size": size, "what": what, "seconds": s, "times": reference / s if i else None}
        if flop:
            row["gflops"] = flop / s / 1e9
        if gigabytes:
            row["gb/s"] = gigabytes / s
        rows.append(row)
    return rows


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def prim_in_numpy(similarity: np.ndarray) -> float:
    """The plain loop."""
    count = len(similarity)
    best, outside = similarity[0].copy(), np.ones(count, bool)
    outside[0], weakest = False, np.inf
    for _ in range(count - 1):
        j = int(np.where(outside, best, -np.inf).argmax())
        weakest = min(weakest, best[j])
        outside[j] = False
        np.maximum(best, similarity[j], out=best)
    return weakest


def bipartition(quick: bool) -> list[Row]:
    rows = []
    for count in (1000, 2000) if quick else (1000, 5000, 10_000):
        similarity = kernels.pairwise_cosine(normal(count, 64))
        host = np.asarray(similarity)
        distances = 1.0 - host.astype(np.float64)
        np.fill_diagonal(distances, 0)
        condensed = squareform(distances, checks=False)
        del distances
        seconds = in_turn(
            {
                "SciPy linkage(single)": lambda c=condensed: linkage(c, "single"),
                "NumPy Prim": lambda h=host: prim_in_numpy(h),
                "optimal_bipartition": lambda s=similarity: kernels.optimal_bipartition(s),
            }
        )
        rows += rows_of("bipartition", f"N={count}", seconds)
        if count <= 5000:
            apart = 1.0 - similarity
            for name in ("complete", "average"):
                seconds = in_turn(
                    {
                        f"SciPy linkage({name})": lambda c=condensed, name=name: linkage(c, name),
                        f"linkage_tree({name})": lambda d=apart, name=name: kernels.linkage_tree(d, name),
                    },
                    repeats=3,
                )
                rows += rows_of(f"{name} linkage", f"N={count}", seconds)
    return rows


product_with_itself = jax.jit(lambda u: u @ u.T)


def cosine(quick: bool) -> list[Row]:
    rows = []
    for count, dim in ((1000, 2000),) if quick else ((5000, 2000), (1000, 100_000)):
        updates = jnp.asarray(normal(count, dim))
        host = np.asarray(updates)
        seconds = in_turn(
            {
                "NumPy U @ U.T (BLAS)": lambda h=host: h @ h.T,
                "jitted U @ U.T": lambda u=updates: product_with_itself(u),
                "pairwise_cosine": lambda u=updates: kernels.pairwise_cosine(u),
                "squared_distances": lambda u=updates: kernels.squared_distances(u),
            }
        )
        rows += rows_of("cosine", f"N={count} D={dim}", seconds, flop=count * count * dim)
    return rows


@jax.jit
def _recomputed(points, quantile, num_rounds):
    """Threshold clustering with every point a centre, distances by a matrix product in every round."""

    def move(_, centers):
        squares = jnp.square(points).sum(1)[None, :] - 2 * centers @ points.T + jnp.square(centers).sum(1)[:, None]
        inside = (squares <= jnp.quantile(squares, quantile, axis=1)[:, None]).astype(points.dtype)
        return (inside @ points + (len(points) - inside.sum(1))[:, None] * centers) / len(points)

    return jax.lax.fori_loop(0, num_rounds, move, points)


def threshold(quick: bool) -> list[Row]:
    """Every point a centre; the error is that of the centres against float64, with a radius between the clusters."""
    rows = []
    for count, dim in ((100, 10_000),) if quick else ((200, 100_000), (300, 100_000), (1000, 100_000)):
        points = normal(count, dim) + 10 + normal(4, dim, seed=1)[np.random.default_rng(2).integers(0, 4, count)]
        device = jnp.asarray(points)

        def run(form, z=device, **options):
            return kernels.threshold_clustering(z, num_rounds=10, form=form, **options)

        named = {"distances recomputed by products": lambda z=device: _recomputed(z, 0.2, 10)}
        if count <= 200:
            named["direct form"] = lambda run=run: run("direct", quantile=0.2)
        named["gram form"] = lambda run=run: run("gram", quantile=0.2)
        rows += rows_of("threshold", f"N=K={count} D={dim} L=10", in_turn(named, repeats=2))
        if count <= 300:
            radius = 1.3 * (2 * dim) ** 0.5  # between the distances inside and across
            truth = threshold_in_float64(points, radius)
            offset = {"gram form": run("gram", radius=radius)}
            if count <= 200:
                offset["direct form"] = run("direct", radius=radius)
            for row in rows[-len(named) :]:
                if row["what"] in offset:
                    row["error"] = float(np.abs(np.asarray(offset[row["what"]]) - truth).max())
    return rows


def threshold_in_float64(points: np.ndarray, radius: float) -> np.ndarray:
    """The centres after ten rounds, from products of centred points in float64."""
    mean = points.astype(np.float64).mean(0)
    z = points - mean
    gram, a = z @ z.T, np.eye(len(z))
    for _ in range(10):
        squares = np.diagonal(gram)[None] - 2 * a @ gram + (a @ gram * a).sum(1)[:, None]
        inside = squares <= radius**2
        a = inside / len(z) + (1 - inside.mean(1))[:, None] * a
    return a @ z + mean


def clipping(quick: bool) -> list[Row]:
    count, dim = (200, 10_000) if quick else (1000, 100_000)
    updates = jnp.asarray(normal(count, dim))
    host, copy = np.asarray(updates), np.empty((count, dim), np.float32)
    gigabytes = updates.nbytes / 1e9
    center = jnp.asarray(normal(dim, seed=1)) * 0.1

    @jax.jit
    def as_written(z, v):
        distances = jnp.linalg.norm(z - v[None], axis=1)
        return v + ((z - v[None]) * jnp.minimum(1, 300.0 / distances)[:, None]).mean(0)

    seconds = in_turn(
        {
            "NumPy copy (read and write)": lambda: np.copyto(copy, host),
            "as written": lambda: as_written(updates, center),
            "centered_clip, one iteration": lambda: kernels.centered_clip(updates, radius=300.0, center=center),
            "centered_clip, one of ten": lambda: kernels.centered_clip(
                updates, radius=300.0, center=center, num_iters=10
            ),
        }
    )
    seconds["centered_clip, one of ten"] /= 10  # a call also looks for rows that are not finite, once
    rows = rows_of("clipping", f"N={count} D={dim}", seconds)
    for row in rows:  # an iteration as written reads the updates twice: lengths, then the mean
        row["gb/s"] = 2 * gigabytes / row["seconds"]
        row["times"] = row["gb/s"] / rows[0]["gb/s"]
    few = jnp.asarray(normal(50, dim))
    given = ([few], jnp.ones(len(few), bool), [jnp.zeros(dim)], jnp.float32(300.0))
    forms = {"direct form": robust_vectors._clip, "gram form": robust_vectors._clip_by_products}
    seconds = in_turn({form: lambda run=run: run(*given, num_iters=50) for form, run in forms.items()})
    return rows + rows_of("clipping", f"N=50 D={dim}, 50 iterations", seconds)


def matmul_peak() -> float:
    """GFLOP/s of a large product, now."""
    x = jnp.asarray(normal(4096, 4096))
    product = jax.jit(lambda x: x @ x)
    product(x)
    return 2 * 4096**3 / min(timed(lambda: product(x), 3)) / 1e9


def of_updates(quick: bool) -> list[Row]:
    """Time, share of the matrix product's peak, and memory beside the updates, until five minutes are reached."""
    rows = []
    sizes = [(n, 1000) for n in ((2000, 4000) if quick else (5000, 10_000, 20_000, 40_000, 80_000, 150_000))]
    sizes += [] if quick else [(10_000, 100), (10_000, 10_000)]
    for kind in ("random", "four clusters"):
        slow = False
        for count, dim in sizes:
            if slow and dim == 1000:
                continue
            updates = normal(count, dim)
            if kind != "random":
                if count > 20_000 or dim != 1000:
                    continue
                updates += normal(4, dim, seed=1)[np.random.default_rng(2).integers(0, 4, count)]
            updates = jnp.asarray(updates)
            compiled = jax.jit(kernels.bipartition_of_updates).lower(updates).compile()
            memory = compiled.memory_analysis().temp_size_in_bytes / 1e6
            before = matmul_peak()
            first = timed(partial(compiled, updates), 1)
            seconds = first if first[0] > 60 else timed(partial(compiled, updates), 1)
            peak = (before + matmul_peak()) / 2
            gflops = 2 * count**2 * dim / seconds[0] / 1e9 if count <= 80_000 else None  # of one pass over all pairs
            print(f"N={count} D={dim} {kind}: {seconds[0]:.2f} s", file=sys.stderr, flush=True)
            rows.append(
                {
                    "kernel": "bipartition_of_updates",
                    "size": f"N={count} D={dim}",
                    "what": kind,
                    "seconds": seconds[0],
                    "gflops": gflops,
                    "share of peak": gflops / peak if gflops else None,
                    "temporary_mb": memory,
                    "clients": count,
                    "dim": dim,
                }
            )
            slow |= seconds[0] > 85  # the next would pass five minutes
    return rows


def plot_growth(rows: list[Row]) -> None:
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    by_n, by_d = figure.subplots(1, 2)
    random = [r for r in rows if r.get("what") == "random"]
    for axes, fixed, along, label in (
        (by_n, "dim", "clients", "N, D = 1000"),
        (by_d, "clients", "dim", "D, N = 10,000"),
    ):
        value = 1000 if fixed == "dim" else 10_000
        points = sorted((r[along], r["seconds"]) for r in random if r[fixed] == value)
        if len(points) < 2:
            continue
        x, y = np.array(points).T
        axes.loglog(x, y, "o-", label="bipartition_of_updates")
        power = 2 if along == "clients" else 1
        axes.loglog(x, y[-1] * (x / x[-1]) ** power, ":", color="gray", label=f"{label[0]}{'²' if power == 2 else ''}")
        axes.set(xlabel=label, ylabel="seconds")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(RESULTS / "kernels-growth.png", dpi=110)


def k_means(quick: bool) -> list[Row]:
    rows = []
    for count, dim, k in ((1000, 100, 4),) if quick else ((1000, 100, 4), (1000, 1000, 4), (2000, 10_000, 4)):
        points = normal(count, dim) + normal(k, dim, seed=1)[np.random.default_rng(2).integers(0, k, count)]
        device, key = jnp.asarray(points), jax.random.key(0)
        run = lambda z=device, k=k, key=key: kernels.kmeans(z, k, key=key)  # noqa: E731
        compile_and_run = timed(run, 1)[0]
        seconds = in_turn(
            {
                "scikit-learn": lambda p=points, k=k: KMeans(k, n_init=10, random_state=0).fit(p) and None,
                "kmeans on the device": run,
            },
            repeats=3,
        )
        rows += rows_of("kmeans", f"N={count} D={dim} K={k}", seconds)
        rows[-1]["first call"] = compile_and_run
    return rows


def spectral(quick: bool) -> list[Row]:
    """The number of clusters, of two to four, by the measure of Davies and Bouldin; one embedding for all numbers."""

    def theirs(affinity):
        vectors = spectral_embedding(affinity, n_components=5, drop_first=False, random_state=0)
        return np.argmin([davies_bouldin_score(vectors[:, 1 : k + 1], cluster_qr(vectors[:, :k])) for k in (2, 3, 4)])

    rows = []
    for count in (100,) if quick else (100, 1000):
        points = 3 * np.eye(3)[np.arange(count) % 3] + normal(count, 3)
        affinity = np.float32(np.exp(-np.square(points[:, None] - points[None]).sum(axis=2) / 4))
        ours = partial(kernels.spectral_clusters, jnp.asarray(affinity), most=4)
        seconds = in_turn({"scikit-learn": partial(theirs, affinity), "spectral_clusters": ours}, repeats=3)
        rows += rows_of("spectral", f"N={count}, 2 to 4 clusters", seconds)
    return rows


NOT_TIMED = ("bucketing", "clip_norms", "smea")  # SMEA would compare ten billion subsets


def options_of(aggregator: str, case: Row) -> dict[str, Any]:
    """Returns the options of one of our aggregators in a case of peers/byzfl_aggregators.py."""
    if aggregator == "centered_clip":
        return {"radius": case["radius"], "num_iters": case["iterations"]}
    without = ("mean", "coordinate_median", "geometric_median", "clipped_clustering", "sign_guard")
    return {} if aggregator in without else {"num_malicious": case["malicious"]}


def aggregators(quick: bool) -> list[Row]:
    """ByzFL's geometric median has three iterations, its default; ours, as many as it takes to converge."""
    case = {"clients": 50, "dim": 1000 if quick else 100_000, "malicious": 10, "iterations": 3, "radius": 100.0}
    case |= {"repeats": 3, "head": 1000}
    theirs = run_peer("byzfl", "byzfl_aggregators.py", case)
    if theirs is None:
        print("byzfl: not set up, see 'make peers'", file=sys.stderr)
    updates = jnp.asarray(normal(case["clients"], case["dim"]))
    rows = []
    for name, fn in {**kernels.AGGREGATORS, **kernels.PRE_AGGREGATORS}.items():
        if name in NOT_TIMED:
            continue
        given = options_of(name, case)
        ours = statistics.median(timed(lambda fn=fn, given=given: fn(updates, **given), 4)[1:])
        row = {"kernel": "aggregators", "size": f"N={case['clients']} D={case['dim']}", "what": name, "seconds": ours}
        if theirs and name in theirs:
            row["reference seconds"] = statistics.median(theirs[name]["seconds"])
            row["reference of"] = theirs[name]["of"]
            row["times"] = row["reference seconds"] / ours
            result = fn(updates, **given)
            result = result[0] if isinstance(result, tuple) else result
            head = np.asarray(result).reshape(-1)[: case["head"]]
            row["difference"] = float(np.abs(head - np.array(theirs[name]["head"])).max())
        rows.append(row)
    return rows


def convolution(quick: bool) -> list[Row]:
    """The second layer of the papers' MNIST CNN, forward and both gradients, in a loop of steps with own weights."""
    steps, clients, side, channels, kernel = 3, 4, 13, 32, 5
    padding = ((1, 0), (1, 0))  # 10 x 10 come out, all that is pooled
    numbers = ("NHWC", "HWIO", "NHWC")
    ways = {
        "lax.conv_general_dilated": lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), padding, dimension_numbers=numbers
        ),
        "patches times weights": lambda x, w: patches(x, w.shape[:2], (1, 1), padding) @ w.reshape(-1, w.shape[-1]),
        "jfcl.models.conv": lambda x, w: conv(x, w, (1, 1), padding, dimension_numbers=numbers),
    }

    def training(conv, client_axis):
        def client(x, w):
            def step(_, carry):
                gradients = jax.grad(lambda x, w: (conv(x, w) ** 2).sum(), argnums=(0, 1))(*carry)
                return jax.tree.map(lambda p, g: p - 1e-9 * g, carry, gradients)

            return lax.fori_loop(0, steps, step, (x, w))

        return jax.jit(client_axis(client))

    rows = []
    for batch in (20,) if quick else (20, 100):
        x, w = normal(clients, batch, side, side, channels), normal(clients, kernel, kernel, channels, channels)
        flop = 3 * 2 * clients * steps * batch * 10 * 10 * kernel**2 * channels**2
        for name, axis in {"one at a time": mapping.chunked(1), "vmapped": jax.vmap}.items():
            runs = {what: partial(training(conv, axis), jnp.asarray(x), jnp.asarray(w)) for what, conv in ways.items()}
            rows += rows_of("convolution", f"batch {batch}, {name}", in_turn(runs, repeats=3), flop=flop)
    return rows


LAYERS = [  # clients, batch, side, channels, kernel, outputs, padding: of the papers' CNNs, the VGG, ResNet-18
    (100, 100, 28, 1, 5, 32, 1),
    (100, 100, 13, 32, 5, 32, 1),
    (20, 100, 32, 32, 3, 64, 1),
    (20, 100, 16, 64, 3, 128, 1),
    (20, 100, 8, 128, 3, 128, 1),
    (20, 50, 12, 64, 5, 64, 2),
    (20, 50, 32, 64, 3, 64, 1),
    (20, 50, 16, 128, 3, 128, 1),
    (20, 50, 8, 256, 3, 256, 1),
    (20, 50, 4, 512, 3, 512, 1),
]


def layers(quick: bool) -> list[Row]:
    """Convolutions of clients with their own weights, vmapped: forward, and the gradient with respect to weights."""
    rows = []
    for clients, batch, side, channels, kernel, outputs, pad in LAYERS:
        if quick or jax.default_backend() == "cpu":
            clients, batch = 4, 20
        ways = {
            "lax.conv_general_dilated": lax.conv_general_dilated,
            "jfcl.models.conv": conv,
        }
        convolve = {
            what: jax.vmap(
                partial(
                    way, window_strides=(1, 1), padding=((pad, pad),) * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
            for what, way in ways.items()
        }
        x = jnp.asarray(normal(clients, batch, side, side, channels))
        w = jnp.asarray(normal(clients, kernel, kernel, channels, outputs))
        reach = side + 2 * pad - kernel + 1
        g = jnp.asarray(normal(clients, batch, reach, reach, outputs))
        flop = 2 * clients * batch * reach**2 * kernel**2 * channels * outputs
        size = f"{clients} clients, {batch} x {side} x {side} x {channels}, {kernel} x {kernel} x {outputs}"
        forward = {what: partial(jax.jit(of), x, w) for what, of in convolve.items()}
        backward = {
            what: partial(jax.jit(lambda x, w, g, of=of: jax.vjp(lambda w: of(x, w), w)[1](g)[0]), x, w, g)
            for what, of in convolve.items()
        }
        for name, runs in {"forward": forward, "gradient of weights": backward}.items():
            rows += rows_of("layers", f"{size}, {name}", in_turn(runs, repeats=3), flop=flop)
    return rows


SECTIONS = {
    "bipartition": bipartition,
    "cosine": cosine,
    "threshold": threshold,
    "clipping": clipping,
    "kmeans": k_means,
    "spectral": spectral,
    "aggregators": aggregators,
    "of_updates": of_updates,
    "convolution": convolution,
    "layers": layers,
}
APART = ("convolution", "layers")  # which have tables of their own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, help=f"one section; default: all but {' and '.join(APART)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; writes nothing")
    args = parser.parse_args()
    rows: list[Row] = []
    for name in [args.only] if args.only else [name for name in SECTIONS if name not in APART]:
        print(name, file=sys.stderr, flush=True)
        rows += SECTIONS[name](args.quick)
    columns = ["kernel", "size", "what", "seconds", "times", "gflops", "share of peak", "gb/s", "error", "temporary_mb"]
    columns += ["difference", "first call"]
    name = None if args.quick else "kernels" + (f"-{args.only}" if args.only else "")
    report(name, "Kernels; times: how often ours fits into the reference", columns, rows)
    if name == "kernels":
        plot_growth(rows)


if __name__ == "__main__":
    main()
