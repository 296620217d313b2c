"""Networks, tasks made from them, and their convolution. A new model is a class and a line in `MODELS`."""

from functools import partial

from jfcl.models.conv import conv, max_pool
from jfcl.models.language import check_tokens, language_model
from jfcl.models.networks import CNN5, MLP, VGG, CNNCifar, CNNFemnist, CNNMnist, Linear, LSTMLanguageModel
from jfcl.models.pretrained import cache_features, from_flax, frozen, lora, merged, to_flax
from jfcl.models.residual import MobileNet, MobileNetBatchNorm, ResNet, ResNetBatchNorm
from jfcl.models.tasks import classification, in_bfloat16, parameter_paths, regression, task
from jfcl.models.transformers import GPT, ViT

MODELS = {
    "linear": (Linear, "softmax regression: one dense layer"),
    "mlp": (MLP, "one hidden layer of 200 (the MNIST model of IFCA and Federated-Clustering)"),
    "mlp2048": (partial(MLP, hidden=(2048,)), "one hidden layer of 2,048"),
    "cnn_mnist": (CNNMnist, "2 conv 5x5x32, fc 256 (Byzantine-CFL's MNIST and Fashion-MNIST model)"),
    "cnn_cifar": (CNNCifar, "2 conv 5x5x64, fc 384 (IFCA's CIFAR-10 model)"),
    "cnn_femnist": (CNNFemnist, "2 conv 5x5x32 and 5x5x64, fc 2,048 (IFCA's FEMNIST model)"),
    "cnn5": (CNN5, "3 conv 3x3x32, 64, 64, fc 64 (for CFL's 5-layer CIFAR-10 model, of unknown widths)"),
    "vgg": (VGG, "8 conv 3x3x32 to 128, 2 fc 128 (Byzantine-CFL's CIFAR-10 model; images of 32x32)"),
    "vgg16": (
        partial(VGG, blocks=((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3), dense=(512, 512)),
        "13 conv, 2 fc 512 (Federated-Clustering's VGG-16 for CIFAR-10, dense layers made for 32x32)",
    ),
    "vgg8": (
        partial(VGG, blocks=((16,), (32,), (64,), (128,), (512,)), dense=(512, 512)),
        "5 conv 3x3x16 to 512, 2 fc 512 (Federated-Clustering's code for CIFAR-100, without dropout)",
    ),
    "resnet18_gn": (ResNet, "ResNet-18 in its CIFAR form, group norm (11.17 M parameters)"),
    "resnet18_narrow": (partial(ResNet, width=16), "the same with a quarter of the channels, for a CPU (0.70 M)"),
    "resnet18_bn": (ResNetBatchNorm, "ResNet-18 with batch norm, as published"),
    "mobilenet_gn": (MobileNet, "MobileNet in its CIFAR form, depthwise-separable convolutions, group norm (3.22 M)"),
    "mobilenet_bn": (MobileNetBatchNorm, "the same with batch norm, as published"),
    "vit": (ViT, "vision transformer: patches of 4x4, 6 blocks of 192, the mean over patches (2.69 M)"),
    "lstm": (LSTMLanguageModel, "two LSTM layers of 128 that predict the next word (CFL's AG News model; text)"),
    "gpt": (GPT, "decoder in the form of GPT-2: 6 blocks of 128, causal attention (3.76 M at 10,000 words; text)"),
}
LANGUAGE_MODELS = ("lstm", "gpt")  # these take a vocabulary's size and texts; all others a number of classes and images
