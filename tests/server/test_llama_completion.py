"""POST /completion in the form of llama.cpp's server: the same text, its fields, its answers, its slots."""

import json
import math
import threading

import pytest
from paths import ROOT
from server_tools import ask, events, idle, running, settings, tiny, until

from eagle3_llama.server.body.other_servers import OtherServers

PATH = "/completion"
SEA = "The sea is"
SAMPLED = {"temperature": 0.9, "seed": 7, "n_predict": 24}
# what llama.cpp's own page and others send whatever the user chose
ALL_OFF = {
    **dict.fromkeys("dynatemp_range xtc_probability dry_multiplier min_keep n_keep n_discard".split(), 0),
    **dict.fromkeys("top_n_sigma dry_penalty_last_n adaptive_target t_max_predict_ms".split(), -1),
    "dynatemp_exponent": 1,
    "xtc_threshold": 0.1,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_sequence_breakers": ["\n"],
    "n_indent": 0,
    "lora": [],
    "cache_prompt": False,
    "repeat_last_n": 64,
    "grammar": "",
    "samplers": "edskypmxt",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(settings(slot_save_path=str(tmp_path_factory.mktemp("slots")))) as s:
        yield s


def post(server, prompt=SEA, path=PATH, **more):
    r = server.client.post(path, json={"prompt": prompt, "n_predict": 12, "temperature": 0, **more})
    assert r.status_code == 200, r.text
    return r.json()


def refused(server, field, **more):
    r = server.client.post(PATH, json={"prompt": SEA, "n_predict": 2, **more})
    error = r.json()["error"]
    assert r.status_code == 400 and (error["param"] or "").startswith(field), error
    return error["message"]


def text_of(server, prompt=SEA, **more):
    """What /v1/completions says."""
    given = {"prompt": prompt, "max_tokens": 12, "temperature": 0, **more}
    return server.client.post("/v1/completions", json=given).json()["choices"][0]["text"]


def streamed(server, **more):
    r = server.client.post(
        PATH, json={"prompt": SEA, "n_predict": 12, "temperature": 0, "stream": True, **more}
    )
    assert "[DONE]" not in r.text
    return events(r)


# -- the text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [None, {"enabled": False}, {"n_max": 4}], ids=str)
def test_the_text_is_that_of_the_other_route(server, drafts):
    more = {} if drafts is None else {"speculative": drafts}
    whole = post(server, **SAMPLED, return_tokens=True, **more)
    assert whole["content"] == text_of(server, temperature=0.9, seed=7, max_tokens=24)
    pieces = streamed(server, **SAMPLED, **more)
    assert "".join(p["content"] for p in pieces) == whole["content"]
    assert sum((p["tokens"] for p in pieces), []) == whole["tokens"] and len(whole["tokens"]) == 24
    back = server.client.post("/detokenize", json={"tokens": whole["tokens"]}).json()["content"]
    assert back == whole["content"]
    assert [p["stop"] for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(p["tokens"] and p["tokens_evaluated"] == whole["tokens_evaluated"] for p in pieces[:-1])
    same = "prompt tokens_predicted stop_type truncated model has_new_line tokens_cached".split()
    assert {n: pieces[-1][n] for n in same} == {n: whole[n] for n in same}


def test_prompts_of_every_kind(server):
    ids = server.client.post("/tokenize", json={"content": SEA, "add_special": True}).json()["tokens"]
    one = post(server)
    assert one["prompt"] == SEA and one["tokens_evaluated"] == len(ids) and one["tokens"] == []
    for same in (ids, {"prompt_string": SEA}, [SEA], [ids], ["The", *ids[1:]], [*ids[:1], " sea is"]):
        again = post(server, same)
        assert (again["content"], again["prompt"]) == (one["content"], SEA), same
    several = post(server, [ids, SEA, {"prompt_string": "Two and two"}, ["Two", " and two"]], n_cmpl=2)
    assert [a["index"] for a in several] == list(range(8))
    assert [a["prompt"] for a in several] == [SEA] * 4 + ["Two and two"] * 4
    assert {a["content"] for a in several[:4]} == {one["content"]}
    image = {"prompt_string": SEA, "multimodal_data": ["AA"]}
    for wrong in ([1, [2]], "", [], image, [1, 1 << 30], 3, [1.5]):
        assert refused(server, "prompt", prompt=wrong)
    assert "at most 64" in refused(server, "prompt", prompt=["x"] * 65)


def test_how_it_ends(server):
    text = post(server, n_predict=40)["content"]
    word = text.split()[3]
    by_word = post(server, stop=["never", word], return_tokens=True)
    assert (by_word["stop_type"], by_word["stopping_word"], by_word["truncated"]) == ("word", word, False)
    assert by_word["content"] == text[: text.index(word)] and by_word["tokens_predicted"] == len(
        by_word["tokens"]
    )
    ends = post(server, json_schema={"const": "42"}, return_tokens=True)
    assert (ends["content"], ends["stop_type"], ends["stopping_word"]) == ('"42"', "eos", "")
    limit = post(server, n_predict=3)
    assert (limit["stop_type"], limit["tokens_predicted"], limit["truncated"]) == ("limit", 3, False)


def test_an_answer_that_fills_its_slot(files):
    with running(tiny(files)) as s:
        full = post(s, n_predict=-1, logit_bias=[[0, False], [2, False]])
        assert full["truncated"] and full["stop_type"] == "limit"
        assert full["tokens_evaluated"] + full["tokens_predicted"] - 1 == s.batcher.n_ctx
        assert full["tokens_cached"] == s.batcher.n_ctx
        assert full["has_new_line"] == ("\n" in full["content"])


def test_no_tokens_prepare_a_prompt(server):
    """As llama.cpp's clients do while the user still writes."""
    prompt = "A sentence that nobody has sent before this test, long enough to be worth it."
    none = post(server, prompt, n_predict=0)
    assert (none["content"], none["tokens_predicted"], none["stop_type"]) == ("", 0, "limit")
    then = post(server, f"{prompt} And more.")
    assert then["timings"]["cache_n"] >= none["tokens_evaluated"] - 1


# -- fields -----------------------------------------------------------------------------------------------


def test_what_turns_nothing_on_is_taken(server):
    plain = post(server, **SAMPLED)
    same = post(server, **SAMPLED, **ALL_OFF)
    assert same["content"] == plain["content"]
    assert post(server, **{**SAMPLED, "mirostat": 2, "mirostat_tau": 3.0})["content"] != plain["content"]


@pytest.mark.parametrize(
    "field, value, says",
    [
        ("dry_multiplier", 0.8, "no DRY"),
        ("xtc_probability", 0.5, "no XTC"),
        ("dynatemp_range", 0.5, "no dynamic temperature"),
        ("top_n_sigma", 1.0, "no top_n_sigma"),
        ("adaptive_target", 0.5, "no adaptive"),
        ("min_keep", 3, "no min_keep"),
        ("n_indent", 2, "no indentation"),
        ("t_max_predict_ms", 100, "time limit"),
        ("lora", [{"id": 0, "scale": 1}], "adapters"),
        ("samplers", ["temperature", "top_k"], "in the order penalties"),
        ("samplers", "kq", "no sampler 'q'"),
        ("id_slot", 3, "slots 0..2"),
        ("n_predict", -2, "greater than"),
        ("logit_bias", [[1 << 30, 1]], "token ids are"),
    ],
)
def test_what_this_server_has_not_is_refused_in_words(server, field, value, says):
    assert says in refused(server, field, **{field: value})


def test_fields_that_contradict_each_other(server):
    assert "differs" in refused(server, "", n_predict=2, max_tokens=3)
    assert "last 64" in refused(server, "repeat_last_n", repeat_last_n=5, repeat_penalty=1.1)
    assert "only one" in refused(server, "json_schema", json_schema={}, grammar='root ::= "a"')
    report = {"speculative": {"report": True}, "prompt": ["a", "b"]}
    assert "several" in refused(server, "speculative", **report)
    for beside in (
        {"repeat_penalty": 1.2},
        {"mirostat": 1},
        {"grammar": 'root ::= "a"'},
        {"json_schema": {}},
    ):
        for asked in ({"n_probs": 2}, {"logprobs": 2}, {"logprobs": 0}):
            message = refused(server, "post_sampling_probs", post_sampling_probs=True, **asked, **beside)
            assert "depends on those before it" in message
        assert post(server, n_predict=1, post_sampling_probs=True, **beside)[
            "content"
        ]  # without any, no matter
    for asked in ({"n_probs": 2}, {"logprobs": 0}):
        message = refused(server, "post_sampling_probs", post_sampling_probs=True, echo=True, **asked)
        assert "leave echo out" in message


def test_samplers_that_are_not_named_are_off(server):
    greedy = post(server)["content"]
    assert post(server, temperature=2.0, top_k=1, samplers=["top_k", "temperature"])["content"] == greedy
    free = {**SAMPLED, "temperature": 1.0}
    off = post(server, **free, top_k=0, typical_p=1, top_p=1, min_p=0)["content"]
    assert (
        post(server, **{**free, "temperature": 0.1}, top_k=1, repeat_penalty=2.0, samplers=[])["content"]
        == off
    )
    assert post(server, repeat_penalty=2.0, repeat_last_n=0)["content"] == greedy
    assert post(server, repeat_penalty=2.0)["content"] != greedy


def test_logit_bias(server):
    first = post(server, n_predict=1, return_tokens=True)["tokens"]
    text = server.client.post("/detokenize", json={"tokens": first}).json()["content"]
    for bias in ([[first[0], False]], [[text, -100]], {str(first[0]): -100}, {text: False}):
        assert post(server, n_predict=1, return_tokens=True, logit_bias=bias)["tokens"] != first, bias
    halves = [[first[0], -50.0], [text, -50.0]]
    assert post(server, n_predict=1, return_tokens=True, logit_bias=halves)["tokens"] != first  # they add up
    for nothing in (0, 0.0, -0.0):
        answer = post(
            server, n_predict=1, return_tokens=True, logit_bias=[[first[0], nothing], [text, nothing]]
        )
        assert answer["tokens"] == first, nothing
        assert answer["generation_settings"]["logit_bias"] == [{"token": first[0], "bias": 0.0}]
    for wrong in (True, 10**400, "0", None):
        assert refused(server, "logit_bias", logit_bias=[[first[0], wrong]])


@pytest.mark.parametrize("drafts", [{"enabled": False}, {"n_max": 4}], ids=str)
def test_probabilities(server, drafts):
    more = {"speculative": drafts, "n_probs": 4}
    before = post(server, n_predict=8, **more)["completion_probabilities"]
    assert len(before) == 8
    for t in before:
        assert t["top_logprobs"][0]["id"] == t["id"] and len(t["top_logprobs"]) == 4
        assert bytes(t["bytes"]).decode() == t["token"] and t["logprob"] <= 0
    pieces = streamed(server, n_predict=8, **more)
    parts = [p["completion_probabilities"] for p in pieces if not p["stop"]]
    assert sum(parts, []) == before and {len(p) for p in parts} == {1}
    # what is left of the likeliest four at a temperature is known from their logprobs
    sampled = {"temperature": 0.7, "seed": 3, "top_k": 3, "top_p": 1.0, "min_p": 0.0, "n_predict": 8}
    plain = post(server, **more, **sampled)["completion_probabilities"]
    after = post(server, **more, **sampled, post_sampling_probs=True)["completion_probabilities"]
    assert [t["id"] for t in after] == [t["id"] for t in plain]
    for t, was in zip(after, plain):
        weights = [math.exp(top["logprob"] / 0.7) for top in was["top_logprobs"][:3]]
        assert [top["id"] for top in t["top_probs"]] == [top["id"] for top in was["top_logprobs"][:3]]
        for top, weight in zip(t["top_probs"], weights):
            assert top["prob"] == pytest.approx(weight / sum(weights), abs=1e-4)
        assert t["prob"] == pytest.approx(
            next(x["prob"] for x in t["top_probs"] if x["id"] == t["id"]), abs=1e-4
        )
    greedy = post(server, **more, post_sampling_probs=True)["completion_probabilities"]
    assert [(t["prob"], len(t["top_probs"])) for t in greedy] == [(1.0, 1)] * 12


def test_response_fields_and_settings(server):
    names = ["content", "generation_settings/n_predict", "generation_settings/seed", "nothing/there"]
    answer = post(server, **SAMPLED, response_fields=names)
    assert list(answer) == names[:3]
    assert (answer["generation_settings/n_predict"], answer["generation_settings/seed"]) == (24, 7)
    asked = {
        "top_k": 5,
        "stop": ["x"],
        "mirostat": 1,
        "samplers": ["top_k", "temperature"],
        "temperature": 0.5,
    }
    used = post(server, **asked)["generation_settings"]
    assert {n: used[n] for n in asked} == asked and (used["top_p"], used["min_p"]) == (1.0, 0.0)
    seeds = {post(server, n_predict=1, seed=-1)["generation_settings"]["seed"] for _ in range(3)}
    assert len(seeds) == 3 and -1 not in seeds
    again = post(server, **{**SAMPLED, "seed": min(seeds)})
    assert again["content"] == text_of(server, temperature=0.9, seed=min(seeds), max_tokens=24)


def test_timings_and_reports(server):
    timed = streamed(server, timings_per_token=True)
    assert all(p["timings"]["predicted_n"] >= p["tokens_predicted"] for p in timed)
    assert all("timings" not in p for p in streamed(server)[:-1])
    report = post(server, speculative={"n_max": 3, "report": True})["eagle"]
    assert sum(report["drafted"].values()) > 0
    assert streamed(server, speculative={"n_max": 3, "report": True})[0]["eagle"]["positions"]


def test_the_path_that_two_apis_share(server):
    """Without /v1, OpenAI's clients are known by `model`, which they always send."""
    assert post(server, path="/completions")["content"] == text_of(server)
    asked = {"model": "any", "max_tokens": 12, "temperature": 0, "prompt": SEA}
    r = server.client.post("/completions", json=asked).json()
    assert r["object"] == "text_completion" and r["choices"][0]["text"] == text_of(server)
    r = server.client.post("/completions", content=b'{"model', headers={"Content-Type": "application/json"})
    assert r.status_code == 400 and r.json()["error"]["code"] == "invalid_json"


def test_a_prompt_that_is_too_long(server):
    r = server.client.post(PATH, json={"prompt": "x " * 3000})
    error = r.json()["error"]
    assert r.status_code == 400 and error["type"] == "exceed_context_size_error"
    assert error["n_ctx"] == server.batcher.n_ctx and error["n_prompt_tokens"] > error["n_ctx"]
    assert refused(server, "prompt", prompt=["x", 1] * 600).startswith("the prompt has 1200 tokens")
    longest = server.app.state.server.choices.size.most_bytes
    error = server.client.post(PATH, json={"prompt": "x" * (longest + 1)}).json()["error"]  # is not tokenized
    assert error["code"] == "context_length_exceeded" and error["n_prompt_tokens"] > error["n_ctx"]


# -- slots ------------------------------------------------------------------------------------------------


def test_the_slot_that_is_asked_for(server):
    for slot in (2, 0, 1, 2):
        assert post(server, id_slot=slot)["id_slot"] == slot
    n = len(server.client.post("/tokenize", json={"content": SEA}).json()["tokens"])
    assert post(server, id_slot=1)["timings"]["prompt_n"] == 1
    assert post(server, f"{SEA} deep", id_slot=1)["timings"]["cache_n"] == n
    several = post(server, [SEA, SEA], id_slot=0)
    assert [a["id_slot"] for a in several] == [0, 0]
    r = ask(server.client, n=2, id_slot=1, max_tokens=4)  # in turn, as there is one such slot
    assert r.status_code == 200 and len(r.json()["choices"]) == 2


def test_a_slot_that_is_busy_is_waited_for(server):
    """Meanwhile others go by, and the batcher sleeps while the slot's reader has enough tokens."""
    batcher, answers = server.batcher, []
    ends = [token for token in range(batcher.base.n_vocab()) if batcher.base.is_end(token)]

    def goes_on(_, logits):
        logits[ends] = -math.inf
        return logits

    with batcher.request(slot=0) as held:
        tokens = held.generate([1, 2, 3], logits_processor=[goes_on])
        assert next(tokens) >= 0 and held.slot == 0
        waiting = threading.Thread(target=lambda: answers.append(post(server, id_slot=0, n_predict=4)))
        waiting.start()
        until(lambda: batcher.waiting() == 1)
        assert post(server, n_predict=4)["id_slot"] != 0 and post(server, id_slot=2)["id_slot"] == 2
        until(lambda: batcher._slots[0].job.state.name == "PAUSED")
        until(lambda: not batcher._has_work())  # the answers to the others come before their slots are free
        assert batcher.waiting() == 1 and not answers
    waiting.join(60)
    assert answers[0]["id_slot"] == 0
    until(lambda: idle(server))


def test_saved_slots(server):
    prompt = "What is the capital of France?"
    asked = {"prompt": prompt, "id_slot": 1}
    first = post(server, **asked)
    for action, slot in (("save", 1), ("erase", 1), ("erase", 0), ("restore", 0)):
        body = {} if action == "erase" else {"json": {"filename": "capital.bin"}}
        assert server.client.post(f"/slots/{slot}?action={action}", **body).status_code == 200
    restored = post(server, prompt, id_slot=0)
    assert restored["timings"]["prompt_n"] == 1 and restored["content"] == first["content"]
    slots = server.client.get("/slots").json()
    assert [s["is_processing"] for s in slots] == [False] * 3 and {s["n_ctx"] for s in slots} == {1024}


def test_the_body_is_documented(server):
    schemas = server.client.get("/openapi.json").json()["components"]["schemas"]
    fields = set(schemas["LlamaBody"]["properties"])
    assert {"n_predict", "id_slot", "response_fields"} <= fields
    page = (ROOT / "eagle3_llama/docs/serve_apis.md").read_text(encoding="utf-8")
    about = page.partition("### llama.cpp's completions")[2].partition("\n### ")[0]
    own = fields - set(OtherServers.model_fields)  # those are refused
    assert not [name for name in own if f"`{name}`" not in about]
    assert json.dumps(schemas["LlamaCompletion"]).count("generation_settings") == 1
