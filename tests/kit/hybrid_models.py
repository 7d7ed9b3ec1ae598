"""A hybrid and a mixture of experts whose next token is foreseen with a chosen chance, and their heads.

    python tests/kit/hybrid_models.py make hybrid Q8_0 0.7 FOLDER    # writes a target and its head
    python tests/kit/hybrid_models.py find hybrid Q8_0 0.7           # the size of the noise, for FOUND

As in cycle_models.py, row f(x) of the output matrix is x's embedding, and the head knows f. Here f has cycles
of 24 to 48 tokens, so that a text meets them again. Only the tokens of some cycles are ever likely: after one
walk through these, a text has seen all that follows.

A hybrid's layers add noise that depends on the last tokens: the more they add, the more often another token
is the likeliest. Without recurrence noise would follow from the token alone, and the text would soon repeat
itself; so experts add none, and sampling() makes the chance.

topic: the share of an embedding that the tokens of a cycle have in common. A router reads embeddings, so
neighbours in a text then choose the same experts. With 0 they choose independently.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import cycle_models
import gguf
import numpy as np
from weights import BASE, Shape, Tensors, kind_of, metadata, tokenizer

SHORTEST, LONGEST = 24, 48  # tokens of a cycle
CONVOLUTION, INTERVAL = 4, 4  # as in Qwen3.5: every fourth layer has attention
LIKELY = 40  # tokens that sampling() leaves
SHARP = 3.0  # the queries' norm: attention that reads few tokens depends on the text most


class Model(NamedTuple):
    """n_live: tokens that are ever likely. inner, state, groups: of a recurrent layer. experts: or 0."""

    shape: Shape
    n_live: int
    inner: int = 0
    state: int = 128
    groups: int = 1
    experts: int = 0
    used: int = 0
    n_ff: int = 0  # of an expert


MODELS = {
    "tiny-hybrid": Model(Shape(256, 2, 1, 4, 512, 2048, 512), 128, inner=256),
    "tiny-experts": Model(Shape(256, 4, 2, 4, 512, 2048, 512), 128, experts=8, used=2, n_ff=64),
    # 200 MB in Q8_0, 4.7 MB of state
    "hybrid": Model(Shape(1024, 8, 2, 12, 2048, 32000, 4096), 512, inner=1024, groups=4),
    "experts": Model(Shape(512, 8, 2, 12, 2048, 32000, 4096), 512, experts=32, used=4, n_ff=256),
}
# (model, format, chance): what a layer adds, as the command above finds it
FOUND = {("hybrid", "Q8_0", 0.7): 3.327, ("hybrid", "Q4_0", 0.7): 3.42, ("tiny-hybrid", "Q8_0", 0.7): 3.2}
ALWAYS, NEVER = 0.1, 100.0


class Cycles(NamedTuple):
    """ids: the draft vocabulary, ascending. following: its permutation f. cycles: their members in order."""

    ids: np.ndarray
    following: np.ndarray
    cycles: list

    def prompt(self, n_live, turn=0):
        """Each live cycle once, the first `turn` of them last."""
        live = self.live(n_live)
        turn %= len(live)
        return [int(self.ids[i]) for cycle in (*live[turn:], *live[:turn]) for i in cycle]

    def live(self, n_live):
        """The first cycles, with at least n_live tokens in all."""
        ends = np.cumsum([len(cycle) for cycle in self.cycles])
        return self.cycles[: int(np.searchsorted(ends, n_live)) + 1]

    def foreseen(self, text):
        """Of the tokens but the first, the share that f gives from the one before."""
        follows = dict(zip(self.ids.tolist(), self.ids[self.following].tolist()))
        return sum(follows.get(a) == b for a, b in zip(text, text[1:])) / (len(text) - 1)


def cycles(shape, seed=0):
    """Of 24 to 48 tokens, over the whole draft vocabulary."""
    rng = np.random.default_rng([seed, 5])
    ids = np.sort(rng.choice(np.arange(300, shape.n_vocab), shape.n_draft, replace=False))
    order = rng.permutation(shape.n_draft)
    ends = np.cumsum(rng.integers(SHORTEST, LONGEST + 1, shape.n_draft // SHORTEST))
    parts = np.split(order, ends[ends < shape.n_draft - SHORTEST])
    following = np.empty(shape.n_draft, int)
    for part in parts:
        following[part] = np.roll(part, -1)
    return Cycles(ids, following, parts)


def target(path, model, adds, kind="Q8_0", topic=0.0, seed=0, pools=None):
    """Writes it: a qwen35, or a qwen3moe if the model has experts. adds: how large its noise is.

    The qwen35 has an MTP layer, which says f(token).
    """
    shape, arch = model.shape, "qwen3moe" if model.experts else "qwen35"
    w = gguf.GGUFWriter(path, arch)
    metadata(w, shape, shape.n_layer + (not model.experts))
    w.add_rope_freq_base(BASE)
    w.add_key_length(shape.d)
    w.add_value_length(shape.d)
    _keys(w, model)
    tokenizer(w, shape.n_vocab)
    tensors = Tensors(w, shape, seed, pools)
    _vocabulary(tensors, model, kind, codes(shape, topic, seed), cycles(shape, seed))
    for i in range(shape.n_layer):
        _layer(tensors, i, model, kind, adds)
    if not model.experts:
        _next_token(tensors, model, kind)
    tensors.write()
    return path


def head(path, model, p=1.0, kind="Q8_0", topic=0.0, seed=0):
    """Writes it: a head that is right about f with probability p, whatever the target makes of it."""
    ids, following, _ = cycles(model.shape, seed)
    known = ids, following, codes(model.shape, topic, seed)
    return cycle_models.head(path, model.shape, p, kind, seed, known=known)


def chance(path, model, n=400, seed=0):
    """The share of n tokens of its greedy text that f gives from the token before."""
    from eagle3_llama import EagleLlama

    of = cycles(model.shape, seed)
    prompt = of.prompt(model.n_live)
    with EagleLlama(path, text=False, n_ctx=len(prompt) + n + 8, verbose=False) as llm:
        text = [token for token, _ in zip(llm.generate(prompt, temp=0.0), range(n))]
    return of.foreseen([prompt[-1], *text])


def sampling(model, wanted, topic=0.0, seed=0):
    """Settings of a sampler with which f gives the next token with this chance, where there is no noise."""
    if wanted == 1:
        return {"temp": 0.0}
    shape, of = model.shape, cycles(model.shape, seed)
    live = np.concatenate(of.live(model.n_live))
    code = codes(shape, topic, seed)[live]
    norm = np.sqrt((cycle_models.CONSTANT**2 + shape.n_embd - 1) / shape.n_embd)
    logits = np.sort(4 * shape.n_embd**-0.5 / norm * code[:64] @ code.T, axis=1)[:, ::-1][:, :LIKELY]
    low, high = 1e-2, 1e4
    for _ in range(60):
        temp = (low * high) ** 0.5
        chance = np.mean(1 / np.exp((logits - logits[:, :1]) / temp).sum(1))
        low, high = (temp, high) if chance > wanted else (low, temp)
    return {"temp": float(temp), "top_k": LIKELY, "top_p": 1.0, "min_p": 0.0}


def find(path, model, wanted, kind="Q8_0", topic=0.0, low=0.5, high=16.0, within=0.015, steps=10, n=800):
    """(adds, chance): bisects until the chance is as near to the wanted one. Leaves a target in path."""
    pools = {}
    for _ in range(steps):
        adds = round((low * high) ** 0.5, 3)
        found = chance(target(path, model, adds, kind, topic, pools=pools), model, n)
        print(f"{kind} adds={adds}: {found:.3f}", file=sys.stderr, flush=True)
        if abs(found - wanted) <= within:
            break
        low, high = (adds, high) if found > wanted else (low, adds)
    return adds, found


def _keys(w, model):
    if not model.experts:
        d = model.shape.d
        w.add_rope_dimension_sections([d // 8, d * 3 // 16, d * 3 // 16, 0])
        w.add_ssm_conv_kernel(CONVOLUTION)
        w.add_ssm_inner_size(model.inner)
        w.add_ssm_state_size(model.state)
        w.add_ssm_time_step_rank(model.inner // model.state)
        w.add_ssm_group_count(model.groups)
        w.add_uint32("qwen35.full_attention_interval", INTERVAL)
        w.add_uint32("qwen35.nextn_predict_layers", 1)
        return
    w.add_expert_count(model.experts)
    w.add_expert_used_count(model.used)
    w.add_expert_feed_forward_length(model.n_ff)


def codes(shape, topic=0.0, seed=0):
    """(n_draft, n_embd): embeddings, of one length, with 0 in the first column."""
    code = cycle_models.codes(shape, seed)
    if topic:
        length = np.sqrt(shape.n_embd - 1)
        for part in cycles(shape, seed).cycles:
            rng = np.random.default_rng([seed, 6, int(part[0])])
            common = rng.standard_normal(shape.n_embd, np.float32)
            common[0] = 0
            common *= length / np.linalg.norm(common)
            code[part] = (1 - topic) ** 0.5 * code[part] + topic**0.5 * common
        code *= length / np.linalg.norm(code, axis=1, keepdims=True)
    return code


def _vocabulary(tensors, model, kind, code, of):
    """Embeddings, output matrix and last norm. Rows of tokens that are never likely are a quarter as long."""
    shape = model.shape
    size, live = (shape.n_vocab, shape.n_embd), np.concatenate(of.live(model.n_live))
    embedding = code.copy()
    embedding[:, 0] = cycle_models.CONSTANT
    tensors.norm("output_norm.weight")
    tensors.rows("token_embd.weight", size, kind_of(kind, "token_embd"), 1.0, of.ids, embedding)
    root = shape.n_embd**-0.5
    rows = of.ids[of.following[live]]
    tensors.rows("output.weight", size, kind_of(kind, "output"), root, rows, 4 * root * code[live])


def _layer(tensors, i, model, kind, adds):
    shape = model.shape
    n, d = shape.n_embd, shape.d
    hybrid = not model.experts
    if hybrid and (i + 1) % INTERVAL:
        _recurrence(tensors, i, model, kind, adds)
    else:
        q, kv = shape.n_head * d, shape.n_kv * d
        sizes = {"attn_q": (2 * q if hybrid else q, n), "attn_k": (kv, n), "attn_v": (kv, n)}
        sizes["attn_output"] = n, q
        _matrices(tensors, i, sizes, kind, adds)
        tensors.plain(f"blk.{i}.attn_q_norm.weight", np.full(d, SHARP, np.float32))
        tensors.plain(f"blk.{i}.attn_k_norm.weight", np.ones(d, np.float32))
    tensors.norm(f"blk.{i}.attn_norm.weight")
    tensors.norm(f"blk.{i}.{'post_attention' if hybrid else 'ffn'}_norm.weight")
    if hybrid:
        sizes = {"ffn_gate": (shape.n_ff, n), "ffn_up": (shape.n_ff, n), "ffn_down": (n, shape.n_ff)}
    else:
        e, ff = model.experts, model.n_ff
        tensors.plain(f"blk.{i}.ffn_gate_inp.weight", router(model, i, tensors.seed))
        sizes = {"ffn_gate_exps": (e, ff, n), "ffn_up_exps": (e, ff, n), "ffn_down_exps": (e, n, ff)}
    _matrices(tensors, i, sizes, kind, adds)


def _next_token(tensors, model, kind):
    """An MTP layer behind the others: it passes the token's embedding on, and adds nothing."""
    shape, i = model.shape, model.shape.n_layer
    n, q, kv = shape.n_embd, shape.n_head * shape.d, shape.n_kv * shape.d
    sizes = {"attn_q": (2 * q, n), "attn_k": (kv, n), "attn_v": (kv, n), "ffn_gate": (shape.n_ff, n)}
    _matrices(tensors, i, {**sizes, "ffn_up": (shape.n_ff, n)}, kind, 0.0)
    given = {"attn_output": np.zeros((n, q), np.float32), "ffn_down": np.zeros((n, shape.n_ff), np.float32)}
    for name, x in {**given, "nextn.eh_proj": np.eye(n, 2 * n, dtype=np.float32)}.items():
        tensors.dense(f"blk.{i}.{name}.weight", x, kind_of(kind, name))
    for name in ("attn_q_norm", "attn_k_norm"):
        tensors.plain(f"blk.{i}.{name}.weight", np.ones(shape.d, np.float32))
    for name in ("attn_norm", "post_attention_norm", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"):
        tensors.norm(f"blk.{i}.{name}.weight")


def router(model, layer, seed=0):
    """(experts, n_embd): what chooses a layer's experts."""
    return _small(np.random.default_rng([seed, 7, layer]), model.experts, model.shape.n_embd)


def _recurrence(tensors, i, model, kind, adds):
    """A gated delta net whose state forgets within 3 to 30 tokens."""
    n, heads = model.shape.n_embd, model.inner // model.state
    channels = model.inner + 2 * model.groups * model.state
    sizes = {"attn_qkv": (channels, n), "attn_gate": (model.inner, n), "ssm_out": (n, model.inner)}
    _matrices(tensors, i, sizes, kind, adds)
    rng = np.random.default_rng([tensors.seed, 7, i])
    for name in ("ssm_alpha", "ssm_beta"):
        tensors.plain(f"blk.{i}.{name}.weight", _small(rng, heads, n))
    tensors.plain(f"blk.{i}.ssm_conv1d.weight", _small(rng, channels, CONVOLUTION))
    tensors.plain(f"blk.{i}.ssm_a", -np.linspace(0.05, 0.5, heads, dtype=np.float32))
    tensors.plain(f"blk.{i}.ssm_dt.bias", np.zeros(heads, np.float32))
    tensors.plain(f"blk.{i}.ssm_norm.weight", np.ones(model.state, np.float32))


def _small(rng, rows, n):
    """A matrix that is kept in F32."""
    return rng.standard_normal((rows, n), np.float32) * np.float32(n**-0.5)


def _matrices(tensors, i, sizes, kind, adds):
    """Random ones. Those that write to the residual stream are as large as `adds` says."""
    for name, size in sizes.items():
        writes = name.startswith(("attn_output", "ssm_out", "ffn_down"))
        scale = adds if writes else 1.0
        tensors.random(f"blk.{i}.{name}.weight", size, kind_of(kind, name), scale * size[-1] ** -0.5)


def noise(name, kind, wanted):
    """What a layer adds in this model for a chance of f. Raises KeyError if it was not found yet."""
    if MODELS[name].experts:
        return ALWAYS
    return {0.0: NEVER, 1.0: ALWAYS}.get(wanted) or FOUND[name, kind, wanted]


def made(folder, name, kind, wanted, topic=0.0, p=1.0):
    """(target, head) in the folder, written unless they are there. p: how often the head is right about f."""
    model, folder = MODELS[name], Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    adds = noise(name, kind, wanted)
    paths = folder / f"{name}-{kind}-{adds}-{topic}.gguf", folder / f"{name}-head-{p}-{topic}.gguf"
    if not paths[0].is_file():
        _whole(paths[0], lambda part: target(part, model, adds, kind, topic))
    if not paths[1].is_file():
        _whole(paths[1], lambda part: head(part, model, p, topic=topic))
    return paths


def _whole(path, write):
    part = path.with_suffix(f".{os.getpid()}.part")
    write(part)
    part.replace(path)


def main():
    do, name, kind, wanted = *sys.argv[1:4], float(sys.argv[4])
    if do == "make":
        print(*made(sys.argv[5], name, kind, wanted))
        return
    with tempfile.TemporaryDirectory() as folder:
        adds, found = find(Path(folder) / "t.gguf", MODELS[name], wanted, kind)
    print(f'("{name}", "{kind}", {wanted}): {adds},  # {found:.3f}')


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
