"""Every layout and variant: conversion, the native graph against the NumPy reference, text against plain."""

import gguf
import heads
import numpy as np
import pytest
import tiny_models
from converting import converted
from cores import THREADS
from heads import N_LAYER
from tiers import each
from tiny_models import N_EMBD, N_VOCAB, take

from eagle3_llama import EagleError, EagleLlama
from eagle3_llama.heads.compare import compare, stage_names
from eagle3_llama.heads.compare.read import read_reference
from eagle3_llama.heads.convert import convert


def cosine(a, b):
    a, b = np.asarray(a, np.float64).ravel(), np.asarray(b, np.float64).ravel()
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


@pytest.mark.parametrize("name", heads.RECIPES)
def test_native_graph(tmp_path, target, name):
    """Every stage in F32, logits in Q8_0 and Q4_0, and a draft's further steps."""
    rng = np.random.default_rng(3)
    for outtype, least in (("f32", 0.9999), ("q8_0", 0.999), ("q4_0", 0.9)):
        (tmp_path / outtype).mkdir()
        head, path = converted(tmp_path / outtype, name, target, outtype)
        n, features = 24, rng.standard_normal((24, len(head.layers) * N_EMBD)).astype(np.float32)
        tokens = rng.integers(3, N_VOCAB, n)
        expected = head.truth.forward(tokens, head.truth.fuse(features))
        llm = EagleLlama(
            str(target), eagle_path=str(path), n_max=4, n_ctx=256, n_threads=THREADS, verbose=False
        )
        g, state, logits = llm.engine.head.forward(tokens, features)
        assert cosine(logits, expected["logits"]) > least
        if outtype == "f32":
            for stage in stage_names(head.truth.n_layer)[:-1]:
                assert cosine(llm.engine.head.trace(tokens, features, stage), expected[stage]) > 0.9999, stage
            assert cosine(g, expected["g"]) > 0.9999 and cosine(state, expected["state"]) > 0.9999
            assert (llm.engine.head.d2t() == head.d2t).all()
        llm.close()


@pytest.mark.parametrize("name", each(heads.RECIPES, quick=heads.FEW))
def test_drafts_and_text(tmp_path, target, name):
    """Drafts from the target's own features equal the reference's. The text equals plain decoding's."""
    head, path = converted(tmp_path, name, target)
    plain = take(EagleLlama(str(target), n_ctx=256, n_threads=THREADS, verbose=False), 40)
    llm = EagleLlama(
        str(target),
        eagle_path=str(path),
        n_max=4,
        n_ctx=256,
        n_threads=THREADS,
        flash_attn=True,
        verbose=False,
    )
    assert take(llm, 40) == take(
        EagleLlama(str(target), n_ctx=256, n_threads=THREADS, flash_attn=True, verbose=False), 40
    )
    llm.close()
    llm = EagleLlama(str(target), eagle_path=str(path), n_max=4, n_ctx=256, n_threads=THREADS, verbose=False)
    drafts = []
    spy(llm.engine, drafts)
    assert take(llm, 40) == plain
    features = graph_features(target, [*tiny_models.PROMPT, *plain], head.layers)
    text, checked = [*tiny_models.PROMPT, *plain], 0
    for at, token, draft in drafts[:6]:
        assert text[at] == token
        for row, chosen in zip(head.truth.draft_logits(text[1 : at + 1], features[:at], draft), draft):
            # the native cache is half precision: a token that is as good as the best may win
            assert row.max() - row[list(head.d2t).index(chosen)] < 0.02 * row.std()
            checked += 1
    assert checked >= 12


def spy(engine, drafts):
    """Writes down each round's (n_past, token, draft tokens)."""
    inner = engine.round

    def watched(asks, samplers):
        def look(tokens):
            drafts.append((engine.n_past(), tokens[0], tokens[1:]))

        return inner([asks[0]._replace(on_draft=look), *asks[1:]], samplers)

    engine.round = watched


def graph_features(target, tokens, layers):
    from eagle3_llama.heads.compare.graph import GraphLayers

    graph = GraphLayers(target)
    assert graph.decode(tokens, range(len(tokens))) == 0
    features = np.concatenate([graph.truth(k) for k in layers], axis=1)
    graph.close()
    return features


@pytest.mark.parametrize(
    "name",
    ["SpecForge, EAGLE-3.1", "speculators, qwen3", "EAGLE-1", "two projections", "yarn rope", "AngelSlim"],
)
def test_gguf_to_gguf(tmp_path, target, name):
    """A head's GGUF converts to one that computes the same."""
    _, path = converted(tmp_path, name, target)
    report = convert(path, target, tmp_path / "again.gguf")
    ours, theirs = gguf.GGUFReader(tmp_path / "again.gguf"), gguf.GGUFReader(path)
    keys = lambda r: {
        k: f.contents() for k, f in r.fields.items() if k not in ("general.name", "GGUF.kv_count")
    }
    assert report.layout == "GGUF" and keys(ours) == keys(theirs)
    assert {t.name: t.data.tobytes() for t in ours.tensors} == {
        t.name: t.data.tobytes() for t in theirs.tensors
    }


def test_gguf_of_the_older_branch(tmp_path, target):
    """eagle3.extract_layers and blk.0.hidden_norm load as they are, and convert to today's names."""
    head, path = converted(tmp_path, "SafeAILab", target)
    old = older(path, tmp_path / "old.gguf")
    llm = EagleLlama(str(target), eagle_path=str(old), n_ctx=128, n_threads=THREADS, verbose=False)
    assert llm.engine.head.info()["layers"] == head.layers
    llm.close()
    report = convert(old, target, tmp_path / "new.gguf")
    keys = gguf.GGUFReader(tmp_path / "new.gguf")
    assert (
        report.layers == head.layers
        and "eagle3.target_layers" in keys.fields
        and "eagle3.extract_layers" not in keys.fields
    )
    assert {t.name for t in keys.tensors} == {t.name for t in gguf.GGUFReader(path).tensors}


def older(path, out):
    """A GGUF as the branch before the merge wrote it."""
    reader, w = gguf.GGUFReader(path), gguf.GGUFWriter(out, "eagle3")
    for key, f in reader.fields.items():
        if key.startswith(("eagle3.", "tokenizer.")):
            kind, item = f.types[0], f.types[1] if len(f.types) > 1 else None
            w.add_key_value(key.replace("target_layers", "extract_layers"), f.contents(), kind, item)
    for t in reader.tensors:
        w.add_tensor(t.name.replace("attn_norm_2", "hidden_norm"), np.array(t.data), raw_dtype=t.tensor_type)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return out


@pytest.mark.parametrize("name", each(heads.RECIPES, quick=heads.FEW))
def test_compare_reads_the_gguf_alike(tmp_path, target, name):
    """`compare` makes the reference from the GGUF that the head was made with, and all stages agree."""
    head, path = converted(tmp_path, name, target)
    tokens, features = (
        np.arange(3, 11),
        np.random.default_rng(0).standard_normal((8, len(head.layers) * N_EMBD)),
    )
    reference = read_reference(path, target)
    ours, theirs = (r.forward(tokens, r.fuse(features)) for r in (reference, head.truth))
    for stage in stage_names(head.truth.n_layer):
        np.testing.assert_allclose(ours[stage], theirs[stage], rtol=1e-4, atol=1e-4)


def test_compare(tmp_path, target):
    head, path = converted(tmp_path, "speculators, qwen3", target)
    stages = {s.name: s for s in compare(path, target, "a b c d e f")}
    assert list(stages) == ["features", *stage_names(2)]
    assert stages["features"].error == 0 and min(s.cosine for s in stages.values()) > 0.9999
    with pytest.raises(EagleError, match="longer"):
        compare(path, target, "")


def test_state_of_two_layers(tmp_path, target):
    """A saved state has the keys and values of every decoder layer."""
    _, path = converted(tmp_path, "speculators, qwen3", target)
    llm = EagleLlama(str(target), eagle_path=str(path), n_max=4, n_ctx=256, n_threads=THREADS, verbose=False)
    first = take(llm, 12)
    state = llm.save_state()
    after = take(llm, 24, [*tiny_models.PROMPT, *first])
    drafted = llm.stats.drafted
    llm.load_state(state)
    llm.stats.reset()
    assert take(llm, 24, [*tiny_models.PROMPT, *first]) == after
    assert drafted and llm.stats.drafted
    llm.close()


def test_other_layers_than_the_file_names(tmp_path, target):
    _, path = converted(tmp_path, "SafeAILab", target)
    llm = EagleLlama(
        str(target),
        eagle_path=str(path),
        extract_layers=[0, 1, N_LAYER],
        n_ctx=128,
        n_threads=THREADS,
        verbose=False,
    )
    assert llm.engine.head.info()["layers"] == [0, 1, N_LAYER]
    llm.close()
    for wrong in ([1, 2], [2, 1, 3], [1, 2, 13]):
        with pytest.raises(EagleError, match="layer"):
            EagleLlama(
                str(target),
                eagle_path=str(path),
                extract_layers=wrong,
                n_ctx=128,
                n_threads=THREADS,
                verbose=False,
            )
