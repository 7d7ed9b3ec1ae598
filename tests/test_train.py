"""Training: data, the unrolled head against the native one, loss, acceptance, resuming, export."""

import dataclasses
import json
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny_models
from safetensors.numpy import load_file

from eagle3_llama import EagleError, EagleLlama, EagleParams
from eagle3_llama.models import smollm2
from eagle3_llama.train import TrainSettings, train

torch = pytest.importorskip("torch")

from eagle3_llama.train.acceptance import measure, walk  # noqa: E402
from eagle3_llama.train.data import Corpus, batches, draft_vocabulary, split  # noqa: E402
from eagle3_llama.train.export import head_d2t, write  # noqa: E402
from eagle3_llama.train.loop import Trainer  # noqa: E402
from eagle3_llama.train.loss import Teacher, training_time_test  # noqa: E402
from eagle3_llama.train.model import build  # noqa: E402
from eagle3_llama.train.generate import OPENING, WINDOW, loop_end  # noqa: E402
from eagle3_llama.train.shards import Shards, shard_info  # noqa: E402
from eagle3_llama.train.sources import Tasks, read_conversations, read_prompts  # noqa: E402
from eagle3_llama.train.start import least_squares_start  # noqa: E402
from eagle3_llama.train.target import Target  # noqa: E402
from eagle3_llama.train.weights import TargetWeights  # noqa: E402


def lines(path, items):
    path.write_text("".join(json.dumps(i) + "\n" for i in items))
    return str(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny target and settings for it: conversations of random ids, some structure in them."""
    d = tmp_path_factory.mktemp("tiny")
    target = str(tiny_models.target(d / "target.gguf"))
    rng = np.random.default_rng(0)
    made = [{"toks": [1, *(int(3 + (a + b * i) % 40) for i in range(60))], "prompt": 8} for a, b in rng.integers(1, 30, (96, 2))]
    return TrainSettings(targets=(target,), out=str(d / "out"), conversations=(lines(d / "made.jsonl", made),), weights=(0, 0, 1),
                         layers=(1, 2, 3), draft_vocab=64, steps=3, batch_tokens=512, epochs=2, eval_every=4, heldout=8, slots=4, max_tokens=5000)


@pytest.fixture(scope="module")
def corpus(tiny):
    return Corpus(make_shards(tiny, tiny.out))


def make_shards(settings, out):
    from pathlib import Path

    return Shards(Path(out) / "data", settings).fill(lambda p: Target(p, settings.capture_layers or settings.layers, settings.slots, 256, 1), lambda *_: None)


@pytest.fixture(scope="module")
def head(tiny, corpus):
    weights = TargetWeights(tiny.targets[0])
    d2t, coverage = draft_vocabulary(corpus.answers(corpus.items), weights.shape.n_vocab, 64)
    assert coverage == 1.0 and len(set(d2t.tolist())) == 64
    return build(weights, 3, d2t, 0)


def test_native_head_computes_the_same(tiny, corpus, head, tmp_path):
    """Exported, converted, loaded: drafts and logits of the PyTorch head, greedy chains included."""
    from eagle3_llama.convert import convert

    write(head, corpus.layers, tmp_path, torch.float32)
    convert(tmp_path, tiny.targets[0], tmp_path / "head.gguf", "f32")
    llm = EagleLlama(tiny.targets[0], eagle_path=str(tmp_path / "head.gguf"), n_ctx=256, verbose=False)
    item = corpus.items[3]
    batch = corpus.batch([item], 6)
    n = len(item) - 1
    with torch.no_grad():
        expected = head.lm_head(next(head.unroll(batch.features, batch.tokens, 1)))[0, :n].numpy()
        drafts = head.draft(batch.features, batch.tokens, 4)[0].numpy()
    _, _, logits = llm._engine.head_forward(batch.tokens[0, 1 : n + 1].numpy(), batch.features[0, :n].numpy())
    np.testing.assert_allclose(logits, expected, atol=2e-3 * np.abs(expected).max())
    same = 0
    for t in range(8, 48):
        llm.reset()
        llm._engine.rewind(0)
        llm.eval(batch.tokens[0, : t + 1].tolist())
        same += llm._engine.draft(int(batch.tokens[0, t + 1]), EagleParams(4))[0] == drafts[t].tolist()
    assert same >= 38  # float16 features against live ones may tip a near tie
    llm.close()


def test_checkpoint_is_what_servers_read(corpus, head, tmp_path):
    """Names, shapes, dtypes and keys of SpecForge's layout, as vLLM's and SGLang's loaders expect them."""
    write(head, corpus.layers, tmp_path)
    found, s = load_file(tmp_path / "model.safetensors"), head.shape
    h, q, kv = s.n_embd, s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    shapes = {"fc.weight": (h, 3 * h), "norm.weight": (h,), "lm_head.weight": (64, h), "d2t": (64,), "t2d": (s.n_vocab,),
              "midlayer.input_layernorm.weight": (h,), "midlayer.hidden_norm.weight": (h,), "midlayer.post_attention_layernorm.weight": (h,),
              "midlayer.self_attn.q_proj.weight": (q, 2 * h), "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
              "midlayer.self_attn.v_proj.weight": (kv, 2 * h), "midlayer.self_attn.o_proj.weight": (h, q),
              "midlayer.mlp.gate_proj.weight": (s.n_ff, h), "midlayer.mlp.up_proj.weight": (s.n_ff, h), "midlayer.mlp.down_proj.weight": (h, s.n_ff)}
    assert {k: v.shape for k, v in found.items()} == shapes
    assert found["d2t"].dtype == np.int64 and found["t2d"].dtype == bool and found["fc.weight"].dtype == np.float16
    assert (np.flatnonzero(found["t2d"]) == found["d2t"] + np.arange(64)).all()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama" and config["num_hidden_layers"] == 1
    assert config["draft_vocab_size"] == 64 and config["vocab_size"] == s.n_vocab and config["torch_dtype"] == "float16"
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
    assert (head_d2t(tmp_path) == head.d2t.numpy()).all()


def test_later_steps_see_their_own_chain_only(corpus, head):
    """Step j at t, unrolled for all positions at once, equals a chain drafted from t alone."""
    batch = corpus.batch(corpus.items[:1], 6)
    with torch.no_grad():
        together = torch.stack(list(head.unroll(batch.features, batch.tokens, 4)))[:, 0]
        for t in (0, 5, 20):
            alone = torch.stack(list(head.unroll(batch.features[:, : t + 1], batch.tokens[:, : t + 6], 4)))[:, 0]
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
                if p < batch.n_tokens[b] and p + 1 >= batch.n_prompt[b] and teacher.in_draft[batch.best[b, p]]:
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


def test_least_squares_start(tiny, corpus):
    """Before any training: unseen text is said better than from the last layer alone, by heads that look at their own row."""
    weights = TargetWeights(tiny.targets[0])
    d2t, _ = draft_vocabulary(corpus.answers(corpus.items), weights.shape.n_vocab, 64)
    plain, started = build(weights, 3, d2t, 0), build(weights, 3, d2t, 0)
    items, held = split(corpus, 8, 1)
    assert least_squares_start(started, corpus, items, 0)
    teacher, batch = Teacher.of(weights, plain, "cpu"), corpus.batch(held, 4)
    with torch.no_grad():
        before, after = (training_time_test(h, teacher, batch, 1, 0.8).losses[0] for h in (plain, started))
        assert after < before - 0.3
        layer = started.midlayer
        x = layer.hidden_norm(started.fc(batch.features))
        u = torch.cat([layer.input_layernorm(started.embedding[batch.tokens[:, 1 : x.shape[1] + 1]]), layer.hidden_norm(x)], -1)
        angles = torch.arange(x.shape[1])[:, None] * started.frequencies
        q, k, _ = layer.self_attn.project(u, angles.cos(), angles.sin())
        score = (q[:, 0] @ k[:, 0].transpose(-1, -2) / started.shape.head_dim**0.5).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -1e9)
        assert score.softmax(-1).diagonal(dim1=-2, dim2=-1).mean() > 0.8


def test_mixed_precision(tiny, corpus, head):
    """Products in bfloat16, as on CUDA: the loss and the direction of the gradients stay."""
    teacher, batch = Teacher.of(TargetWeights(tiny.targets[0]), head, "cpu"), corpus.batch(corpus.items[:4], 6)
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


def test_rounds_of_acceptance():
    tokens = [0, 0, 5, 6, 7, 8, 9]  # a prompt of two; 5 is sampled from it
    right = [[tokens[t + 2 + j] if t + 2 + j < 7 else -1 for j in range(2)] for t in range(7)]
    assert walk(tokens, right, 2, 2) == (2, [2, 1])
    assert walk(tokens, [[-1, -1]] * 7, 2, 2) == (4, [0, 0])


def test_acceptance_is_the_engines(tiny, corpus, head, tmp_path):
    """Measured in PyTorch and by decoding: the same rounds on a greedy answer of the target."""
    from eagle3_llama.convert import convert
    from itertools import islice

    plain = EagleLlama(tiny.targets[0], n_ctx=256, verbose=False)
    prompt = corpus.tokens(corpus.items[0])[:10].tolist()
    answer = list(islice(plain.generate(prompt, temp=0.0), 120))
    plain.close()
    settings = dataclasses.replace(tiny, out=str(tmp_path), conversations=(lines(tmp_path / "c.jsonl", [{"toks": prompt + answer, "prompt": 10}]),))
    own = Corpus(make_shards(settings, tmp_path))
    d2t = np.arange(tiny_models.N_VOCAB)
    full = build(TargetWeights(tiny.targets[0]), 3, d2t, 0)
    simulated = measure(full, own, own.items, 3)
    write(full, own.layers, tmp_path, torch.float32)
    convert(tmp_path, tiny.targets[0], tmp_path / "head.gguf", "f32")
    llm = EagleLlama(tiny.targets[0], eagle_path=str(tmp_path / "head.gguf"), n_max=3, n_ctx=256, verbose=False)
    assert list(islice(llm.generate(prompt, temp=0.0), 120)) == answer
    assert abs(simulated.rounds - llm.stats.rounds) <= 3
    for ours, theirs in zip(simulated.accept_per_position, llm.stats.accept_per_position):
        assert abs(ours - theirs) < 0.06
    llm.close()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_learns_and_resumes(tiny, corpus, tmp_path, optimizer):
    """A run killed at every few steps ends with the very weights of one that was not."""

    class Stop(Exception):
        pass

    def run(out, kill_every):
        settings = dataclasses.replace(tiny, out=str(out), epochs=5, lr=3e-3, optimizer=optimizer, minutes=60)
        out.mkdir()
        while True:
            trainer = Trainer(settings, corpus, out)
            trainer.save_every = 0
            trainer.resume()
            start = trainer.state["step"]

            def progress(p):
                if kill_every and p.step - start == kill_every:
                    raise Stop

            try:
                trainer.train(progress)
                return trainer
            except Stop:
                pass

    whole, pieces = run(tmp_path / "a", 0), run(tmp_path / "b", 7)
    for (name, p), (_, q) in zip(whole.head.state_dict().items(), pieces.head.state_dict().items()):
        assert torch.equal(p, q), name
    rows = whole.state["rows"]
    assert [r["accept_per_position"] for r in rows] == [r["accept_per_position"] for r in pieces.state["rows"]]
    assert rows[-1]["loss"] < 0.8 * rows[1]["loss"]
    assert (tmp_path / "a" / "log.csv").read_text().count("\n") == len(rows) + 1
    with pytest.raises(EagleError, match="other settings .lr."):
        Trainer(dataclasses.replace(tiny, epochs=5, lr=0.5, optimizer=optimizer), corpus, tmp_path / "a").resume()


def test_data_is_the_same_after_a_kill(tiny, tmp_path):
    """Self-synthesis, prompts and conversations: killed in the middle of a shard, made again bit for bit."""
    prompts = lines(tmp_path / "p.jsonl", ["Hello there", {"prompt": "Name a colour"}, {"messages": [{"role": "user", "content": "Hi"}]}])
    settings = dataclasses.replace(tiny, prompts=(prompts,), weights=(0, 1, 1), max_tokens=3000, n_predict=24)
    first = make_shards(settings, tmp_path / "a")
    data = first[0].read_bytes()

    class Stop(Exception):
        pass

    def stop(tokens, *_):
        if tokens > 1000:
            raise Stop

    with pytest.raises(Stop):
        Shards(tmp_path / "b" / "data", settings).fill(lambda p: Target(p, settings.capture_layers or settings.layers, settings.slots, 256, 1), stop)
    assert not list((tmp_path / "b").glob("**/*.safetensors")) and not list((tmp_path / "b").glob("**/.*part"))
    second = make_shards(settings, tmp_path / "b")
    assert second[0].read_bytes() == data
    with pytest.raises(EagleError, match="other settings"):
        Shards(tmp_path / "b" / "data", dataclasses.replace(settings, seed=2))
    first[0].write_bytes(data[:-100])
    with pytest.raises(EagleError, match="damaged"):
        make_shards(settings, tmp_path / "a")


def test_sequences_together_are_as_alone(tiny):
    """Features of many sequences in one batch: each as if alone."""
    target = Target(tiny.targets[0], (1, 2, 3), 4, 64, 1)
    text = [[1, *range(10 + 7 * s, 30 + 7 * s)] for s in range(4)]
    for s in range(4):
        target.prefill(text[s][:-1], s)
    rows, features = target.decode([t[-1] for t in text], [20] * 4, range(4))
    rows = rows.copy()
    for s in range(4):
        target.prefill(text[s][:-1], 0)
        alone, f = target.decode([text[s][-1]], [20], [0])
        assert (rows[s] == alone[0]).all() and (features[s] == f[0]).all()
    target.close()


def test_capture_in_pytorch(tiny):
    """The second backend against llama.cpp: logits and features, of a prompt and of many sequences at once."""
    backends = [Target(tiny.targets[0], (1, 2, 3), 3, 64, 1, device) for device in (None, "cpu")]
    text = [[1, *range(10 + 7 * s, 25 + 9 * s)] for s in range(3)]
    results = []
    for target in backends:
        prompts = [target.prefill(t[:-1], s) for s, t in enumerate(text)]
        rows, features = target.decode([t[-1] for t in text], [len(t) - 1 for t in text], range(3))
        results.append([*(p[0] for p in prompts), *(p[2] for p in prompts), rows.copy(), features])
        target.close()
    for ours, theirs in zip(*results):
        np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), atol=2e-2 * np.abs(theirs).max())


def test_capture_in_pytorch_on_the_real_model():
    text = "The sky is blue because"
    rows = []
    for device in (None, "cpu"):
        target = Target(str(smollm2("Q8_0")), None, 1, 64, 2, device)
        features, best, _ = target.prefill(target.llm.tokenize(text.encode()), 0)
        rows.append((features.astype(np.float64), best))
        target.close()
    (a, best), (b, other) = rows
    cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    assert cosine.min() > 0.995 and (best == other).mean() > 0.7  # llama.cpp rounds activations to 8 bits


def test_loops_are_cut():
    """A window of a loop is kept, the rest is not; text that repeats nothing stays whole."""
    text = np.random.default_rng(0).integers(0, 1000, 100).tolist()
    assert loop_end(text) is None and loop_end(text[:5]) is None
    end = loop_end(text + [1, 2, 3, 4, 5] * 60)
    assert 100 + WINDOW - 24 <= end <= 100 + WINDOW + 24


def test_a_model_without_a_template_writes_texts(tiny, tmp_path):
    """Self-synthesis with a base model: no user turn to open, so it writes from its first token on."""
    settings = dataclasses.replace(tiny, conversations=(), weights=(1, 0, 0), max_tokens=1000, n_predict=40)
    made = Corpus(make_shards(settings, tmp_path))
    assert all(made.tokens(i)[0] == 1 and i.n_prompt == OPENING + 1 for i in made.items)
    assert len({tuple(made.tokens(i)[:OPENING]) for i in made.items}) > len(made.items) / 2


def test_several_targets_take_turns(tiny, tmp_path):
    """Each reads other conversations; the head may read fewer layers than the data holds."""
    other = str(tiny_models.target(tmp_path / "other.gguf", kind="BF16"))
    settings = dataclasses.replace(tiny, targets=(tiny.targets[0], other), max_tokens=18000, layers=(1, 2), capture_layers=(1, 2, 3),
                                   conversations=(lines(tmp_path / "c.jsonl", [{"toks": [1, *range(3 + i % 50, 60)], "prompt": 4} for i in range(600)]),))
    paths = make_shards(settings, tmp_path)
    assert {shard_info(p)["target"] for p in paths} == {"target.gguf", "other.gguf"}
    all_layers, two = Corpus(paths), Corpus(paths, settings.layers)
    assert all_layers.batch(all_layers.items[:1], 2).features.shape[-1] == 3 * 64
    assert (two.batch(two.items[:1], 2).features == all_layers.batch(all_layers.items[:1], 2).features[..., :128]).all()
    with pytest.raises(EagleError, match="not of .0."):
        Corpus(paths, (0, 1))


def test_sources(tmp_path, tiny):
    settings = dataclasses.replace(tiny, prompts=(lines(tmp_path / "p.jsonl", [f"prompt {i}" for i in range(50)]),), weights=(2, 1, 1))
    tasks = [Tasks(settings).task(i) for i in range(100)]
    assert [sum(t.kind == k for t in tasks) for k in ("write", "answer", "read")] == [50, 25, 25]
    asked = [t.messages[0]["content"] for t in tasks if t.kind == "answer"]
    assert len(set(asked)) == 25 and tasks == [Tasks(settings).task(i) for i in range(100)]
    for bad in ('{"prompt": 5}', "[1]", "{", '{"messages": []}'):
        (tmp_path / "bad.jsonl").write_text(bad + "\n")
        with pytest.raises(EagleError, match="bad.jsonl"):
            read_prompts(tmp_path / "bad.jsonl")
        with pytest.raises(EagleError, match="bad.jsonl"):
            read_conversations(tmp_path / "bad.jsonl")


def test_batches_hold_every_item_once(corpus, tiny):
    items, held = split(corpus, 8, 1)
    for epoch in range(2):
        drawn = batches(items, 512, 1, epoch)
        assert sorted(k for b in drawn for k in b) == list(range(len(items)))
        assert all(len(b) * max(len(items[k]) for k in b) <= 512 for b in drawn)
    assert len(held) == min(8, len(corpus.items) // 10) and not {(i.shard, i.first) for i in held} & {(i.shard, i.first) for i in items}


@pytest.mark.parametrize("wrong", [{"targets": ()}, {"steps": 0}, {"lr": float("nan")}, {"weights": (0, 0, 0)}, {"prompts": ("none.jsonl",)}, {"max_tokens": 3}])
def test_wrong_settings(tiny, wrong):
    with pytest.raises(EagleError):
        dataclasses.replace(tiny, **wrong)


def test_real_model_on_a_tiny_budget(tmp_path):
    """The command on SmolLM2, self-synthesis and prompts; killed once; the head loads and beats a random one."""
    prompts = lines(tmp_path / "p.jsonl", ["Why is the sky blue?", "Name three rivers.", "Write a haiku about rain.", "What is 12 times 7?"])
    command = [sys.executable, "-m", "eagle3_llama.cli", "train", "--target", smollm2("Q4_0"), "--out", tmp_path / "head", "--prompts", prompts,
               "--weights", "1,1,0", "--max-tokens", "5000", "--n-predict", "48", "--minutes", "0.7", "--epochs", "3", "--eval-every", "5",
               "--draft-vocab", "2048", "--heldout", "6", "--slots", "16"]
    child = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE)
    time.sleep(12)
    child.kill()
    child.wait()
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "held-out greedy chains" in done.stdout
    llm = EagleLlama(str(smollm2("Q4_0")), eagle_path=str(tmp_path / "head" / "head.gguf"), n_max=1, n_ctx=512, verbose=False)
    llm("The capital of France is", max_tokens=80, temperature=0)
    assert llm.stats.accept_per_position[0] > 0.1  # a random head: one in thousands
    llm.close()
