"""Every method compiles for a TPU slice that is not here: what travels between chips, and at which precision.

The tests need libtpu (docs/plan.md) and are slow; without it they are skipped.
"""

import math
import re
from functools import partial

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_methods import ONE_STEP, OPTIONS

import jfcl
from jfcl.core import Clients
from jfcl.methods import METHODS
from jfcl.planning import cost, targets

pytestmark = pytest.mark.slow
SLICE = "v5e:2x2"
N, M = 24, 12
MODELS = {"mlp": (jfcl.models.MLP(10, hidden=(16,)), (8, 8, 1)), "cnn": (jfcl.models.CNNMnist(10), (16, 16, 1))}
MOST_COLLECTIVES = 40


class Normalised(nn.Module):
    """For FedBN: a dense or a convolutional layer, batch normalisation, and a head."""

    convolution: bool

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Conv(4, (3, 3))(x) if self.convolution else nn.Dense(16)(x.reshape(len(x), -1))
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


@pytest.fixture(scope="module")
def mesh():
    try:
        return targets.mesh(SLICE)
    except ValueError as error:
        pytest.skip(str(error))


def compiled(name, model, mesh):
    """The texts of `init` and `step`, compiled for the clients divided among four chips."""
    module, shape = MODELS[model]
    module = Normalised(model == "cnn") if name == "fedbn" else module
    task = jfcl.models.classification(module, shape, 10)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=1 if name in ONE_STEP else 3)
    options = OPTIONS.get(name, {}) | ({"cluster": np.arange(N) % 2} if name == "oracle" else {})
    algorithm = partial(METHODS[name].make, **options)(task, training, client_axis=jfcl.sharded(mesh, jax.vmap))
    split, same = NamedSharding(mesh, PartitionSpec("clients")), NamedSharding(mesh, PartitionSpec())
    shaped = partial(jax.ShapeDtypeStruct, sharding=split)
    examples = {"x": shaped((N, M, *shape), np.float32), "y": shaped((N, M), np.int32)}
    clients = Clients(examples, shaped((N,), np.int32), shaped((N,), np.int32))
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=same)

    def placed(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split if x.shape[:1] == (N,) else same)

    state = jax.tree.map(placed, jax.eval_shape(algorithm.init, key, clients))
    options = {"optimization_level": 9}  # O0: faster; what travels does not depend on it
    with targets.not_cached():
        init = jax.jit(algorithm.init).lower(key, clients).compile(compiler_options=options)
        step = jax.jit(algorithm.step).lower(key, state, clients).compile(compiler_options=options)
    return init.as_text(), step.as_text()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_compiles_for_a_slice(name, model, mesh):
    shape = MODELS[model][1]
    for part, text in zip(("init", "step"), compiled(name, model, mesh), strict=True):
        found = cost.price(text, targets.target(SLICE))
        count = sum(number for number, _ in found.collectives.values())
        assert count <= MOST_COLLECTIVES, found.collectives
        # Loops over rounds (of HypCluster's start) or local steps are shorter than any over the clients of a chip.
        loops = [loop for loop in found.loops if loop.collectives and (loop.trips is None or loop.trips >= N // 4 - 1)]
        assert not loops or name == "feddrift", "a loop over clients communicates in every trip"  # there, over models

        # No client's examples travel, in whatever shape, but where Federated-Clustering's models meet batches of all
        # clients, and FedGroup trains a sample of them at first.
        sent = re.findall(rf"= (\(?\w+\[[^=]*?) (?:{'|'.join(cost.COLLECTIVES)})(?:-start)?\(", text)
        sizes = {math.prod(map(int, dims.split(","))) for one in sent for dims in re.findall(r"\w+\[([\d,]+)\]", one)}
        pixels = M * math.prod(shape)
        if name != "federated_clustering" and (name, part) != ("fedgroup", "init"):
            assert not sizes & {pixels * n for n in (1, N // 4, N)}, sizes

        # Kernels compute in full precision whatever training does.
        kernels = found.precision.get("kernels", {})
        assert set(kernels) <= {"float32"}, kernels
