from functools import partial

import jax
import numpy as np
import pytest

import jfcl
from jfcl import core, experiments
from jfcl.core import (
    Clients,
    aligned_zeros,
    check,
    check_apart,
    check_choice,
    check_clients,
    check_count,
    check_labels,
    client_keys,
    concatenate_clients,
    mask,
    stack_clients,
    stacking,
    take_clients,
)


def small(size=(3, 2)):
    x = np.arange(2 * 3 * 2, dtype=np.float32).reshape(2, 3, 2)
    return Clients({"x": x, "y": np.array([[0, 1, 2], [1, 0, 9]], np.int32)}, np.array(size, np.int32))


def test_mask_marks_real_examples():
    assert mask(small()).tolist() == [[True, True, True], [True, True, False]]


def test_a_clients_key_depends_on_its_id_alone():
    clients = small()
    key = jax.random.key(3)
    swapped = jax.jit(take_clients)(clients, np.array([1, 0]))
    of = jax.jit(lambda c: jax.random.key_data(client_keys(key, c)))
    a, b = np.asarray(of(clients)), np.asarray(of(swapped))
    assert (a[::-1] == b).all()
    assert (a[0] != a[1]).any()


BIG, FINE, COARSE = 2**24, np.arange(20_000) / 20_000, np.arange(2000) / 2000


@pytest.mark.parametrize(
    ("columns", "column"),
    [
        (np.array([0, BIG, BIG + 1]), ""),
        (np.array([0, BIG, BIG + 1], np.int32), ""),
        (np.array([0, -BIG, -BIG - 1]), ""),
        (np.array([[1, 0], [2, BIG], [3, BIG + 1]]), r" \(column 1\)"),
        (1.7e9 + np.arange(20) / 10, ""),
        (10_000 + COARSE, ""),  # float32 is 1 / 1024 apart there
        (1000 + FINE, None),  # 1 / 16,384, of numbers between 1000 and 1001: rounding
        (np.array([0.5, 1e9, 1e9 + 1]), None),
        (np.array([0.3, 0.1 + 0.2]), None),
        (np.array([BIG, BIG]), None),
        (np.array([1.0, 2.0, 1e300]), None),  # refused elsewhere
        ((1.7e9 + np.arange(20)).astype(np.float32), None),
        (np.array([["a"], ["b"]]), None),
    ],
)
def test_numbers_that_float32_does_not_tell_apart_are_refused(columns, column):
    if column is None:
        check_apart("x", columns)
    else:
        with pytest.raises(ValueError, match=f"^x{column} must be of numbers that float32 tells apart"):
            check_apart("x", columns)


def test_stack_clients_pads_with_zeros_and_keeps_order():
    clients = stack_clients(
        [{"x": np.ones((2, 3)), "y": np.ones(2)}, {"x": np.full((1, 3), 5.0), "y": np.ones(1)}], pad_to=4
    )
    assert clients.examples["x"].shape == (2, 4, 3)
    assert clients.size.tolist() == [2, 1]
    assert clients.examples["x"][1].sum() == 15 and clients.examples["x"][0, 2:].sum() == 0


def test_concatenated_clients_are_those_that_are_stacked_together():
    rng = np.random.default_rng(0)
    one = [{"x": rng.normal(size=(m, 3)), "y": rng.integers(0, 2, m)} for m in (2, 5, 1, 3)]
    parts = stack_clients(one[:1]), stack_clients(one[1:3], pad_to=7), stack_clients(one[3:])
    found, whole = concatenate_clients(*parts), stack_clients(one, pad_to=7)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, whole)) and found.id is None
    named = [part._replace(id=np.array(ids)) for part, ids in zip(parts, ([4], [2, 9], [0]), strict=True)]
    assert concatenate_clients(*named).id.tolist() == [4, 2, 9, 0]
    with pytest.raises(ValueError, match="ids must be different for all clients"):
        concatenate_clients(named[0], named[0])
    with pytest.raises(ValueError, match=r"client 1: its examples have shape \(4,\), those of client 0 \(3,\)"):
        concatenate_clients(parts[0], stack_clients([{"x": np.zeros((2, 4)), "y": np.zeros(2)}]))
    with pytest.raises(ValueError, match="parts must be at least one"):
        concatenate_clients()


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        (small((3, 0)), "without examples"),
        (small((3, 4)), "between 0 and M=3"),
        (small((-1, 2)), "between 0 and M=3"),
        (Clients({"x": np.zeros((2, 3)), "y": np.zeros((2, 4))}, np.array([1, 1])), "share their leading axes"),
        (Clients({"x": np.zeros((2, 3))}, np.array([1, 1, 1])), "clients.size must be of shape"),
        (
            Clients({"x": np.array([[1.0, np.nan]])}, np.array([2])),
            "NaN or infinity in 1 .*first at client 0",
        ),
        (Clients({"x": np.array([[[1.0, -np.inf]]])}, np.array([1])), "NaN or infinity"),
        (Clients({"x": np.array([[2**31]])}, np.array([1])), r"clients.examples\['x'\] must be of numbers that int32"),
        (Clients({"x": np.array([[1e300]])}, np.array([1])), r"examples\['x'\] must be of numbers that float32 holds"),
        (Clients({"x": np.zeros((2, 3))}, np.array([1, 1]), np.arange(3)), "clients.id must be of shape"),
        (Clients({"x": np.zeros((2, 3))}, np.array([1, 1]), np.array([4, 4])), "clients.id must be different integers"),
        (Clients({"x": np.zeros((2, 3))}, np.array([1, 1]), np.array([0, 2**32])), "clients.id must be different"),
        (Clients({"x": np.zeros((2, 3))}, np.array([1, 1]), np.array([-1, 2])), "clients.id must be different"),
        (Clients({"x": np.zeros((2, 3))}, np.array([1, 1]), np.array([0, 0.5])), "clients.id must be different"),
        (Clients({}, np.array([1])), "at least one array"),
    ],
)
def test_bad_clients_are_named(clients, words):
    with pytest.raises(ValueError, match=words):
        check_clients(clients)


def test_nan_in_padding_is_no_ones_business():
    check_clients(Clients({"x": np.array([[1.0, np.nan]])}, np.array([1])))
    check_clients(Clients({"x": np.array([[1.0, 1e300]])}, np.array([1])))


def test_labels_out_of_range():
    check_labels(small((3, 2)), 3)
    with pytest.raises(ValueError, match=r"0\.\.2, got 9 at client 1"):
        check_labels(small((3, 3)), 3)


def test_stack_clients_refuses():
    with pytest.raises(ValueError, match="at least one client"):
        stack_clients([])
    with pytest.raises(ValueError, match="client 1: its arrays must have one length"):
        stack_clients([{"x": np.zeros(2), "y": np.zeros(2)}, {"x": np.zeros(2), "y": np.zeros(3)}])
    with pytest.raises(ValueError, match="pad_to must be at least the largest client's 3"):
        stack_clients([{"x": np.zeros(3)}], pad_to=2)


def test_choices_name_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'ifca'"):
        check_choice("method", "ifac", ["ifca", "fedavg"])
    with pytest.raises(ValueError, match="Accepted: ifca, fedavg"):
        check_choice("method", "zzz", ["ifca", "fedavg"])


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_counts(value):
    with pytest.raises(ValueError, match="num_rounds must be an integer, at least 1"):
        check_count("num_rounds", value)


def test_tracers_pass_validation():
    assert jax.jit(lambda lr: (check(lr > 0, "lr", lr, "positive"), lr)[1])(-1.0) == -1.0


def test_stacking_takes_a_type_that_holds_every_clients_numbers():
    whole, fractions = {"x": np.array([[1, 2]])}, {"x": np.array([[0.75, 0.5]], np.float32)}
    assert stack_clients([whole, fractions]).examples["x"][:, 0].tolist() == [[1, 2], [0.75, 0.5]]
    bytes_, wide = {"x": np.array([[3]], np.uint8)}, {"x": np.array([[300]])}
    assert stack_clients([bytes_, wide]).examples["x"].ravel().tolist() == [3, 300]
    with pytest.raises(ValueError, match="client 1: its examples have shape"):
        stack_clients([{"x": np.ones((2, 3))}, {"x": np.ones((2, 5))}])
    with pytest.raises(ValueError, match="client 1: its arrays are"):
        stack_clients([{"x": np.ones((2, 3))}, {"y": np.ones((2, 3))}])


def test_what_does_not_fit_into_memory_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(stacking, "free_host_memory", lambda: 1e8)
    with pytest.raises(ValueError, match=r"of memory, and 0.1 GB are free; use fewer clients"):
        aligned_zeros((1 << 10, 1 << 10, 64), np.float32)
    assert aligned_zeros((3,), np.float32).tolist() == [0, 0, 0]


def test_free_memory_is_what_the_control_group_leaves(monkeypatch):
    files = {"memory.max": "5000", "memory.current": "3000", "memory.stat": "anon 1\ninactive_file 400\n"}
    files["meminfo"] = "MemTotal: 9 kB\nMemAvailable:       8 kB\n"

    def read_text(path):
        if path.name not in files or path.parent.name == "memory":
            raise FileNotFoundError(path)
        return files[path.name]

    monkeypatch.setattr(stacking.Path, "read_text", read_text)
    assert core.free_host_memory() == 2400
    files["memory.max"] = "max"
    assert core.free_host_memory() == 8192


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"examples": {"x": np.ones((2, 3, 4), np.complex64)}},
            "must be an array of real numbers .give real and",
        ),
        ({"examples": {"x": np.full((2, 3), "a")}}, "must be an array of real numbers"),
        ({"examples": {"x": np.full((2, 3), None)}}, "must be an array of real numbers"),
        ({"examples": {"x": np.ones((2, 3), "datetime64[s]")}}, "must be an array of real numbers"),
        ({"size": np.int32(3)}, r"clients.size must be an array \[N\] of integers"),
        ({"size": 3}, r"clients.size must be an array \[N\] of integers"),
        ({"size": [3, 3]}, r"clients.size must be an array \[N\] of integers"),
        ({"id": [0, 1]}, r"clients.id must be an array \[N\] of integers"),
        ({"id": np.int32(1)}, r"clients.id must be an array \[N\] of integers"),
        ({"id": np.array([0.0, 1.0])}, "clients.id must be different integers"),
    ],
)
def test_clients_are_real_numbers_by_rows(change, said):
    clients = jfcl.Clients({"x": np.ones((2, 3, 4), np.float32)}, np.full(2, 3, np.int32), np.arange(2))
    task, training = jfcl.testing.problem()[2:]
    with pytest.raises(ValueError, match=said):
        check_clients(clients._replace(**change))
    with pytest.raises(ValueError, match=said):
        jfcl.simulate(jfcl.fedavg(task, training), clients._replace(**change), key=jax.random.key(0), num_rounds=1)


def with_ids(given):
    """A run, its clients with ids of their own or without, and the ids."""
    clients, _, task, training = jfcl.testing.problem()
    ids = np.arange(len(clients.size), dtype=np.int32) + 4 * given
    run = partial(jfcl.simulate, jfcl.fedavg(task, training), key=jax.random.key(0), num_rounds=1)
    return run, clients._replace(id=ids if given else None), ids


@pytest.mark.slow
@pytest.mark.parametrize("given", [False, True])
def test_test_clients_have_the_ids_of_those_in_training(given):
    run, clients, ids = with_ids(given)
    losses = [run(clients, test_clients=clients._replace(id=tests)).records[-1]["loss"] for tests in (None, ids)]
    assert losses[0] == losses[1] and np.isfinite(losses[0])


@pytest.mark.parametrize("given", [False, True])
def test_test_clients_with_other_ids_are_refused(given):
    run, clients, ids = with_ids(given)
    with pytest.raises(ValueError, match=r"test_clients.id must be the ids of the clients in training"):
        run(clients, test_clients=clients._replace(id=ids[::-1].copy()))


@pytest.mark.parametrize("out", ["", "  ", 5, "a\0b"])
def test_a_folder_has_a_name(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clients, _, task, training = jfcl.testing.problem()
    config = experiments.Config("fedavg", clients=4, rounds=1)
    calls = [
        lambda: jfcl.simulate(jfcl.fedavg(task, training), clients, key=jax.random.key(0), num_rounds=1, out=out),
        lambda: experiments.run(config, out=out),
        lambda: experiments.run_sweep(config, {"lr": [0.1]}, out=out),
        lambda: experiments.report(out),
        lambda: experiments.load_run(out),
        lambda: jfcl.data.ClientStore.open(out),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="must name a file or folder"):
            call()
    assert not list(tmp_path.iterdir())


def test_found_clusters_are_integers():
    for found in ([0, float("nan")], [0, 0.5], [0, float("inf")], ["a", "b"]):
        with pytest.raises(ValueError, match="found must be integers, the cluster of each client"):
            jfcl.metrics.cluster_recovery(found, [0, 1])
    with pytest.raises(ValueError, match="true must be integers"):
        jfcl.metrics.cluster_recovery([0, 1], [0, float("nan")])
    assert jfcl.metrics.cluster_recovery([0.0, 1.0], [0, 1])["cluster_accuracy"] == 1
