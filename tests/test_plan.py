"""Plans for accelerators that are not there: the reader of compiled programs, their price, targets, and the command.

Counts are compared with those of hand-written programs, and of programs compiled for the CPU. The tests of the real
compilers are slow, and are skipped where those are not installed.
"""
# ruff: noqa: E501  (instructions of XLA are long lines)

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jfcl
from jfcl import cli
from jfcl.execution import hlo, memory, targets
from jfcl.execution.cost import price
from jfcl.execution.mapping import client_mesh
from jfcl.execution.plan import candidates, plan
from jfcl.testing import problem

V5E, H100 = targets.target("v5e:2x2"), targets.target("h100")
QUICK = ["--clients", "8", "--clusters", "2", "--rounds", "3", "--local-steps", "2", "--quiet"]

# A product of [4, 8] and [8, 16] in a loop of 3 x 5 trips, the inner one with the compiler's own count.
LOOPS = f"""
HloModule nested, is_scheduled=true

FileNames
1 "/usr/lib/python3/site-packages/flax/linen.py"
2 "{hlo._PACKAGE}/kernels/similarity.py"
3 "{hlo._PACKAGE}/execution/mapping.py"
4 "/home/user/my_model.py"

FunctionNames
1 "Dense.__call__"
2 "pairwise_cosine.<locals>.tile"
3 "chunked.__call__"
4 "train"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=2}}
2 {{file_name_id=2 function_name_id=2 line=7 end_line=7 column=1 end_column=2}}
3 {{file_name_id=3 function_name_id=3 line=9 end_line=9 column=1 end_column=2}}
4 {{file_name_id=4 function_name_id=4 line=5 end_line=5 column=1 end_column=2}}

StackFrames
1 {{file_location_id=3 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=1 parent_frame_id=3}}
4 {{file_location_id=4 parent_frame_id=1}}

%inner_body (p.1: (s32[], f32[4,8], f32[8,16], f32[4,16])) -> (s32[], f32[4,8], f32[8,16], f32[4,16]) {{
  %p.1 = (s32[], f32[4,8]{{1,0}}, f32[8,16]{{1,0}}, /*index=3*/f32[4,16]{{1,0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %one.1 = s32[] constant(1)
  %next.1 = s32[] add(%i.1, %one.1)
  %x.1 = f32[4,8]{{1,0:T(8,128)S(1)}} get-tuple-element(%p.1), index=1
  %y.1 = f32[8,16]{{1,0}} get-tuple-element(%p.1), index=2
  %z.1 = f32[4,16]{{1,0}} dot(%x.1, %y.1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, operand_precision={{highest,highest}}, metadata={{op_name="jit(step)/transpose(jvp())/dot_general" stack_frame_id=3}}
  ROOT %t.1 = (s32[], f32[4,8]{{1,0}}, f32[8,16]{{1,0}}, f32[4,16]{{1,0}}) tuple(%next.1, %x.1, %y.1, %z.1)
}}

%inner_condition (p.2: (s32[], f32[4,8], f32[8,16], f32[4,16])) -> pred[] {{
  %p.2 = (s32[], f32[4,8]{{1,0}}, f32[8,16]{{1,0}}, f32[4,16]{{1,0}}) parameter(0)
  ROOT %less.2 = pred[] custom-call(%p.2), custom_call_target="opaque"
}}

%outer_body (p.3: (s32[], f32[4,8], f32[8,16], f32[4,16])) -> (s32[], f32[4,8], f32[8,16], f32[4,16]) {{
  %p.3 = (s32[], f32[4,8]{{1,0}}, f32[8,16]{{1,0}}, f32[4,16]{{1,0}}) parameter(0)
  %loop.3 = (s32[], f32[4,8]{{1,0}}, f32[8,16]{{1,0}}, f32[4,16]{{1,0}}) while(%p.3), condition=%inner_condition, body=%inner_body, backend_config={{"known_trip_count":{{"n":"5"}}}}
  %sum.3 = f32[4,16]{{1,0}} get-tuple-element(%loop.3), index=3
  %reduced.3 = f32[4,16]{{1,0}} all-reduce(%sum.3), replica_groups={{}}, to_apply=%add
  ROOT %t.3 = (s32[], f32[4,8]{{1,0}}, f32[8,16]{{1,0}}, f32[4,16]{{1,0}}) tuple(%loop.3, %loop.3, %loop.3, %reduced.3)
}}

%outer_condition (p.4: (s32[], f32[4,8], f32[8,16], f32[4,16])) -> pred[] {{
  %p.4 = (s32[], f32[4,8]{{1,0}}, f32[8,16]{{1,0}}, f32[4,16]{{1,0}}) parameter(0)
  %i.4 = s32[] get-tuple-element(%p.4), index=0
  %limit.4 = s32[] constant(5)
  ROOT %less.4 = pred[] compare(%i.4, %limit.4), direction=LT
}}

ENTRY %main (x: f32[4,8], y: f32[8,16], z: f32[4,16]) -> (s32[], f32[4,8], f32[8,16], f32[4,16]) {{
  %x = f32[4,8]{{1,0}} parameter(0)
  %y = f32[8,16]{{1,0}} parameter(1)
  %z = f32[4,16]{{1,0}} parameter(2)
  %two = s32[] constant(2)
  %copied = s32[] copy(%two)
  %all = (s32[], f32[4,8]{{1,0}}, f32[8,16]{{1,0}}, f32[4,16]{{1,0}}) tuple(%copied, %x, %y, %z)
  ROOT %loop = (s32[], f32[4,8]{{1,0}}, f32[8,16]{{1,0}}, f32[4,16]{{1,0}}) while(%all), condition=%outer_condition, body=%outer_body
}}
"""


def compiled(fn, *args):
    return jax.jit(fn).lower(*args).compile().as_text()


# ---------------------------------------------------------------------------------------------------------------
# The reader.


def test_instructions_are_read():
    program = hlo.parse(LOOPS)
    assert program.entry == "main" and len(program.computations) == 5
    product = program.computations["inner_body"]["z.1"]
    assert product.op == "dot" and product.operands == ("x.1", "y.1") and not product.is_root
    assert product.arrays == (hlo.Array("f32", (4, 16)),) and product.arrays[0].nbytes == 4 * 4 * 16
    x, whole = program.computations["inner_body"]["x.1"], program.computations["inner_body"]["p.1"]
    assert not x.arrays[0].in_memory and [a.shape for a in whole.arrays] == [(), (4, 8), (8, 16), (4, 16)]
    assert hlo.numbers(product, "lhs_contracting_dims") == (1,)
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("HloModule nothing")


@pytest.mark.parametrize(("direction", "trips"), [("LT", 3), ("LE", 4)])
def test_trips_are_the_limit_less_the_first_value(direction, trips):
    program = hlo.parse(LOOPS.replace("direction=LT", f"direction={direction}"))
    assert hlo.trip_count(program, "main", program.computations["main"]["loop"]) == (trips, True)
    inner = program.computations["outer_body"]["loop.3"]
    assert hlo.trip_count(program, "outer_body", inner) == (5, True)


def test_a_loop_that_may_end_early_is_uncertain():
    text = LOOPS.replace(
        "ROOT %less.4 = pred[] compare(%i.4, %limit.4), direction=LT",
        "%less.5 = pred[] compare(%i.4, %limit.4), direction=LT\n  ROOT %less.4 = pred[] and(%less.5, %less.5)",
    )
    program = hlo.parse(text)
    assert hlo.trip_count(program, "main", program.computations["main"]["loop"]) == (3, False)
    program = hlo.parse(text.replace("constant(5)", "constant(-5)"))
    assert hlo.trip_count(program, "main", program.computations["main"]["loop"]) == (None, False)
    assert price(program, H100).sequential_steps == 5  # once


def test_functions_are_those_of_the_library_or_of_the_user():
    program = hlo.parse(LOOPS)
    product = program.computations["inner_body"]["z.1"]
    assert hlo.source(program, product) == "kernels.similarity.pairwise_cosine (gradient)"
    assert hlo.is_kernel(program, product)
    for frame, name in ((1, "execution.mapping.chunked.__call__"), (4, "my_model.train"), (9, "")):
        moved = product._replace(attributes=f"metadata={{stack_frame_id={frame}}}")
        assert hlo.source(program, moved) == name and not hlo.is_kernel(program, moved)


# ---------------------------------------------------------------------------------------------------------------
# The price.


def test_loops_multiply_what_is_in_them():
    found = price(LOOPS, H100)
    assert found.flops == 3 * 5 * 2 * 4 * 8 * 16
    assert found.precision == {"kernels": {"float32": found.flops}}
    assert found.collectives == {"all-reduce": [3, 3 * 4 * 4 * 16]}
    assert found.sequential_steps == 15
    assert [(loop.trips, loop.certain, loop.collectives) for loop in found.loops] == [(5, True, 0), (3, True, 1)]
    assert found.seconds == pytest.approx(sum(found.parts.values())) == pytest.approx(sum(found.limits.values()))


def test_cycles_of_the_tpu_compiler_are_its_seconds():
    noted = ', backend_config={"estimated_cycles":"3000"}'
    text = LOOPS.replace("stack_frame_id=3}", f"stack_frame_id=3}}{noted}")
    found = price(text, V5E)
    assert found.parts["kernels.similarity.pairwise_cosine (gradient)"] == pytest.approx(15 * 3000 / 1.5e9)
    assert "dot" not in found.guessed and price(LOOPS, V5E).guessed["dot"] > 0


@pytest.mark.parametrize(
    ("dtype", "asked", "on_tpu", "on_gpu"),
    [
        ("f32", "default,default", "bfloat16", "tf32"),
        ("f32", "high,high", "bfloat16 x 3", "float32"),
        ("f32", "highest,highest", "float32", "float32"),
        ("bf16", "default,default", "bfloat16", "bfloat16"),
        ("f64", "highest,highest", "float64", "float64"),
    ],
)
def test_precision_of_products(dtype, asked, on_tpu, on_gpu):
    text = LOOPS.replace("f32[", f"{dtype}[").replace("highest,highest", asked)
    assert list(price(text, V5E).precision["kernels"]) == [on_tpu]
    assert list(price(text, H100).precision["kernels"]) == [on_gpu]
    algorithm = LOOPS.replace("operand_precision={highest,highest}", "algorithm=dot_bf16_bf16_f32_x3")
    assert list(price(algorithm, H100).precision["kernels"]) == ["bfloat16 x 3"]


def test_a_conditional_costs_its_longest_or_shortest_branch():
    def step(x, y, rare):
        return jax.lax.cond(rare, lambda: x @ y @ y, lambda: x + jnp.ones_like(x))

    text = compiled(step, jnp.ones((32, 64)), jnp.ones((64, 64)), True)
    assert price(text, H100).flops == 2 * 2 * 32 * 64 * 64 and price(text, H100, rare=False).flops == 0


@pytest.mark.parametrize("seed", range(8))
def test_operations_of_convolutions(seed):
    """Products of real inputs, one by one, against the count: strides, padding, dilation of inputs and of windows."""
    rng = np.random.default_rng(seed)
    n, size = rng.integers(3, 9, 2), rng.integers(1, 4, 2)
    stride, low, high = rng.integers(1, 3, 2), rng.integers(0, 3, 2), rng.integers(0, 3, 2)
    spread, dilated = rng.integers(1, 3, 2), rng.integers(1, 3, 2)
    extent = (n - 1) * spread + 1 + low + high
    out = (extent - (size - 1) * dilated - 1) // stride + 1
    if out.min() < 1:
        pytest.skip("no output")
    expected = 0
    for o in itertools.product(*map(range, out)):
        for w in itertools.product(*map(range, size)):
            at = [o[d] * stride[d] + w[d] * dilated[d] - low[d] for d in range(2)]
            expected += all(a >= 0 and a % spread[d] == 0 and a // spread[d] < n[d] for d, a in enumerate(at))
    x = lambda values: "x".join(map(str, values))  # noqa: E731
    pads = "x".join(f"{a}_{b}" for a, b in zip(low, high, strict=True))
    text = f"""
ENTRY %main (x: f32[2,{n[0]},{n[1]},3], k: f32[{size[0]},{size[1]},3,5]) -> f32[2,{out[0]},{out[1]},5] {{
  %x = f32[2,{n[0]},{n[1]},3]{{3,2,1,0}} parameter(0)
  %k = f32[{size[0]},{size[1]},3,5]{{3,2,1,0}} parameter(1)
  ROOT %c = f32[2,{out[0]},{out[1]},5]{{3,2,1,0}} convolution(%x, %k), window={{size={x(size)} stride={x(stride)} pad={pads} lhs_dilate={x(spread)} rhs_dilate={x(dilated)}}}, dim_labels=b01f_01io->b01f
}}"""
    assert price(text, H100).flops == 2 * 2 * 3 * 5 * expected


def test_compiled_loops_have_the_operations_of_their_products():
    def step(x, y):
        inner = lambda _, x: jnp.tanh(x @ y)  # noqa: E731
        return jax.lax.fori_loop(0, 7, lambda _, x: jax.lax.fori_loop(0, 3, inner, x) + jnp.ones_like(x), x)

    found = price(compiled(step, jnp.ones((48, 64)), jnp.ones((64, 64))), H100)
    assert found.flops == 21 * 2 * 48 * 64 * 64 and found.sequential_steps == 21


def test_compiled_collectives_are_counted_with_their_bytes():
    mesh = client_mesh(2)
    rows = NamedSharding(mesh, PartitionSpec("clients"))
    x = jax.device_put(jnp.ones((8, 32)), rows)
    text = compiled(lambda x: jnp.linalg.norm(x.sum(axis=0)), x)
    assert price(text, targets.target("h100:2")).collectives == {"all-reduce": [1, 32 * 4]}


def test_parts_have_the_names_of_kernels():
    found = price(compiled(jfcl.kernels.pairwise_cosine, jnp.ones((20, 50))), H100)
    assert any(name.startswith("kernels.similarity.") for name in found.parts), found.parts
    assert set(found.precision) == {"kernels"} and found.flops >= 2 * 20 * 20 * 50


def test_only_slices_are_read():
    """A loop that takes one row of a large array at a time does not read the array in every trip."""
    x = jnp.ones((64, 4096))
    text = compiled(lambda x: jax.lax.fori_loop(0, 64, lambda i, s: s + jnp.tanh(x[i]), jnp.zeros(4096)), x)
    assert price(text, H100).bytes_moved < 8 * x.nbytes


# ---------------------------------------------------------------------------------------------------------------
# Targets.


def test_targets_have_the_chips_of_their_slices():
    assert [targets.target(name).count for name in ("v5e:1x1", "v5e:2x4", "v6e:16x16", "v5p:4x4x8")] == [1, 8, 256, 128]
    assert targets.target("H100").name == "h100" and targets.target("h100:8").count == 8
    assert targets.larger(V5E, 1.1) == "v5e:2x4" and targets.larger(targets.target("v5e:16x16"), 2) is None
    for chip in targets.CHIPS.values():
        assert chip.bfloat16 > chip.tf32 > chip.float32 and chip.link < chip.bandwidth
        assert not chip.is_tpu or chip.float32 == chip.bfloat16 / 6


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("v5x:2x2", ["unknown target 'v5x:2x2'", "did you mean 'v5"]),
        ("h10", ["did you mean 'h100'?"]),
        ("rtx", ["unknown target 'rtx'", "v5e:2x2", "h100", "b200"]),
        ("v5e:3x3", ["a slice of v5e that exists: 1x1, 2x2, 2x4", "the nearest is v5e:"]),
        ("v5e", ["a slice of v5e"]),
        ("v5p:2x2", ["the nearest is v5p:2x2x"]),
        ("h100:3", ["a slice of h100 that exists: 1, 2, 4, 8"]),
        ("", ["unknown target ''"]),
    ],
)
def test_refuses_targets(name, parts):
    with pytest.raises(ValueError) as error:
        targets.target(name)
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize(
    ("target", "versions", "said"),
    [
        ("v5e:2x2", {}, r"needs the TPU compiler: pip install 'jfcl\[plan-tpu\]' jax==9.9"),
        ("v5e:2x2", {"libtpu": "0.0.1"}, r"libtpu is of version 0.0.1, but jax 9.9 needs 0.0.\d+: pip install"),
        ("h100", {}, r"needs the CUDA compiler: pip install 'jfcl\[plan-gpu\]' jax-cuda12-plugin==9.9"),
        ("h100", {"jax-cuda12-plugin": "0.4.1"}, r"jax-cuda12-plugin is of version 0.4.1, but jax 9.9 needs 9.9: pip"),
    ],
)
def test_compilers_that_are_not_there(monkeypatch, target, versions, said):
    monkeypatch.setattr(targets, "_version", ({"jax": "9.9"} | versions).get)
    monkeypatch.setattr(targets.os, "environ", {})
    with pytest.raises(ValueError, match=said):
        targets.mesh(target)


def test_compilers_that_fail(monkeypatch):
    from jax.experimental import topologies

    def fails(**_):
        raise RuntimeError("INVALID_ARGUMENT: version 3 is too old\nmore")

    monkeypatch.setattr(topologies, "get_topology_desc", fails)
    monkeypatch.setattr(targets, "_version", lambda name: "1.2")
    monkeypatch.setattr(targets, "_libtpu_of_jax", lambda: None)
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


def make(axis):
    _, _, task, training = problem()
    return jfcl.ifca(task, training, num_clusters=2, client_axis=axis)


def test_candidates_leave_no_rest_where_they_can():
    assert candidates(100, 1)[1:] == [jfcl.chunked(1), jfcl.chunked(10)]
    assert candidates(1201, 1)[1:] == [jfcl.chunked(size) for size in (1, 8, 64, 256)]
    assert candidates(3, 4) == [jax.vmap]


def test_a_plan_has_the_fastest_mapping_that_fits(on_cpu, monkeypatch):
    clients, ticks = problem()[0], []
    found = plan(make, clients, target="h100:2", other_bytes=1000, tick=lambda *step: ticks.append(step))
    assert found.fits and found.advice == "" and found.other_bytes == 1000
    assert found.needed_bytes >= found.argument_bytes + found.output_bytes + found.temp_bytes
    assert found.needed_bytes < found.limit_bytes == 80e9
    assert found.cost.seconds == min(c.seconds for c in found.candidates) == found.candidates[0].seconds
    assert len(ticks) == len(found.candidates) + 1 == ticks[0][1]
    assert found.seconds(10) == pytest.approx(found.init_seconds + 10 * found.cost.seconds)
    assert sum(count for count, _ in found.cost.collectives.values()) > 0
    for text in (found.step_hlo, found.init_hlo):
        assert text.startswith("HloModule")
    # With too little memory, nothing fits, and the advice is larger slices, which two of eight are not yet.
    chip = targets.CHIPS["h100"]._replace(memory=1000.0)
    monkeypatch.setitem(targets.CHIPS, "h100", chip)
    small = plan(make, clients, target="h100:2", inner=[jax.vmap])
    assert not small.fits and small.limit_bytes == 1000 and "--chunk" in small.advice and small.cost is not None
    assert small.needed_bytes > 1000


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
    from jfcl.execution.plan import _Refused, _Work

    monkeypatch.setattr(_Work, "finished", lambda self, lowered: _Refused(18_400_000_000))
    monkeypatch.setitem(targets.CHIPS, "h100", targets.CHIPS["h100"]._replace(memory=16e9))
    found = plan(make, problem()[0], target="h100:2")
    assert not found.fits and found.cost is None and found.needed_bytes == 18_400_000_000
    assert "--target h100:4" in found.advice and math.isnan(found.seconds(5)) and found.step_hlo == ""
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
        patched.setattr(memory.jax, "jit", lambda *_: Refuses())
        with pytest.raises(
            ValueError, match=rf"memory must be at most the 0.0 GB that are free.*{size * 1.0737:.1f} GB"
        ):
            memory.check_memory(algorithm, clients, jax.vmap, state)


def test_the_command_writes_its_files(on_cpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "plan"
    assert cli.main(["plan", "ifca", *QUICK, "--target", "h100:2", "--chunk", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "a round, predicted" in printed and "times are predictions" in printed.replace("\n", " ")
    assert max(map(len, printed.splitlines())) <= 80
    kept = json.loads((out / "plan.json").read_text())
    named = "target mapping chunk fits argument_bytes temp_bytes limit_bytes seconds_per_round flops mfu precision"
    assert {*named.split(), "collectives", "sequential_steps", "seconds"} <= kept.keys()
    assert kept["mapping"] == "chunked" and kept["chunk"] == 2 and kept["fits"] and kept["num_rounds"] == 3
    assert kept["seconds"] > 3 * kept["seconds_per_round"] > 0
    assert {f.name for f in out.iterdir()} == {"plan.json", "plan.png", "step.hlo.txt", "init.hlo.txt"}
    assert (out / "step.hlo.txt").read_text().startswith("HloModule")
    # What does not fit is printed, kept, and refused.
    monkeypatch.setitem(targets.CHIPS, "h100", targets.CHIPS["h100"]._replace(memory=1000.0))
    assert cli.main(["plan", "ifca", *QUICK, "--target", "h100:2", "--mapping", "vmap", "--out", str(out)]) == 2
    assert "may fit" in capsys.readouterr().err and not json.loads((out / "plan.json").read_text())["fits"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "target must be given, such as --target v5e:2x4"),
        (["--target", "v5e:2x3"], "a slice of v5e that exists"),
        (["--target", "h100:2", "--population", "100"], "population must be left out"),
        (["--target", "h100:2", "--mapping", "pmap"], "mapping must be vmap, chunked, sharded or auto"),
        (["--target", "h100:2", "--mapping", "chunked"], "chunk must be given with --mapping chunked"),
        (["--target", "h100:2", "--devices", "2"], "devices must be left out"),
        (["--target", "h100:2", "--model", "mpl"], "did you mean 'mlp'?"),
        (["--tagret", "h100:2"], "did you mean --target?"),
    ],
)
def test_the_command_refuses(on_cpu, options, said, capsys):
    assert cli.main(["plan", "fedavg", *QUICK, *options]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


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
@pytest.mark.parametrize("target", ["v5e:1x1", "v6e:2x2", "v5p:2x2x1", "a100", "h100", "h200", "b200"])
def test_plain_products_are_predicted_near_the_peak(target):
    """8,192^3 in bfloat16: what large products reach on these chips, and never more than the peak."""
    mesh = mesh_or_skip(target)
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16, sharding=whole)
    found = price(compiled(lambda x, y: x @ y, x, x), targets.target(target))
    assert found.flops == 2 * 8192**3 and 0.4 < found.mfu <= 1, found.mfu


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x2", "h100"])
def test_the_command_compiles_for_a_target(target, tmp_path, capsys):
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
    assert not found.fits and found.needed_bytes > 100 * 2**20 * 64 * 4 and "v5e:" in found.advice
