"""Training: the unrolled head against the native one, its start, its loss, measured acceptance."""

import copy
import dataclasses
from itertools import islice

import numpy as np
import pytest
import tiny_models
from training import lines, make_shards

from eagle3_llama import EagleError, EagleLlama, EagleParams
from eagle3_llama.errors import ErrorKind
from eagle3_llama.heads.convert import convert

# ruff: noqa: E402 - the imports below need torch, which may be absent
torch = pytest.importorskip("torch")

from eagle3_llama.train.acceptance import measure, walk
from eagle3_llama.train.data import Corpus, draft_vocabulary, split
from eagle3_llama.train.export import write
from eagle3_llama.train.loss import Teacher, training_time_test
from eagle3_llama.train.model import build
from eagle3_llama.train.pointers import pointing
from eagle3_llama.train.start import _low_rank, least_squares_start
from eagle3_llama.train.weights import TargetWeights


def test_native_head_computes_the_same(tiny, corpus, head, tmp_path):
    """Exported, converted, loaded: drafts and logits of the PyTorch head, greedy chains included."""
    write(head, corpus.layers, tmp_path, torch.float32)
    convert(tmp_path, tiny.targets[0], tmp_path / "head.gguf", "f32")
    llm = EagleLlama(tiny.targets[0], eagle_path=str(tmp_path / "head.gguf"), n_ctx=256, verbose=False)
    item = corpus.items[3]
    batch = corpus.batch([item], 6)
    n = len(item) - 1
    with torch.no_grad():
        expected = head.lm_head(next(head.unroll(batch.features, batch.tokens, 1)))[0, :n].numpy()
        drafts = head.draft(batch.features, batch.tokens, 4)[0].numpy()
    _, _, logits = llm.engine.head.forward(batch.tokens[0, 1 : n + 1].numpy(), batch.features[0, :n].numpy())
    np.testing.assert_allclose(logits, expected, atol=2e-3 * np.abs(expected).max())
    same = 0
    for t in range(8, 48):
        llm.reset()
        llm.engine.rewind(0)
        llm.eval(batch.tokens[0, : t + 1].tolist())
        same += llm.engine.steps.draft(int(batch.tokens[0, t + 1]), EagleParams(4))[0] == drafts[t].tolist()
    assert same >= 38  # float16 features against live ones may tip a near tie
    llm.close()


def test_later_steps_see_their_own_chain_only(corpus, head):
    """Step j at t, unrolled for all positions at once, equals a chain drafted from t alone."""
    batch = corpus.batch(corpus.items[:1], 6)
    with torch.no_grad():
        together = torch.stack(list(head.unroll(batch.features, batch.tokens, 4)))[:, 0]
        for t in (0, 5, 20):
            alone = torch.stack(list(head.unroll(batch.features[:, : t + 1], batch.tokens[:, : t + 6], 4)))[
                :, 0
            ]
            torch.testing.assert_close(together[:, t], alone[:, t], atol=1e-4, rtol=1e-4)
        thinned = list(head.unroll(batch.features, batch.tokens, 4, stride=3, offset=2))
        torch.testing.assert_close(thinned[0][0], together[0])
        torch.testing.assert_close(torch.stack(thinned[1:])[:, 0], together[1:, 2::3], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stride, offset, hard", [(1, 0, 0.0), (3, 1, 0.0), (2, 0, 0.3)])
def test_loss_is_the_plain_sum(tiny, corpus, head, stride, offset, hard):
    """Loss and gradients against a loop over positions that is written as the definition reads."""
    teacher = Teacher.of(TargetWeights(tiny.targets[0]), head, "cpu")
    batch = corpus.batch(corpus.items[:2], 6)
    got = training_time_test(head, teacher, batch, 3, 0.8, hard, 1.0, stride, offset)
    got.total.backward()
    gradients = [p.grad.clone() for p in head.parameters()]
    head.zero_grad()
    total = 0.0
    for j, h in enumerate(head.unroll(batch.features, batch.tokens, 3)):
        log_q, terms = head.lm_head(h).log_softmax(-1), []
        for b in range(2):
            for t in range(offset if j else 0, int(batch.n_tokens[b]) - 1, stride if j else 1):
                p = t + 1 + j  # the target's row that predicts token t + 2 + j
                if (
                    p < batch.n_tokens[b]
                    and p + 1 >= batch.n_prompt[b]
                    and teacher.in_draft[batch.best[b, p]]
                ):
                    target = teacher.probabilities(batch.final[b, p][None], 1.0)[0] * (1 - hard)
                    target[teacher.t2d[batch.best[b, p]]] += hard
                    terms.append(-(target * log_q[b, t]).sum())
        loss = torch.stack(terms).mean()
        assert abs(float(loss.detach()) - got.losses[j]) < 1e-4
        total = total + 0.8**j * loss / (1 + 0.8 + 0.64)
    assert abs(float((total - got.total).detach())) < 1e-4
    total.backward()
    for p, gradient in zip(head.parameters(), gradients):
        torch.testing.assert_close(p.grad, gradient, atol=1e-5, rtol=1e-3)
    head.zero_grad()


def test_mixed_precision(tiny, corpus, head):
    """Products in bfloat16, as on CUDA: the loss and the direction of the gradients stay."""
    teacher, batch = (
        Teacher.of(TargetWeights(tiny.targets[0]), head, "cpu"),
        corpus.batch(corpus.items[:4], 6),
    )
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        head.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = training_time_test(head, teacher, batch, 3, 0.8, dtype=dtype)
        loss.total.backward()
        found.append((float(loss.total.detach()), [p.grad.clone() for p in head.parameters()]))
    assert abs(found[0][0] - found[1][0]) < 0.02 * found[0][0]
    for a, b in zip(found[0][1], found[1][1]):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.98
    head.zero_grad()


def looks(head, batch):
    """Where each head of the attention looks: [B, n_head, T, T]."""
    layer, t = head.midlayer, batch.features.shape[1]
    u = layer.pair(head.embedding[batch.tokens[:, 1 : t + 1]], head.fc(batch.features))
    angles = torch.arange(t)[:, None] * head.frequencies
    q, k, _ = layer.self_attn.project(u, angles.cos(), angles.sin())
    score = q @ k.transpose(-1, -2) / head.shape.head_dim**0.5
    return score.masked_fill(torch.ones(t, t).triu(1).bool(), -1e9).softmax(-1)


def test_least_squares_start(tiny, tmp_path):
    """Before training, the head predicts unseen text better than from the last layer alone.

    Some attention heads read their own row, others the place where the next token has occurred before.
    """
    rng = np.random.default_rng(0)
    loops = [{"toks": [1, *(rng.permutation(60)[:12] + 3).tolist() * 5], "prompt": 13} for _ in range(96)]
    settings = dataclasses.replace(tiny, conversations=(lines(tmp_path / "loops.jsonl", loops),))
    corpus = Corpus(make_shards(settings, tmp_path))
    weights = TargetWeights(tiny.targets[0])
    d2t, _ = draft_vocabulary(corpus.answers(corpus.items), weights.shape.n_vocab, 64)
    plain, started = build(weights, 3, d2t, 0), build(weights, 3, d2t, 0)
    items, held = split(corpus, 8, 1)
    steps = []
    assert least_squares_start(started, corpus, items, 0, lambda done, of: steps.append((done, of)))
    assert steps == [(n + 1, len(steps)) for n in range(len(steps))]
    teacher, batch = Teacher.of(weights, plain, "cpu"), corpus.batch(held, 4)
    with torch.no_grad():
        before, after = (training_time_test(h, teacher, batch, 1, 0.8).losses[0] for h in (plain, started))
        assert after < before - 0.3
        at = looks(started, batch)
        assert at[:, 0].diagonal(dim1=-2, dim2=-1).mean() > 0.8
    (pointer,) = pointing(started.shape.n_head, started.shape.n_head // started.shape.n_head_kv)
    found = []
    for b, item in enumerate(held):
        tokens = batch.tokens[b, : len(item)]
        for t in range(item.n_prompt, len(item) - 2):
            right = (tokens[1 : t + 2] == tokens[t + 2]).nonzero()[:, 0]
            if len(right):
                found.append(float(at[b, pointer, t, right].sum()) - len(right) / (t + 1))
    assert np.mean(found) > 0.1  # above chance


@pytest.mark.parametrize("common", [0, 10, 100, 1000])
def test_the_start_of_few_rows_that_have_much_in_common(common):
    """Fewer rows than inputs, which are nearly the same: the values keep the whole product."""
    generator = torch.Generator().manual_seed(1)
    x = common + torch.randn(100, 576, generator=generator)
    c = torch.randn(8, 576, generator=generator)
    values, product = x @ _low_rank(c, x, 8).T, x @ c.T
    values, product = values.double(), product.double()
    left = product - values @ torch.linalg.lstsq(values, product).solution
    assert left.norm() < 0.02 * product.norm()


@pytest.mark.parametrize("words", [1, 2, 3, 6, 20])
def test_the_start_of_texts_of_few_words(tiny, tmp_path, words):
    """As logs and forms are: many inputs are almost empty. The head is written, and computes numbers."""
    rng = np.random.default_rng(0)
    texts = [{"toks": [1, *(60 + rng.integers(0, words, 60)).tolist()], "prompt": 8} for _ in range(40)]
    settings = dataclasses.replace(tiny, conversations=(lines(tmp_path / "few.jsonl", texts),))
    corpus = Corpus(make_shards(settings, tmp_path))
    weights = TargetWeights(tiny.targets[0])
    d2t, _ = draft_vocabulary(corpus.answers(corpus.items), weights.shape.n_vocab, 64)
    started = build(weights, 3, d2t, 0)
    assert least_squares_start(started, corpus, corpus.items, 0)
    for name, p in started.named_parameters():
        assert float(p.detach().abs().max()) < 1000, name
    write(started, corpus.layers, tmp_path / "head")


@pytest.mark.parametrize(
    "weight, said", [(1e5, "up to 100,000, and float16 holds 65,504"), (np.nan, "that are no numbers")]
)
def test_a_head_that_diverged_is_said_to_be_ones_own(corpus, head, tmp_path, weight, said):
    spoilt = copy.deepcopy(head)
    with torch.no_grad():
        spoilt.fc.weight[0, 0] = weight
    with pytest.raises(EagleError, match=f"trained head's fc.weight has weights {said}.*lower --lr") as e:
        write(spoilt, corpus.layers, tmp_path)
    assert e.value.kind is ErrorKind.BAD_VALUE and not list(tmp_path.iterdir())


def test_rounds_of_acceptance():
    tokens = [0, 0, 5, 6, 7, 8, 9]  # a prompt of two; 5 is sampled from it
    right = [[tokens[t + 2 + j] if t + 2 + j < 7 else -1 for j in range(2)] for t in range(7)]
    assert walk(tokens, right, 2, 2) == (2, [2, 1])
    assert walk(tokens, [[-1, -1]] * 7, 2, 2) == (4, [0, 0])


def test_acceptance_is_the_engines(tiny, corpus, head, tmp_path):
    """Measured in PyTorch and by decoding: the same rounds on a greedy answer of the target."""

    plain = EagleLlama(tiny.targets[0], n_ctx=256, verbose=False)
    prompt = corpus.tokens(corpus.items[0])[:10].tolist()
    answer = list(islice(plain.generate(prompt, temp=0.0), 120))
    plain.close()
    settings = dataclasses.replace(
        tiny,
        out=str(tmp_path),
        conversations=(lines(tmp_path / "c.jsonl", [{"toks": prompt + answer, "prompt": 10}]),),
    )
    own = Corpus(make_shards(settings, tmp_path))
    d2t = np.arange(tiny_models.N_VOCAB)
    full = build(TargetWeights(tiny.targets[0]), 3, d2t, 0)
    least_squares_start(full, own, own.items, 0)  # or nothing is accepted, by either
    simulated = measure(full, own, own.items, 3)
    assert simulated.accept_per_position[0] > 0.1
    write(full, own.layers, tmp_path, torch.float32)
    convert(tmp_path, tiny.targets[0], tmp_path / "head.gguf", "f32")
    llm = EagleLlama(
        tiny.targets[0], eagle_path=str(tmp_path / "head.gguf"), n_max=3, n_ctx=256, verbose=False
    )
    assert list(islice(llm.generate(prompt, temp=0.0), 120)) == answer
    assert abs(simulated.rounds - llm.stats.rounds) <= 3
    for ours, theirs in zip(simulated.accept_per_position, llm.stats.accept_per_position):
        assert abs(ours - theirs) < 0.06
    llm.close()
