"""The next-word model: LSTM equations, loss, perplexity, texts without words, and a run on real news."""

import csv
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfcl
from jfcl.core import Clients
from jfcl.data import DATASETS, Dataset
from jfcl.experiments import Config, run, setup
from jfcl.models import LSTMLanguageModel, check_tokens, in_bfloat16, language, language_model

V, L = 11, 6


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def loop_logits(params, x):
    """The network in float64, one text, layer and word after another; LSTM as in Hochreiter & Schmidhuber (1997)."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    out = []
    for text in x:
        states = [params["Embed_0"]["embedding"][word] for word in text]
        for layer in (params["OptimizedLSTMCell_0"], params["OptimizedLSTMCell_1"]):
            c = h = np.zeros(layer["hi"]["bias"].shape)
            for t, value in enumerate(states):
                i, f, g, o = (
                    value @ layer["i" + gate]["kernel"] + h @ layer["h" + gate]["kernel"] + layer["h" + gate]["bias"]
                    for gate in "ifgo"
                )
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                h = sigmoid(o) * np.tanh(c)
                states[t] = h
        out.append([state @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"] for state in states])
    return np.array(out)


def loop_scores(params, x):
    """Loss and accuracy of every text: means over its words but the first."""
    losses, shares = [], []
    for text, logits in zip(x, loop_logits(params, x[:, :-1]), strict=True):
        own, right = [], []
        for word, row in zip(text[1:], logits, strict=True):
            if word != 0:
                own.append(np.log(np.exp(row).sum()) - row[word])
                right.append(row.argmax() == word)
        losses.append(np.mean(own) if own else 0)
        shares.append(np.mean(right) if right else 0)
    return np.array(losses), np.array(shares)


def small(vocab_size=V, length=L):
    return language_model(LSTMLanguageModel(vocab_size, features=5, hidden=7), length, vocab_size)


def spread(params, seed=0):
    """Parameters large enough to tell a wrong equation."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)


def texts(shape=(4,), seed=0, vocab_size=V, length=L):
    """Random texts, of which some end early (never before the second word)."""
    rng = np.random.default_rng(seed)
    x = rng.integers(1, vocab_size, (*shape, length)).astype(np.int32)
    x[np.arange(length) >= rng.integers(2, length + 3, (*shape, 1))] = 0
    return x


@pytest.mark.slow
def test_lstm_against_a_loop():
    task = small()
    params, x = spread(jax.eval_shape(task.init, jax.random.key(0))), texts()[:, :-1]
    got = jax.jit(task.apply)(params, x)
    assert got.shape == (4, L - 1, V)
    np.testing.assert_allclose(got, loop_logits(params, x), rtol=1e-4, atol=1e-4)
    # (inputs + hidden + 1) x 4 gates a layer, between embedding and dense layer
    assert sum(p.size for p in jax.tree.leaves(params)) == V * 5 + 4 * 7 * (5 + 7 + 1) + 4 * 7 * (7 + 7 + 1) + 8 * V


def test_loss_and_accuracy_against_a_loop_with_padding():
    task = small()
    params, x = spread(jax.eval_shape(task.init, jax.random.key(0))), texts((12,))
    x = np.concatenate([x, [[3, 0, 0, 0, 0, 0], [0] * L]]).astype(np.int32)  # nothing to predict
    assert (x[:12] == 0).any() and (x[:12, -1] != 0).any()
    losses, shares = loop_scores(params, x)
    found, found_shares = jax.jit(lambda p: (task.loss(p, {"x": x}), task.scores(task.correct, p, {"x": x})))(params)
    np.testing.assert_allclose(found, losses, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found_shares, shares, rtol=1e-6)
    assert losses[-1] == 0 and shares.sum() > 0


def test_all_products_in_bfloat16_are_of_bfloat16():
    task, params = small(), spread(jax.eval_shape(small().init, jax.random.key(0)))
    narrow, batch = in_bfloat16(task), {"x": texts()}
    program = str(jax.make_jaxpr(narrow.loss)(params, batch))
    products = [line for line in program.splitlines() if "dot_general[" in line]
    assert len(products) == 5 and all(":bf16[" in line for line in products)  # two a layer, and the last
    np.testing.assert_allclose(narrow.loss(params, batch), task.loss(params, batch), rtol=0.1)


@pytest.mark.slow
def test_a_text_without_words_to_predict_has_a_finite_gradient():
    task = small()
    params, x = spread(jax.eval_shape(task.init, jax.random.key(0))), np.int32([[3, 0, 0, 0, 0, 0], [0] * L])
    gradient = jax.jit(jax.grad(lambda p: task.loss(p, {"x": x}).sum()))(params)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_many_large_models_can_be_drawn_at_once():
    """With flax's orthogonal matrices this never ended on a CPU: QR decompositions waited for each other."""
    params = jax.jit(jax.vmap(language_model(LSTMLanguageModel(V), L, V).init))(jax.random.split(jax.random.key(0), 4))
    kernel = np.asarray(params["OptimizedLSTMCell_1"]["hi"]["kernel"])
    assert kernel.shape == (4, 128, 128) and np.abs(kernel[0] - kernel[1]).max() > 0.1
    np.testing.assert_allclose(kernel.std(axis=(1, 2)), 128**-0.5, rtol=0.05)


def test_what_comes_later_does_not_matter():
    task = small()
    params, x = spread(jax.eval_shape(task.init, jax.random.key(0))), texts()[:, :-1]
    changed = np.where(np.arange(L - 1) < 3, x, 1 + x % (V - 1)).astype(np.int32)
    predict = jax.jit(task.apply)
    same = np.asarray(predict(params, x) == predict(params, changed)).all(axis=(0, 2))
    assert same.tolist() == [True] * 3 + [False] * (L - 4)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 3], ids=["one by one", "3, 3 and 1"])
def test_large_batches_in_parts_are_the_same(most):
    params, batch = spread(jax.eval_shape(small().init, jax.random.key(0))), {"x": texts((7,))}
    assert small().at_once == language.MOST_LOGITS // (V * (L - 1))

    def results(task):
        def total(p):
            return jnp.sin(task.loss(p, batch)).sum(), task.scores(task.correct, p, batch)

        return jax.jit(jax.value_and_grad(total, has_aux=True))(params)

    whole, parts = results(small()), results(small()._replace(at_once=most))
    for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(V)(nn.Dropout(0.5, deterministic=not train)(nn.Embed(V, 8)(x)))


def test_dropout_draws_other_numbers_for_each_part_of_a_batch(monkeypatch):
    monkeypatch.setattr(language, "MOST_LOGITS", 1)
    task, batch = language_model(Dropping(), L, V), {"x": np.repeat(texts()[:1], 3, axis=0)}
    losses, _ = jax.jit(task.train_loss)(jax.random.key(0), task.init(jax.random.key(1)), batch, np.ones(3, bool))
    assert task.at_once == 1 and len({*losses.tolist()}) == 3


@pytest.mark.slow
def test_clients_together_are_each_client_alone():
    task, x = small(), texts((3, 4))
    params = jax.jit(jax.vmap(task.init))(jax.random.split(jax.random.key(0), 3))

    @jax.jit
    def step(params, x):
        loss, g = jax.value_and_grad(lambda p: task.loss(p, {"x": x}).mean())(params)
        return loss, jax.tree.map(lambda p, d: p - jnp.float32(0.5) * d, params, g)

    steps = jax.jit(jax.vmap(step))
    together = steps(params, x)
    for i in range(3):
        alone = step(jax.tree.map(lambda p, i=i: p[i], params), x[i])
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5)
    assert (steps(together[1], x)[0] < together[0]).all()  # and they learn


def corpora(n=6, m=20):
    """Clients of two topics: a word is followed by the next one in one topic, by the one before in the other."""
    rng = np.random.default_rng(0)
    start, step = rng.integers(0, 9, (n, m, 1)), np.where(np.arange(n) % 2, 1, -1)[:, None, None]
    x = (2 + (start + step * np.arange(L)) % 9).astype(np.int32)
    return Clients({"x": x, "y": np.zeros((n, m), np.int32)}, np.full(n, m, np.int32)), np.arange(n) % 2


@pytest.mark.slow
def test_perplexity_is_the_exponential_of_each_clients_loss():
    task = small()
    clients, topic = corpora()
    training = jfcl.local_training(optax.sgd(0.5, momentum=0.9), num_steps=10)
    algorithm = jfcl.oracle(task, training, cluster=topic)
    key = jax.random.key(0)
    history = jfcl.simulate(algorithm, clients, key=key, num_rounds=15, test_clients=clients, newcomers=clients)
    for record in history.records:
        assert record["perplexity"] >= np.exp(record["loss"]) - 1e-4  # a mean of exponentials
        assert record["newcomer_perplexity"] <= record["perplexity"] + 1e-4
    np.testing.assert_allclose(history.clients["perplexity"], np.exp(history.clients["loss"]), rtol=1e-5)
    last = history.records[-1]
    assert last["perplexity"] == pytest.approx(history.clients["perplexity"].mean())
    losses, shares = loop_scores(jax.tree.map(lambda p: p[1], history.state.params), clients.examples["x"][1])
    assert history.clients["perplexity"][0, 1] == pytest.approx(np.exp(losses.mean()), rel=1e-4)
    assert history.clients["accuracy"][0, 1] == pytest.approx(shares.mean(), rel=1e-5)
    assert history.records[0]["perplexity"] > 6 and last["perplexity"] < 1.5 and last["accuracy"] > 0.9
    first = np.arange(len(topic)) == 0
    no_words = jfcl.evaluate(task, history.state.params, clients._replace(size=clients.size * first), topic)
    assert (np.isnan(no_words["perplexity"]) == ~first).all()
    assert "perplexity" not in jfcl.metrics.summarize({"loss": np.ones(1)}, np.ones(1))


class OneLogitShort(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(V - 1)(nn.Embed(V, 3)(x))


def test_refuses():
    task, x = small(), texts()
    params = task.init(jax.random.key(0))
    assert small() is task
    with pytest.raises(ValueError, match=r"x must be token ids, which are integers .*, got .*float32"):
        task.loss(params, {"x": x.astype(np.float32)})
    with pytest.raises(ValueError, match=r"x must be token ids of shape \(B, 6\), got \(4, 5\)"):
        jax.jit(task.loss)(params, {"x": x[:, 1:]})
    for wrong in (V, -1):
        with pytest.raises(ValueError, match=rf"x must be token ids in 0\.\.10, got '.*{wrong}"):
            task.loss(params, {"x": np.where(x == x.max() if wrong > 0 else x == 0, wrong, x).astype(np.int32)})
    with pytest.raises(ValueError, match="length must be an integer, at least 2, got 1"):
        language_model(LSTMLanguageModel(V), 1, V)
    with pytest.raises(ValueError, match="vocab_size must be an integer, at least 3, got 2"):
        language_model(LSTMLanguageModel(V), L, 2)
    with pytest.raises(
        ValueError, match=r"the outputs of .* must be logits of shape \(2, 5, 11\) for a batch of 2, got"
    ):
        language_model(OneLogitShort(), L, V)


def test_check_tokens_finds_what_the_model_cannot_see():
    x = texts((3, 4))
    size = np.array([4, 2, 4], np.int32)
    check_tokens(Clients({"x": x}, size), V)
    x[1, 3] = 99  # padding
    check_tokens(Clients({"x": x}, size), V)
    with pytest.raises(ValueError, match=r"clients: token ids must lie in 0\.\.10, got 99 at client 1"):
        check_tokens(Clients({"x": x}, np.full(3, 4, np.int32)), V)
    x[2, 1, 1:] = 0
    with pytest.raises(ValueError, match=r"test: 1 text\(s\) without a second word, first at client 2"):
        check_tokens(Clients({"x": x}, size), V, name="test")
    for wrong in (x.astype(np.float32), x[0]):
        with pytest.raises(ValueError, match=r"clients.examples\['x'\] must be integer token ids \[N, M, L\]"):
            check_tokens(Clients({"x": wrong}, size), V)


@pytest.fixture
def sentences(monkeypatch, tmp_path):
    """A data set of 80 + 40 sentences of two topics, by the name "sentences", as if from official files."""
    monkeypatch.setenv("JFCL_DATA_DIR", str(tmp_path))
    rng = np.random.default_rng(0)
    words = ["the ball flew over a goal line", "the bank sold a share at noon"]
    y = np.arange(120, dtype=np.int32) % 2
    x = np.array([" ".join(rng.permutation(words[topic].split())) for topic in y], object)
    made = Dataset("sentences", {"x": x[:80], "y": y[:80]}, {"x": x[80:], "y": y[80:]}, 2, None, "")
    monkeypatch.setitem(DATASETS, "sentences", (lambda data_dir: made, "two topics"))
    return made


TEXTS = {"dataset": "sentences", "heterogeneity": "topic", "model": "lstm", "clients": 4, "clusters": 2, "length": 8}


@pytest.mark.slow
def test_a_run_on_texts_reports_perplexity(sentences, tmp_path):
    config = Config("oracle", **TEXTS, rounds=2, local_epochs=1, batch_size=5, lr=0.5, seeds=2, newcomer_examples=10)
    summary, history, parts = run(config, out=tmp_path / "run")
    words = set(" ".join(sentences.train["x"]).split())
    assert parts.task.init(jax.random.key(0))["Embed_0"]["embedding"].shape == (2 + len(words), 128)
    assert parts.federation.train.examples["x"].shape == (4, 20, 8)
    mine = np.exp(history.clients["loss"]).mean(axis=1)
    assert summary["mean"]["perplexity"] == pytest.approx(mine.mean(), rel=1e-5)
    assert [row["perplexity"] for row in summary["per_seed"]] == pytest.approx(mine.tolist(), rel=1e-5)
    assert summary["per_seed"][0]["newcomer_perplexity"] > 1
    assert (tmp_path / "run" / "plots" / "perplexity.png").exists()
    with (tmp_path / "run" / "clients.csv").open() as f:
        first = float(next(csv.DictReader(f))["perplexity"])
    assert first == pytest.approx(np.exp(history.clients["loss"][0, 0]), rel=1e-4)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["vocab_size"], config["length"]) == (10_000, 8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "mlp"}, "model 'mlp' reads images, but data set 'sentences' holds texts; for it: lstm"),
        ({"dataset": "digits"}, "model 'lstm' reads texts, but data set 'digits' holds none; for it: linear, mlp"),
        ({"heterogeneity": "label_swap"}, "heterogeneity must be none, class or topic for texts, as model 'lstm' does"),
        ({"heterogeneity": "rotation"}, "heterogeneity must be none, class or topic for texts"),
        ({"attack": "label_zero", "malicious": 0.25}, "attack must be one on updates for texts, got 'label_zero'"),
        ({"vocab_size": 2}, "vocab_size must be an integer, at least 3, got 2"),
        ({"length": 1}, "length must be an integer, at least 2, got 1"),
        ({"clusters": 3}, "^clusters must be at most 2, the number of topics, got 3"),
    ],
)
def test_a_run_refuses_what_does_not_fit(options, said, sentences):
    with pytest.raises(ValueError, match=said):
        setup(Config("fedavg", **TEXTS | options))


def test_a_run_refuses_texts_of_one_word(sentences, monkeypatch):
    x = sentences.test["x"].copy()
    x[3] = "word"
    short = sentences._replace(test=sentences.test | {"x": x})
    monkeypatch.setitem(DATASETS, "sentences", (lambda data_dir: short, ""))
    with pytest.raises(ValueError, match=r"test clients: 1 text\(s\) without a second word, first at client"):
        setup(Config("fedavg", **TEXTS))


@pytest.mark.slow
def test_clusters_of_real_news(data_dir):
    """AG News: 20 clients of one topic each; a few steps already beat the frequencies of words."""
    options = TEXTS | {"dataset": "ag_news", "clients": 20, "clusters": 4, "length": 12, "vocab_size": 300}
    options |= {"examples_per_client": 100, "rounds": 3, "local_epochs": 1, "batch_size": 20, "lr": 1.0}
    summary, history, parts = run(Config("oracle", **options), data_dir=str(data_dir))
    y = parts.federation.train.examples["y"]
    assert all(set(y[i].tolist()) == {i % 4} for i in range(20))
    assert parts.federation.test.size.sum() == 7600
    first, last = history.records[0]["perplexity"], history.records[-1]["perplexity"]
    assert last < first < 300 and summary["mean"]["perplexity"] == last
