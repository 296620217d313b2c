"""Models of finished runs in use: predictors, newcomers, exported files."""

import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jfcl
from jfcl.core.files import npz_bytes
from jfcl.core.parameters import named_parameters
from jfcl.experiments import Config, export_model, load_params, load_run, run, setups
from jfcl.experiments.serving import LoadedRun, structured

BYTES = np.full((2, 8, 8, 1), 255, np.uint8)
NAN = np.zeros((2, 8, 8, 1))
NAN[1, 2, 3] = np.nan


@pytest.fixture(scope="module")
def folders(finished_runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("served")
    small = {"clients": 6, "clusters": 2, "rounds": 2, "local_steps": 1, "mapping": "vmap"}
    run(Config("fedper", **small, model="mlp"), out=out / "fedper")
    return {"ifca": load_run(finished_runs / "ifca"), "fedper": load_run(out / "fedper")}


@pytest.mark.parametrize("name", ["ifca", "fedper"])
def test_predictors_are_the_evaluated_models(folders, name):
    """The predictions of each client's own predictor give the accuracy that the run reports."""
    found = folders[name]
    test = found.setup.federation.test
    if name == "ifca":
        reported = jfcl.evaluate(found.setup.task, found.params, test, found.cluster)["accuracy"]
    for i in range(len(found.cluster)):
        size = int(test.size[i])
        x, y = (np.asarray(test.examples[k][i]) for k in "xy")  # of one shape: compiled once
        accuracy = (np.asarray(found.predictor(i)(x)).argmax(axis=1) == y)[:size].mean()
        if name == "fedper":  # an independent forward pass with the files' arrays
            body, head = found.params["Dense_0"], found.personal["Dense_1"]
            h = np.maximum(x.reshape(len(x), -1) @ body["kernel"][0] + body["bias"][0], 0)
            reported = {i: ((h @ head["kernel"][i] + head["bias"][i]).argmax(axis=1) == y)[:size].mean()}
        assert accuracy == pytest.approx(float(reported[i]))


@pytest.mark.slow_cases("cfl", "pacfl", "knn_per")
@pytest.mark.parametrize("method", ["ifca", "fedem", "fedper", "cfl", "pacfl", "knn_per"])
def test_newcomers_are_served_as_in_the_run(method, tmp_path):
    """What `adopt` serves has the loss of the run's last record, also where the method has no rule of its own."""
    options = {"clients": 6, "clusters": 2, "rounds": 2, "local_steps": 1, "model": "mlp", "mapping": "vmap"}
    records = run(Config(method, **options, newcomer_examples=5, seeds=2), out=tmp_path)[1].records
    found = load_run(tmp_path)
    newcomers = found.setup.federation.newcomers
    served = found.adopt(newcomers)
    personal = () if served.personal is None else served.personal
    results = jfcl.evaluate(found.setup.task, served.models, newcomers, served.to, personal=personal)
    recorded = next(r for r in records if r["round"] == records[-1]["round"] and r["seed"] == 0)
    assert recorded["newcomer_loss"] == pytest.approx(float(np.mean(results["loss"])), rel=1e-6)
    assert recorded["newcomer_accuracy"] == pytest.approx(float(np.mean(results["accuracy"])), rel=1e-6)


@pytest.mark.slow
def test_newcomers_of_drifting_data_are_served(tmp_path):
    run(Config("feddrift", clients=10, rounds=10, drift="Y", local_steps=1, model="linear"), out=tmp_path)
    found = load_run(tmp_path)
    drift, train = found.setup.federation.drift, found.setup.federation.train
    served = found.adopt(drift.clients(train, drift.num_steps - 1))
    losses = [jfcl.evaluate(found.setup.task, served.models, drift.tests(9), to)["loss"] for to in (served.to, None)]
    assert served.to.shape == (10,) and np.isfinite(losses).all()


def test_newcomers_need_a_checkpoint_and_the_examples_of_the_run(folders, finished_runs, tmp_path):
    shutil.copytree(finished_runs / "ifca", tmp_path / "ifca")
    found = load_run(tmp_path / "ifca")
    clients = found.setup.federation.test
    with pytest.raises(ValueError, match=r"newcomers.examples\['x'\] must be floats, as in training"):
        found.adopt(clients._replace(examples=clients.examples | {"x": clients.examples["x"].astype(np.uint8)}))
    shutil.rmtree(tmp_path / "ifca" / "checkpoints")
    with pytest.raises(ValueError, match="has no checkpoint, which holds the state of the method"):
        found.adopt(clients)


def test_files_of_a_model_hold_it(folders, tmp_path):
    found = folders["fedper"]
    task, model = found.setup.task, found.model(2)
    x = np.asarray(found.setup.federation.test.examples["x"][0, :3])
    wanted = np.asarray(jax.jit(task.apply)(model, x))
    export_model(task, model, tmp_path / "m.npz")
    with np.load(tmp_path / "m.npz") as arrays:
        assert set(arrays.files) == set(jfcl.models.parameter_paths(task))
        np.testing.assert_array_equal(arrays["Dense_1/kernel"], found.personal["Dense_1"]["kernel"][2])
    export_model(task, model, tmp_path / "m.jax")
    again = export.deserialize(bytearray((tmp_path / "m.jax").read_bytes()))
    np.testing.assert_allclose(again.call(x), wanted, rtol=1e-5, atol=1e-6)
    assert {"cpu", "cuda", "tpu"} <= set(again.platforms)


def test_models_in_bfloat16(tmp_path):
    """NumPy's files do not have the type: a run with such parameters could not be served or continued."""
    model = {"Dense_0": {"kernel": jnp.asarray([[0.5, 3.25]], jnp.bfloat16), "bias": jnp.ones((1, 2))}}
    (tmp_path / "params.npz").write_bytes(npz_bytes(named_parameters(model)))
    found = load_params(tmp_path)
    assert {found["Dense_0"][name].dtype.name for name in ("kernel", "bias")} == {"float32"}
    again = structured(found, model)
    assert [x.dtype for x in jax.tree.leaves(again)] == [x.dtype for x in jax.tree.leaves(model)]
    assert again["Dense_0"]["kernel"].tolist() == [[0.5, 3.25]]


def test_safetensors(folders, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy", reason="the package safetensors is not installed")
    found = folders["ifca"]
    export_model(found.setup.task, found.model(0), tmp_path / "m.safetensors")
    read = safetensors.load_file(tmp_path / "m.safetensors")
    kernel = found.params["Dense_0"]["kernel"][found.cluster[0]]
    np.testing.assert_array_equal(read["Dense_0/kernel"], kernel)


def test_a_newcomer_chooses_by_all_that_the_loss_reads():
    """Weights that leave one example choose the model of that example."""
    line = jfcl.models.task(lambda key: np.ones(1, np.float32), lambda w, x: x @ w, kind="regression")
    weighted = line._replace(cost=lambda out, batch: batch["w"] * line.cost(out, batch), reads=("x", "y", "w"))
    params = np.float32([[1], [5]])
    examples = {"x": np.ones((3, 1), np.float32), "y": np.float32([1, 1, 5]), "w": np.float32([0, 0, 1])}
    federation = SimpleNamespace(train=jfcl.stack_clients([examples]))
    of_weighted, of_line = (
        LoadedRun(None, SimpleNamespace(task=task, federation=federation), params, np.zeros(1, int))
        for task in (weighted, line)
    )
    assert of_weighted.choose(examples) == 1
    assert of_line.choose(examples) == 0
    with pytest.raises(ValueError, match="examples must be a dict with x and y and w"):
        of_weighted.choose({"x": examples["x"], "y": examples["y"]})


def test_newcomers_choose(folders):
    found = folders["ifca"]
    train = found.setup.federation.train
    size = int(train.size[:2].min())  # of one shape: compiled once
    for i in range(2):
        examples = {k: np.asarray(train.examples[k][i][:size]) for k in "xy"}
        losses = []
        for k in range(2):
            kernel, bias = (np.asarray(found.params["Dense_0"][name][k], np.float64) for name in ("kernel", "bias"))
            logits = examples["x"].reshape(size, -1) @ kernel + bias
            shifted = logits - logits.max(axis=1, keepdims=True)
            losses.append((np.log(np.exp(shifted).sum(1)) - shifted[np.arange(size), examples["y"]]).mean())
        assert found.choose(examples) == int(np.argmin(losses))
        other = 1 - int(np.argmin(losses))  # where models are added, one without clients may not exist
        assert found._replace(adds_models=True, cluster=np.full(6, other)).choose(examples) == other
        means = [
            np.concatenate([train.examples["x"][j][: train.size[j]] for j in np.flatnonzero(found.cluster == k)]).mean(
                0
            )
            for k in np.unique(found.cluster)
        ]
        nearest = np.argmin([np.square(m - examples["x"].mean(0)).sum() for m in means])
        chosen = found.choose({"x": examples["x"]}, by="inputs")
        assert chosen == np.unique(found.cluster)[nearest]
        attacked = found._replace(setup=found.setup._replace(malicious=found.cluster == chosen))
        assert attacked.choose({"x": examples["x"]}, by="inputs") == 1 - chosen


@pytest.mark.slow
def test_newcomers_choose_among_the_models_that_exist(tmp_path):
    """FedDrift has one model here, and 31 places for others, which hold what the first one began with."""
    options = {"clients": 4, "clusters": 2, "rounds": 2, "model": "linear", "drift": "sudden", "drift_steps": 2}
    run(Config("feddrift", **options, lr=1.0), out=tmp_path)
    found = load_run(tmp_path)
    train = found.setup.federation.train
    for shift in range(10):  # labels that no model knows
        y = (train.examples["y"][0][: train.size[0]] + shift) % 10
        assert found.choose({"x": train.examples["x"][0][: train.size[0]], "y": y}) in found.cluster


def test_inputs_of_drifting_data_are_those_of_the_last_step(tmp_path):
    """Clients were in other clusters before: their older examples say nothing of the clusters that the run reports."""
    options = {"clients": 10, "clusters": 4, "heterogeneity": "rotation", "drift": "F", "rounds": 10}
    run(Config("oracle", **options, model="linear", local_steps=1, mapping="vmap"), out=tmp_path)
    found = load_run(tmp_path)
    test = found.setup.federation.test  # of the last step
    inputs = [np.asarray(test.examples["x"][i, : test.size[i]]) for i in range(10)]
    assert [found.choose({"x": x}, by="inputs") for x in inputs] == found.cluster.tolist()


@pytest.mark.slow
def test_models_of_a_method_with_its_own_structure(tmp_path):
    """kNN-Per's models hold a model and remembered examples: its predictors give the accuracies of the run."""
    run(Config("knn_per", clients=4, clusters=2, rounds=2), out=tmp_path)
    found = load_run(tmp_path)
    test = found.setup.federation.test
    reported = jfcl.evaluate(found.setup.task, found.params, test, found.cluster)["accuracy"]
    for i in range(4):
        x, y = (np.asarray(test.examples[k][i][: test.size[i]]) for k in "xy")
        assert (np.asarray(found.predictor(i)(x)).argmax(axis=1) == y).mean() == pytest.approx(float(reported[i]))
    assert found.choose({k: test.examples[k][1][: test.size[1]] for k in "xy"}) in range(4)
    with pytest.raises(ValueError, match=r"x must be of shape \(B, \*\(8, 8, 1\)\), got"):
        found.predictor(0)(np.zeros((2, 1, 8, 8)))  # the channels first


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda f: f["ifca"].predictor(8), r"client must be an integer, at least 0 and at most 7, got 8"),
        (lambda f: f["ifca"].predictor(-1), r"client must be an integer, at least 0, got -1"),
        (
            lambda f: f["ifca"].choose({"x": np.zeros((2, 8, 8, 1)), "y": np.zeros(3, int)}),
            r"examples\['y'\] must be one for each of the 2 inputs, got \(3,\)",
        ),
        (
            lambda f: f["ifca"].choose({"x": np.zeros((2, 8, 8, 1)), "y": np.full(2, 10)}),
            r"examples: labels must lie in 0\.\.9, got 10",
        ),
        (lambda f: f["ifca"].predictor(0)(np.zeros((2, 1, 8, 8))), r"x must be of shape \(B, \*\(8, 8, 1\)\), got"),
        (lambda f: f["ifca"].predictor(0)(np.zeros((8, 8, 1))), r"x must be of shape \(B, "),
        (lambda f: f["ifca"].predictor(0)(np.zeros((0, 8, 8, 1))), r"x must be of shape \(B, "),
        (lambda f: f["ifca"].predictor(0)(BYTES), r"x must be floats, as in training, such as images / 255"),
        (lambda f: f["ifca"].choose({"x": BYTES}, by="inputs"), r"examples\['x'\] must be floats, as in training"),
        (lambda f: f["ifca"].choose({"x": np.zeros((2, 3))}, by="inputs"), r"examples\['x'\] must be of shape \(B, "),
        (lambda f: f["ifca"].choose({"x": np.zeros((2, 8, 8, 1))}), "examples must be a dict with x and y"),
        (lambda f: f["ifca"].choose(np.zeros((2, 8, 8, 1))), "examples must be a dict with x and y, .* got 'ndarray'"),
        (lambda f: f["ifca"].choose({"x": NAN, "y": np.zeros(2, int)}), r"examples\['x'\]: NaN or infinity in 1 ex"),
        (lambda f: f["ifca"].choose({"x": NAN}, by="inputs"), r"examples\['x'\]: NaN or infinity in 1 example"),
        (lambda f: f["ifca"].choose({"x": np.zeros((2, 8, 8, 1))}, by="los"), "los.*loss"),
        (lambda f: f["fedper"].choose({"x": np.zeros((2, 8, 8, 1))}), "have personal parameters"),
        (lambda f: export_model(f["ifca"].setup.task, f["ifca"].model(0), "m.h5"), "unknown suffix"),
        (
            lambda f: export_model(f["ifca"].setup.task._replace(input_shape=None), f["ifca"].model(0), "m.jax"),
            "Give input_shape",
        ),
    ],
)
def test_refuses(folders, use, message):
    with pytest.raises(ValueError, match=message):
        use(folders)


def test_scalars_keep_their_shape_in_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy", reason="the package safetensors is not installed")
    export_model(None, {"scale": np.float32(2.0), "w": np.ones((2, 3), np.float32).T}, tmp_path / "m.safetensors")
    read = safetensors.load_file(tmp_path / "m.safetensors")
    assert read["scale"].shape == () and read["w"].shape == (3, 2)


def test_a_warm_start_has_the_structure_of_the_model(tmp_path):
    task = jfcl.Task(lambda key: [jnp.ones(3), {"b": jnp.zeros(())}], lambda p, x: x, lambda outputs, batch: outputs)
    file = npz_bytes({"0": np.full((1, 3), 2, np.float32), "1/b": np.ones(1, np.float32)})
    (tmp_path / "params.npz").write_bytes(file)
    start = setups._warm_start(Config("fedavg", init_from=str(tmp_path)), task)
    assert jax.tree.map(lambda x: np.asarray(x).tolist(), start) == [[2, 2, 2], {"b": 1}]


def test_outputs_of_several_arrays_are_exported(tmp_path):
    task = jfcl.Task(None, lambda w, x: {"sum": x @ w, "x": x}, None)
    export_model(task, jnp.ones(3), tmp_path / "m.jax", input_shape=(3,))
    again, x = export.deserialize(bytearray((tmp_path / "m.jax").read_bytes())), np.ones((2, 3), np.float32)
    assert jax.tree.map(np.shape, again.call(x)) == {"sum": (2,), "x": (2, 3)}


def test_the_models_of_single_clients_of_a_last_cohort_are_no_result(tmp_path):
    """Nothing in a population's folder would say whose they are, and they are fewer than the rows of clients.csv."""
    options = {"population": 12, "cohort": 4, "clusters": 2, "rounds": 1, "local_steps": 1, "examples_per_client": 8}
    run(Config("local", **options, model="linear", mapping="vmap"), out=tmp_path)
    with pytest.raises(ValueError, match=r"params\.npz does not exist"):
        load_params(tmp_path)


@pytest.mark.slow
def test_a_language_model_is_exported_for_whole_numbers(tmp_path):
    task = jfcl.models.language_model(jfcl.models.LSTMLanguageModel(12, features=3, hidden=4), 5, 12)
    model = task.init(jax.random.key(0))
    export_model(task, model, tmp_path / "m.jax", input_shape=(5,))
    again = export.deserialize(bytearray((tmp_path / "m.jax").read_bytes()))
    x = np.arange(10, dtype=np.int32).reshape(2, 5)
    np.testing.assert_allclose(again.call(x), task.apply(model, x), rtol=1e-5, atol=1e-6)
