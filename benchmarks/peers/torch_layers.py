"""The layers of the papers' CNN in PyTorch, one by one, and a whole client step, with one thread.

Called by `cnn_cpu.py` with a case as JSON: that of `torch_loop.py`, `times`, `layers` (`{name: (input, kernel)}` in
jfcl's layouts) and `parts` (`{name: a convolution's output}`, which is pooled). Prints one JSON line: `rows` of a
layer, a pass and its seconds, and the `gflops` of a large product.
"""

import json
import sys
import time

import torch
from torch.nn import functional as F
from torch_loop import as_tensors, make_model, train


def seconds_of(fn, times: int) -> float:
    """Of a call: the fewest of two rounds of `times` calls, after one call."""
    fn()
    found = []
    for _ in range(2):
        started = time.perf_counter()
        for _ in range(times):
            fn()
        found.append(time.perf_counter() - started)
    return min(found) / times


def layer_rows(name: str, inputs: list[int], kernel: list[int], times: int) -> list[tuple[str, str, float]]:
    if len(kernel) == 2:
        x, w = torch.randn(inputs), torch.randn(kernel[::-1])
        g = torch.randn(inputs[0], kernel[1])
        passes = [lambda: x @ w.T, lambda: g.T @ x, lambda: g @ w]
    else:
        b, height, width, channels = inputs
        x, w = torch.randn(b, channels, height, width), torch.randn(kernel[3], channels, *kernel[:2])
        g = torch.randn_like(F.conv2d(x, w, padding=1))

        def gradient(of_input: bool, of_weights: bool):
            geometry = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
            return lambda: torch.ops.aten.convolution_backward(g, x, w, None, *geometry, [of_input, of_weights, False])

        passes = [lambda: F.conv2d(x, w, padding=1), gradient(False, True), gradient(True, False)]
    names = "forward", "gradient of weights", "gradient of input"
    return [(name, of, seconds_of(fn, times)) for of, fn in zip(names, passes, strict=True)]


def part_rows(name: str, shape: list[int], times: int) -> list[tuple[str, str, float]]:
    b, height, width, channels = shape
    y = torch.randn(b, channels, height, width, requires_grad=True)
    part = lambda: F.max_pool2d(F.relu(y), 2)  # noqa: E731
    pooled = part()
    g = torch.randn_like(pooled)
    backward = lambda: torch.autograd.grad(pooled, y, g, retain_graph=True)  # noqa: E731
    return [(name, "forward", seconds_of(part, times)), (name, "backward", seconds_of(backward, times))]


def main() -> None:
    torch.set_num_threads(1)
    case = json.loads(sys.argv[1])
    times = case["times"]
    a = torch.ones(2048, 2048)
    gflops = 2 * 2048**3 / min(seconds_of(lambda: a @ a, 1) for _ in range(3)) / 1e9
    rows = []
    for name, (inputs, kernel) in case["layers"].items():
        rows += layer_rows(name, inputs, kernel, times)
    for name, shape in case["parts"].items():
        rows += part_rows(name, shape, times)
    x, y = as_tensors(json.dumps({k: v for k, v in case.items() if k not in ("layers", "parts")}))
    net = make_model(case["model"])
    step = seconds_of(lambda: train(net, x[0], y[0], case), max(times // case["steps"], 1)) / case["steps"]
    rows.append(("a whole step", "", step))
    print(json.dumps({"gflops": gflops, "rows": rows, "versions": {"torch": torch.__version__}}))


if __name__ == "__main__":
    main()
