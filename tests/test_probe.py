"""The probe of mappings, and what is said of memory before a run starts."""

import contextlib
import json
import math
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfcl
from jfcl import cli, kernels
from jfcl.core import default_device
from jfcl.mapping import memory
from jfcl.mapping.axis import client_mesh
from jfcl.simulation import probe
from jfcl.testing import problem

QUICK = ["--clients", "8", "--clusters", "2", "--rounds", "2", "--local-steps", "1", "--quiet"]


def make(axis):
    _, _, task, training = problem()
    return jfcl.fedavg(task, training, client_axis=axis)


def test_the_fastest_is_taken_and_remembered(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JFCL_CACHE_DIR", str(tmp_path))
    clients = problem()[0]
    candidates = {"a": jfcl.chunked(1), "b": jfcl.chunked(3), "c": jax.vmap}
    pace = {jfcl.chunked(1): 3.0, jfcl.chunked(3): 1.0, jax.vmap: 2.0}
    asked = []

    def seconds(algorithm, clients, axis, few):
        asked.append(axis)
        return pace[axis]

    monkeypatch.setattr(probe, "seconds_per_client", seconds)
    monkeypatch.setattr(memory, "needed_memory", lambda *_: 0)
    assert probe.fastest(make, clients, candidates, options="x") == jfcl.chunked(3) and len(asked) == 3
    printed = capsys.readouterr().err
    assert printed.startswith("mapping: a short probe, which compiles and times a round with ")
    assert "ms a client" in printed and "1e+03" in printed
    assert probe.fastest(make, clients, candidates, options="x") == jfcl.chunked(3) and len(asked) == 3
    assert "as an earlier probe found" in capsys.readouterr().err
    probe.fastest(make, clients, candidates, options="y", show=False)
    assert len(asked) == 6 and capsys.readouterr().err == ""
    for file in (tmp_path / "mappings").iterdir():
        whole = file.read_text()
        file.write_text(whole[:20])  # whoever cannot be read is asked again
        probe.fastest(make, clients, candidates, options="x", show=False)
        probe.fastest(make, clients, candidates, options="y", show=False)
        assert file.read_text() == whole
    assert len(asked) == 12
    kept = [json.loads(f.read_text()) for f in (tmp_path / "mappings").iterdir()]
    assert len(kept) == 2 and all(k["fastest"] == "b" and k["seconds_per_client"]["c"] == 2.0 for k in kept)


def test_without_a_home_nothing_is_cached(monkeypatch):
    for name in ("JFCL_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without an entry in the system
    assert probe.cache_dir() is None


def test_a_cache_that_cannot_be_written_is_no_obstacle(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JFCL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(probe, "seconds_per_client", lambda *_: 1.0)
    assert probe.fastest(make, problem()[0], {"a": jfcl.chunked(1)}, options="x") == jfcl.chunked(1)
    assert "the choice could not be kept for the next time" in capsys.readouterr().err


def test_mappings_that_do_not_fit_are_not_run(monkeypatch):
    clients = problem()[0]
    candidates = {"a": jfcl.chunked(1), "b": jax.vmap}
    needs = {"a": memory.needed_memory(make(jfcl.chunked(1)), clients, jfcl.chunked(1)), "b": 1 << 40}
    monkeypatch.setattr(
        memory, "needed_memory", lambda algorithm, shapes, axis: needs["b" if axis is jax.vmap else "a"]
    )
    monkeypatch.setattr(
        probe, "seconds_per_client", lambda algorithm, clients, axis, _: 0.0 if axis is jax.vmap else 1.0
    )
    assert probe.fastest(make, clients, candidates, show=False) == jfcl.chunked(1)
    monkeypatch.setattr(memory, "free_memory", lambda: 0.0)
    with pytest.raises(ValueError, match=r"memory: .* with every mapping"):
        probe.fastest(make, clients, candidates, show=False)


@pytest.mark.parametrize(
    ("stats", "free"),
    [({"bytes_limit": 100, "bytes_in_use": 30}, 70), ({"bytes_limit": 0, "bytes_in_use": 30}, np.inf), (None, np.inf)],
)
def test_free_memory_of_a_device(monkeypatch, stats, free):
    """An allocator without a limit, as cuda_async, says 0 or nothing."""

    class Device:
        platform = "gpu"

        def memory_stats(self):
            return stats

    monkeypatch.setattr(memory, "default_device", Device)
    assert memory.free_memory() == free


def test_the_default_device_is_the_users():
    with jax.default_device(jax.devices()[1]):
        assert default_device() == jax.devices()[1]
    with jax.default_device("cpu"):
        assert default_device() == jax.devices()[0]


@pytest.mark.slow
def test_needed_memory_grows_with_the_clients_at_once():
    task = jfcl.models.classification(jfcl.models.MLP(10), (64,), 10)
    clients = jfcl.Clients({"x": np.zeros((64, 8, 64), np.float32), "y": np.zeros((64, 8), np.int32)}, np.full(64, 8))
    training = problem()[3]

    def needed(axis):
        return memory.needed_memory(jfcl.fedavg(task, training, client_axis=axis), clients, axis)

    model = 4 * (64 * 200 + 200 + 2010)
    assert needed(jfcl.chunked(1)) < 12 * model < 32 * model < needed(jax.vmap)


MEDIAN = pytest.param({"aggregator": kernels.coordinate_median}, id="keeps all updates", marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("options", [pytest.param({}, id="sums"), MEDIAN])
def test_memory_of_updates_that_are_kept_is_asked_for_one_client_at_a_time(monkeypatch, options):
    """30 clients of a model of 0.2 MB: a mean needs room for a few, a median for the updates of all."""
    task = jfcl.models.classification(jfcl.models.MLP(10, hidden=(512,)), (64,), 10)
    clients = jfcl.Clients({"x": np.zeros((30, 2, 64), np.float32), "y": np.zeros((30, 2), np.int32)}, np.full(30, 2))
    algorithm = jfcl.fedavg(task, problem()[3], client_axis=jfcl.chunked(1), **options)
    monkeypatch.setattr(memory, "free_memory", lambda: 4e6)
    run = partial(jfcl.simulate, algorithm, clients, key=jax.random.key(0), num_rounds=1, client_axis=jfcl.chunked(1))
    if options:
        with pytest.raises(
            ValueError, match=r"a round needs .* and 0.0 GB are free; use fewer clients or a smaller model"
        ):
            run()
    else:
        assert run().rounds == 1


@pytest.mark.slow
def test_seeds_at_once_and_other_clients_count(monkeypatch):
    clients, _, task, training = problem()
    algorithm = jfcl.fedavg(task, training, client_axis=jax.vmap)
    asked = []
    monkeypatch.setattr(memory, "check_memory", lambda *_, **options: asked.append(options))
    for axis in (jax.vmap, jfcl.chunked(1), jfcl.chunked(8)):
        keys = jax.random.split(jax.random.key(0), 3)
        jfcl.simulate(algorithm, clients, key=keys, num_rounds=1, seed_axis=axis, test_clients=clients)
    assert [o["seeds_at_once"] for o in asked] == [3, 1, 3] and all(len(o["tests"]) == 1 for o in asked)
    monkeypatch.undo()
    monkeypatch.setattr(memory, "free_memory", lambda: 4000.0)
    monkeypatch.setattr(memory, "needed_memory", lambda *_: 1500)
    state = jax.eval_shape(lambda: jax.tree.map(lambda x: x[None], algorithm.init(jax.random.key(0), clients)))
    memory.check_memory(algorithm, clients, jax.vmap, state)
    for more in ({"seeds_at_once": 3}, {"copies": 1, "tests": [clients] * 20}):
        with pytest.raises(ValueError, match="are free"):
            memory.check_memory(algorithm, clients, jax.vmap, state, **more)
    monkeypatch.setattr(memory, "needed_memory", lambda *_: 0)  # of a compiler that counts none
    memory.check_memory(algorithm, clients, jax.vmap, state)


def test_too_little_memory_is_said_before_anything_runs(monkeypatch, tmp_path):
    clients, _, task, training = problem()
    ran = []

    def init(key, clients):
        ran.append(isinstance(clients.size, jax.core.Tracer))
        return jfcl.fedavg(task, training).init(key, clients)

    algorithm = jfcl.fedavg(task, training, client_axis=jax.vmap)._replace(init=init)
    monkeypatch.setattr(memory, "free_memory", lambda: 50.0)
    with pytest.raises(ValueError, match=r"of memory, and 0.0 GB are free; use fewer clients"):
        jfcl.simulate(algorithm, clients, key=jax.random.key(0), num_rounds=1)
    assert all(ran), "only shapes may be looked at"
    monkeypatch.setattr(memory, "free_memory", lambda: 4000.0)
    monkeypatch.setattr(memory, "needed_memory", lambda *_: 6000)
    with pytest.raises(ValueError, match=r"chunks of at most 4 clients \(--chunk 4, jfcl.chunked\(4\)\) may fit"):
        jfcl.simulate(algorithm, clients, key=jax.random.key(0), num_rounds=1, client_axis=jax.vmap, out=tmp_path / "x")
    large = jfcl.chunked(1000)  # of all clients there are: the advice is the same
    with pytest.raises(ValueError, match="chunks of at most 4 clients"):
        jfcl.simulate(algorithm, clients, key=jax.random.key(0), num_rounds=1, client_axis=large)
    assert not (tmp_path / "x").exists(), "a run that was refused leaves nothing in the way of the next"


SHARDED = jfcl.sharded(client_mesh(2), jax.vmap)


@pytest.mark.parametrize(
    ("kind", "axis", "options", "copies", "parts"),
    [
        ("cpu", jax.vmap, {}, 0, 1),
        ("cpu", jax.vmap, {"copies": 2, "tests": 3}, 2 + 3, 1),
        ("cpu", SHARDED, {}, 1, 1),  # the devices share their memory
        ("gpu", jax.vmap, {"tests": 1}, 1 + 1, 1),
        ("gpu", SHARDED, {"copies": 2}, 2, 2),
    ],
)
def test_a_run_needs_memory_for_its_data_and_twice_its_state(monkeypatch, kind, axis, options, copies, parts):
    clients, _, task, training = problem()
    algorithm = jfcl.local_only(task, training, client_axis=axis)
    state = jax.eval_shape(lambda: jax.tree.map(lambda x: x[None], algorithm.init(jax.random.key(0), clients)))
    options = options | {"tests": [clients] * options.get("tests", 0)}
    data, rows, shared = (
        sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
        for leaves in (
            jax.tree.leaves(clients.examples),
            [x for x in jax.tree.leaves(state) if x.shape[1:2] == (7,)],
            [x for x in jax.tree.leaves(state) if x.shape[1:2] != (7,)],
        )
    )
    needed = (copies * data + 2 * rows) / parts + 2 * shared
    monkeypatch.setattr(memory, "needed_memory", lambda *_: 0)
    monkeypatch.setattr(memory.mapping, "platform_of", lambda axis: kind)
    monkeypatch.setattr(memory, "free_memory", lambda: needed + 1)
    memory.check_memory(algorithm, clients, axis, state, **options)
    monkeypatch.setattr(memory, "free_memory", lambda: needed)
    with pytest.raises(ValueError, match="use fewer clients or examples, or a smaller model"):
        memory.check_memory(algorithm, clients, axis, state, **options)
    # Of a round, which is compiled for one device of several that share the memory, and for one of three seeds.
    monkeypatch.setattr(memory, "needed_memory", lambda *_: needed)
    monkeypatch.setitem(memory.TEMPORARIES, kind, 10**6)  # so that it might not fit
    times = 3 * (2 if axis is SHARDED and kind == "cpu" else 1)
    most = copies * data / parts + times * needed
    for free, fits in ((most, False), (most + 1, True)):
        monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
        with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="are free"):
            memory.check_memory(algorithm, clients, axis, state, seeds_at_once=3, **options)


@pytest.mark.parametrize(
    ("kind", "axis", "seeds", "most"),
    [
        ("cpu", jax.vmap, 1, 6 * 5 * 140),
        ("cpu", jfcl.chunked(1), 3, 6 * 3 * 5 * 20),  # one client at a time needs nothing, the results of all do
        ("gpu", jfcl.chunked(2), 1, 200 * 2 * 140),
        ("gpu", SHARDED, 1, 200 * 3 * 140),  # the larger half of the clients
    ],
)
def test_a_round_is_compiled_where_it_might_not_fit(monkeypatch, kind, axis, seeds, most):
    """Of 5 clients with 120 bytes of examples, and of models with 20 bytes."""
    clients, _, task, training = problem()
    clients = jax.tree.map(lambda x: x[:5], clients)
    algorithm, compiled = jfcl.ifca(task, training, num_clusters=2, client_axis=axis), []
    state = jax.eval_shape(lambda: jax.tree.map(lambda x: x[None], algorithm.init(jax.random.key(0), clients)))
    monkeypatch.setattr(memory, "needed_memory", lambda *_: compiled.append(1) or 0)
    monkeypatch.setattr(memory.mapping, "platform_of", lambda axis: kind)
    for free, is_compiled in ((most, True), (most + 1, False)):
        compiled.clear()
        monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
        memory.check_memory(algorithm, clients, axis, state, seeds_at_once=seeds)
        assert bool(compiled) == is_compiled


def test_chunks_that_may_fit_leave_room_for_the_data(monkeypatch):
    clients, _, task, training = problem()
    algorithm = jfcl.fedavg(task, training, client_axis=jax.vmap)
    state = jax.eval_shape(lambda: jax.tree.map(lambda x: x[None], algorithm.init(jax.random.key(0), clients)))
    monkeypatch.setattr(memory.mapping, "platform_of", lambda axis: "gpu")
    monkeypatch.setattr(memory, "free_memory", lambda: 7 * 120 + 4000.0)
    monkeypatch.setattr(memory, "needed_memory", lambda *_: 6000)
    with pytest.raises(ValueError, match="chunks of at most 4 clients"):
        memory.check_memory(algorithm, clients, jax.vmap, state)


@pytest.mark.parametrize(("axis", "data"), [(jax.vmap, 7 * 124), (SHARDED, 8 * 124 // 2)])
def test_needed_memory_is_that_of_each_device_without_the_clients(monkeypatch, axis, data):
    """Examples of 120 bytes and a size of 4; devices have equally many clients, one of which is padding."""
    clients, _, task, training = problem()
    algorithm = jfcl.fedavg(task, training, client_axis=axis)

    class Refused:
        def __init__(self, step):
            pass

        def lower(self, *_):
            return self

        def compile(self):
            if refusal is None:
                return None
            raise jax.errors.JaxRuntimeError(refusal)

    monkeypatch.setattr(memory, "jitted", Refused)
    monkeypatch.setattr(memory, "memory_of", lambda _: memory.Memory(5000, 300, 200, 100))
    monkeypatch.setattr(memory, "free_memory", lambda: 900.0)
    for refusal, needed in (  # noqa: B007
        (None, 5400 - data),
        ("RESOURCE_EXHAUSTED: 2.00K of 4.00KiB, which exceeds 3.5K", 4096 - data),
        ("RESOURCE_EXHAUSTED: 1.00K", 901),  # more than is free, as it was refused
    ):
        assert memory.needed_memory(algorithm, clients, axis) == needed
    refusal = "INTERNAL: 2K"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        memory.needed_memory(algorithm, clients, axis)


@pytest.mark.slow
def test_every_mapping_of_the_command_line_gives_the_same(tmp_path, capsys):
    losses = {}
    for name in ("", "chunked --chunk 3", "sharded", "pmap", "auto"):
        out, mapped = tmp_path / name.split(" ")[0] / "run", ["--mapping", *name.split()] if name else []
        assert cli.main(["run", "fedavg", *QUICK, *mapped, "--out", str(out)]) == 0
        losses[name] = json.loads((out / "summary.json").read_text())["mean"]["loss"]
        assert ("a short probe" in capsys.readouterr().err) == (name == "auto")
    assert losses == pytest.approx(dict.fromkeys(losses, losses[""]), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mapping", "shard"], "unknown mapping 'shard': did you mean 'sharded'?"),
        (["--devices", "3"], "num_devices must be at most the 2 there are"),
        (["--devices", "0"], "devices must be an integer, at least 1"),
    ],
)
def test_refuses(options, said, capsys):
    assert cli.main(["run", "fedavg", *QUICK, *options]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is resumed with another mapping")
def test_resumed_on_another_number_of_devices(tmp_path):
    """9 clients on two devices have a padding client, on one device none: what is kept does not depend on it."""
    common = ["--clients", "9", "--clusters", "3", "--local-steps", "2", "--quiet", "--eval-every", "1", "--seeds", "2"]
    for devices, rounds, run in (
        (["2"], "2", ["run"]),
        (["1"], "4", ["run", "--resume"]),
        (["2"], "6", ["run", "--resume"]),
        (["1"], "6", ["alone"]),
    ):
        out = ["--out", str(tmp_path / run[0]), *run[1:]]
        assert cli.main(["run", "local", *common, "--devices", *devices, "--rounds", rounds, *out]) == 0
    a, b = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("run", "alone"))
    np.testing.assert_allclose(a["mean"]["loss"], b["mean"]["loss"], rtol=1e-4)
    rows = [(tmp_path / run / "clients.csv").read_text().splitlines() for run in ("run", "alone")]
    assert len(rows[0]) == len(rows[1]) == 1 + 2 * 9


@pytest.mark.slow
def test_placed_runs_equal_others():
    """`simulate` on devices that do not divide the clients: the same records and a state of as many clients."""
    clients, cluster, task, training = problem()
    axis = jfcl.sharded(jfcl.client_mesh(2))
    found = [
        jfcl.simulate(
            jfcl.local_only(task, training, client_axis=a),
            clients,
            key=jax.random.key(0),
            num_rounds=3,
            test_clients=clients,
            newcomers=clients,
            true_cluster=cluster,
            client_axis=a,
        )
        for a in (axis, jfcl.chunked(1))
    ]
    for a, b in zip(*(h.records for h in found), strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
        np.testing.assert_allclose(a["newcomer_loss"], b["newcomer_loss"], rtol=1e-5)
    one, other = (jax.tree.map(jnp.shape, h.state) for h in found)
    assert one == other


@pytest.mark.slow_cases("options0")
@pytest.mark.parametrize("options", [{"cohort": 100}, {"cohort": None}])
def test_a_method_that_was_told_of_all_clients_is_asked_with_all(options):
    clients = jax.tree.map(lambda x: np.repeat(x, 20, axis=0), problem()[0])  # 140, of which 64 would do
    _, _, task, training = problem()
    algorithm, trained = jfcl.fedavg(task, training, client_axis=jax.vmap, **options), []

    def step(key, state, clients):
        trained.append(len(clients.size))
        return algorithm.step(key, state, clients)

    assert probe.seconds_per_client(algorithm._replace(step=step), clients, jax.vmap, 64) > 0
    assert trained[-1] == (64 if options["cohort"] is None else 140)


def test_so_many_clients_are_timed_that_mappings_differ():
    two = client_mesh(2)
    assert probe.enough_clients([jfcl.chunked(1), jfcl.chunked(16), jax.vmap]) == 64
    assert probe.enough_clients([jfcl.chunked(256), jax.vmap]) == 512
    assert probe.enough_clients([jfcl.chunked(32), jfcl.sharded(two, jfcl.chunked(32)), jfcl.sharded(two)]) == 128


@pytest.mark.slow
def test_the_probe_measures_at_the_precision_of_the_run(monkeypatch):
    seen = []

    def fastest(make, clients, candidates, **_):
        seen.append(jax.config.jax_default_matmul_precision)
        return jfcl.chunked(1)

    monkeypatch.setattr(probe, "fastest", fastest)
    arguments = [*QUICK, "--mapping", "auto", "--precision", "float32"]
    assert cli.main(["run", "fedavg", *arguments]) == 0 and seen == ["float32"]
