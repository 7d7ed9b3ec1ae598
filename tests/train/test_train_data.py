"""Training data: sources, generation, capture, shards, batches."""

import dataclasses

import numpy as np
import pytest
import tiny_models
from training import lines, make_shards

from eagle3_llama import EagleError
from eagle3_llama.models import smollm2

pytest.importorskip("torch")

from eagle3_llama.train.data import Corpus, batches, split
from eagle3_llama.train.generate import OPENING, WINDOW, loop_end
from eagle3_llama.train.shards import Shards, shard_info
from eagle3_llama.train.sources import Tasks, read_conversations, read_prompts
from eagle3_llama.train.target import TrainingTarget


def test_sources(tmp_path, tiny):
    settings = dataclasses.replace(
        tiny, prompts=(lines(tmp_path / "p.jsonl", [f"prompt {i}" for i in range(50)]),), weights=(2, 1, 1)
    )
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


def test_data_is_the_same_after_a_kill(tiny, tmp_path):
    """Self-synthesis, prompts and conversations: killed in the middle of a shard, made again bit for bit."""
    prompts = lines(
        tmp_path / "p.jsonl",
        ["Hello there", {"prompt": "Name a colour"}, {"messages": [{"role": "user", "content": "Hi"}]}],
    )
    settings = dataclasses.replace(tiny, prompts=(prompts,), weights=(0, 1, 1), max_tokens=3000, n_predict=24)
    first = make_shards(settings, tmp_path / "a")
    data = first[0].read_bytes()

    class Stop(Exception):
        pass

    def stop(tokens, *_):
        if tokens > 1000:
            raise Stop

    with pytest.raises(Stop):
        make_shards(settings, tmp_path / "b", stop)
    assert not list((tmp_path / "b").glob("**/*.safetensors")) and not list(
        (tmp_path / "b").glob("**/.*part")
    )
    second = make_shards(settings, tmp_path / "b")
    assert second[0].read_bytes() == data
    with pytest.raises(EagleError, match="other settings"):
        Shards(tmp_path / "b" / "data", dataclasses.replace(settings, seed=2))
    first[0].write_bytes(data[:-100])
    with pytest.raises(EagleError, match="damaged"):
        make_shards(settings, tmp_path / "a")


def test_max_tokens_is_a_maximum(tiny, tmp_path):
    """Whatever is under way. More of them adds to the same data, fewer read its beginning."""
    prompts = lines(tmp_path / "p.jsonl", ["Hello there", "Name a colour", "Hi"])
    settings = dataclasses.replace(tiny, prompts=(prompts,), weights=(0, 1, 1), n_predict=24)
    texts, made = {}, {}
    for most in (1000, 300, 2000, 6000):  # a shard alone has more than 2,000
        mine, counted = dataclasses.replace(settings, max_tokens=most), []
        corpus = Corpus(make_shards(mine, tmp_path / "a", lambda *n: counted.append(n)), None, most)
        texts[most] = [corpus.tokens(item).tolist() for item in corpus.items]
        assert most - 100 < sum(map(len, texts[most])) <= most  # no text is longer than 100
        made[most] = counted[-1][1]
    assert made[300] == 0 and 1000 <= made[1000] < 2000
    for fewer, more in ((300, 1000), (1000, 2000), (2000, 6000)):
        assert texts[more][: len(texts[fewer])] == texts[fewer]
    whole = make_shards(dataclasses.replace(settings, max_tokens=6000), tmp_path / "b")
    again = make_shards(dataclasses.replace(settings, max_tokens=6000), tmp_path / "a")
    assert [path.read_bytes() for path in whole] == [path.read_bytes() for path in again]
    alone = make_shards(dataclasses.replace(settings, max_tokens=1000, slots=1), tmp_path / "c")
    corpus = Corpus(alone, None, 1000)
    assert [corpus.tokens(item).tolist() for item in corpus.items] == texts[1000]


def test_sequences_together_are_as_alone(tiny):
    """Features of many sequences in one batch: each as if alone."""
    target = TrainingTarget(tiny.targets[0], (1, 2, 3), 4, 64, 1)
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
    """The second backend gives llama.cpp's logits and features, for a prompt and for a batch of sequences."""
    backends = [TrainingTarget(tiny.targets[0], (1, 2, 3), 3, 64, 1, device) for device in (None, "cpu")]
    text = [[1, *range(10 + 7 * s, 25 + 9 * s)] for s in range(3)]
    results = []
    for target in backends:
        prompts = [target.prefill(t[:-1], s) for s, t in enumerate(text)]
        rows, features = target.decode([t[-1] for t in text], [len(t) - 1 for t in text], range(3))
        results.append([*(p[0] for p in prompts), *(p[2] for p in prompts), rows.copy(), features])
        target.close()
    for ours, theirs in zip(*results):
        np.testing.assert_allclose(
            ours.astype(np.float32), theirs.astype(np.float32), atol=2e-2 * np.abs(theirs).max()
        )


def test_capture_in_pytorch_on_the_real_model():
    text = "The sky is blue because"
    rows = []
    for device in (None, "cpu"):
        target = TrainingTarget(str(smollm2("Q8_0")), None, 1, 64, 2, device)
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
    settings = dataclasses.replace(
        tiny,
        targets=(tiny.targets[0], other),
        max_tokens=18000,
        layers=(1, 2),
        capture_layers=(1, 2, 3),
        conversations=(
            lines(
                tmp_path / "c.jsonl", [{"toks": [1, *range(3 + i % 50, 60)], "prompt": 4} for i in range(600)]
            ),
        ),
    )
    paths = make_shards(settings, tmp_path)
    assert {shard_info(p)["target"] for p in paths} == {"target.gguf", "other.gguf"}
    all_layers, two = Corpus(paths), Corpus(paths, settings.layers)
    assert all_layers.batch(all_layers.items[:1], 2).features.shape[-1] == 3 * 64
    assert (
        two.batch(two.items[:1], 2).features == all_layers.batch(all_layers.items[:1], 2).features[..., :128]
    ).all()
    with pytest.raises(EagleError, match="not of .0."):
        Corpus(paths, (0, 1))


def test_batches_hold_every_item_once(corpus, tiny):
    items, held = split(corpus, 8, 1)
    for epoch in range(2):
        drawn = batches(items, 512, 1, epoch)
        assert sorted(k for b in drawn for k in b) == list(range(len(items)))
        assert all(len(b) * max(len(items[k]) for k in b) <= 512 for b in drawn)
    assert len(held) == min(8, len(corpus.items) // 10) and not {(i.shard, i.first) for i in held} & {
        (i.shard, i.first) for i in items
    }
