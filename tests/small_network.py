"""A network of two dense layers, with and without batch statistics, that several files test and write in NumPy."""

import flax.linen as nn
import jax.numpy as jnp

import jfcl

N, M, D, H, C = 4, 6, 3, 5, 2  # clients, examples, inputs, hidden numbers, classes
EPS, KEPT = 1e-5, 0.5  # of batch normalisation


class Net(nn.Module):
    normal: bool = False

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(H)(x)
        if self.normal:
            x = nn.BatchNorm(use_running_average=not train, momentum=KEPT, epsilon=EPS)(x)
        return nn.Dense(C)(jnp.tanh(x))


PLAIN = jfcl.models.classification(Net(), (D,), C)
NORMAL = jfcl.models.classification(Net(True), (D,), C)
