"""Table 1 and figure 6 of Federated-Clustering (Werner et al. 2023), on MNIST: as the authors' code, and corrected.

The code is github.com/liehe/PRFL. A row is made of cells, one per seed, each of which is kept in a file of its own.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.papers import report
from benchmarks.papers.networks import with_torch_init
from benchmarks.papers.recipes import Bench, Outcome, Row, recipe
from jfcl import data, mapping, methods, models
from jfcl.core import Adversary, Algorithm, Clients, PyTree, Task, check_choice, client_keys, num_bytes, stack_clients
from jfcl.data import HETEROGENEITY
from jfcl.methods.federated_clustering import gradient, model_keys
from jfcl.methods.personal import PersonalState, initial_state
from jfcl.methods.round import round_metrics
from jfcl.robust import attacks
from jfcl.simulation.loop import rollout
from jfcl.training.local import LocalTraining, draw_batch, local_training

LABELS = ("task", "column", "method")  # of a row
TASKS = {"rotation": "rotation", "private label": "private_label"}
CODE, CORRECTED = "as the authors' code", "corrected"
PAPER = {
    "rotation": (71.3, 46.6, 62.0, 54.6, 52.1, 75.4, 84.7),
    "private label": (75.2, 22.2, 61.7, 65.4, 63.2, 77.0, 85.1),
}
BATCH, BATCHES = 32, ("in order", "at random")
METHODS = ("local", "fedavg", "ditto", "ifca", "knn_per", "federated_clustering", "oracle")
# The code has its batches in order. Federated-Clustering's are all images, and kNN-Per remembers all of a client's.
AT_RANDOM = ("federated_clustering", "knn_per")
RERUN = {
    "rotation": {"local": 72.4, "fedavg": 52.9, "oracle": 87.6},
    "private label": {"local": 70.4, "fedavg": 22.8, "oracle": 85.2},
}


def likelihood_task(column: str) -> Task:
    """The MLP 784-200-10; as the authors' code, with minus the probability, not its logarithm, for a loss.

    That loss is flat where a model is sure and wrong, so that it matters where training begins: as in PyTorch, which
    the code is written in, weights and biases uniform in `± 1 / sqrt(inputs)`.
    """
    task = models.classification(models.MLP(10), (28, 28, 1), 10)
    if column == CORRECTED:
        return task

    def cost(outputs, batch):
        return -jnp.take_along_axis(jax.nn.softmax(outputs), batch["y"][:, None], axis=1)[:, 0]

    return with_torch_init(task)._replace(cost=cost, dense_start=None)  # the layers as the code computes them


def ditto_of_the_code(task: Task, training: LocalTraining, lr: float, lam: float = 1.0) -> Algorithm:
    """Ditto as the authors' code has it: the model `w` that personal models are pulled to stays the initial one.

    The code gives the mean gradient only to parameters that have a gradient already, and none was ever computed at
    `w`. The pull is not part of the momentum `m_i`, which the optimiser of `training` returns:
    `v_i ← v_i − η (m_i + λ (v_i − w))`.
    """

    def init(key: jax.Array, clients: Clients) -> PersonalState:
        state = initial_state(task, training, key, clients, None)
        return state._replace(common=jax.tree.map(lambda p: p[0], state.params))

    def step(key: jax.Array, state: PersonalState, clients: Clients):
        def client(key, v, momentum, examples, size):
            loss, g = gradient(task, v, *draw_batch(task, training, key, examples, size), model_keys(task, key))
            m, momentum = training.optimizer.update(g, momentum, v)
            return jax.tree.map(lambda v, m, w: v - lr * (m + lam * (v - w)), v, m, state.common), momentum, loss

        params, momenta, loss = mapping.auto()(client)(
            client_keys(key, clients), state.params, state.client, clients.examples, jnp.asarray(clients.size)
        )
        model = num_bytes(state.common)
        metrics = round_metrics(clients.size > 0, loss, jnp.isfinite(loss), 1, model, model)
        return state._replace(params=params, round=state.round + 1, client=momenta), metrics

    return Algorithm(init, step, task)


def one_step() -> LocalTraining:
    """A step of a batch with the momentum that a client keeps."""
    return local_training(optax.sgd(0.1, momentum=0.9), num_steps=1, batch_size=BATCH, keep="everything")


def clustering(column: str, setting: dict[str, Any], threshold_rounds: int) -> dict[str, Any]:
    """Returns the options of Federated-Clustering."""
    rule = "index_shrunk" if column == CODE else "linear"
    options = {"quantile": 0.2, "quantile_rule": rule, "threshold_rounds": threshold_rounds}
    return options | {"subgroup_size": setting["subgroup_size"]}


def table_1_method(name: str, column: str, cluster: np.ndarray, setting: dict[str, Any]) -> Algorithm:
    """The method of one row."""
    task, one, of_code = likelihood_task(column), one_step(), column == CODE
    if name == "ditto" and of_code:
        return ditto_of_the_code(task, one._replace(optimizer=optax.trace(0.9)), lr=0.1)
    if name == "local" and of_code:
        one = one._replace(optimizer=optax.sgd(0.1))  # without momentum
    if name == "federated_clustering" and of_code:
        one = one._replace(batch_size=None)
    if name == "knn_per":
        task = task._replace(represent=task.apply)  # distances are of the ten outputs
    gradients = {"average": "gradients", "identity_batch": BATCH} if of_code else {}
    make, options = {
        "local": (methods.local_only, {}),
        "fedavg": (methods.fedavg, {"weights": "equal"}),
        "ditto": (methods.ditto, {"weights": "equal"}),
        "ifca": (methods.ifca, {"num_clusters": 4, **gradients}),
        "knn_per": (methods.knn_per, {"num_neighbours": 10, "scale": 10.0}),
        "federated_clustering": (methods.federated_clustering, clustering(column, setting, 3)),
        "oracle": (methods.oracle, {"cluster": cluster, "weights": "equal"}),
    }[name]
    return make(task, one, **options)


@functools.lru_cache(maxsize=1)
def normalised_mnist(data_dir: str | None) -> data.Dataset:
    """MNIST as table 1 trains on it: pixels less their mean, divided by their standard deviation."""
    dataset = data.load("mnist", data_dir)
    train, test = ({**part, "x": (part["x"] - 0.1307) / 0.3081} for part in (dataset.train, dataset.test))
    return dataset._replace(train=train, test=test)


def deal_images(
    dataset, heterogeneity: str, cluster: np.ndarray, seed: int, redraw: bool, each: int | None = None, hostile: int = 0
) -> Iterator[Clients]:
    """The clients of every epoch: `each` has so many images, drawn again each time, or always the same.

    By default all images are dealt. Hostile clients follow, which need no data: they have those of the first.
    """
    change = HETEROGENEITY[heterogeneity][0]
    x, y = dataset.train["x"], dataset.train["y"].astype(np.int32)
    rng = np.random.default_rng(seed)
    each = each or len(y) // len(cluster)

    def client(rows, k):
        return dict(zip("xy", change(x[rows], y[rows], int(k), 4, 10), strict=True))

    clients = None
    while True:
        if clients is None or redraw:
            parts = rng.permutation(len(y))[: len(cluster) * each].reshape(len(cluster), each)
            dealt = [client(rows, k) for rows, k in zip(parts, cluster, strict=True)]
            clients = stack_clients(dealt + dealt[:hostile])
        yield clients


def tester(task: Task, dataset, heterogeneity: str, true: np.ndarray) -> Callable[[PyTree, Any], np.ndarray]:
    """Returns `(params, model of each client) -> [N]`: accuracies on all test images as the true clusters see them."""
    change = HETEROGENEITY[heterogeneity][0]
    sets = [change(dataset.test["x"], dataset.test["y"].astype(np.int32), k, 4, 10) for k in range(4)]
    count = math.gcd(len(sets[0][1]), 10)  # lots of one size, so that activations take less memory
    tests = {
        name: jnp.stack([s[part].reshape(count, -1, *s[part].shape[1:]) for s in sets])
        for part, name in enumerate("xy")
    }

    @jax.jit
    def of_all(params, model_of, tests):
        def client(model, kind):
            own = jax.tree.map(lambda p: p[model], params)
            right = lambda lot: task.scores(task.correct, own, lot).mean()  # noqa: E731
            return mapping.chunked(1)(right)(jax.tree.map(lambda t: t[kind], tests)).mean()

        return mapping.chunked(1)(client)(model_of, jnp.asarray(true))

    return lambda params, model_of: np.asarray(of_all(params, jnp.asarray(model_of), tests))


def batch_in_order(clients: Clients, turn: jax.Array) -> Clients:
    """The clients with the images of one batch, which follow those of the turn before; the last has what is left."""
    most = jax.tree.leaves(clients.examples)[0].shape[1]
    rows = jnp.minimum(turn * BATCH + jnp.arange(BATCH), most - 1)
    left = jnp.clip(jnp.asarray(clients.size) - turn * BATCH, 0, BATCH).astype(jnp.int32)
    return clients._replace(examples=jax.tree.map(lambda part: part[:, rows], clients.examples), size=left)


def trained(
    algorithm: Algorithm, deal: Iterator[Clients], seed: int, epochs: int, rounds: int, in_order: bool
) -> Iterator[Any]:
    """The states after each epoch of so many rounds, each with the clients that are dealt for it.

    `in_order`: in each round a client has the next batch of its images alone, as a PyTorch loader gives them.
    """
    key = jax.random.key(seed)

    @jax.jit
    def advance(key, state, clients):
        if not in_order:
            return rollout(algorithm, clients, key=key, num_rounds=rounds, state=state)[0]

        def one_batch(state, turn):
            return algorithm.step(jax.random.fold_in(key, turn + 1), state, batch_in_order(clients, turn))[0], None

        return jax.lax.scan(one_batch, state, jnp.arange(rounds))[0]

    state = None
    for epoch in range(epochs):
        clients = jax.device_put(next(deal))
        if state is None:
            state = jax.jit(algorithm.init)(jax.random.fold_in(key, 0), clients)
        state = jax.block_until_ready(advance(jax.random.fold_in(key, epoch + 1), state, clients))
        yield state


def accuracies(
    algorithm: Algorithm,
    dataset: data.Dataset,
    heterogeneity: str,
    clients: int,
    seed: int,
    *,
    epochs: int,
    rounds: int,
    eval_every: int,
    in_order: bool,
    redraw: bool,
    images: int | None = None,
    hostile: int = 0,
) -> Row:
    """Trains, and returns the mean accuracy of the clients in percent by epoch, and the seconds with compilation.

    It is measured after every so many epochs, and after the last. `rounds` are those of an epoch.
    """
    started, curve = time.perf_counter(), {"epoch": [], "accuracy %": []}
    true = (np.arange(clients) % 4).astype(np.int32)
    test = tester(algorithm.task, dataset, heterogeneity, true)
    deal = deal_images(dataset, heterogeneity, true, seed, redraw, images, hostile)
    for epoch, state in enumerate(trained(algorithm, deal, seed, epochs, rounds, in_order), 1):
        if epoch % eval_every == 0 or epoch == epochs:
            curve["epoch"].append(epoch)
            curve["accuracy %"].append(float(100 * test(state.params, state.cluster[:clients]).mean()))
    return curve | {"seconds": time.perf_counter() - started}


@recipe(
    "federated_clustering.table1",
    full={"clients": 300, "epochs": 30, "epochs_of_fc": 50, "subgroup_size": 20, "columns": [CODE, CORRECTED]}
    | {"batches": "in order", "seeds": 3},
    small={"epochs": 5, "epochs_of_fc": 8, "seeds": 1},
)
def table_1(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """FC, table 1: seven methods on MNIST, 300 clients, as the authors' code and corrected.

    As the code, but for kNN-Per, with batches at random, and IFCA, where clients compare models on the batch that they
    train on. With `batches="at random"`, all are drawn at random.
    """
    check_choice("batches", setting["batches"], BATCHES)
    normalised_mnist(bench.data_dir)  # before any process starts
    cells = [dict(zip(LABELS, of, strict=True)) for of in product(TASKS, setting["columns"], METHODS)]
    rows = []
    for cell, kept in zip(cells, report.kept_cells(bench, _cell, setting, cells), strict=True):
        task, column, method = cell.values()
        row = cell | report.accuracy_of(kept)
        paper = PAPER[task][METHODS.index(method)] if column == CODE else None
        row |= report.paper_columns(row["accuracy %"], paper)
        rows.append(row | {"rerun %": RERUN[task].get(method) if column == CODE else None})
    return Outcome(rows, None, "corrected: log-likelihood, fixed data, cluster means, as many steps for all")


def _cell(data_dir: str | None, setting: dict[str, Any], of: Row) -> Row:
    """Trains one method with one seed."""
    task, column, method, seed = of.values()
    clients, of_code = setting["clients"], column == CODE
    cluster = (np.arange(clients) % 4).astype(np.int32)
    algorithm = table_1_method(method, column, cluster, setting)
    # 7 batches of 32 make an epoch of 200 images; the code's Federated-Clustering has 50 steps with all of them.
    whole = of_code and method == "federated_clustering"
    epochs, rounds = (setting["epochs_of_fc"], 1) if whole else (setting["epochs"], 7)
    schedule = {"epochs": epochs, "rounds": rounds, "eval_every": epochs, "redraw": of_code}
    in_order = of_code and method not in AT_RANDOM and setting["batches"] == "in order"
    dataset, heterogeneity = normalised_mnist(data_dir), TASKS[task]
    return accuracies(algorithm, dataset, heterogeneity, clients, seed, in_order=in_order, **schedule) | of


ATTACKS = {"far": attacks.far, "opposite": attacks.opposite}
MOMENTA = ("heavy ball", "exponential")  # m <- 0.9 m + g, and m <- 0.9 m + 0.1 g
# Read off the figure.
PAPER_6 = {"fedavg": {"far": 10.0, "opposite": 24.0}, "federated_clustering": {"far": 55.0, "opposite": 55.0}}


@recipe(
    "federated_clustering.figure6",
    full={"clients": 200, "hostile": 50, "images": 300, "subgroup_size": 25, "epochs": 100, "eval_every": 5}
    | {"columns": [CODE, CORRECTED], "methods": list(PAPER_6), "batches": "in order", "seeds": 1}
    | {"steps": 10, "momentum": "heavy ball"},
    small={"clients": 40, "hostile": 10, "epochs": 10},
)
def figure_6(bench: Bench, setting: dict[str, Any]) -> Outcome:
    """FC, figure 6: hostile gradients, private labels on MNIST.

    A fifth of the clients hostile, with gradients far away or opposite to a good client's; accuracy by epoch. An
    epoch has at most so many `steps`: ten batches of 32 are all images. With `momentum="exponential"` the clients'
    momentum is that of the paper's Algorithm 4, but begins at 0 and not at the first gradient.
    """
    for name, choices in {"batches": BATCHES, "momentum": MOMENTA}.items():
        check_choice(name, setting[name], choices)
    normalised_mnist(bench.data_dir)
    parts = product(ATTACKS, setting["columns"], setting["methods"])
    cells = [{"attack": a, "column": c, "method": m} for a, c, m in parts]
    rows, (figure, [line]) = [], report.panels(10, 3.8, 1, 2, sharey=True)
    for cell, kept in zip(cells, report.kept_cells(bench, _attacked, setting, cells), strict=True):
        attack, column, method = cell.values()
        row = cell | report.accuracy_of(kept)
        paper = PAPER_6[method][attack] if column == CODE else None
        rows.append(row | report.paper_columns(row["accuracy %"], paper))
        report.plot_epochs(line[list(ATTACKS).index(attack)], kept, f"{method}, {column}")
    for axes, attack in zip(line, ATTACKS, strict=True):
        report.label_axes(axes, 8, title=f"gradients {attack}", xlabel="epoch", ylabel="test accuracy %")
    return Outcome(rows, figure, "good clients only; the paper's numbers are read off its figure")


def _attacked(data_dir: str | None, setting: dict[str, Any], of: Row) -> Row:
    """Trains one method with one seed among hostile clients; the accuracy is that of the good ones."""
    attack, column, method, seed = of.values()
    good, hostile, of_code = setting["clients"], setting["hostile"], column == CODE
    options = {"adversary": Adversary(ATTACKS[attack](), np.arange(good + hostile) >= good)}
    task, one = likelihood_task(column), one_step()
    if setting["momentum"] == "exponential":
        one = one._replace(optimizer=optax.chain(optax.ema(0.9, debias=False), optax.sgd(0.1)))
    if method == "fedavg":
        algorithm = methods.fedavg(task, one, weights="equal", **options)
    else:
        algorithm = methods.federated_clustering(task, one, **clustering(column, setting, 10), **options)
    schedule = {name: setting[name] for name in ("epochs", "eval_every", "images", "hostile")}
    schedule |= {"rounds": min(setting["steps"], -(-setting["images"] // BATCH)), "redraw": of_code}
    in_order, dataset = of_code and setting["batches"] == "in order", normalised_mnist(data_dir)
    return accuracies(algorithm, dataset, "private_label", good, seed, in_order=in_order, **schedule) | of
