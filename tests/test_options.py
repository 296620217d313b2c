"""Options are declared once: a new method's reach the command line, its help, files and checks from its factory."""

import copy
import dataclasses
import json
import pickle
from typing import Annotated

import pytest

import jfcl
from jfcl import cli
from jfcl.cli.commands import given_options
from jfcl.cli.parser import parse
from jfcl.core.options import CLASSES, Interval, Needs, OneOf, Range, Real
from jfcl.experiments import Config, setup
from jfcl.experiments.config import from_saved, to_saved
from jfcl.experiments.options import COMMON, all_options, method_options
from jfcl.methods import METHODS, Method

TINY = ["--clients", "4", "--clusters", "2", "--rounds", "1", "--model", "linear", "--quiet"]
received = []


def annealed(
    task,
    training,
    *,
    heat: Annotated[Real, Interval("(0, 1]")] = 0.5,
    start: Annotated[str, OneOf(("cold", "warm"))] = "cold",
    stages: Annotated[int | None, Range(2, 9)] = None,
    gently: bool = False,
    client_axis=None,
):
    """FedAvg, under another name.

    Args:
      task, training, client_axis: as in `jfcl.fedavg`.
      heat: share of the heat that is left after a round. It is not used.
      start: `"cold"`, or `"warm"` from a model that is trained already.
      stages: number of stages; default: none. Nor is it.
      gently: cool slowly.
    """
    received.append({"heat": heat, "start": start, "stages": stages, "gently": gently})
    return jfcl.fedavg(task, training, client_axis=client_axis)


@pytest.fixture(autouse=True)
def new_method(monkeypatch):
    monkeypatch.setitem(METHODS, "annealed", Method(annealed, "a method of the tests"))
    monkeypatch.setattr(cli, "_compilation_cache", lambda: None)
    monkeypatch.setenv("COLUMNS", "100")
    received.clear()


def help_of(capsys, *command: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_new_methods_options_have_flags(tmp_path, capsys):
    out = tmp_path / "run"
    flags = ["--heat", "0.25", "--start", "warm", "--stages", "3", "--gently"]
    assert cli.main(["run", "annealed", *TINY, *flags, "--out", str(out)]) == 0
    given = {"heat": 0.25, "start": "warm", "stages": 3, "gently": True}
    assert received == [given]
    saved = json.loads((out / "config.json").read_text())
    assert {name: saved[name] for name in given} == given
    received.clear()
    again = ["run", "--config", str(out / "config.json"), "--out", str(out), "--resume", "--quiet"]
    assert cli.main([*again, "--rounds", "2"]) == 0 and received == [given]
    capsys.readouterr()
    assert cli.main([*again, "--heat", "0.5"]) == 2
    assert "heat: it has 0.25, asked for 0.5" in capsys.readouterr().err.replace("\n", " ")


def test_a_new_methods_options_have_names_in_files(tmp_path, capsys):
    file = tmp_path / "new.toml"
    file.write_text('method = "annealed"\nheat = 1\nstart = "warm"\nclients = 4\nclusters = 2\nrounds = 1\n')
    setup(Config(**given_options(parse(["run", "--config", str(file), "--model", "linear", "--stages", "2"]))))
    assert received == [{"heat": 1.0, "start": "warm", "stages": 2, "gently": False}]
    capsys.readouterr()
    for text, words in [
        ('heat = "high"', "heat must be of type float, got 'high'"),
        ("stages = 2.5", "stages must be of type int, got 2.5"),
        ("gently = 1", "gently must be of type bool, got 1"),
        ("stage = 2", "x.toml, line 2: unknown option 'stage': did you mean 'stages'?".replace("x.toml", file.name)),
    ]:
        file.write_text(f'method = "annealed"\n{text}\n')
        assert cli.main(["run", "--config", str(file)]) == 2
        assert words in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["annealed", "--heat", "2"], "heat must be in (0, 1], got 2.0"),
        (["annealed", "--heat", "nan"], "heat must be finite"),
        (["annealed", "--heat", "hot"], "--heat: invalid float value: 'hot'"),
        (["annealed", "--start", "wram"], "unknown start 'wram': did you mean 'warm'?"),
        (["annealed", "--stages", "1"], "stages must be an integer, at least 2, got 1"),
        (["annealed", "--stages", "10"], "stages must be at most 9, got 10"),
        (["annealed", "--hat", "2"], "unknown option --hat: did you mean --heat?"),
        (["annealed", "--quantile", "0.2"], "method annealed has no option quantile (only federated_clustering, "),
        (["annealed", "--cohort", "2"], "method annealed has no option cohort (only fedavg, oracle, "),
        (["fedavg", "--heat", "0.5"], "method fedavg has no option heat (only annealed)"),
        (["fedavg", "--gently", "--stages", "3"], "no option gently (only annealed); stages (only annealed)"),
    ],
)
def test_what_a_new_method_does_not_take_is_refused(command, words, capsys):
    assert cli.main(["run", *command]) == 2
    printed = capsys.readouterr()
    assert words in printed.err.replace("\n", " ") and printed.out == "" and not received


def test_the_help_of_a_method_shows_its_options_and_the_common_ones(capsys):
    printed = " ".join(help_of(capsys, "run", "annealed").split())
    assert "--heat X share of the heat that is left after a round [0.5]" in printed
    assert "--start {cold,warm} cold, or warm from a model that is trained already [cold]" in printed
    assert "--stages N number of stages; default: none --gently cool slowly" in printed
    assert "It is not used" not in printed and "A method of the tests" in printed
    flags = printed.replace(",", " ").split()
    assert {"--clients", "--lr", "--attack", "--seeds", "--config"} <= set(flags)
    assert not {"--eps-1", "--quantile", "--num-models", "--server-lr", "--aggregator", "--track-gap"} & set(flags)
    assert cli.main(["run", "anealed", "--help"]) == 2 and "did you mean 'annealed'?" in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_help_of_run_is_one_screen(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    printed = help_of(capsys, "run")
    assert printed.count("\n") <= 42 and max(map(len, printed.splitlines())) <= int(columns)
    assert all(f"--{name.replace('_', '-')}" in printed.split() for name in COMMON)
    assert "--heat" not in printed and "annealed" in printed and "jfcl run METHOD --help" in printed
    for group in ("Data:", "Training:", "Attack:", "Run:"):
        assert f"\n{group}" in printed


def test_flat_names_are_arguments_and_attributes():
    config = Config("cfl", eps_1=0.3, clients=20)
    assert (config.eps_1, config.clients, config.min_size, config.max_clusters) == (0.3, 20, 1, None)
    assert config.restarts is None and (Config("ifca").restarts, Config("ifca").restart_rounds) == (5, 5)
    assert config == Config("cfl", eps_1=0.3, clients=20, min_size=None, eval_every=2)
    longer = dataclasses.replace(config, rounds=7, eps_2=0.5)
    assert (longer.rounds, longer.eps_1, longer.eps_2) == (7, 0.3, 0.5) and config.eps_2 is None
    assert len({config, dataclasses.replace(config)}) == 1
    with pytest.raises(TypeError, match="did you mean 'eps_1'"):
        Config("cfl", eps1=0.3)
    with pytest.raises(AttributeError, match="eps1"):
        _ = config.eps1
    with pytest.raises(ValueError, match=r"method ifca has no option eps_1 \(only cfl\)"):
        Config("ifca", eps_1=0.3)


DERIVED = [
    ("ifca", {"rounds": 200}, {"eval_every": 4, "num_models": 4, "restarts": 5, "local_steps": 10, "momentum": 0.0}),
    ("ifca", {"min_share": 0.1}, {"restarts": 1, "restart_rounds": 5}),
    ("ifca", {"clusters": 1}, {"restarts": 1, "num_models": 1}),
    ("myopic_clustering", {}, {"local_steps": 1, "keep": "everything"}),
    ("fedavg", {"local_epochs": 2}, {"local_steps": None}),
    ("fedavg", {"optimizer": "adam"}, {"momentum": None}),
    ("fedavg", {"schedule": "step"}, {"step_rounds": 33, "keep": "schedule"}),
    ("fedavg", {"lr_decay": 0.9}, {"keep": "schedule"}),
    ("fedavg", {"dp_clip": 1.0}, {"weights": "equal", "dp_sampling": "poisson"}),
    ("fedavg", {"aggregator": "bucketing+krum"}, {"weights": "equal", "bucket_size": 2}),
    ("fedavg", {"population": 150}, {"cohort": 100, "clients": 150, "examples_per_client": 20}),
    ("fedavg", {"population": 30, "dp_clip": 1.0}, {"cohort": 30, "dp_sampling": "fixed"}),
]


def test_a_configuration_does_not_change():
    config = Config("fedavg", lr=0.5)
    for options in (config.values, config.given):
        with pytest.raises(TypeError):
            options["lr"] = 1.0
    again = pickle.loads(pickle.dumps(copy.deepcopy(config)))
    assert again == config and again.given == config.given and again.values == config.values


@pytest.mark.parametrize(("method", "given", "derived"), DERIVED)
def test_what_is_not_given_follows_from_the_rest_once(method, given, derived):
    config = Config(method, **given)
    assert {name: getattr(config, name) for name in derived} == derived and config.given == given
    # What is saved is what runs, with or without the names of those given, and also where one was changed in the file.
    saved = json.loads(json.dumps(to_saved(config, "h")))
    assert {name: saved.get(name) for name in derived if name in saved} == {
        n: derived[n] for n in derived if n in saved
    }
    again = dataclasses.replace(config, precision=saved["precision"])
    assert Config(**from_saved(saved)) == again
    assert Config(**from_saved({name: value for name, value in saved.items() if name != "given"})) == again
    assert from_saved(saved | {"eval_every": 3})["eval_every"] == 3
    assert dataclasses.replace(config, clusters=2).num_models == (None if config.num_models is None else 2)


def test_every_option_is_declared_whole():
    kinds = {}
    for method in METHODS:
        for name, option in (method_options(method) | COMMON).items():
            assert option.text, f"{method}: {name} has no entry in the docstring"
            assert kinds.setdefault(name, option.kind) is option.kind, f"{name} is of two types"
            assert option.kind in CLASSES and (option.default is None or option.check(option.default) is None)
            others = [
                other for entry in option.metadata if isinstance(entry, Needs) for other in (entry.option, entry.other)
            ]
            assert {*others} <= {"", *method_options(method), *COMMON}, (method, name)


# ---- Names of Flower (run configurations, strategies, flwr-datasets), FedML (YAML files), PFLlib (flags of main.py),
# ---- FedJAX (functions and hyperparameters), with what is here, or nothing where the name is the same.

OTHERS_OPTIONS = {
    "Flower": "num-server-rounds --rounds, num_rounds --rounds, fraction_fit --cohort, fraction_train --cohort,"
    " fraction_evaluate --cohort, min_fit_clients --cohort, min_available_clients --cohort, local-epochs,"
    " learning-rate --lr, batch-size, num-supernodes --clients, num_partitions --clients, proximal_mu --prox,"
    " server_learning_rate --server-lr, num_sampled_clients --cohort, noise_multiplier --dp-noise,"
    " clipping_norm --dp-clip, num_malicious_clients --malicious, num_classes_per_partition --labels-per-client",
    "FedML": "random_seed --seed, data_cache_dir --data-dir, partition_method --partition, partition_alpha --alpha,"
    " federated_optimizer --server-optimizer, client_num_in_total --clients, client_num_per_round --cohort,"
    " comm_round --rounds, epochs --local-epochs, client_optimizer --optimizer, learning_rate --lr, weight_decay,"
    " frequency_of_the_test --eval-every, enable_wandb --track, using_gpu --devices, gpu_id --devices,"
    " server_lr, server_momentum --server-optimizer, byzantine_client_num --malicious, attack_type --attack,"
    " defense_type --aggregator, epsilon --dp-noise, delta --dp-delta, group_num --clusters",
    "PFLlib": "dataset, num_classes --labels-per-client, ncl --labels-per-client, model, lbs --batch-size, lr,"
    " local_learning_rate --lr, learning_rate_decay_gamma --lr-decay, gr --rounds, global_rounds --rounds,"
    " ls --local-epochs, algorithm METHOD, join_ratio --cohort, jr --cohort, nc --clients, num_clients --clients,"
    " times --seeds, eg --eval-every, eval_gap --eval-every, save_folder_name --out,"
    " batch_num_per_client --local-steps, client_drop_rate --dropout, mu --prox, plocal_epochs --personal-steps,"
    " device_id --devices, max_len --length",
    "FedJAX": "num_rounds --rounds, num_clients_per_round --cohort, client_learning_rate --lr,"
    " num_epochs --local-epochs, num_steps --local-steps, server_learning_rate --server-lr,"
    " num_clusters --clusters, eval_frequency --eval-every",
    "others": "participation --cohort, partition-alpha --alpha, num-classes --labels-per-client, wandb --track,"
    " noise-multiplier --dp-noise, num-byzantine --malicious, cuda --devices",
}
OTHERS_VALUES = {
    (
        "method",
    ): "fedprox --prox, FedProx --prox, fedadam adam, FedAdam adam, FedYogi adam, FedAdagrad adam, FedOpt adam,"
    " FedAvgM momentum, FedMedian coordinate_median, FedTrimmedAvg trimmed_mean, Krum krum, MultiKrum multi_krum,"
    " Bulyan bulyan, FedAvg 'fedavg', FedSGD --local-steps, LG-FedAvg 'lg_fedavg', FedPer 'fedper', FedRep 'fedrep',"
    " FedBN 'fedbn', Ditto 'ditto', Local 'local', HypCluster 'hypcluster', IFCA 'ifca', QFedAvg MODULE,"
    " SCAFFOLD MODULE, MOON MODULE, FedDyn MODULE, FedNova MODULE, PerFedAvg MODULE, pFedMe MODULE, APFL MODULE,"
    " FedALA MODULE, FedRoD MODULE, FedBABU MODULE, FedProto MODULE, FedFomo MODULE, FedAMP MODULE, GPFL MODULE,"
    " Mime MODULE, MimeLite MODULE, AgnosticFedAvg MODULE, DPFedAvgFixed --dp-noise",
    ("attack", "--malicious", "0.2"): "label_flip 'label_reverse', label_flipping 'label_zero', byzantine 'gaussian',"
    " random 'gaussian', model_replacement 'scaled'",
    ("aggregator",): "median 'coordinate_median', rfa 'geometric_median', norm_diff_clipping 'clip_norms+mean',"
    " coordinate_wise_median 'coordinate_median', cclip 'centered_clip'",
    (
        "partition",
    ): "hetero 'dirichlet', homo 'iid', lda 'dirichlet', dir 'dirichlet', pat 'pathological', natural 'writer',"
    " linear 'distribution', exponential 'distribution', inner_dirichlet 'distribution'",
    ("server-optimizer",): "yogi 'adam', adagrad 'adam', sgd 'average'",
}


def pairs(listed: str) -> list[tuple[str, str]]:
    return [tuple([*one.split(), ""][:2]) for one in listed.split(",")]


@pytest.mark.parametrize("library", OTHERS_OPTIONS)
def test_options_of_other_libraries_are_answered(library, capsys):
    known = {*all_options(), "method"}
    for name, ours in pairs(OTHERS_OPTIONS[library]):
        if name.replace("-", "_") in known:
            assert not ours  # it is the same here
            continue
        assert cli.main(["run", "ifca", f"--{name}", "1"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"unknown option --{name}" in said and ours and ours in said, (name, said)
        assert all(word[2:].strip("?,.;:()").replace("-", "_") in known | {"track", "out", "data_dir"} for word in
                   said.split() if word.startswith("--") and word.strip(":") != f"--{name}")  # fmt: skip


@pytest.mark.parametrize("what", OTHERS_VALUES)
def test_names_of_other_libraries_are_answered(what, capsys):
    for name, ours in pairs(OTHERS_VALUES[what]):
        command = ["run", name] if what == ("method",) else ["run", "fedavg", f"--{what[0]}", name, *what[1:]]
        assert cli.main(command) == 2
        said = " ".join(capsys.readouterr().err.split("Accepted:")[0].split())
        assert f"unknown {what[0].replace('-', '_')} '{name}'" in said and ours in said, (name, said)


def test_shares_counts_and_files_of_others_are_answered(tmp_path, capsys):
    (tmp_path / "x.yaml").write_text("lr: 0.1\n")
    (tmp_path / "x.toml").write_text("cohort = 0.1\n")
    for flags, said in [
        (["--clusters", "auto"], "the hidden ones of the data; num_models is the number of models"),
        (["--cohort", "0.1"], "argument --cohort: invalid int value: '0.1' (a number of clients, not a share)"),
        (["--num-models", "autoo"], "argument --num-models: invalid int or 'auto' value: 'autoo'"),
        (
            ["--config", str(tmp_path / "x.toml")],
            "cohort must be of type int (a number of clients, not a share), got 0.1",
        ),
        (["--config", str(tmp_path / "x.yaml")], "must be TOML, a line such as lr = 0.1 for each option"),
        (["--participation", "0.1"], "did you mean --cohort (a number of clients, not a share)?"),
        (["--num-byzantine", "2"], "did you mean --malicious (a share of the clients, not a number)?"),
    ]:
        assert cli.main(["run", "fedavg", *flags]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_a_json_file_of_ones_own(tmp_path):
    file, options = tmp_path / "own.json", {"method": "fedavg", "clients": 8, "clusters": 2, "rounds": 3}
    file.write_text(json.dumps(options))
    given = given_options(parse(["run", "--config", str(file)]))
    assert given == options and Config(**given).rounds == 3


def test_a_flag_overrides_what_a_file_has_in_its_place(tmp_path):
    file = tmp_path / "x.toml"
    for content, flags, wanted in [
        ("seeds = 5", ["--seed", "7"], {"seed": 7}),
        ("seed = 7", ["--seeds", "5"], {"seeds": 5}),
        ("local_steps = 5", ["--local-epochs", "2"], {"local_epochs": 2}),
        ("local_epochs = 5", ["--local-steps", "2"], {"local_steps": 2}),
        ("seeds = 5", ["--lr", "0.5"], {"seeds": 5, "lr": 0.5}),
    ]:
        file.write_text(content)
        given = given_options(parse(["run", "fedavg", "--config", str(file), *flags]))
        assert given == {"method": "fedavg"} | wanted and Config(**given)
