"""A tiny random llama and an EAGLE-3 head for it, as GGUF files: for mechanics, not for sense."""

import itertools

import gguf
import numpy as np

N_EMBD, N_HEAD, N_KV, N_LAYER, N_VOCAB, N_DRAFT = 64, 4, 2, 4, 320, 96
HEADS_OF_64 = {"n_embd": 256, "n_head": 4, "n_kv": 2}  # every device computes attention for such
BOS, EOS = 1, 2
PROMPT = [1, 60, 70, 80, 90, 100]


def _vocabulary(n_vocab=N_VOCAB):
    """Specials, 256 byte tokens, and some letters; and the types of all."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    tokens += [f"▁{chr(97 + i % 26)}{i}" for i in range(n_vocab - len(tokens))]
    return tokens, [2, 3, 3] + [6] * 256 + [1] * (n_vocab - 259)


def _tokenizer(w, tokens, types):
    """SentencePiece style; <s> is 1, </s> 2."""
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens)
    w.add_token_scores([-float(i) for i in range(len(tokens))])
    w.add_token_types(types)
    w.add_bos_token_id(BOS)
    w.add_eos_token_id(EOS)
    w.add_unk_token_id(types.index(2))


def _common(w, n_layer, n_embd=N_EMBD, vocabulary=None, n_ctx=1024, n_head=N_HEAD, n_kv=N_KV):
    w.add_block_count(n_layer)
    w.add_context_length(n_ctx)
    w.add_embedding_length(n_embd)
    w.add_feed_forward_length(2 * n_embd)
    w.add_head_count(n_head)
    w.add_head_count_kv(n_kv)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(n_embd // n_head)
    _tokenizer(w, *(vocabulary or _vocabulary()))


def _finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _layer(w, i, rng, n_in, kind, n_embd=N_EMBD, adds=0.3, n_head=N_HEAD, n_kv=N_KV):
    """adds: the size of what it adds to the stream."""
    d, n_ff = n_embd // n_head, 2 * n_embd
    shapes = {
        "attn_q": (n_embd, n_in),
        "attn_k": (n_kv * d, n_in),
        "attn_v": (n_kv * d, n_in),
        "attn_output": (n_embd, n_embd),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }
    for name, shape in shapes.items():
        _matrix(
            w,
            f"blk.{i}.{name}.weight",
            rng,
            shape,
            kind,
            adds if name in ("attn_output", "ffn_down") else 0.3,
        )
    for name in ("attn_norm", "ffn_norm"):
        w.add_tensor(f"blk.{i}.{name}.weight", np.ones(n_embd, np.float32))


def _matrix(w, name, rng, shape, kind, size=0.3):
    x = (rng.standard_normal(shape) * size).astype(np.float32)
    w.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)


def target(
    path,
    seed=0,
    kind="F32",
    n_embd=N_EMBD,
    n_layer=N_LAYER,
    arch="llama",
    chat_template=None,
    ends=True,
    pooling=None,
    tied=False,
    adds=0.3,
    infills=None,
    n_vocab=N_VOCAB,
    n_ctx=1024,
    n_head=N_HEAD,
    n_kv=N_KV,
    factors=False,
):
    """Writes a llama, or a qwen2vl (M-RoPE). kind: name of a GGML type.

    ends=False: it hardly ever samples its end token. pooling: of embeddings. tied: the token embeddings are
    its output matrix too. adds: the size of what layers add; with 0 a token depends on the one before it
    alone, so that a greedy text soon repeats itself. infills: its tokens before a prefix, a suffix and the
    middle between them. factors: it has lists of rope factors, one for contexts longer than n_ctx.
    """
    rng, kind = np.random.default_rng(seed), gguf.GGMLQuantizationType[kind]
    w = gguf.GGUFWriter(path, arch)
    _common(w, n_layer, n_embd, _vocabulary(n_vocab), n_ctx, n_head, n_kv)
    if arch == "qwen2vl":
        w.add_rope_dimension_sections([2, 3, 3, 0])
    if chat_template is not None:
        w.add_chat_template(chat_template)
    for name, token in zip(("PRE", "SUF", "MID"), infills or ()):
        w.add_uint32(getattr(gguf.Keys.Tokenizer, f"FIM_{name}_ID"), token)
    if pooling is not None:
        w.add_pooling_type(pooling)
    _matrix(w, "token_embd.weight", rng, (n_vocab, n_embd), kind)
    if not tied:
        _matrix(
            w,
            "output.weight",
            rng,
            (n_vocab, n_embd),
            kind,
            0.3 if ends else 0.3 * (np.arange(n_vocab)[:, None] != EOS),
        )
    w.add_tensor("output_norm.weight", np.ones(n_embd, np.float32))
    if factors:
        w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    for name, size in (("long", 4.0), ("short", 1.0)) if factors else ():
        w.add_tensor(f"rope_factors_{name}.weight", np.full(n_embd // n_head // 2, size, np.float32))
    for i in range(n_layer):
        _layer(w, i, rng, n_embd, kind, n_embd, adds, n_head, n_kv)
    _finish(w)
    return path


def head(path, seed=1, kind="F32", layers=(1, 2, 3), own_output=True, n_embd=N_EMBD, n_vocab=N_VOCAB, **keys):
    """A head for target(). keys: metadata to override. own_output=False: uses the target's lm_head."""
    rng, kind = np.random.default_rng(seed), gguf.GGMLQuantizationType[kind]
    w = gguf.GGUFWriter(path, "eagle3")
    _common(w, 1, n_embd, _vocabulary(n_vocab))
    w.add_array("eagle3.target_layers", list(layers))
    w.add_uint32("eagle3.target_hidden_size", keys.get("target_hidden_size", n_embd))
    _matrix(w, "fc.weight", rng, (n_embd, len(layers) * n_embd), kind)
    if own_output:
        _matrix(w, "output.weight", rng, (N_DRAFT, n_embd), kind)
    w.add_tensor("output_norm.weight", np.ones(n_embd, np.float32))
    w.add_tensor("blk.0.attn_norm_2.weight", np.ones(n_embd, np.float32))
    _layer(w, 0, rng, 2 * n_embd, kind, n_embd)
    if own_output:
        ids = np.sort(rng.choice(n_vocab, N_DRAFT, replace=False)).astype(np.int64)
        w.add_tensor("d2t", keys.get("d2t", ids))
    _finish(w)
    return path


def bert(path, seed=2, pooling=None, n_ctx=128):
    """A BERT, which reads in both directions. Its words are the letters a to z, between [CLS] and [SEP]."""
    rng, w, n = np.random.default_rng(seed), gguf.GGUFWriter(path, "bert"), N_EMBD
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"▁{chr(97 + i)}" for i in range(26))]
    w.add_block_count(2)
    w.add_context_length(n_ctx)
    w.add_embedding_length(n)
    w.add_feed_forward_length(2 * n)
    w.add_head_count(N_HEAD)
    w.add_layer_norm_eps(1e-5)
    w.add_causal_attention(False)
    w.add_token_type_count(2)
    if pooling is not None:
        w.add_pooling_type(pooling)
    w.add_tokenizer_model("bert")
    w.add_tokenizer_pre("jina-v2-en")
    w.add_token_list(words)
    w.add_token_types([3] * 5 + [1] * 26)
    for name, i in (("pad", 0), ("unk", 1), ("bos", 2), ("sep", 3), ("mask", 4)):
        getattr(w, f"add_{name}_token_id")(i)
    add = lambda name, *shape: w.add_tensor(name, (rng.standard_normal(shape) * 0.3).astype(np.float32))
    add("token_embd.weight", len(words), n)
    add("token_types.weight", 2, n)
    add("position_embd.weight", n_ctx, n)
    add("token_embd_norm.weight", n)
    add("token_embd_norm.bias", n)
    for i in range(2):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{i}.{name}.weight", n, n)
        add(f"blk.{i}.ffn_up.weight", 2 * n, n)
        add(f"blk.{i}.ffn_down.weight", n, 2 * n)
        for name in ("attn_output_norm", "layer_output_norm"):
            add(f"blk.{i}.{name}.weight", n)
            add(f"blk.{i}.{name}.bias", n)
    _finish(w)
    return path


def tiny_lora(path, n_embd=N_EMBD):
    """An adapter of rank 2 for one matrix of the tiny target."""
    w, n = gguf.GGUFWriter(path, "llama"), n_embd
    w.add_type(gguf.GGUFType.ADAPTER)
    w.add_string(gguf.Keys.Adapter.TYPE, "lora")
    w.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 2.0)
    w.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((2, n), np.float32))
    w.add_tensor("blk.0.attn_q.weight.lora_b", np.ones((n, 2), np.float32))
    _finish(w)
    return path


def take(llm, n, prompt=PROMPT, **sampling):
    """The first n tokens that llm says after prompt."""
    llm.set_seed(5)
    generator = llm.generate(prompt, **{"temp": 0.0, **sampling})
    out = list(itertools.islice(generator, n))
    generator.close()
    return out


def wanted(params):
    """The number of draft tokens that params ask for."""
    return 24 if params.planned else params.tree.nodes if params.fixed_tree else params.n_max


def scripted(llm, propose):
    """Puts a drafter in the head's place: propose(ask) returns a Draft, or None for the head's. Returns what
    undoes it."""
    engine, own, own_run = llm.engine, llm.engine.round, llm.engine.run
    longest = itertools.cycle((1, 3, 2, 16))  # of a run, in which nobody is asked again

    def given_round(asks, samplers):
        return own([a._replace(given=propose(a)) for a in asks], samplers)

    def given_run(ask, sampler, most, left=None):
        return own_run(ask._replace(given=propose(ask)), sampler, min(most, next(longest)), left)

    def undo():
        engine.round, engine.run = own, own_run

    engine.round, engine.run = given_round, given_run
    return undo


def draft_from(llm, texts, rng):
    """Puts a drafter in the head's place that knows how the texts go on, and is wrong at times."""
    from eagle3_llama.runtime.engine import Draft

    def propose(ask):
        if ask.params.n_max == 0:
            return None
        seq = [*llm._input_ids.tolist(), ask.token]
        right = next((t[len(seq) :] for t in texts if t[: len(seq)] == seq), [])[: rng.randint(0, 3)]
        drafts, parents, tree = [], [], llm.engine.trees(ask.params)
        for t in right:
            wrong = (t + 1) % N_VOCAB
            level = [wrong, t] if tree else [t if rng.random() < 0.8 else wrong]
            parents += [len(drafts) - 1] * len(level)  # the right token lies last on each level
            drafts += level
        return Draft(drafts, parents if tree else None)

    scripted(llm, propose)
