"""Networks, tasks made from them, and the convolution they share. A new model is its class and a line in `MODELS`."""

from functools import partial

from jfcl.models.conv import conv, max_pool
from jfcl.models.networks import MLP, CNNCifar, CNNFemnist, CNNMnist, Linear
from jfcl.models.tasks import classification, parameter_paths, regression, task

MODELS = {
    "linear": (Linear, "softmax regression: one dense layer"),
    "mlp": (MLP, "one hidden layer of 200 (IFCA's and FC's MNIST model)"),
    "mlp2048": (partial(MLP, hidden=(2048,)), "one hidden layer of 2,048"),
    "cnn_mnist": (CNNMnist, "2 conv 5x5x32, fc 256 (Byzantine-CFL's MNIST and Fashion-MNIST model)"),
    "cnn_cifar": (CNNCifar, "2 conv 5x5x64, fc 384 (IFCA's CIFAR-10 model)"),
    "cnn_femnist": (CNNFemnist, "2 conv 5x5x32 and 5x5x64, fc 2,048 (IFCA's FEMNIST model)"),
}

__all__ = [
    "MLP",
    "MODELS",
    "CNNCifar",
    "CNNFemnist",
    "CNNMnist",
    "Linear",
    "classification",
    "conv",
    "max_pool",
    "parameter_paths",
    "regression",
    "task",
]
