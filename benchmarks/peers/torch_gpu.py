"""Rounds as an expert writes them in PyTorch for one GPU: batched products by hand, CUDA graphs, torch.compile.

Called by benchmarks/gpu.py: a case as JSON in the first argument, or as a line of the standard input, which lets the
caller start the process before its turn. Prints a JSON line for each form of the round: the seconds of every round, or
the error. A form is told by its name: "CUDA graph", "torch.compile", "autocast" or "bfloat16" and so on; products are
TF32 unless it says one of these or float32. Every round begins at the same models.

A case: `round` ("ifca", "fedavg", "federated clustering", "cfl"), `model` ("mlp", "cnn", "resnet"), `forms`,
`clients`, `examples`, `batch` (null: all), `steps`, `lr`, `shape` of an example, `rounds`, and `models`: an .npz file
of the models that the round begins with, `[K, ...]` by names of parameters, and of `x` and `y` where they are not to be
random. With `results` (a path), the models after the round are written there.
"""

import contextlib
import faulthandler
import functools
import gc
import json
import math
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DENSE = ("Dense_0/kernel", "Dense_0/bias", "Dense_1/kernel", "Dense_1/bias")
QUANTILE, THRESHOLD_ROUNDS, MODELS_AT_ONCE = 0.2, 10, 20


@functools.cache
def compiled(function, mode=None):
    return torch.compile(function, mode=mode, dynamic=False)


def captured(function):
    """`function` as one CUDA graph, which writes to the same result in every call; itself on a CPU."""
    if DEVICE == "cpu":
        return function
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()

    def replay():
        graph.replay()
        return result

    return replay


def precise(products):
    """Multiplies in "float32" or "tf32" from here on."""
    torch.set_float32_matmul_precision("highest" if products == "float32" else "high")


# The MLP of all clients at once: products and gradients by hand, updates in place.


def delta(logits, target, scale):
    d = (logits.softmax(-1) - target) * scale
    return d, d.sum(1)


def through_relu(dh, h):
    dh = torch.where(h > 0, dh, 0.0)
    return dh, dh.sum(1, dtype=torch.float32)


def subtract(w, a, b, lr):
    """`w -= lr * a @ b` in place; a product in bfloat16 is subtracted from `w` in float32."""
    if w.dtype == a.dtype:
        w.baddbmm_(a, b, alpha=-lr)
    else:
        w.sub_(torch.bmm(a, b), alpha=lr)


def mlp_step(x, target, w1, b1, w2, b2, lr, delta=delta, through_relu=through_relu):
    """A step of gradient descent on `x` `[N, M, d]` for `N` models, in place; `target` `[N, M, C]` is one-hot.

    Products and hidden arrays have the type of `x`; models and the loss are in float32.
    """
    narrow = x.dtype
    narrow_w2 = w2.to(narrow)
    h = torch.baddbmm(b1[:, None].to(narrow), x, w1.to(narrow)).relu_()
    d, of_b2 = delta(torch.baddbmm(b2[:, None].to(narrow), h, narrow_w2).float(), target, 1 / x.shape[1])
    d = d.to(narrow)
    dh, of_b1 = through_relu(torch.bmm(d, narrow_w2.mT), h)
    subtract(w2, h.mT, d, lr)
    subtract(w1, x.mT, dh, lr)
    b2.sub_(of_b2, alpha=lr)
    b1.sub_(of_b1, alpha=lr)


def stepper(form):
    """`mlp_step` as the form's name says."""
    if "all but the products" in form:
        return functools.partial(mlp_step, delta=compiled(delta), through_relu=compiled(through_relu))
    if "torch.compile" in form:
        return compiled(mlp_step, "max-autotune-no-cudagraphs" if "max-autotune" in form else None)
    return mlp_step


def choose(x, target, w1, b1, w2, b2):
    """The model of the lowest loss for each client, `[N]`; the first layers of all models are one product."""
    (n, m, d), (k, _, width) = x.shape, w1.shape
    first, b1, w2, b2 = (p.to(x.dtype) for p in (w1.permute(1, 0, 2).reshape(d, -1), b1, w2, b2))
    h = torch.addmm(b1.reshape(-1), x.reshape(-1, d), first).relu_()
    logits = torch.baddbmm(b2[:, None], h.view(-1, k, width).transpose(0, 1), w2).float()
    losses = logits.logsumexp(-1) - (logits * target.reshape(1, n * m, -1)).sum(-1)
    return losses.view(k, n, m).mean(-1).argmin(0)


def one_hot(y, classes):
    return (y[..., None] == torch.arange(classes, device=y.device)).float()


def examples(form, x):
    """`[N, M, d]`, once in the type of the products."""
    return x.flatten(2).to(torch.bfloat16 if "bfloat16" in form else torch.float32)


def ifca(case, form, models, x, y):
    models = [models[name] for name in DENSE]
    x, target = examples(form, x), one_hot(y, models[3].shape[-1])
    k = len(models[0])
    step = stepper(form)
    choosing = compiled(choose) if "torch.compile" in form else choose

    def one_round():
        chosen = choosing(x, target, *models)
        own = [p[chosen] for p in models]
        for _ in range(case["steps"]):
            step(x, target, *own, case["lr"])
        members = one_hot(chosen, k).T
        count = members.sum(1)
        shares = members / count.clamp(min=1)[:, None]
        means = [(shares @ p.flatten(1)).view_as(old) for p, old in zip(own, models, strict=True)]
        kept = [(count > 0).view(k, *[1] * (p.ndim - 1)) for p in models]
        return dict(zip(DENSE, map(torch.where, kept, means, models), strict=True))

    return captured(one_round) if "CUDA graph" in form else one_round


def cfl(case, form, models, x, y):
    """One cluster: local training, the norms that a split asks for, the mean; similarities where the form has them."""
    models = [models[name] for name in DENSE]
    x, target = examples(form, x), one_hot(y, models[3].shape[-1])
    step = stepper(form)

    def one_round():
        own = [p.repeat(len(x), *[1] * (p.ndim - 1)) for p in models]
        for _ in range(case["steps"]):
            step(x, target, *own, case["lr"])
        updates = [p.sub_(old).flatten(1) for p, old in zip(own, models, strict=True)]
        means = [u.mean(0) for u in updates]
        squares = sum(torch.linalg.vector_norm(u, dim=1).square() for u in updates)
        norms = squares.max().sqrt(), sum(m.square().sum() for m in means).sqrt()
        if "similarities" in form:
            precise("float32")
            products = sum(u @ u.T for u in updates)
            precise("tf32")
            norms += (products * squares.rsqrt()[:, None] * squares.rsqrt()[None, :],)
        new = {name: old + m.view_as(old) for name, old, m in zip(DENSE, models, means, strict=True)}
        return new | {"norms": norms}

    return captured(one_round) if "CUDA graph" in form else one_round


def federated_clustering(case, form, models, x, y):
    """All clients' gradients at some models at once, their inner products, and the centres as combinations of them."""
    models = [models[name] for name in DENSE]
    (n, m), batch, classes = x.shape[:2], case["batch"] or x.shape[1], models[3].shape[-1]
    of_gram = "tf32" if "TF32 throughout" in form else "float32"
    of_gradients = "float32" if form.endswith("float32 throughout") else "tf32"
    place = QUANTILE * (n - 1)
    low, part = math.floor(place), place - math.floor(place)
    step = functools.partial(torch.lerp, weight=part)

    def centres(first, points):
        """The centres from `points` `[c, N, ...]` of each model, that start at the clients `first`, ... `[c, ...]`."""
        precise(of_gram)
        count = len(points[0])
        products = sum(torch.bmm(p.flatten(2), p.flatten(2).mT) for p in points)
        norms = products.diagonal(dim1=1, dim2=2)
        at = (torch.arange(n, device=DEVICE) == first + torch.arange(count, device=DEVICE)[:, None]).float()
        precise("float32")
        for _ in range(THRESHOLD_ROUNDS):
            to_points = torch.bmm(products, at[:, :, None])[:, :, 0]
            distances = (norms - 2 * to_points + (at * to_points).sum(1, keepdim=True)).clamp(min=0).sqrt()
            ordered = distances.sort(1).values
            radius = step(ordered[:, low], ordered[:, min(low + 1, n - 1)])
            inside = (distances <= radius[:, None]).float() / n
            at = inside + (1 - inside.sum(1, keepdim=True)) * at
        return [torch.bmm(at[:, None], p.flatten(2)).view(count, *p.shape[2:]) for p in points]

    def one_round():
        if batch < m:
            rows = torch.rand(n, m, device=DEVICE).argsort(1)[:, :batch]
            bx, by = x.flatten(2).gather(1, rows[:, :, None].expand(-1, -1, x[0, 0].numel())), y.gather(1, rows)
        else:
            bx, by = x.flatten(2), y
        target = one_hot(by, classes).reshape(1, n * batch, classes)
        flat = bx.reshape(1, n * batch, -1)
        new = [p.clone() for p in models]
        for first in range(0, n, MODELS_AT_ONCE):
            some = slice(first, first + MODELS_AT_ONCE)
            w1, b1, w2, b2 = (p[some] for p in models)
            c, width = len(w1), w1.shape[2]
            precise(of_gradients)
            h = torch.baddbmm(b1[:, None], flat.expand(c, -1, -1), w1).relu_()
            d = torch.baddbmm(b2[:, None], h, w2).softmax(-1).sub_(target).div_(batch)
            dh = torch.ops.aten.threshold_backward(torch.bmm(d, w2.mT), h, 0)
            h, d, dh = (z.view(c * n, batch, -1) for z in (h, d, dh))
            of_w1 = torch.empty(c, n, bx.shape[2], width, device=DEVICE)
            for i in range(c):  # one product of all would copy the examples for every model
                torch.bmm(bx.mT, dh.view(c, n, batch, width)[i], out=of_w1[i])
            of_w2 = torch.bmm(h.mT, d).view(c, n, width, classes)
            points = of_w1, dh.sum(1).view(c, n, -1), of_w2, d.sum(1).view(c, n, -1)
            for p, centre in zip(new, centres(first, points), strict=True):
                p[some].sub_(centre, alpha=case["lr"])
        return dict(zip(DENSE, new, strict=True))

    return captured(one_round) if "CUDA graph" in form else one_round


# Convolutional networks, by parameters with the names of jfcl's; images are NCHW with channels last in memory.


def dense(p, name, x):
    return torch.addmm(p[f"{name}/bias"], x, p[f"{name}/kernel"])


def cnn(p, x):
    for name in ("Conv_0", "Conv_1"):
        x = F.max_pool2d(F.conv2d(x, p[f"{name}/kernel"], p[f"{name}/bias"], padding=1), 2).relu()
    x = x.permute(0, 2, 3, 1).flatten(1)
    return dense(p, "Dense_1", dense(p, "Dense_0", x).relu())


def resnet(p, x):
    def layer(x, prefix, i, stride=1):
        kernel = p[f"{prefix}Conv_{i}/kernel"]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)
        scale, bias = p[f"{prefix}GroupNorm_{i}/scale"], p[f"{prefix}GroupNorm_{i}/bias"]
        return F.group_norm(x, math.gcd(32, x.shape[1]), scale, bias, eps=1e-6)

    x = layer(x, "", 0).relu()
    for block in range(sum(name.endswith("/Conv_0/kernel") for name in p)):
        prefix = f"ResidualBlock_{block}/"
        shrinks = f"{prefix}Conv_2/kernel" in p
        out = layer(layer(x, prefix, 0, 1 + shrinks).relu(), prefix, 1)
        x = (out + (layer(x, prefix, 2, 2) if shrinks else x)).relu()
    return dense(p, "Dense_0", x.mean((2, 3)))


NETWORKS = {"cnn": cnn, "resnet": resnet}


def cnn_loss(p, x, y):
    return F.cross_entropy(cnn(p, x).float(), y)


def resnet_loss(p, x, y):
    return F.cross_entropy(resnet(p, x).float(), y)


def narrow_loss(loss, p, x, y):
    """The loss of a model in bfloat16 with parameters in float32."""
    return loss({name: w.to(torch.bfloat16) for name, w in p.items()}, x.to(torch.bfloat16), y)


def fedavg(case, form, models, x, y):
    """One client after another, or all by `vmap(grad)`."""
    n, m = y.shape
    batch, steps, lr = case["batch"] or m, case["steps"], case["lr"]
    loss_of = {"cnn": cnn_loss, "resnet": resnet_loss}[case["model"]]
    start = {name: to_torch(p[0]) for name, p in models.items()}
    if "bfloat16 model" in form:
        loss_of = functools.partial(narrow_loss, loss_of)
    if "torch.compile" in form:
        loss_of = compiled(loss_of)
    places = torch.arange(steps * batch, device=DEVICE) % m

    def rounded():
        casts = torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False)
        return casts if "autocast" in form else contextlib.nullcontext()

    def order():
        rows = torch.arange(m, device=DEVICE).expand(n, m) if batch == m else torch.rand(n, m, device=DEVICE).argsort(1)
        return rows[:, places]

    def back(p):
        return {name: from_torch(w)[None] for name, w in p.items()}

    if "vmap" in form:
        gradients = torch.func.vmap(torch.func.grad(loss_of))

        def one_round():
            own = {name: p.repeat(n, *[1] * p.ndim) for name, p in start.items()}
            rows, clients = order(), torch.arange(n, device=DEVICE)[:, None]
            for t in range(steps):
                at = rows[:, t * batch : (t + 1) * batch]
                with rounded():
                    grads = gradients(own, x[clients, at].permute(0, 1, 4, 2, 3), y[clients, at])
                torch._foreach_add_(list(own.values()), list(grads.values()), alpha=-lr)
            return back({name: p.mean(0) for name, p in own.items()})

        return one_round

    own = {name: p.clone().requires_grad_() for name, p in start.items()}
    total = [torch.zeros_like(p) for p in start.values()]
    bx = torch.zeros(steps * batch, *x.shape[2:], device=DEVICE)
    by = torch.zeros(steps * batch, dtype=y.dtype, device=DEVICE)

    def client():
        leaves = list(own.values())
        with torch.no_grad():
            torch._foreach_copy_(leaves, list(start.values()))
        for t in range(steps):
            some = slice(t * batch, (t + 1) * batch)
            with rounded():
                loss = loss_of(own, bx[some].permute(0, 3, 1, 2), by[some])
            grads = torch.autograd.grad(loss, leaves)
            with torch.no_grad():
                torch._foreach_add_(leaves, grads, alpha=-lr)
        with torch.no_grad():
            torch._foreach_add_(total, leaves)

    run = captured(client) if "CUDA graph" in form else client

    def one_round():
        torch._foreach_zero_(total)
        rows = order()
        for i in range(n):
            torch.index_select(x[i], 0, rows[i], out=bx)
            torch.index_select(y[i], 0, rows[i], out=by)
            run()
        return back({name: p / n for name, p in zip(start, total, strict=True)})

    return one_round


def to_torch(p):
    """A kernel `[h, w, in, out]` as `[out, in, h, w]`, with channels last in memory; else `p`."""
    return p.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last) if p.ndim == 4 else p


def from_torch(p):
    return p.permute(2, 3, 1, 0) if p.ndim == 4 else p


ROUNDS = {"ifca": ifca, "cfl": cfl, "federated clustering": federated_clustering, "fedavg": fedavg}


def measured(case, form, models, x, y):
    """`(seconds of each round, seconds before them, models after a round)`."""
    wait = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    precise("tf32")
    began = time.perf_counter()
    with contextlib.nullcontext() if case["round"] == "fedavg" else torch.no_grad():
        one_round = ROUNDS[case["round"]](case, form, models, x, y)
        for _ in range(2):
            new = one_round()
        wait()
        started = time.perf_counter()
        seconds = []
        while len(seconds) < case["rounds"]:
            at = time.perf_counter()
            new = one_round()
            wait()
            seconds.append(time.perf_counter() - at)
    new.pop("norms", None)
    return seconds, started - began, {name: p.detach().float().cpu().numpy() for name, p in new.items()}


def main(case):
    faulthandler.enable()  # a crash says where
    torch.backends.cudnn.benchmark = True
    given = {name: torch.from_numpy(np.asarray(array)).to(DEVICE) for name, array in np.load(case["models"]).items()}
    torch.manual_seed(0)
    n, m = case["clients"], case["examples"]
    x = given.pop("x") if "x" in given else torch.rand(n, m, *case["shape"], device=DEVICE)
    y = (given.pop("y") if "y" in given else torch.randint(0, 10, (n, m), device=DEVICE)).long()
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    for form in case["forms"]:
        line = {"form": form, "torch": torch.__version__, "device": device}
        try:
            line["seconds"], line["compile_seconds"], new = measured(case, form, given, x, y)
            if DEVICE == "cuda":
                line["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            if "results" in case:
                np.savez(case["results"], **new)
        except Exception as error:  # the other forms go on
            line["error"] = f"{type(error).__name__}: {error}"[-1000:]
        print(json.dumps(line), flush=True)
        new = None
        gc.collect()
        if DEVICE == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main(json.loads(sys.argv[1] if len(sys.argv) > 1 else input()))
