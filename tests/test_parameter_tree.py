"""The parameter tree against loops over Algorithm 4 in float64."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import rollout
from test_cfl import CLUSTER, TASK, TRAINING, TRUTH, local_update, regression

import jfcl
from jfcl import parameter_tree, plots
from jfcl.core import Clients
from jfcl.kernels import OPERATORS
from jfcl.testing import count_compilations

CLIENTS = regression(TRUTH, CLUSTER)


OPTIONS = {"eps_1": 0.05, "eps_2": 0.2, "max_clusters": 6}


@cache
def trained(**options):
    algorithm = jfcl.cfl(TASK, TRAINING, **OPTIONS | options)
    return rollout(algorithm, CLIENTS, key=jax.random.key(0), num_rounds=80)[0]


def with_tree(**changes):
    return trained()._replace(tree=trained().tree._replace(**changes))


@pytest.mark.parametrize(("of_run", "of_newcomers"), [(None, "rotation"), ("rotation", None), ("sign", "permutation")])
def test_updates_hidden_otherwise_are_refused(of_run, of_newcomers, tmp_path):
    state = with_tree(privacy=jnp.int32([None, *OPERATORS].index(of_run)))
    ask = {"key": jax.random.key(1), "privacy": of_newcomers}
    parameter_tree.save_tree(tmp_path / "tree.npz", state)
    for tree in (state, parameter_tree.load_tree(tmp_path, TASK)):
        with pytest.raises(ValueError, match=f"privacy must be {of_run!r}, as in the run.*got {of_newcomers!r}"):
            jfcl.assign_newcomer(TASK, TRAINING, tree, CLIENTS, **ask)


def test_newcomers_with_other_inputs_are_refused():
    late = jfcl.data.from_arrays([(np.zeros((5, 7), np.float32), np.zeros(5, np.float32))])
    task = TASK._replace(input_shape=(3,))
    with pytest.raises(ValueError, match=r"newcomers: inputs have shape \(7,\)"):
        jfcl.assign_newcomer(task, TRAINING, trained(), late, key=jax.random.key(1))


def test_nodes():
    found = parameter_tree.nodes(trained())
    leaves = [n for n in found if not n.children]
    assert len(found) == 5 and len(leaves) == 3
    assert found[0].parent == -1 and found[0].clients.tolist() == list(range(8)) and found[0].round == 0
    for i, node in enumerate(found):
        for child in node.children:
            assert found[child].parent == i and found[child].round > node.round
        if node.children:
            below = np.concatenate([found[c].clients for c in node.children])
            assert sorted(below.tolist()) == node.clients.tolist()
            assert -1 <= node.cross_similarity < 1
    assert sorted(n.clients.tolist() for n in leaves) == sorted(np.flatnonzero(k == CLUSTER).tolist() for k in range(3))


def algorithm_4(clients, i):
    """To the letter, on the nodes' own models and their clients' own updates."""
    found, models = parameter_tree.nodes(trained()), np.asarray(parameter_tree.models(trained())["w"], np.float64)
    v = 0
    while found[v].children:
        new = local_update(clients, i, models[v].copy())

        def most_similar(child, v=v, new=new):
            updates = [local_update(CLIENTS, j, models[v].copy()) for j in descendants(found, child)]
            return max(new @ u / np.linalg.norm(new) / np.linalg.norm(u) for u in updates)

        first, second = found[v].children
        v = first if most_similar(first) > most_similar(second) else second
    return found[v].slot


def descendants(found, v):
    if not found[v].children:
        return found[v].clients.tolist()
    return [i for child in found[v].children for i in descendants(found, child)]


def test_newcomers_are_led_by_algorithm_4():
    late = regression(TRUTH, np.arange(30) % 3, seed=7, noise=0.8, examples=5)
    found = jfcl.assign_newcomer(TASK, TRAINING, trained(), late, key=jax.random.key(1))
    assert found.cluster.tolist() == [algorithm_4(late, i) for i in range(30)]
    assert len(set(found.cluster.tolist())) == 3
    served = jfcl.cfl(TASK, TRAINING, **OPTIONS).adopt(trained(), late)
    assert served.to.tolist() == found.cluster.tolist()
    for without in ({"tree_dim": 0}, {"max_clusters": 1}):
        assert jfcl.cfl(TASK, TRAINING, **OPTIONS | without).adopt is None
    alone = jax.tree.map(lambda x: x[4:5], late)
    one = jfcl.assign_newcomer(TASK, TRAINING, trained(), alone, key=jax.random.key(1))
    assert one.cluster.tolist() == found.cluster[4:5].tolist()


def test_a_newcomer_without_a_finite_update_moves_nowhere():
    late = regression(TRUTH, np.arange(8) % 3, seed=7, noise=0.1)
    late.examples["x"][0] *= 1e25
    found = jfcl.assign_newcomer(TASK, TRAINING, trained(), late, key=jax.random.key(1))
    assert found.cluster.tolist()[0] == 0 and np.isnan(found.similarity).tolist() == [True] + 7 * [False]


@pytest.mark.slow_cases("options1")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"privacy": "rotation"},
        pytest.param({"privacy": "permutation"}, marks=pytest.mark.slow),
        pytest.param({"tree_dim": 2}, marks=pytest.mark.slow),
    ],
)
def test_clients_of_the_run_find_their_own_leaf(options):
    state = trained(**options)
    known = {name: value for name, value in options.items() if name == "privacy"}
    found = jfcl.assign_newcomer(TASK, TRAINING, state, CLIENTS, key=jax.random.key(1), **known)
    np.testing.assert_array_equal(found.cluster, state.cluster)
    np.testing.assert_allclose(found.similarity, 1, atol=1e-5)  # their own updates are what they are compared with


@pytest.mark.slow
def test_hidden_updates_say_nothing_to_those_without_the_secret():
    state = trained(privacy="rotation")
    wrong = jfcl.assign_newcomer(
        TASK, TRAINING, state, CLIENTS, key=jax.random.key(1), privacy="rotation", privacy_seed=5
    )
    assert not np.allclose(wrong.similarity, 1, atol=1e-3)


def test_a_tree_of_one_node():
    state = jax.jit(jfcl.cfl(TASK, TRAINING, **OPTIONS).init)(jax.random.key(0), CLIENTS)
    found = jfcl.assign_newcomer(TASK, TRAINING, state, CLIENTS, key=jax.random.key(1))
    assert (np.asarray(found.cluster) == 0).all() and np.isnan(found.similarity).all()
    assert len(parameter_tree.nodes(state)) == 1


def test_models_on_the_path():
    found, models = parameter_tree.nodes(trained()), np.asarray(parameter_tree.models(trained())["w"])
    result = parameter_tree.evaluate_paths(TASK, trained(), CLIENTS)
    assert result.node.shape == (8, 3) and (result.node[:, 0] == 0).all() and result.accuracy is None
    for i in range(8):
        way = parameter_tree.path(trained(), int(trained().cluster[i]))
        assert result.node[i].tolist() == way + way[-1:] * (3 - len(way))
        assert all(found[b].parent == a for a, b in itertools.pairwise(way))
        x, y = (CLIENTS.examples[k][i][: CLIENTS.size[i]].astype(np.float64) for k in "xy")
        losses = [np.mean((x @ models[v] - y) ** 2) for v in result.node[i]]
        np.testing.assert_allclose(result.loss[i], losses, rtol=1e-4)
        np.testing.assert_array_equal(models[way[-1]], trained().params["w"][trained().cluster[i]])
    assert result.loss[:, -1].mean() < result.loss[:, 0].mean() / 10  # the leaf's model suits them


@pytest.mark.slow
def test_leavers_train_no_more_and_are_forgotten():
    who = np.arange(8) == 3
    state = parameter_tree.leave(trained(), who)
    algorithm = jfcl.cfl(TASK, TRAINING, **OPTIONS)
    after, metrics = jfcl.rollout(algorithm, CLIENTS, key=jax.random.key(9), num_rounds=2, state=state)
    assert metrics["participants"].tolist() == [7, 7]
    assert all(3 not in node.clients for node in parameter_tree.nodes(after))
    assert not np.asarray(after.tree.updates)[:, 3].any()
    gone = jax.tree.map(lambda x: x.copy(), CLIENTS)
    gone.examples["y"][3] += 50  # whatever it holds now
    other, _ = jfcl.rollout(algorithm, gone, key=jax.random.key(9), num_rounds=2, state=state)
    np.testing.assert_array_equal(after.params["w"], other.params["w"])


@pytest.mark.slow
def test_a_recursive_run_ends_without_a_cluster_that_all_clients_have_left():
    algorithm = jfcl.cfl(TASK, TRAINING, **OPTIONS, recursive=True)
    go_on = {"algorithm": algorithm, "clients": CLIENTS, "key": jax.random.key(0)}
    state, _ = jfcl.rollout(num_rounds=5, **go_on)
    last = int(state.cluster[-1])
    assert not state.final[last]
    state = parameter_tree.leave(state, state.cluster == last)
    _, metrics = jfcl.rollout(num_rounds=40, state=state, **go_on)
    ended, participants = np.asarray(metrics["ended"]), np.asarray(metrics["participants"])
    assert not ended[0]
    assert ended[-1]
    np.testing.assert_array_equal(participants[1:] == 0, ended[:-1])


def test_saved_and_loaded(tmp_path):
    parameter_tree.save_tree(tmp_path / "tree.npz", trained())
    state = parameter_tree.load_tree(tmp_path, TASK)
    jax.tree.map(np.testing.assert_array_equal, state, trained()._replace(client=(), sides=()))
    late = regression(TRUTH, np.arange(8) % 3, seed=8)
    one, two = (
        jfcl.assign_newcomer(TASK, TRAINING, s, late, key=jax.random.key(1)).cluster for s in (state, trained())
    )
    np.testing.assert_array_equal(one, two)


def test_the_picture():
    for truth in (CLUSTER, None):
        figure = plots.tree(parameter_tree.nodes(trained()), truth)
        said = [t.get_text() for t in figure.axes[0].texts]
        assert len(said) == 5 and said[0].startswith("8, α = ")


def test_a_tree_stays_until_the_next_one_is_whole(tmp_path, monkeypatch):
    file = tmp_path / "tree"  # the name is kept as it is given
    parameter_tree.save_tree(file, trained())

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr("jfcl.core.files.os.fsync", full)
        parameter_tree.save_tree(file, trained())
    np.testing.assert_array_equal(parameter_tree.load_tree(file).cluster, trained().cluster)
    assert [p.name for p in tmp_path.iterdir()] == ["tree"]


OTHER = jfcl.models.task(lambda key: {"w": jnp.zeros(4)}, lambda p, x: x @ p["w"], kind="regression")
NAMED = jfcl.models.task(lambda key: {"v": jnp.zeros(3)}, lambda p, x: x @ p["v"], kind="regression")


def test_bad_input_is_named(tmp_path):
    parameter_tree.save_tree(tmp_path / "tree.npz", trained())
    for other in (OTHER, NAMED):
        with pytest.raises(ValueError, match="is of another model than this task's"):
            parameter_tree.load_tree(tmp_path, other)
    with pytest.raises(ValueError, match="file must be a parameter tree"):
        parameter_tree.load_tree(tmp_path / "no.npz", TASK)
    whole = (tmp_path / "tree.npz").read_bytes()
    np.save(tmp_path / "array.npy", np.zeros(3))
    array = (tmp_path / "array.npy").read_bytes()
    for damaged in (b"nothing", b"", whole[: len(whole) // 2], array):
        (tmp_path / "bad.npz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"bad\.npz is damaged"):
            parameter_tree.load_tree(tmp_path / "bad.npz", TASK)
    np.savez(tmp_path / "other.npz", w=np.zeros(3))
    with pytest.raises(ValueError, match="this one lacks cluster"):
        parameter_tree.load_tree(tmp_path / "other.npz", TASK)
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"state must be of the task's model \{\"\['w'\]\": \(4,\)\}"):
        jfcl.assign_newcomer(OTHER, TRAINING, trained(), CLIENTS, key=key)
    for other in (OTHER, NAMED):
        with pytest.raises(ValueError, match="state must be of the task's model"):
            parameter_tree.evaluate_paths(other, trained(), CLIENTS)
    with pytest.raises(ValueError, match="tree_dim must be above 0 in the run"):
        jfcl.assign_newcomer(TASK, TRAINING, with_tree(updates=trained().tree.updates[:, :, :0]), CLIENTS, key=key)
    fedavg = jfcl.fedavg(TASK, TRAINING).init(key, CLIENTS)
    with pytest.raises(ValueError, match="state must be a CFLState"):
        parameter_tree.nodes(fedavg)
    with pytest.raises(ValueError, match="of one seed"):
        parameter_tree.nodes(jax.tree.map(lambda x: x[None], trained()))
    with pytest.raises(ValueError, match=r"who must be bool of shape \(8,\)"):
        parameter_tree.leave(trained(), np.zeros(3, bool))
    with pytest.raises(ValueError, match="cluster must be one of the clusters there are"):
        parameter_tree.path(trained(), 5)
    few = Clients(jax.tree.map(lambda x: x[:2], CLIENTS.examples), CLIENTS.size[:2])
    with pytest.raises(ValueError, match="clients must be the 8 clients of the run, got '2 clients'"):
        parameter_tree.evaluate_paths(TASK, trained(), few)


def test_the_next_newcomers_compile_nothing():
    for seed in (8, 9):
        late = regression(TRUTH, np.arange(8) % 3, seed=seed)
        with count_compilations() as compiled:
            jfcl.assign_newcomer(TASK, TRAINING, trained(), late, key=jax.random.key(seed))
    assert compiled.count == 0


def test_a_tree_of_16_bits_is_saved_and_loaded(tmp_path):
    def half(tree):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

    state = trained()._replace(
        params=half(trained().params),
        tree=trained().tree._replace(model=half(trained().tree.model)),
        client=(),
        sides=(),
    )
    parameter_tree.save_tree(tmp_path / "tree.npz", state)
    loaded = parameter_tree.load_tree(tmp_path, TASK._replace(init=lambda key: half(TASK.init(key))))
    jax.tree.map(np.testing.assert_array_equal, loaded, state)
