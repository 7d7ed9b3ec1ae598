"""POST /v1/embeddings, with a BERT and with the target itself: the vectors are those of llama-cpp-python."""

import base64
import contextlib
import dataclasses
import threading

import gguf
import httpx
import numpy as np
import pytest
import tiny_models
from client_tools import openai_client
from server_tools import Blocked, running, settings, until
from tiers import crossed
from tiny_models import PROMPT

from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.batching.embedder import Embedder
from eagle3_llama.common.limits import MAX_ROWS
from eagle3_llama.errors import EagleError
from eagle3_llama.runtime.binding import Llama
from eagle3_llama.server.embeddings import routes

PATH, COMPLETIONS = "/v1/embeddings", "/v1/completions"
TEXT = "a b c z q"
LONG = "q w e r t y " * 6  # of several chunks as the target's tokens, and one of the BERT's


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return str(tiny_models.bert(tmp_path_factory.mktemp("bert") / "bert.gguf"))


@pytest.fixture(scope="module")
def batcher(files):
    given = settings(model=files[0], eagle=files[1], n_ctx=256, n_parallel=2, threads=1)
    with contextlib.closing(Batcher(BatchSettings(**given.batch()))) as b:
        b.given = given
        yield b


@pytest.fixture(scope="module")
def servers(batcher, bert):
    """bert: with a model for embeddings. target: with the target's. none: without."""
    with contextlib.ExitStack() as stack:
        made = {"bert": bert, "target": "target", "none": None}
        yield {
            kind: stack.enter_context(running(dataclasses.replace(batcher.given, embeddings=model), batcher))
            for kind, model in made.items()
        }


@pytest.fixture(params=["bert", "target"])
def server(servers, request):
    return servers[request.param]


def vectors(server, given, **more):
    r = server.client.post(PATH, json={"input": given, **more})
    assert r.status_code == 200, r.text
    data = r.json()["data"]
    assert [d["index"] for d in data] == list(range(len(data)))
    return [d["embedding"] for d in data]


def reference(path, texts, pooling):
    """Of llama-cpp-python, which decodes a text at once."""
    llm = Llama(path, embedding=True, n_ctx=256, pooling_type=pooling, verbose=False)
    with contextlib.closing(llm):
        return np.array([llm.embed(text, normalize=True) for text in texts])


@pytest.mark.parametrize("kind, pooling", crossed(["bert", "llama"], ["MEAN", "CLS", "LAST"]))
def test_vectors_are_those_of_the_model(tmp_path, batcher, kind, pooling):
    """Pooled as its file says; a long text too, of which a part is decoded at a time."""
    make = tiny_models.bert if kind == "bert" else tiny_models.target
    path = str(make(tmp_path / "m.gguf", pooling=gguf.PoolingType[pooling]))
    with contextlib.closing(Embedder(batcher, path)) as embedder:
        tokens = [embedder.tokenize(text) for text in (TEXT, LONG)]
        assert kind == "bert" or len(tokens[1]) > 2 * MAX_ROWS
        got = np.array([embedder.embed(ids) for ids in tokens])
        assert embedder.pooling == pooling.lower() and got.dtype == np.float32
    np.testing.assert_allclose(got, reference(path, (TEXT, LONG), gguf.PoolingType[pooling]), atol=2e-3)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1.0, atol=1e-5)
    same = (kind, pooling) == ("llama", "CLS")  # both begin with the same token, and it sees no other
    assert (np.abs(got[0] - got[1]).max() > 0.01) != same


def test_a_model_that_names_no_pooling(servers, bert, files):
    """It is the mean over the tokens."""
    for kind, path in (("bert", bert), ("target", files[0])):
        expected = reference(path, [TEXT, LONG], gguf.PoolingType.MEAN)
        np.testing.assert_allclose(vectors(servers[kind], [TEXT, LONG]), expected, atol=2e-3)


def test_forms_of_the_input(server):
    """A text or its tokens, one or several: the same vectors, to the last bit."""
    embedder = server.app.state.embeddings.embedder
    ids, other = embedder.tokenize(TEXT), embedder.tokenize(LONG)
    first, second = vectors(server, [TEXT, LONG])
    assert vectors(server, TEXT) == vectors(server, ids) == vectors(server, [ids]) == [first]
    assert vectors(server, [other, ids]) == vectors(server, [LONG, TEXT]) == [second, first]
    [coded] = vectors(server, TEXT, encoding_format="base64")
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == np.float32(first).tolist()
    found = openai_client(server).embeddings.create(model="any", input=[TEXT, LONG], dimensions=len(first))
    assert found.data[1].embedding == np.float32(second).tolist()
    assert found.usage.prompt_tokens == found.usage.total_tokens == len(ids) + len(other)


@pytest.mark.parametrize(
    "message, more",
    [
        ("dimensions: this model's embeddings have 64 numbers", {"dimensions": 32}),
        ("tokens, at most", {"input": [TEXT, "q " * 300]}),
        ("input[1] has no tokens", {"input": [TEXT, ""]}),
        ("token ids are 0..", {"input": [[5, 100_000]]}),
        ("encoding_format", {"encoding_format": "int8"}),
        ("input", {"input": []}),
        ("at most 2 are possible", {"input": [TEXT] * 3}),
    ],
)
def test_what_is_refused(servers, monkeypatch, message, more):
    monkeypatch.setattr(routes, "MAX_NUMBERS", 2 * 64)
    server = servers["bert"]
    monkeypatch.setattr(server.app.state.embeddings.embedder._model, "tokenize", _without_specials(server))
    r = server.client.post(PATH, json={"input": TEXT, **more})
    assert r.status_code == 400 and message in r.json()["error"]["message"], r.text


def _without_specials(server):
    """Tokenizes without the tokens around a text, as a model without any does."""
    own = server.app.state.embeddings.embedder._model.tokenize
    return lambda text, _, special: own(text, False, special)


def test_without_a_model(servers):
    r = servers["none"].client.post(PATH, json={"input": TEXT})
    error = r.json()["error"]
    assert r.status_code == 501 and error["code"] == "no_embeddings" and "--embeddings" in error["message"]


def test_models_that_make_none(tmp_path, batcher):
    path = str(tiny_models.bert(tmp_path / "m.gguf", pooling=gguf.PoolingType.RANK))
    with pytest.raises(EagleError, match="a reranker"):
        Embedder(batcher, path)
    with pytest.raises(EagleError, match="no such file"):
        dataclasses.replace(batcher.given, embeddings=str(tmp_path / "none.gguf"))
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:3000])
    with pytest.raises(EagleError, match="cannot load"):
        Embedder(batcher, path)


def test_others_get_their_text(server):
    """Rounds go on between the parts of a text, and the texts and vectors stay what they are."""
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    expected, alone = (
        server.client.post(COMPLETIONS, json=body).json()["choices"],
        vectors(server, [LONG] * 9),
    )
    found = []
    reader = threading.Thread(target=lambda: found.append(vectors(server, [LONG] * 9)))
    reader.start()
    texts = [server.client.post(COMPLETIONS, json=body).json()["choices"] for _ in range(3)]
    reader.join(60)
    assert found == [alone] and texts == [expected] * 3


def test_a_client_that_leaves(servers, monkeypatch):
    """No further text is read for it."""
    server, calls = servers["target"], []
    routes = server.app.state.embeddings
    own = routes.embedder.embed
    monkeypatch.setattr(routes.embedder, "embed", lambda ids: calls.append(ids) or own(ids))
    with Blocked(server) as blocked:
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(PATH, json={"input": [TEXT] * 50}, timeout=0.5)
        until(lambda: calls)
        blocked.go()
        until(lambda: routes.work.inside == 0)
    assert len(calls) < 50


@pytest.mark.parametrize("forced", [False, True])
def test_one_that_runs_past_the_end(batcher, monkeypatch, caplog, forced):
    """Its client gets an error as all do, which is none in the log. forced: by a second signal."""
    begun, go, answers, calls = threading.Event(), threading.Event(), [], []
    with running(dataclasses.replace(batcher.given, embeddings="target"), batcher) as s:
        embed = s.app.state.embeddings.embedder.embed
        held = lambda ids: (calls.append(ids), begun.set(), go.wait(60), embed(ids))[3]
        monkeypatch.setattr(s.app.state.embeddings.embedder, "embed", held)
        ask = threading.Thread(target=lambda: answers.append(s.client.post(PATH, json={"input": [TEXT] * 3})))
        ask.start()
        assert begun.wait(60)
        s.gate.draining = s.uvicorn.should_exit = True
        s.uvicorn.force_exit = forced
        ask.join(60)
        go.set()
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"
    assert "ASGI" not in caplog.text and "embed" not in caplog.text and len(calls) == 1


def test_bounds(servers, batcher, monkeypatch):
    server = servers["target"]
    monkeypatch.setattr(server.app.state.embeddings.work, "most", 0)
    assert server.client.post(PATH, json={"input": TEXT}).json()["error"]["code"] == "busy"
    monkeypatch.setattr(server.gate, "draining", True)
    assert server.client.post(PATH, json={"input": TEXT}).json()["error"]["code"] == "shutting_down"
    given = dataclasses.replace(batcher.given, embeddings="target", timeout=0.1)
    with running(given, batcher) as s, Blocked(s) as blocked:
        answers = []
        ask = lambda: answers.append(s.client.post(PATH, json={"input": [TEXT, TEXT]}))
        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: s.app.state.embeddings.embedder._lock.locked())
        threading.Event().wait(0.2)  # the time that a request has
        blocked.go()
        asking.join(60)
        assert answers[0].status_code == 504 and answers[0].json()["error"]["code"] == "deadline"
