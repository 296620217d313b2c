"""Plans for accelerators that are not there: targets, plans, and the command.

The tests of the real compilers are slow, and are skipped where those are not installed.
"""

import json
import math
from functools import wraps

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jfcl
from jfcl import cli
from jfcl.cli.parser import parse
from jfcl.experiments import Config
from jfcl.experiments import plan as plans
from jfcl.mapping import memory
from jfcl.mapping.axis import client_mesh
from jfcl.planning import targets
from jfcl.planning.cost import price
from jfcl.planning.plan import candidates, plan
from jfcl.testing import problem

QUICK = ["--clients", "8", "--clusters", "2", "--rounds", "3", "--local-steps", "2", "--quiet"]


# ---------------------------------------------------------------------------------------------------------------
# Targets.


def test_targets_have_the_chips_of_their_slices():
    assert [targets.target(name).count for name in ("v5e:1x1", "v5e:2x4", "v6e:16x16", "v5p:4x4x8")] == [1, 8, 256, 128]
    assert targets.target("H100").name == "h100" and targets.target("h100:8").count == 8
    types = {
        "v5e-1": "v5e:1x1",
        "v5e-8": "v5e:2x4",
        "v5litepod-16": "v5e:4x4",
        "tpu-v6e-256": "v6e:16x16",
        "h100-8": "h100:8",
    }
    types |= {
        "V5P-8": "v5p:2x2x1",
        "v5p-256": "v5p:4x4x8",
        "v5p-1024": "v5p:8x8x8",
        "v4-8": "v4:2x2x1",
        "v4-64": "v4:2x4x4",
    }
    assert {name: targets.target(name).name for name in types} == types
    for chip in targets.CHIPS.values():
        assert chip.bfloat16 > chip.tf32 > chip.float32 and chip.link < chip.bandwidth
        assert not chip.is_tpu or chip.float32 == chip.bfloat16 / 6


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("v5x:2x2", ["unknown target 'v5x'", "did you mean 'v5"]),
        ("rtx", ["unknown target 'rtx'", "v5e", "h100", "b200"]),
        ("v5e:3x3", ["unknown slice of v5e", "'3x3'", "1x1, 2x2, 2x4"]),
        ("v5e", ["unknown slice of v5e, such as v5e:2x2"]),
        ("h100:3", ["unknown slice of h100", "1, 2, 4, 8"]),
        ("v5e-3", ["unknown number of chips of v5e '3'", "1, 4, 8, 16"]),
        ("v5p-4", ["unknown number of cores (two in each chip) of v5p", "8, 16, 32, 64"]),
        ("v3-8", ["unknown target 'v3': did you mean 'v"]),
        ("v5e-8:2x4", ["unknown target"]),
        ("", ["unknown target ''"]),
    ],
)
def test_refuses_targets(name, parts):
    with pytest.raises(ValueError) as error:
        targets.target(name)
    assert all(part in str(error.value) for part in parts), error.value


def test_an_empty_target_is_refused_by_the_name_of_its_flag():
    with pytest.raises(ValueError, match=r"^target must be text of 1 to 4096 characters"):
        parse(["plan", "ifca", "--target", ""])


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("v5e:2x2", r"needs the TPU compiler: pip install 'jfcl\[plan-tpu\]' jax==9.9"),
        ("h100", r"needs the CUDA compiler: pip install 'jfcl\[plan-gpu\]' jax-cuda12-plugin==9.9"),
    ],
)
def test_compilers_that_are_not_there(monkeypatch, target, said):
    monkeypatch.setattr(targets, "_version", {"jax": "9.9"}.get)
    monkeypatch.setattr(targets.os, "environ", {})
    with pytest.raises(ValueError, match=said):
        targets.mesh(target)


def test_compilers_that_fail(monkeypatch):
    from jax.experimental import topologies

    def fails(**_):
        raise RuntimeError("INVALID_ARGUMENT: version 3 is too old\nmore")

    monkeypatch.setattr(topologies, "get_topology_desc", fails)
    monkeypatch.setattr(targets, "_version", lambda name: "1.2")
    monkeypatch.setattr(targets.os, "environ", {})
    with pytest.raises(
        ValueError, match=r"its compiler failed \(libtpu 1.2, jax .*: INVALID_ARGUMENT: version 3 is too"
    ):
        targets.mesh("v5e:2x2")


# ---------------------------------------------------------------------------------------------------------------
# Plans. The devices are those of the CPU here, in the place of a target's.


@pytest.fixture
def on_cpu(monkeypatch):
    """Targets of two chips have the two devices of the CPU."""
    monkeypatch.setattr(targets, "mesh", lambda name: client_mesh(2))
    monkeypatch.setattr(targets, "only_compile", lambda: None)


@pytest.fixture
def names_of_loops():
    """Programs have the names of loops, as by default; `conftest.py` leaves them out."""
    before = jax.config.jax_include_full_tracebacks_in_locations
    jax.config.update("jax_include_full_tracebacks_in_locations", True)
    yield
    jax.config.update("jax_include_full_tracebacks_in_locations", before)


def make(axis):
    _, _, task, training = problem()
    return jfcl.ifca(task, training, num_clusters=2, client_axis=axis)


def test_candidates_are_chunks_of_less_than_half_of_a_chips_clients():
    assert candidates(100, 1) == [jax.vmap, *map(jfcl.chunked, (1, 5, 10, 20))]
    assert candidates(1200, 2)[1:] == [jfcl.chunked(size) for size in (1, 5, 10, 20, 60, 200)]
    assert candidates(997, 1)[1:] == [jfcl.chunked(size) for size in (1, 5, 10, 20, 64, 256)]
    assert candidates(3, 4) == [jax.vmap]


@pytest.mark.slow
def test_a_plan_has_the_fastest_mapping_that_fits(on_cpu, monkeypatch):
    clients, ticks = problem()[0], []
    found = plan(make, clients, target="h100:2", other_bytes=1000, tick=lambda *step: ticks.append(step))
    assert found.fits and found.other_bytes == 1000
    assert found.needed_bytes >= found.argument_bytes + found.output_bytes + found.temp_bytes
    assert found.needed_bytes < found.limit_bytes == 80e9
    assert found.cost.seconds == min(c.seconds for c in found.candidates) == found.candidates[0].seconds
    assert len(ticks) == len(found.candidates) + 1 == ticks[0][1]
    assert found.seconds(10) == pytest.approx(found.init_seconds + 10 * found.cost.seconds)
    assert sum(count for count, _ in found.cost.collectives.values()) > 0
    for text in (found.step_hlo, found.init_hlo):
        assert text.startswith("HloModule")
    late = f"{1000 * found.cost.seconds:.3g} ms a round (predicted)"
    assert repr(found).startswith("<Plan for h100:2: fits") and late in repr(found) and "HloModule" not in repr(found)
    # With too little memory, nothing fits.
    chip = targets.CHIPS["h100"]._replace(memory=1000.0)
    monkeypatch.setitem(targets.CHIPS, "h100", chip)
    small = plan(make, clients, target="h100:2", inner=[jax.vmap])
    assert not small.fits and small.limit_bytes == 1000 and small.cost is not None
    assert small.needed_bytes > 1000


@pytest.mark.slow
def test_an_algorithm_is_planned_as_it_was_made(on_cpu):
    clients = problem()[0]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), clients)
    axis = jfcl.sharded(client_mesh(2), jax.vmap)
    one = plan(make(axis), shapes, target="h100:2")
    other = plan(make, clients, target="h100:2", inner=[jax.vmap])
    assert one.mapping == "as made" and other.mapping == "vmap"
    assert one.cost == other.cost and one.needed_bytes == other.needed_bytes
    several = plan(make, shapes, target="h100:2", inner=[jfcl.chunked(1)], seeds=3)
    assert several.chunk == 1 and several.cost.flops > 2 * other.cost.flops


def test_a_refusal_of_the_compiler_is_a_plan_that_does_not_fit(on_cpu, monkeypatch):
    from jfcl.planning.plan import _Program, _Work

    monkeypatch.setattr(_Work, "finished", lambda self, lowered: _Program(18_400_000_000))
    monkeypatch.setitem(targets.CHIPS, "h100", targets.CHIPS["h100"]._replace(memory=16e9))
    found = plan(make, problem()[0], target="h100:2")
    assert not found.fits and found.cost is None and found.needed_bytes == 18_400_000_000
    assert repr(found) == "<Plan for h100:2: refused by the compiler, 18.4 of 16 GB a chip>"
    assert math.isnan(found.seconds(5)) and found.step_hlo == ""
    assert json.loads(json.dumps(found.as_dict()))["seconds_per_round"] is None


def test_what_a_target_cannot_compile_is_one_sentence(on_cpu):
    primitive = jax.extend.core.Primitive("of_another_platform")
    primitive.def_abstract_eval(lambda x: x)
    algorithm = make(jfcl.chunked(1))
    odd = algorithm._replace(step=lambda key, state, clients: (state, {"loss": primitive.bind(clients.size)}))
    with pytest.raises(ValueError, match=r"target 'h100:2' cannot compile ours: .*of_another_platform"):
        plan(odd, problem()[0], target="h100:2", name="ours")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory. Used 18.40G of 15.75G hbm. Exceeded by 2.65G.", 18.40),
        ("RESOURCE_EXHAUSTED: required for HLO temporaries (596.24G) exceeds available HBM (15.75G).", 596.24),
    ],
)
def test_memory_is_refused_with_the_compilers_bytes(monkeypatch, text, size):
    error = jax.errors.JaxRuntimeError(text)
    assert memory.exhausted(error) == int(size * 2**30) and memory.exhausted(RuntimeError("INTERNAL")) is None

    class Refuses:
        def lower(self, *_):
            return self

        def compile(self):
            raise error

    clients, _, task, training = problem()
    algorithm = jfcl.fedavg(task, training, client_axis=jax.vmap)
    state = jax.eval_shape(lambda: jax.tree.map(lambda x: x[None], algorithm.init(jax.random.key(0), clients)))
    monkeypatch.setattr(memory, "free_memory", lambda: 4000.0)
    with monkeypatch.context() as patched:
        patched.setattr(memory, "jitted", lambda *_: Refuses())
        with pytest.raises(ValueError, match=rf"needs {size * 1.0737:.1f} GB of memory, and 0.0 GB are free"):
            memory.check_memory(algorithm, clients, jax.vmap, state)


def test_the_command_writes_its_files(on_cpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out, planned, plan_run = tmp_path / "plan", [], plans.plan_run
    kept_plan = lambda *args, **given: planned.append(plan_run(*args, **given)) or planned[0]  # noqa: E731
    monkeypatch.setattr(plans, "plan_run", wraps(plan_run)(kept_plan))  # the command reads its arguments
    options = [*QUICK, "--model", "linear", "--target", "h100:2", "--chunk", "2", "--out", str(out)]
    assert cli.main(["plan", "fedavg", *options]) == 0
    printed = capsys.readouterr().out
    assert "a round, predicted" in printed and "times are predictions" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 80
    kept = json.loads((out / "plan.json").read_text())
    named = "target mapping chunk fits argument_bytes temp_bytes limit_bytes seconds_per_round flops mfu precision"
    assert {*named.split(), "collectives", "sequential_steps", "seconds"} <= kept.keys()
    assert kept["mapping"] == "chunked" and kept["chunk"] == 2 and kept["fits"] and kept["num_rounds"] == 3
    assert kept["seconds"] > 3 * kept["seconds_per_round"] > 0
    assert {f.name for f in out.iterdir()} == {"plan.json", "step.hlo.txt", "init.hlo.txt"}
    assert (out / "step.hlo.txt").read_text().startswith("HloModule")
    # What does not fit is printed and refused.
    assert "for the start" not in printed
    large = planned[0]._replace(fits=False, needed_bytes=10**12)
    monkeypatch.setattr(plans, "plan_run", lambda *_, **__: large)
    assert cli.main(["plan", "fedavg", *options]) == 2
    printed = capsys.readouterr()
    assert "may fit" in printed.err and "a round, predicted" in printed.out
    assert "no: 1.0 TB of 80.0 GB a chip for the start; a round: " in " ".join(printed.out.split())


def test_the_tests_of_two_steps_of_a_drift_are_held(on_cpu, monkeypatch):
    options, held = {"clients": 4, "clusters": 2, "model": "linear", "heterogeneity": "swap_pairs"}, []
    monkeypatch.setattr(plans, "plan", lambda *_, other_bytes, **__: held.append(other_bytes))
    for drift in ({}, {"drift": "sudden", "drift_steps": 2}):
        plans.plan_run(Config("fedavg", **options, **drift), "h100:2")
    assert held[1] == 2 * held[0] > 0


def test_inputs_are_planned_in_bytes_where_a_run_has_them(on_cpu, monkeypatch):
    """Not where one kind of clients, or an attack, has others."""
    options, types = {"clients": 9, "clusters": 2, "model": "linear"}, []
    monkeypatch.setattr(plans, "plan", lambda _, x, **__: types.append(jax.tree.leaves(x.examples["x"])[0].dtype.name))
    for further in (
        {"heterogeneity": "rotation"},
        {"heterogeneity": "corruption"},
        {"heterogeneity": "rotation", "attack": "noisy_inputs", "malicious": 0.2},
    ):
        plans.plan_run(Config("fedavg", **options, **further), "h100:2")
    assert types == ["uint8", "float32", "float32"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "mapping"), [("10", ["--chunk", "1"]), ("1000", ["--mapping", "vmap"])]
)  # of 20 examples: two batches, and all
def test_local_epochs_count_as_their_steps(on_cpu, names_of_loops, tmp_path, batch, mapping):
    few = ["--clients", "4", "--clusters", "2", "--rounds", "1", "--model", "mlp", "--examples-per-client", "20"]
    plan = ["plan", "fedavg", *few, "--target", "h100:2", "--batch-size", batch, *mapping, "--out", str(tmp_path)]
    flops = []
    for steps in (["--local-epochs", "3"], ["--local-steps", "6" if batch == "10" else "3"]):
        assert cli.main([*plan, *steps]) == 0
        flops.append(json.loads((tmp_path / "plan.json").read_text())["flops"])
    assert flops[0] == flops[1] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "Give a target, such as --target v5e:2x4"),
        (["--target", "v5e:2x3"], "unknown slice of v5e"),
        (["--target", "h100:2", "--population", "100"], "clients must be left out with --population"),
        (["--target", "h100:2", "--population", "8"], "population must be left out: plan a cohort"),
        (["--target", "h100:2", "--mapping", "pmap"], "mapping must be vmap, chunked, sharded or auto"),
        (["--target", "h100:2", "--devices", "2"], "devices must be left out"),
        (["--target", "h100:2", "--model", "mpl"], "did you mean 'mlp'?"),
        (["--tagret", "h100:2"], "did you mean --target?"),
    ],
)
def test_the_command_refuses(on_cpu, options, said, capsys):
    assert cli.main(["plan", "fedavg", *QUICK, *options]) == 2
    printed = capsys.readouterr().err
    assert said in printed.replace("\n", " ") and printed.lstrip("\n").startswith("jfcl: error:")  # no line of the bar


def test_the_command_explains_itself(capsys):
    for arguments in (["plan", "--help"], ["plan", "cfl", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        printed = capsys.readouterr().out
        assert "--target" in printed and "jfcl plan" in printed and "--local-steps" in printed
        assert ("--eps-1" in printed) == ("cfl" in arguments)


def test_a_folder_of_a_run_is_not_written_into(on_cpu, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["plan", "fedavg", *QUICK, "--target", "h100:2", "--out", str(tmp_path)]) == 2
    assert "a folder without a run" in capsys.readouterr().err.replace("\n", " ")
    assert [f.name for f in tmp_path.iterdir()] == ["config.json"]


# ---------------------------------------------------------------------------------------------------------------
# The real compilers.


def mesh_or_skip(target):
    try:
        return targets.mesh(target)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:1x1", "v6e:2x2", "v5p:2x2x1", "v4-8", "a100", "h100", "h200", "b200"])
def test_plain_products_are_predicted_near_the_peak(target):
    """8,192^3 in bfloat16: what large products reach on these chips, and never more than the peak."""
    mesh = mesh_or_skip(target)
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16, sharding=whole)
    found = price(jax.jit(jnp.matmul).lower(x, x).compile().as_text(), targets.target(target))
    assert found.flops == 2 * 8192**3 and 0.4 < found.mfu <= 1, found.mfu


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x2", "h100"])
def test_the_command_compiles_for_a_target(target, tmp_path):
    mesh_or_skip(target)
    out = tmp_path / "plan"
    options = ["--precision", "bfloat16", "--mapping", "vmap"]
    assert cli.main(["plan", "ifca", *QUICK, *options, "--target", target, "--out", str(out)]) == 0
    kept = json.loads((out / "plan.json").read_text())
    chips = targets.target(target).count
    assert kept["fits"] and kept["seconds_per_round"] < 0.01 and (kept["collectives"] != {}) == (chips > 1)
    assert max(kept["precision"]["training"], key=kept["precision"]["training"].get) == "bfloat16"
    assert "custom" in (out / "step.hlo.txt").read_text() or "fusion" in (out / "step.hlo.txt").read_text()


@pytest.mark.slow
def test_a_program_that_the_tpu_compiler_refuses_does_not_fit():
    mesh_or_skip("v5e:1x1")
    _, _, task, training = problem()
    clients = jfcl.Clients(
        {"x": jax.ShapeDtypeStruct((100, 2**20, 64), jnp.float32), "y": jax.ShapeDtypeStruct((100, 2**20), jnp.int32)},
        jax.ShapeDtypeStruct((100,), jnp.int32),
    )
    task = jfcl.models.classification(jfcl.models.MLP(10), (64,), 10)
    made = lambda axis: jfcl.fedavg(task, training, client_axis=axis)  # noqa: E731
    found = plan(made, clients, target="v5e:1x1", inner=[jax.vmap])
    assert not found.fits and found.needed_bytes > 100 * 2**20 * 64 * 4
