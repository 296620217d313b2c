"""Kernels over the columns of clients divided among devices, and what devices say to each other in a round."""

import re
from collections.abc import Iterator
from functools import partial
from itertools import chain

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import jfcl
from jfcl.core import Clients, Task
from jfcl.kernels import geometric_median, kmeans, pairwise_cosine, squared_distances, threshold_clustering
from jfcl.kernels.base import if_rare
from jfcl.kernels.blocks import distances_from, finite_rows, squared_norms
from jfcl.mapping.axis import client_mesh, sharded
from jfcl.mapping.columns import over_columns
from jfcl.mapping.placement import place

AXIS = sharded(client_mesh(2), jax.vmap)
COLLECTIVE = re.compile(r"= [^=]*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def updates(seed, count=9, scale=1.0):
    """A pytree of `count` updates with leaves of odd widths, which two devices cannot share evenly."""
    rng = np.random.default_rng(seed)
    return {
        "w": scale * rng.standard_normal((count, 67, 39)).astype(np.float32),
        "b": scale * rng.standard_normal((count, 5)).astype(np.float32),
    }


def flat(tree):
    return np.concatenate([np.reshape(x, (len(x), -1)) for x in jax.tree.leaves(tree)], axis=1)


def in_columns(kernel, *args):
    return jax.jit(over_columns(AXIS, kernel))(*args)


@pytest.mark.slow_cases("1.0")
@pytest.mark.parametrize("scale", [1.0, 1e-22, 1e30])
def test_cosines_over_columns_are_numpys(scale):
    vectors = updates(0, scale=scale)
    vectors["b"][3] = np.nan
    vectors["w"][5], vectors["b"][5] = 0, 0
    _, ours = in_columns(lambda v: ((), pairwise_cosine(v)), vectors)
    z = np.delete(flat(vectors).astype(np.float64), [3, 5], axis=0)
    units = z / np.linalg.norm(z, axis=1, keepdims=True)
    np.testing.assert_allclose(np.delete(np.delete(ours, [3, 5], 0), [3, 5], 1), units @ units.T, atol=1e-6)
    np.testing.assert_array_equal(ours[5], np.where(np.arange(9) == 3, -1, 0))
    np.testing.assert_array_equal(ours[3], np.where(np.arange(9) == 3, 1, -1))


def test_norms_and_distances_over_columns_are_numpys():
    vectors = updates(1)
    vectors["w"][2, 0, 0] = np.inf
    vectors["w"][4] *= 1e25  # finite, but not its square

    def kernel(v):
        rows = jax.tree.leaves(v)
        known = finite_rows(rows)
        return (), (squared_norms(rows), known, distances_from(rows, [x[0] for x in rows], known))

    norms, known, away = in_columns(kernel, vectors)[1]
    z = flat(vectors).astype(np.float64)
    np.testing.assert_array_equal(known, np.arange(9) != 2)
    usual = np.delete(np.arange(9), [2, 4])
    np.testing.assert_allclose(norms[usual], (z[usual] ** 2).sum(1), rtol=1e-6)
    np.testing.assert_allclose(away[usual], np.linalg.norm(z[usual] - z[0], axis=1), rtol=1e-6, atol=1e-6)
    assert away[2] == away[4] == np.inf


@pytest.mark.slow
@pytest.mark.parametrize("form", ["direct", "gram"])
def test_threshold_clustering_over_columns_is_that_of_one_device(form):
    points = updates(2)
    points["w"][:4] += 1
    starts = jax.tree.map(lambda x: x[[0, 5]], points)
    run = partial(threshold_clustering, quantile=0.4, num_rounds=3, form=form)
    ours, distances = in_columns(lambda s: (run(*s), squared_distances(*s)), [points, starts])
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), ours, run(points, starts))
    np.testing.assert_allclose(distances, squared_distances(points, starts), rtol=1e-5, atol=0.02)


@pytest.mark.slow
def test_narrow_clusters_far_apart_over_columns():
    points = updates(2)
    points["w"][:4] += 10**4
    starts = jax.tree.map(lambda x: x[[0, 5]], points)
    run = partial(threshold_clustering, quantile=0.3, num_rounds=3)
    ours, _ = in_columns(lambda s: (run(*s, form="gram"), ()), [points, starts])
    jax.tree.map(partial(np.testing.assert_allclose, atol=5e-3), ours, run(points, starts, form="direct"))


def test_the_geometric_median_over_columns_is_that_of_one_device():
    """The devices agree when to stop: they would wait for each other forever."""
    vectors = updates(4)
    vectors["w"][:, 33:] = 0  # the second device alone would stop at once
    ours, _ = in_columns(lambda v: (jax.tree.map(lambda x: x[None], geometric_median(v)), ()), vectors)
    jax.tree.map(
        partial(np.testing.assert_allclose, atol=1e-5), ours, {k: v[None] for k, v in geometric_median(vectors).items()}
    )


@pytest.mark.slow
def test_kmeans_over_columns_finds_the_same_clusters():
    points = np.concatenate([updates(3)["w"].reshape(9, -1) + 3 * i for i in range(3)]).astype(np.float32)
    points[1] = np.nan
    options = {"key": jax.random.key(0), "mask": np.arange(27) != 20}
    centers, (cluster, inertia) = in_columns(
        lambda x: (lambda found: (found.centers, found[1:]))(kmeans(x, 3, **options)), points
    )
    assert cluster[1] == cluster[20] == -1
    truth = np.repeat(np.arange(3), 9)
    kept = np.delete(np.arange(27), [1, 20])
    pairs = set(zip(np.asarray(cluster)[kept].tolist(), truth[kept].tolist(), strict=True))
    assert len(pairs) == 3, pairs
    for mine, theirs in pairs:
        mean = points[kept][truth[kept] == theirs].astype(np.float64).mean(0)
        np.testing.assert_allclose(centers[mine], mean, atol=1e-4)
    away = points[kept].astype(np.float64) - np.asarray(centers, np.float64)[np.asarray(cluster)[kept]]
    np.testing.assert_allclose(inertia, (away**2).sum(), rtol=1e-3)


@pytest.mark.slow
@given(st.lists(st.booleans(), min_size=1, max_size=6), st.booleans())
def test_a_rare_branch_gives_what_cond_gives(happens, nested):
    happens, x = np.array(happens), np.arange(1.0, 1.0 + len(happens), dtype=np.float32)
    offset = jnp.float32(3)

    def choose(cond, happens, x):
        return cond(happens, lambda: {"a": -x, "b": offset}, lambda: {"a": x + offset, "b": x})

    ours, theirs = (jax.vmap(partial(choose, cond)) for cond in (if_rare, jax.lax.cond))
    if nested:
        happens, x = np.stack([happens, ~happens]), np.stack([x, x])
        ours, theirs = jax.vmap(ours), jax.vmap(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours(happens, x), theirs(happens, x))
    for case in (True, False):
        one = (choose(cond, jnp.array(case), jnp.float32(2)) for cond in (if_rare, jax.lax.cond))
        jax.tree.map(np.testing.assert_array_equal, *one)


def test_a_rare_branch_is_a_branch_under_vmap():
    x, wanted = jnp.arange(4.0), jnp.array([False, True, False, False])
    for cond, kept in ((if_rare, True), (jax.lax.cond, False)):
        program = jax.make_jaxpr(jax.vmap(lambda w, x: cond(w, lambda: jnp.sin(x), lambda: x)))(wanted, x)  # noqa: B023
        assert ("cond[" in str(program)) == kept


# --- What devices say to each other.


def collectives(text: str) -> tuple[list[str], list[str]]:
    """The collectives of a compiled program: all of them, and those inside loops."""
    bodies = {name: body for name, body in computations(text)}
    inside, todo = set(), re.findall(r"(?:body|condition)=%?([\w.\-]+)", text)
    while todo:
        name = todo.pop()
        if name in bodies and name not in inside:
            inside.add(name)
            todo += re.findall(
                r"%([\w.\-]+)",
                "".join(
                    re.findall(
                        r"(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%[\w.\-]+)",
                        bodies[name],
                    )
                ),
            )
    found = {name: COLLECTIVE.findall(body) for name, body in bodies.items()}
    return list(chain(*found.values())), list(chain(*(found[name] for name in inside)))


def computations(text: str) -> Iterator[tuple[str, str]]:
    for part in re.split(r"\n}\n", text):
        header = re.search(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$", part, re.MULTILINE)
        if header:
            yield header.group(1), part[header.end() :]


def wide_problem(count=8, dim=4500):
    """Linear regressions with so many inputs that kernels loop over blocks of columns."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, 3, dim)).astype(np.float32)
    clients = Clients({"x": x, "y": x[:, :, 0]}, np.full(count, 3, np.int32))
    task = Task(
        init=lambda key: {"w": 0.1 * jax.random.normal(key, (dim,)), "b": jnp.zeros(())},
        apply=lambda params, x: x @ params["w"] + params["b"],
        cost=lambda outputs, batch: 0.5 * (outputs - batch["y"]) ** 2,
    )
    return task, jfcl.local_training(optax.sgd(1e-4), num_steps=1), place(AXIS, clients)


METHODS = {
    "cfl": partial(jfcl.cfl, max_clusters=4),
    "cfl by gradients": partial(jfcl.cfl, max_clusters=4, similarity="gradients", linkage="complete"),
    "byzantine_cfl": jfcl.byzantine_cfl,
    "federated_clustering": partial(jfcl.federated_clustering, quantile=0.4),
    "myopic_clustering": partial(jfcl.myopic_clustering, num_clusters=2, centers="carry"),
    "momentum_clustering": partial(jfcl.momentum_clustering, num_clusters=2),
    "ditto": jfcl.ditto,
    "one_shot init": partial(jfcl.one_shot, num_clusters=2, local_rounds=2),
    "fesem": partial(jfcl.fesem, num_clusters=2),
    "flhc init": partial(jfcl.flhc, num_clusters=2, rounds_before=0),
    "clove": partial(jfcl.clove, num_clusters=2),
    "cfl_gp": partial(jfcl.cfl_gp, num_clusters=2),
    "stocfl": jfcl.stocfl,
    "fedgwc": jfcl.fedgwc,
    "pacfl init": partial(jfcl.pacfl, num_clusters=2, by_label=False),
    "flux init": partial(jfcl.flux, num_clusters=2, by_label=False, rounds_before=1),
    "fedgroup init": partial(jfcl.fedgroup, num_clusters=2),
}


@pytest.mark.parametrize(
    "name", [n if n == "federated_clustering" else pytest.param(n, marks=pytest.mark.slow) for n in METHODS]
)
def test_devices_talk_a_few_times_a_round_and_never_in_a_loop(name):
    task, training, clients = wide_problem()
    algorithm = METHODS[name](task, training, client_axis=AXIS)
    key = jax.random.key(0)
    if name.endswith("init"):
        program = jax.jit(algorithm.init).lower(key, clients)
    else:
        state = jax.eval_shape(algorithm.init, key, clients)
        program = jax.jit(algorithm.step).lower(key, state, clients)
    every, in_loops = collectives(program.compile().as_text())
    assert 0 < len(every) <= 40, every
    assert not in_loops, in_loops


def test_collectives_in_loops_are_found():
    """The parser of the test above: a sum over devices in every step of a loop, and one behind the loop."""
    mesh = client_mesh(2)

    def on_device(x):
        x = jax.lax.fori_loop(0, 3, lambda i, x: x + jax.lax.psum(jnp.sin(x), "clients"), x)
        return jax.lax.psum(x * x, "clients")

    spec = jax.sharding.PartitionSpec("clients")
    run = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec(), check_vma=False)
    every, in_loops = collectives(jax.jit(run).lower(jnp.zeros(4)).compile().as_text())
    assert every == ["all-reduce"] * 2 and in_loops == ["all-reduce"]
