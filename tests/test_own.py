"""A user's own method, model and data set on the command line, as MODULE:NAME."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jfcl
from jfcl import cli
from jfcl.cli import commands
from jfcl.cli.parser import parse
from jfcl.experiments import Config, load_run, read_run, run
from jfcl.experiments.lookup import find_method, find_model
from jfcl.experiments.options import all_options, takes
from jfcl.experiments.setups import make_aggregator, setup

METHOD = "mine_method:server_momentum"
# The names of the modules begin with mine: no other test has them.
MODELS = """
import flax.linen as nn
import jax, jfcl
import numpy as np
from flax import nnx


class Net(nn.Module):
    num_outputs: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_outputs)(x.reshape(len(x), -1))


class Small(nnx.Module):
    def __init__(self, num_outputs, *, rngs):
        self.last = nnx.Linear(64, num_outputs, rngs=rngs)

    def __call__(self, x):
        return self.last(x.reshape(len(x), -1))


class Fixed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(x.reshape(len(x), -1))


def pair(num_outputs):
    init = lambda key: {"w": 0.01 * jax.random.normal(key, (64, num_outputs))}
    return jfcl.models.task(init, lambda params, x: x.reshape(len(x), -1) @ params["w"], kind="classification")


def some_digits():
    digits = jfcl.data.load("digits")
    return digits._replace(name="some", train={name: rows[:400] for name, rows in digits.train.items()})


def line():
    x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
    return jfcl.data.Dataset("line", {"x": x, "y": 2 * x[:, 0]}, None, None, None, "targets of a regression")


def maps():
    x = np.zeros((40, 2, 2, 1), np.float32)
    return jfcl.data.Dataset("maps", {"x": x, "y": x[..., 0].astype(np.int32)}, None, None, None, "labels of pixels")


def sentences():
    rng = np.random.default_rng(0)
    x = np.array([" ".join(rng.choice(list("abcdef"), 8)) for _ in range(60)], object)
    return jfcl.data.Dataset("sentences", {"x": x, "y": np.arange(60, dtype=np.int32) % 2}, None, 2, None, "words")


def words(num_outputs):
    return jfcl.models.LSTMLanguageModel(num_outputs, features=3, hidden=4)


def slope(num_outputs):
    return jfcl.models.regression(jfcl.models.Linear(1), (1,))


def listed():
    return line()._replace(train={"x": [[1.0]], "y": [1.0]})


def nothing():
    return 0


VALUE = 3
NET = Net(10)
"""
FACTORIES = '''
import jfcl


def plain(a, b):
    """No factory."""


def no_axis(task, training):
    """No mapping."""


def no_text(task, training, *, heat: float = 1.0, client_axis=None):
    """An option without help."""


def positional(task, training, heat=1.0, *, client_axis=None):
    """An option in the wrong place."""


def no_default(task, training, *, fn, client_axis=None):
    """What nothing gives."""


def unread(task, training, *, heat: "Missing" = 1.0, client_axis=None):
    """An annotation of nothing."""


def nothing(task, training, client_axis=None):
    """A forgotten return, and a mapping that is not keyword-only, which is accepted."""


def clash(task, training, *, lr: float = 0.1, client_axis=None):
    """An option with the name of another.

    Args:
      lr: learning rate.
    """


def reserved(task, training, *, out: str = "x", client_axis=None):
    """An option with the name of a flag that is no option of a run.

    Args:
      out: a word.
    """


def fails(task, training, *, client_axis=None):
    """An error of its own."""
    raise RuntimeError("as written")


def needs(task, training, *, quantile: str, num_clusters: int, client_axis=None):
    """FedAvg. The type of an option is its own.

    Args:
      quantile: a word, and a number in other methods.
    """
    return jfcl.fedavg(task, training, client_axis=client_axis)


def with_restarts(task, training, *, num_clusters: int, restarts: int = 5, client_axis=None):
    """FedAvg.

    Args:
      restarts: beginnings, of which it has none.
    """
    return jfcl.fedavg(task, training, client_axis=client_axis)


def without_flags(task, training, *, optimizer=None, schedule=None, client_axis=None):
    """FedAvg, with arguments that have no types, and so no flags, but names of options of a run."""
    assert optimizer is None and schedule is None
    return jfcl.fedavg(task, training, client_axis=client_axis)
'''

HOSTILE = """
import jax
import jax.numpy as jnp
import numpy as np


def negated(key, updates, malicious, usable):
    return jax.tree.map(jnp.negative, updates)


def of_cluster(key, updates, malicious, usable, cluster, ids):
    return jax.tree.map(lambda x: x * (1 + cluster.max() + ids.max()).astype(x.dtype), updates)


def reverse(rng, x, y, num_classes):
    return x.astype(np.float64), (num_classes - 1 - y).astype(np.int64)  # as NumPy often makes them


def no_labels(rng, x, y, num_classes):
    return x


def shorter(rng, x, y, num_classes):
    return x[:-1], y[:-1]


def beyond(rng, x, y, num_classes):
    return x, y + 10


def too_few(key, updates):
    return updates


def swapped(key, updates, usable, malicious):
    return updates


def unnamed(generator, x, y, num_classes):
    return x, y


class Unsigned(dict):
    pass


def one_row(key, updates, malicious, usable):
    return jax.tree.map(lambda x: x[:1], updates)


def counted_mean(updates, *, mask, num_malicious):
    assert num_malicious == 2
    row = lambda x: mask.reshape(-1, *[1] * (x.ndim - 1))
    return jax.tree.map(lambda x: jnp.where(row(x), x, 0).sum(0) / jnp.maximum(mask.sum(), 1).astype(x.dtype), updates)


def halved(updates, *, mask):
    return jax.tree.map(lambda x: x / 2, updates), mask


def no_mask(updates):
    return jax.tree.map(lambda x: x.mean(0), updates)


def needs_more(updates, *, mask, temperature):
    return no_mask(updates)


def with_defaults(updates, *, mask, bucket_size=7, radius=5.0, **others):
    assert (bucket_size, radius, others) in ((7, 5.0, {}), (3, 2.0, {}))
    return counted_mean(updates, mask=mask, num_malicious=2)


def whole(updates, *, mask):
    return updates
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with the modules of a user."""
    skeleton = Path(__file__).with_name("skeleton_method.py").read_text()
    texts = {
        "method": skeleton,
        "models": MODELS,
        "factories": FACTORIES,
        "hostile": HOSTILE,
        "syntax": "x = (1",
        "exit": "exit(3)",
    }
    texts |= {"name": "import jax\n\ny = undefined\n", "import": "import not_there\n"}
    for name, text in texts.items():
        (tmp_path / f"mine_{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(cli, "_compilation_cache", lambda: None)
    monkeypatch.setenv("COLUMNS", "300")
    forget()
    yield tmp_path
    forget()


def forget():
    """Removes the modules, as in another process."""
    for name in [name for name in sys.modules if name.startswith("mine_")]:
        del sys.modules[name]


@pytest.mark.slow
def test_own_parts_run_and_are_found_again_in_a_later_process(folder, capsys):
    data = ["--dataset", "mine_models:some_digits", "--clients", "4", "--clusters", "2", "--quiet", "--out", "run"]
    assert cli.main(["run", METHOD, "--beta", "0.25", *data, "--rounds", "1", "--model", "mine_models:Net"]) == 0
    saved = json.loads((folder / "run" / "config.json").read_text())
    names = {"method": METHOD, "model": "mine_models:Net", "dataset": "mine_models:some_digits", "beta": 0.25}
    assert {name: saved[name] for name in names} == names
    forget()
    again = ["run", "--config", "run/config.json", "--out", "run", "--resume", "--quiet", "--rounds", "2"]
    assert cli.main([*again, "--beta", "0.5"]) == 2
    assert "beta: it has 0.25, asked for 0.5" in capsys.readouterr().err
    forget()
    assert cli.main([*again, "--beta", "0.25"]) == 0 and read_run("run")[0]["method"] == METHOD
    forget()
    found = load_run("run")
    assert found.config.beta == 0.25 and found.params["Dense_0"]["kernel"].shape == (1, 64, 10)
    forget()
    capsys.readouterr()
    # Without the module, runs are compared and reported all the same, and do not resume.
    (folder / "mine_method.py").unlink()
    assert cli.main(["compare", "run"]) == 0 and cli.main(["report", "run", "--out", "page.html"]) == 0
    assert METHOD in (folder / "page.html").read_text()
    assert cli.main(again) == 2 and "there is no module 'mine_method'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_population_of_own_data_is_resumed_and_repeated(folder, capsys):
    """Its store names the data set as the command does, not as it names itself."""
    command = ["run", "fedavg", "--dataset", "mine_models:some_digits", "--population", "12", "--cohort", "4"]
    command += ["--quiet", "--heterogeneity", "none", "--clusters", "1", "--examples-per-client", "5"]
    assert cli.main([*command, "--rounds", "2", "--out", "pop"]) == 0
    assert cli.main([*command, "--rounds", "3", "--out", "pop", "--resume"]) == 0, capsys.readouterr().err
    assert cli.main(["run", "--config", "pop/config.json", "--out", "again", "--quiet"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_a_population_of_own_texts_is_resumed(folder, capsys):
    command = ["run", "fedavg", "--dataset", "mine_models:sentences", "--model", "mine_models:words", "--length", "6"]
    command += ["--vocab-size", "12", "--population", "8", "--cohort", "4", "--examples-per-client", "4", "--quiet"]
    command += ["--heterogeneity", "none", "--clusters", "1", "--out", "texts"]
    assert cli.main([*command, "--rounds", "1"]) == 0
    assert cli.main([*command, "--rounds", "2", "--resume"]) == 0, capsys.readouterr().err
    assert "perplexity" in json.loads(Path("texts/summary.json").read_text())["mean"]


@pytest.mark.slow
def test_a_run_on_an_own_store_says_what_is_known_of_it(folder, capsys):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, (6, 8)).astype(np.int32)
    x = rng.normal(size=(6, 8, 3)).astype(np.float32) + 4.0 * np.where(np.arange(6) % 2, y.T, 1 - y.T).T[:, :, None]
    people = [{"x": x[i], "y": y[i]} for i in range(6)]
    for part in ("train", "test"):
        jfcl.data.ClientStore.create(Path("mine") / part, people, cluster=np.arange(6) % 2, num_classes=2)
    run = ["run", "ifca", "--store", "mine", "--model", "linear", "--rounds", "2", "--cohort", "6", "--clusters", "2"]
    assert cli.main([*run, "--out", "own", "--quiet"]) == 0, capsys.readouterr().err
    summary = json.loads(Path("own/summary.json").read_text())
    assert (summary["num_clusters"], summary["dataset"], summary["heterogeneity"]) == (2, None, None)
    assert cli.main(["compare", "own"]) == 0 and cli.main(["report", "own"]) == 0


def test_an_own_store_without_inputs_is_refused(tmp_path):
    for part in ("train", "test"):
        people = [{"image": np.zeros((2, 3), np.float32), "y": np.zeros(2, np.int32)}] * 3
        jfcl.data.ClientStore.create(tmp_path / part, people, num_classes=2)
    with pytest.raises(ValueError, match=r"has no inputs 'x', but \['image', 'y'\]"):
        run(Config("fedavg", store=str(tmp_path), cohort=3, model="linear"))


FEW = {"clients": 8, "clusters": 2, "rounds": 2, "model": "linear", "malicious": 0.25, "examples_per_client": 5}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "known"),
    [
        ({"attack": "mine_hostile:negated"}, {"attack": "sign_flip"}),
        ({"attack": "mine_hostile:reverse"}, {"attack": "label_reverse"}),
        ({"aggregator": "mine_hostile:counted_mean"}, {"aggregator": "mean"}),
        ({"aggregator": "nnm+mine_hostile:counted_mean"}, {"aggregator": "nnm+mean"}),
    ],
    ids=["on updates", "on data", "aggregator", "after a pre-aggregator"],
)
def test_own_attacks_and_aggregators_are_as_those_of_the_library(own, known):
    models = [
        run(Config("fedavg", **FEW | {"attack": "ipm", "devices": 1} | options))[1].state.params["Dense_0"]["kernel"]
        for options in (own, known)
    ]
    np.testing.assert_allclose(*models, atol=1e-6)
    assert np.abs(models[0]).max() > 0.01


@pytest.mark.slow
def test_own_attacks_and_aggregators_on_the_command_line(folder, capsys):
    command = ["run", "fedavg", "--clients", "8", "--rounds", "1", "--model", "linear", "--malicious", "0.25"]
    command += ["--quiet"]
    own = {"attack": "mine_hostile:of_cluster", "aggregator": "mine_hostile:halved+mean"}
    flags = ["--attack", own["attack"], "--aggregator", own["aggregator"], "--devices", "1"]
    assert cli.main([*command, *flags, "--out", "own"]) == 0, capsys.readouterr().err
    saved = json.loads((folder / "own" / "config.json").read_text())
    assert {name: saved[name] for name in own} == own
    forget()
    (folder / "mine_hostile.py").unlink()
    assert cli.main(["compare", "own"]) == 0 and cli.main(["report", "own", "--out", "page.html"]) == 0
    capsys.readouterr()
    assert cli.main([*command, *flags]) == 2 and "there is no module 'mine_hostile'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_own_attack_and_an_own_aggregator_in_a_sweep():
    command = ["sweep", "fedavg", "--clients", "8", "--rounds", "1", "--model", "linear", "--malicious", "0.25"]
    command += ["--attack", "mine_hostile:of_cluster", "--aggregator", "mine_hostile:halved+mean", "--devices", "1"]
    assert cli.main([*command, "--quiet", "--seeds", "1", "--grid", "lr=0.1,0.2"]) == 0


@pytest.mark.parametrize("given", [{}, {"bucket_size": 3, "radius": 2.0}])
def test_defaults_of_an_own_aggregator_hold_unless_an_option_is_given(given):
    config = Config("fedavg", **FEW, attack="ipm", aggregator="mine_hostile:with_defaults", **given)
    made = make_aggregator(config)({"w": np.ones((8, 2), np.float32)}, mask=np.ones(8, bool))  # checks what it gets
    assert made["w"].tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_an_own_attack_on_the_data_of_a_population(folder, capsys):
    few = FEW | {"population": 12, "cohort": 4, "malicious": 0.5, "devices": 1}
    del few["clients"]
    models = [
        run(Config("fedavg", **few, attack=attack))[1].state.params["Dense_0"]["kernel"]
        for attack in ("mine_hostile:reverse", "label_reverse")
    ]
    np.testing.assert_array_equal(*models)
    command = ["run", "fedavg", "--population", "12", "--cohort", "4", "--malicious", "0.5", "--out", "pop", "--quiet"]
    assert cli.main([*command, "--attack", "mine_hostile:beyond"]) == 2
    assert "attack must be one with labels in 0..9" in capsys.readouterr().err and not (folder / "pop").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape"), [("mine_models:slope", (1, 1, 1)), ("linear", (1, 1, 1)), ("mlp", (1, 1, 200))]
)
def test_a_regression_is_shown_by_its_loss(model, shape, folder, capsys):
    command = ["--dataset", "mine_models:line", "--model", model, "--heterogeneity", "none", "--quiet"]
    command += [
        "--clients",
        "2",
        "--clusters",
        "1",
        "--rounds",
        "2",
        "--local-steps",
        "1",
        "--devices",
        "1",
        "--lr",
        "0.01",
    ]
    assert cli.main(["run", "fedavg", *command, "--out", "run"]) == 0
    summary, _ = read_run("run")
    loss = f"{summary['mean']['loss']:.3f}"
    assert loss in capsys.readouterr().out
    assert [file.name for file in Path("run/plots").glob("*")] == ["loss.png"]
    assert cli.main(["compare", "run", "--out", "both"]) == 0
    assert loss in capsys.readouterr().out
    assert {file.name for file in Path("both").glob("*")} == {"loss.png", "methods.png", "results.csv"}
    assert load_run("run").params["Dense_0"]["kernel"].shape == shape


def test_the_help_of_an_own_method_has_its_options(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run", METHOD, "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0 and printed.startswith(f"usage: jfcl run {METHOD} [options] Trains one model: v")
    assert "--beta X share of the velocity that is left after a round; 0 is FedAvg [0.9]" in printed
    flags = printed.replace(",", " ").split()
    assert {"--clients", "--lr"} <= set(flags) and not {"--num-models", "--eps-1"} & set(flags)


@pytest.mark.slow
def test_an_own_method_in_a_sweep(folder, capsys):
    tiny = ["--clients", "4", "--clusters", "2", "--rounds", "1", "--seeds", "1", "--model", "linear", "--quiet"]
    assert cli.main(["sweep", METHOD, "--grid", "beta=0.1,0.5", *tiny, "--out", "sweep"]) == 0
    best = (folder / "sweep" / "best.toml").read_text()
    assert f'method = "{METHOD}"' in best and "beta = 0." in best
    capsys.readouterr()
    assert cli.main(["sweep", METHOD, "--grid", "bta=0.1", *tiny]) == 2
    assert "grid: unknown option 'bta': did you mean 'beta'?" in capsys.readouterr().err


@pytest.mark.slow
def test_an_own_method_in_a_bench(folder, capsys):
    measured = ["--models", "linear", "--clients", "2", "--mappings", "vmap", "--examples", "2", "--quiet"]
    assert cli.main(["bench", "--methods", "mine_factories:needs", *measured]) == 2
    assert "method must be one that has a default for quantile, got 'mine_factories:needs'" in capsys.readouterr().err
    assert cli.main(["bench", "--methods", METHOD, *measured, "--out", "b"]) == 0
    assert json.loads((folder / "b" / "bench.json").read_text())["rows"][0]["seconds"] > 0


def test_a_method_without_restarts_or_a_warm_start_is_helped_by_rounds_alone():
    assert commands._remedies(Config(METHOD)) == "more --rounds can help"


def test_options_of_an_own_method_in_python():
    config = Config(METHOD, beta=0.5)
    assert (config.beta, Config(METHOD).beta, config.given) == (0.5, 0.9, {"beta": 0.5})
    with pytest.raises(TypeError, match="did you mean 'beta'"):
        Config(METHOD, betta=0.5)
    with pytest.raises(TypeError, match="no option 'beta'"):
        Config("fedavg", beta=0.5)
    assert "beta" not in all_options() and takes(METHOD, "beta") and not takes(METHOD, "cohort")
    assert Config("mine_factories:needs", quantile="many").quantile == "many"
    assert all_options("mine_factories:needs")["quantile"].kind is str and all_options()["quantile"].kind is float
    with pytest.raises(ValueError, match="quantile must be given: method mine_factories:needs has no default for it"):
        Config("mine_factories:needs")
    assert find_method("mine_factories:needs").summary == "FedAvg"
    assert parse(["run", "mine_factories:needs", "--quantile", "many"]).quantile == "many"


def test_an_option_that_has_the_name_of_one_of_the_library_keeps_its_default():
    """IFCA has no restarts with one model; an own method has as many as it says."""
    assert Config("mine_factories:with_restarts", clusters=1).restarts == 5 and Config("ifca", clusters=1).restarts == 1


def test_an_argument_without_a_flag_keeps_its_default():
    config = Config("mine_factories:without_flags", clients=2, clusters=1, model="linear", optimizer="adam")
    assert setup(config).algorithm is not None


@pytest.mark.parametrize("method", [None, 5, ["ifca"]])
def test_a_method_is_a_name(method):
    with pytest.raises(ValueError, match="method must be of type str, got "):
        Config(method)


@pytest.mark.parametrize("name", ["Net", "Small", "pair"])
def test_models_of_a_class_or_function(name):
    task = setup(Config("local", clients=2, clusters=1, model=f"mine_models:{name}")).task
    x = np.zeros((3, 8, 8, 1), np.float32)
    assert jax.eval_shape(lambda key: task.apply(task.init(key), x), jax.random.key(0)).shape == (3, 10)


LINE = ["fedavg", "--dataset", "mine_models:line", "--heterogeneity", "none", "--clusters", "1", "--clients", "1"]
LINE += ["--model", "linear", "--devices", "1"]
ATTACKED = ["fedavg", "--clients", "8", "--malicious", "0.25", "--examples-per-client", "5", "--model", "linear"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["mine_metod:f"], "method 'mine_metod:f': there is no module 'mine_metod' in this folder, nor among the"
         " installed packages: did you mean 'mine_method'?"),
        (["mine_method.py:f"], "no module 'mine_method.py' in this folder, nor among the installed packages: did you"),
        (["mine_method:server_mom"], "mine_method.py) has no 'server_mom': did you mean 'server_momentum'?"),
        (["mine_syntax:f"], "module 'mine_syntax' cannot be imported: SyntaxError: '(' was never closed (mine_"),
        (["mine_name:f"], "NameError: name 'undefined' is not defined ("),
        (["mine_name:f"], "mine_name.py, line 3)"),
        (["mine_import:f"], "module 'mine_import' cannot be imported: ModuleNotFoundError: No module named 'not_"),
        (["mine_exit:f"], "module 'mine_exit' cannot be imported: SystemExit: 3"),
        (["mine_models:VALUE"], "method 'mine_models:VALUE' must be a function (task, training, *, client_axis, ...)"
         " that returns an Algorithm, but is int"),
        (["mine_factories:plain"], "that returns an Algorithm, but takes (a, b)"),
        (["mine_factories:no_axis"], "that returns an Algorithm, but takes (task, training)"),
        (["mine_factories:no_text"], "argument heat of method 'mine_factories:no_text' must have an entry under Args"),
        (["mine_factories:positional"], "but takes (task, training, heat, client_axis); write a * before heat: o"),
        (["mine_factories:no_default"], "argument fn of method 'mine_factories:no_default' must have a default, or an"),
        (["mine_factories:unread"], "annotations of method 'mine_factories:unread' cannot be read: name 'Missing'"),
        (["mine_factories:clash"], "argument lr of method 'mine_factories:clash' must have another name: --lr is of"),
        (["mine_factories:reserved"], "'mine_factories:reserved' must have another name: jfcl run has --out"),
        (["mine_factories:nothing"], "the result of method 'mine_factories:nothing' must be an Algorithm, got None"),
        (["mine_factories:needs"], "quantile must be given: method mine_factories:needs has no default for it"),
        (["mine/method:f"], "unknown method 'mine/method:f'. Accepted: fedavg, "),
        (["ifac"], "knn_per, or MODULE:FACTORY for one of your own"),
        ([METHOD, "--beta", "1.0"], "beta must be in [0, 1), got 1.0"),
        ([METHOD, "--bta", "1.0"], "unknown option --bta: did you mean --beta?"),
        ([METHOD, "--num-models", "2"], f"method {METHOD} has no option num_models (only oracle, "),
        (["fedavg", "--model", "mpl"], "unknown model 'mpl': did you mean 'mlp'? Accepted: linear, "),
        (["fedavg", "--model", "mpl"], "gpt, or MODULE:NAME for one of your own"),
        (["fedavg", "--model", "mine_models:Nt"], "mine_models.py) has no 'Nt': did you mean 'Net'?"),
        (["fedavg", "--model", "mine_models:Fixed"], "model must be the name of a class or function of the number of"),
        (["fedavg", "--model", "mine_models:NET"], "a flax module with num_outputs; it is an instance of Net, got"),
        (["fedavg", "--model", "mine_models:nothing"], "got 'mine_models:nothing': too many positional arguments"),
        (["fedavg", "--model", "mine_models:VALUE"], "got 'mine_models:VALUE'"),
        (["fedavg", "--dataset", "mine_models:nothing"], "returns a jfcl.data.Dataset; it returns int, got"),
        (["fedavg", "--dataset", "mine_models:pair"], "got 'mine_models:pair': missing a required argument"),
        (["fedavg", "--dataset", "mine_models:listed"], "data set 'line' (train) must be a dict with arrays 'x' and"
         " 'y', got {'x': 'list', 'y': 'list'}"),
        (["fedavg", "--dataset", "mine_models:maps", "--heterogeneity", "none", "--model", "linear", "--clients", "4"],
         "model must be MODULE:NAME, a function that returns a jfcl.Task: 'mine_models:maps' has neither labels nor n"),
        ([*LINE, "--patience", "2"], "monitor must be loss or train_loss with a model that has no accuracy, got 'acc"),
        ([*LINE, "--metrics", "macro_f1"], "must be logits [M, C] of a classification, for this metric, got (8, 1)"),
        ([*ATTACKED, "--attack", "mine_hostile:too_few"], "attack must be the name of a function with the arguments"
         " (key, updates, malicious, usable), or (rng, x, y, num_classes) for an attack on data, got 'mine_hostile:t"),
        ([*ATTACKED, "--attack", "mine_models:VALUE"], "attack must be the name of a function with the arguments"),
        ([*ATTACKED, "--attack", "mine_hostile:swapped"], "for an attack on data, got 'mine_hostile:swapped(key, u"),
        ([*ATTACKED, "--attack", "mine_hostile:unnamed"], "got 'mine_hostile:unnamed(generator, x, y, num_classes)'"),
        ([*ATTACKED, "--attack", "mine_hostile:Unsigned"], "got 'mine_hostile:Unsigned': no signature found"),
        ([*ATTACKED, "--attack", "mine_hostile:negate"], "has no 'negate': did you mean 'negated'?"),
        ([*ATTACKED, "--attack", "sign_flp"], "unknown attack 'sign_flp': did you mean 'sign_flip'? Accepted: gau"),
        ([*ATTACKED, "--attack", "sign_flp"], "backdoor, or MODULE:NAME for one of your own"),
        ([*ATTACKED, "--attack", "mine_hostile:one_row"], "attack must be a function that returns updates {"),
        ([*ATTACKED, "--attack", "mine_hostile:no_labels"], "attack must be a function that returns (x, y), float32"
         " [5, 8, 8, 1] and int32 [5], got 'one that returned ndarray'"),
        ([*ATTACKED, "--attack", "mine_hostile:shorter"], "got 'one that returned float32 [4, 8, 8, 1] and int32 [4"),
        ([*ATTACKED, "--attack", "mine_hostile:beyond"], "attack must be one with labels in 0..9, got 'one that re"),
        ([*ATTACKED, "--attack", "ipm", "--aggregator", "mine_hostile:no_mask"], "aggregator must be the name of a"
         " function (updates, *, mask, ...); further arguments may be num_malicious, radius, bucket_size, key, trus"),
        ([*ATTACKED, "--attack", "ipm", "--aggregator", "mine_hostile:needs_more"], "missing a required "),
        ([*ATTACKED, "--attack", "ipm", "--aggregator", "mine_hostile:whole"], "aggregator must be a function that"
         " returns one update, {"),
        ([*ATTACKED, "--attack", "ipm", "--aggregator", "mine_hostile:whole+krum"], "aggregator 'whole+krum' must be of"
         " functions that return (updates, mask) before the last one, which returns one update, got 'whole, which r"),
        ([*ATTACKED, "--attack", "ipm", "--aggregator", "krum+mine_hostile:whole"], "joined by +, got 'krum+whole'; M"),
        ([*ATTACKED, "--attack", "ipm", "--aggregator", "mine_hostile:Unsigned"], "Unsigned': no signature found"),
        ([*ATTACKED, "--attack", "ipm", "--aggregator", "krmu"], "unknown aggregator 'krmu': did you mean 'krum'?"),
        ([*ATTACKED, "--attack", "ipm", "--aggregator", "krmu"], "nnm; MODULE:NAME is one of your own"),
        ([*ATTACKED, "--attack", "ipm", "--aggregator", "mine_hostile:no+krum"], "has no 'no'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_does_not_fit_is_refused(command, words, capsys):
    assert cli.main(["run", *command]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.startswith("jfcl: error:") and printed.out == ""


def test_an_error_in_an_own_module_is_shown_without_the_frames_of_the_library(capsys, monkeypatch):
    command = ["run", "mine_factories:fails", "--clients", "4", "--clusters", "2"]
    assert cli.main(command) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "RuntimeError: as written" and [line for line in lines if "File" in line] == [lines[1]]
    assert "mine_factories.py" in lines[1] and lines[1].endswith("in fails")
    monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "off")
    with pytest.raises(RuntimeError):
        cli.main(command)


def test_the_module_that_is_imported_is_that_of_the_current_folder(folder):
    assert find_model("mine_models:Net")(4).num_outputs == 4
    assert sys.path[0] == str(folder) and sys.path.count(str(folder)) == 1
    find_method(METHOD)
    assert sys.path.count(str(folder)) == 1


@pytest.mark.slow
def test_own_metrics_are_recorded_beside_those_of_the_library(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_metrics.py").write_text(
        "import jax.numpy as jnp\n\n\ndef share(outputs, batch, real):\n    return jnp.where(real, 1.0, 0.0).mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    run = ["run", "fedavg", "--clients", "4", "--clusters", "2", "--rounds", "1", "--local-steps", "1", "--quiet"]
    assert cli.main([*run, "--model", "linear", "--metrics", "macro_f1,my_metrics:share", "--out", "out"]) == 0
    record = json.loads(Path("out/metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < record["macro_f1"] < 1 and 0.9 < record["share"] <= 1
    printed = capsys.readouterr().out
    assert f"macro_f1: {record['macro_f1']:.3f}\nshare: {record['share']:.3f}\n" in printed
    assert Path("out/clients.csv").read_text().splitlines()[0].endswith("macro_f1,share")
    assert json.loads(Path("out/summary.json").read_text())["mean"]["macro_f1"] == record["macro_f1"]
    (tmp_path / "my_metrics.py").unlink()
    sys.modules.pop("my_metrics")
    assert load_run("out").setup.task is not None  # which needs no metric
    capsys.readouterr()
    for wrong, words in {
        "macro_f2": "did you mean 'macro_f1'",
        "json:dumps": "a function (outputs, batch, real)",
    }.items():
        assert cli.main([*run, "--metrics", wrong]) == 2 and words in " ".join(capsys.readouterr().err.split())
