"""The reader of compiled programs, and their price.

Counts are compared with those of hand-written programs, and of programs compiled for the CPU.
"""
# ruff: noqa: E501  (instructions of XLA are long lines)

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jfcl
from jfcl.kernels.gram_gpu import upper_products
from jfcl.mapping.axis import client_mesh
from jfcl.planning import hlo, targets
from jfcl.planning.cost import price

V5E, H100 = targets.target("v5e:2x2"), targets.target("h100")

# A product of [4, 8] and [8, 16] in a loop of 3 x 5 trips, the inner one with the compiler's own count.
LOOPS = f"""
HloModule nested, is_scheduled=true

FileNames
1 "/usr/lib/python3/site-packages/flax/linen.py"
2 "{hlo._PACKAGE}/kernels/similarity.py"
3 "{hlo._PACKAGE}/mapping/axis.py"
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
    assert product.op == "dot" and [x.name for x in product.operands] == ["x.1", "y.1"] and not product.is_root
    assert product.arrays == (hlo.Array("f32", (4, 16)),) and product.arrays[0].nbytes == 4 * 4 * 16
    x, whole = program.computations["inner_body"]["x.1"], program.computations["inner_body"]["p.1"]
    assert not x.arrays[0].in_memory and [a.shape for a in whole.arrays] == [(), (4, 8), (8, 16), (4, 16)]
    assert hlo.numbers(product, "lhs_contracting_dims") == (1,)
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("HloModule nothing")


@pytest.mark.parametrize(("direction", "trips"), [("LT", 3), ("LE", 4)])
def test_trips_are_the_limit_less_the_first_value(direction, trips):
    program = hlo.parse(LOOPS.replace("direction=LT", f"direction={direction}"))
    assert hlo.trip_count(program, program.computations["main"]["loop"]) == trips
    inner = program.computations["outer_body"]["loop.3"]
    assert hlo.trip_count(program, inner) == 5


def test_a_loop_that_may_end_early_has_the_most_trips():
    text = LOOPS.replace(
        "ROOT %less.4 = pred[] compare(%i.4, %limit.4), direction=LT",
        "%less.5 = pred[] compare(%i.4, %limit.4), direction=LT\n  ROOT %less.4 = pred[] and(%less.5, %less.5)",
    )
    program = hlo.parse(text)
    assert hlo.trip_count(program, program.computations["main"]["loop"]) == 3
    program = hlo.parse(text.replace("constant(5)", "constant(-5)"))
    assert hlo.trip_count(program, program.computations["main"]["loop"]) is None
    assert price(program, H100).sequential_steps == 5  # once
    loop = program.computations["main"]["loop"]
    for name in ("at_most_7_trips/while", "while/body/vmap(vmap(at_most_7_trips))/while"):
        named = loop._replace(attributes=f'{loop.attributes}, metadata={{op_name="jit(step)/{name}"}}')
        assert hlo.trip_count(program, named) == 7
    inside = loop._replace(attributes=f'{loop.attributes}, metadata={{op_name="at_most_7_trips/while/body/while"}}')
    assert hlo.trip_count(program, inside) is None


def test_functions_are_those_of_the_library_or_of_the_user():
    program = hlo.parse(LOOPS)
    product = program.computations["inner_body"]["z.1"]
    assert hlo.source(program, product) == "kernels.similarity.pairwise_cosine (gradient)"
    assert hlo.is_kernel(program, product)
    for frame, name in ((1, "mapping.axis.chunked.__call__"), (4, "my_model.train"), (9, "")):
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
    assert [(loop.trips, loop.collectives) for loop in found.loops] == [(5, 0), (3, 1)]
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.seconds == pytest.approx((15 * 3 + 3 * 1 + 1 + 3) * 3e-6, rel=0.01)  # kernels, and three collectives


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


def test_operations_of_a_long_convolution_are_those_of_all_its_windows():
    text = """
ENTRY %main (x: f32[1,3000002,1], k: f32[3,1,1]) -> f32[1,3000000,1] {
  %x = f32[1,3000002,1]{2,1,0} parameter(0)
  %k = f32[3,1,1]{2,1,0} parameter(1)
  ROOT %c = f32[1,3000000,1]{2,1,0} convolution(%x, %k), window={size=3}, dim_labels=b0f_0io->b0f
}"""
    assert price(text, H100).flops == 2 * 3 * 3_000_000


@pytest.mark.parametrize(
    ("kind", "left", "right", "out"),
    [
        ("Forward", "8,16,14,14", "32,16,3,3", "8,32,14,14"),
        ("BackwardInput", "8,32,14,14", "32,16,3,3", "8,16,14,14"),
        ("BackwardFilter", "8,16,14,14", "8,32,14,14", "32,16,3,3"),
    ],
)
def test_gradients_of_a_convolution_have_its_operations(kind, left, right, out):
    """cuDNN's calls have the labels of the convolution itself, of which the result is another array."""
    text = f"""
ENTRY %main (x: f32[{left}], y: f32[{right}]) -> (f32[{out}], u8[0]) {{
  %x = f32[{left}]{{3,2,1,0}} parameter(0)
  %y = f32[{right}]{{3,2,1,0}} parameter(1)
  ROOT %c = (f32[{out}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%x, %y), window={{size=3x3 pad=1_1x1_1}}, dim_labels=bf01_oi01->bf01, custom_call_target="__cudnn$conv{kind}"
}}"""
    inside = sum(3 - (at in (0, 13)) for at in range(14)) ** 2  # of the image, for all places of the window
    assert price(text, H100).flops == 2 * 8 * 16 * 32 * inside


@pytest.mark.parametrize(("kind", "times"), [("Forward", 6), ("BackwardInput", 6), ("BackwardFilter", 16)])
def test_convolutions_with_groups_are_slow_on_a_gpu(kind, times):
    def seconds(groups):
        text = f"""
ENTRY %main (x: f32[8,64,14,14], y: f32[64,32,3,3]) -> (f32[8,64,14,14], u8[0]) {{
  %x = f32[8,64,14,14]{{3,2,1,0}} parameter(0)
  %y = f32[64,32,3,3]{{3,2,1,0}} parameter(1)
  ROOT %c = (f32[8,64,14,14], u8[0]{{0}}) custom-call(%x, %y), window={{size=3x3 pad=1_1x1_1}}, dim_labels=bf01_oi01->bf01{groups}, custom_call_target="__cudnn$conv{kind}"
}}"""
        return price(text, H100).seconds

    launch = 3e-6
    assert seconds(", feature_group_count=1") == seconds("") > launch
    assert seconds(", feature_group_count=2") - launch == pytest.approx(times * (seconds("") - launch))


def test_compiled_loops_have_the_operations_of_their_products():
    def step(x, y):
        inner = lambda _, x: jnp.tanh(x @ y)  # noqa: E731
        return jax.lax.fori_loop(0, 7, lambda _, x: jax.lax.fori_loop(0, 3, inner, x) + jnp.ones_like(x), x)

    found = price(compiled(step, jnp.ones((48, 64)), jnp.ones((64, 64))), H100)
    assert found.flops == 21 * 2 * 48 * 64 * 64 and found.sequential_steps == 21


@pytest.mark.parametrize("models", [(), (3,)])  # Federated-Clustering has the gradients at several models at once
def test_the_kernel_of_long_rows_has_the_operations_of_its_tiles(models):
    """300 rows are 15 pairs of tiles, the upper triangle of 5 x 5, of 64 rows each."""
    traced = jax.jit(jax.vmap(upper_products) if models else upper_products).trace(
        jax.ShapeDtypeStruct((*models, 300, 20_000), jnp.float32)
    )
    try:
        lowered = traced.lower(lowering_platforms=("cuda",))
    except RuntimeError as error:  # of JAX 0.12: "No supported GPU devices found"
        pytest.skip(f"this JAX lowers Triton's kernels beside a GPU alone: {str(error).splitlines()[0]}")
    (line,) = (line for line in lowered.as_text("hlo").splitlines() if "gpu.triton" in line)
    shape, name = re.search(r"= (\S+) custom-call", line)[1], re.search(r'\bname = "\w+"', line)[0]
    rows = ",".join(map(str, (*models, 300, 20_000)))
    text = f"""ENTRY %main (a: bf16[{rows}]) -> {shape} {{
  %a = bf16[{rows}] parameter(0)
  ROOT %out = {shape} custom-call(%a, %a), custom_call_target="__gpu$xla.gpu.triton", backend_config={{grid_x = 15, {name}}}
}}"""
    found = price(text, H100)
    expected = math.prod(models) * 15 * 2 * 64 * 64 * 20_000
    assert found.flops == found.precision["training"]["bfloat16 x 3"] == expected
    assert found.seconds > 3 * found.flops / H100.chip.bfloat16


def test_compiled_collectives_are_counted_with_their_bytes():
    mesh = client_mesh(2)
    rows = NamedSharding(mesh, PartitionSpec("clients"))
    x = jax.device_put(jnp.ones((8, 32)), rows)
    text = compiled(lambda x: jnp.linalg.norm(x.sum(axis=0)), x)
    assert price(text, targets.target("h100:2")).collectives == {"all-reduce": [1, 32 * 4]}


@pytest.mark.parametrize(
    ("kind", "result", "size", "share"),
    [
        ("all-reduce", "f32[400,64]", 400, 6 / 4),
        ("all-gather", "f32[1600,64]", 1600, 3 / 4),
        ("all-gather-start", "(f32[400,64], f32[1600,64])", 1600, 3 / 4),
        ("reduce-scatter", "f32[100,64]", 400, 3 / 4),
        ("collective-permute-start", "(f32[400,64], f32[400,64])", 400, 1),
    ],
)
def test_collectives_send_parts_around_a_ring(kind, result, size, share):
    """Of four chips: each sends three quarters of what it adds up, and three quarters of what all receive."""
    text = f"""
ENTRY %main (x: f32[400,64]) -> {result} {{
  %x = f32[400,64]{{1,0}} parameter(0)
  ROOT %y = {result} {kind}(%x), replica_groups={{}}, dimensions={{0}}
}}"""
    found, size = price(text, targets.target("h100:4")), 4 * 64 * size
    assert found.collectives == {kind.removesuffix("-start"): [1, size]}
    assert found.seconds == pytest.approx(share * size / H100.chip.link + 3e-6)


LARGE, ROWS = 4 * 4096**2, 4 * 16 * 4096  # bytes
PRODUCT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
NOTED = 'custom_call_target="__cublas$gemm", backend_config={"lhs_contracting_dimensions":["1"]}'
COPY, NEGATE = "(f32[4096,4096], f32[4096,4096], u32[]) copy-start(%x)", "f32[4096,4096] negate(%x)"


@pytest.mark.parametrize(
    ("lines", "on_gpu", "on_tpu"),
    [
        ([f"f32[4096,4096] dot(%x, %x), {PRODUCT}"], 2 * 4096**3 / (0.7 * 494e12) + 3e-6, None),
        ([f"f32[4096,4096] dot(%m, %x), {PRODUCT}"], 2 * 4096**3 / (0.7 * 494e12) + 3e-6, None),
        ([f"f64[4096,4096] dot(%d, %d), {PRODUCT}"], 2 * 4096**3 / (0.7 * 33.5e12) + 3e-6, None),
        ([f"f32[4096,4096] custom-call(%x, %x), {NOTED}"], 2 * 4096**3 / (0.7 * 494e12) + 3e-6, None),
        ([NEGATE], 2 * LARGE / 3350e9 + 3e-6, 2 * LARGE / 819e9 + 1.2e-6),
        ([COPY], LARGE / 3350e9, LARGE / 819e9),
        ([COPY, NEGATE], 2 * LARGE / 3350e9 + 3e-6, 2 * LARGE / 819e9 + 1.2e-6),
        (["(f32[4096,4096], f32[16,4096], s32[]) slice-start(%x)"], ROWS / 3350e9, ROWS / 819e9),
        (["f32[16,4096] slice(%x)"], 2 * ROWS / 3350e9 + 3e-6, 2 * ROWS / 819e9 + 1.2e-6),
        (
            ["f32[4096,4096] dynamic-update-slice(%x, %u, %i)"],
            2 * ROWS / 3350e9 + 3e-6,
            2 * ROWS / 819e9 + 1.2e-6,
        ),
        (
            ["f32[16,4096] gather(%x, %i), slice_sizes={1,4096}"],
            2 * ROWS / 3350e9 + 3e-6,
            2 * ROWS / 819e9 + 1.2e-6 + 16 * 20 / 1.5e9,
        ),
        (
            ["f32[4096,4096] scatter(%x, %j, %u)"],
            (2 * LARGE + ROWS + 128) / 3350e9 + 3e-6,
            (2 * LARGE + ROWS + 128) / 819e9 + 1.2e-6 + 16 * 20 / 1.5e9,
        ),
        (
            ["f32[4096,4096] sort(%x), dimensions={1}"],
            20 * 2 * LARGE / 3350e9 + 3e-6,
            6 * 78 * 4096**2 / (1024 * 1.5e9) + 1.2e-6,  # 12 stages of 1 to 12 comparisons, on vectors of 1,024
        ),
        (["f32[] constant(1)", "f32[] negate(%y0)"], 8 / 3350e9 + 3e-6, 10 / 1.5e9),
    ],
)
def test_seconds_of_instructions(lines, on_gpu, on_tpu):
    text = "\n".join(f"  %y{i} = {line}" for i, line in enumerate(lines))
    text = f"""
ENTRY %main (x: f32[4096,4096]) -> f32[] {{
  %x = f32[4096,4096]{{1,0}} parameter(0)
  %m = pred[4096,4096]{{1,0}} parameter(1)
  %d = f64[4096,4096]{{1,0}} parameter(2)
  %u = f32[16,4096]{{1,0}} parameter(3)
  %i = s32[16,1]{{1,0}} parameter(4)
  %j = s32[16,2]{{1,0}} parameter(5)
{text}
}}"""
    found = price(text, H100)
    assert found.seconds == pytest.approx(on_gpu)
    assert found.mfu == pytest.approx(found.flops / 989e12 / on_gpu) and found.flops in (0, 2 * 4096**3)
    assert on_tpu is None or price(text, V5E).seconds == pytest.approx(on_tpu)


def test_parts_have_the_names_of_kernels():
    found = price(compiled(jfcl.kernels.pairwise_cosine, jnp.ones((20, 50))), H100)
    assert any(name.startswith("kernels.similarity.") for name in found.parts), found.parts
    assert set(found.precision) == {"kernels"} and found.flops >= 2 * 20 * 20 * 50


def test_only_slices_are_read():
    """A loop that takes one row of a large array at a time does not read the array in every trip."""
    x = jnp.ones((64, 4096))
    text = compiled(lambda x: jax.lax.fori_loop(0, 64, lambda i, s: s + jnp.tanh(x[i]), jnp.zeros(4096)), x)
    assert price(text, H100).bytes_moved < 8 * x.nbytes


def test_only_rows_are_written():
    """A loop that replaces one row at a time moves a row of each array in every trip, and not the arrays."""
    x = jnp.ones((64, 4096))
    replaced = lambda i, out: out.at[i].set(jnp.tanh(x[i]))  # noqa: E731
    text = compiled(lambda x: jax.lax.fori_loop(0, 64, replaced, jnp.zeros_like(x)), x)
    assert 2 * x.nbytes < price(text, H100).bytes_moved < 8 * x.nbytes


@pytest.mark.parametrize(
    ("root", "moved"),
    [
        ("ROOT %d = f32[100,64] dynamic-update-slice(%a, %u, %i, %i)", 2 * 256 + 4),
        ("%b = f32[100,64] bitcast(%a)\n  ROOT %d = f32[100,64] dynamic-update-slice(%b, %u, %i, %i)", 2 * 256 + 4),
        ("ROOT %e = f32[100,64] exp(%d)", 2 * 25600 + 260),
    ],
)
def test_bytes_of_a_row_that_is_replaced_in_place_or_in_a_copy(root, moved):
    copied = "" if "%d =" in root else "%d = f32[100,64] dynamic-update-slice(%a, %u, %i, %i)"
    text = f"""
%fused (a: f32[100,64], u: f32[1,64], i: s32[]) -> f32[100,64] {{
  %a = f32[100,64]{{1,0}} parameter(0)
  %u = f32[1,64]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  {copied}
  {root}
}}

ENTRY %main (a: f32[100,64], u: f32[1,64], i: s32[]) -> f32[100,64] {{
  %a = f32[100,64]{{1,0}} parameter(0)
  %u = f32[1,64]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[100,64]{{1,0}} fusion(%a, %u, %i), kind=kLoop, calls=%fused
}}"""
    assert price(text, H100).bytes_moved == moved
