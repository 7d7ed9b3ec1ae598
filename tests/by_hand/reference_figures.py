"""The figures of the reference head in tests/data by transformers' Llama modules: no code of this project.

    pip install torch transformers accelerate    # in an environment of its own, as no test needs them
    python tests/by_hand/reference_figures.py smollm2-135m-instruct-Q4_1.gguf [--write]

The model is the file that `eagle3_llama.models.smollm2("Q4_1")` names; transformers dequantises it to F32.
What differs from reference.safetensors and expected.json is printed; --write replaces their figures. Tokens,
features, g and the target's answers stay as they are: they depend neither on the layer of the head nor on its
vocabulary. It takes ten minutes.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama as llama

DATA = Path(__file__).resolve().parents[1] / "data"
LAYERS = (2, 15, 27)  # whose inputs are the features
LAST, LAST_LOGITS = 24, 4  # positions that reference.safetensors has g and states of, and logits


class Head:
    """A head of SpecForge's layout, one layer, no norm_before_residual. Row p has token p + 1, and g of p."""

    def __init__(self, folder, embeddings):
        parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
        self.w = {name.removeprefix("midlayer."): w for part in parts for name, w in part.items()}
        self.w = {name: w.float() if w.dtype == torch.float16 else w for name, w in self.w.items()}
        config = json.loads((folder / "config.json").read_text())
        rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
        self.config = LlamaConfig(**config, rope_parameters=rope)
        self.embeddings, self.rope = embeddings, llama.LlamaRotaryEmbedding(self.config)
        self.mlp = llama.LlamaMLP(self.config)
        mlp = {name.removeprefix("mlp."): w for name, w in self.w.items() if name.startswith("mlp.")}
        self.mlp.load_state_dict(mlp)
        self.d2t = torch.arange(len(self.w["d2t"])) + self.w["d2t"]
        assert torch.equal(self.w["t2d"].nonzero()[:, 0], self.d2t)

    def linear(self, name, x):
        return x @ self.w[f"{name}.weight"].T

    def norm(self, name, x):
        norm = llama.LlamaRMSNorm(len(self.w[f"{name}.weight"]), self.config.rms_norm_eps)
        norm.weight.data = self.w[f"{name}.weight"]
        return norm(x)

    def layer(self, tokens, g, first=0, past=None):
        """States of rows from the position `first` on, and keys and values, behind those of `past`."""
        n = len(tokens)
        x = torch.cat(
            [self.norm("input_layernorm", self.embeddings[tokens]), self.norm("hidden_norm", g)], -1
        )
        q, k, v = (
            self.linear(f"self_attn.{name}_proj", x).view(1, n, -1, self.config.head_dim).transpose(1, 2)
            for name in "qkv"
        )
        q, k = llama.apply_rotary_pos_emb(q, k, *self.rope(x[None], torch.arange(first, first + n)[None]))
        if past:
            k, v = (torch.cat(both, 2) for both in zip(past, (k, v)))
        seen = torch.arange(k.shape[2])[None] <= torch.arange(k.shape[2] - n, k.shape[2])[:, None]
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        x = g + self.linear("self_attn.o_proj", mixed.transpose(1, 2).reshape(n, -1))
        return x + self.mlp(self.norm("post_attention_layernorm", x)), (k, v)

    def logits(self, states):
        return self.linear("lm_head", self.norm("norm", states))

    def best(self, states):
        return self.d2t[self.logits(states).argmax(-1)].tolist()


def features(model, tokens):
    states = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[i][0] for i in LAYERS], -1)


def simulate(head, text, features, chain):
    """(rounds, accepted by place in the chain) of greedy chains over a text that is fixed."""
    tokens, at = [*text["prompt_tokens"], *text["greedy_tokens"]], len(text["prompt_tokens"])
    states, (k, v) = head.layer(torch.tensor(tokens[1:]), head.linear("fc", features[:-1]))
    best, rounds, accepted = head.best(states), 0, [0] * chain
    while at + chain + 1 < len(tokens):  # only chains that the answer can tell whole
        drafts, state, past = [best[at - 1]], states[at - 1 : at], (k[:, :, :at], v[:, :, :at])
        for i in range(chain - 1):
            state, past = head.layer(torch.tensor(drafts[-1:]), state, at + i, past)
            drafts += head.best(state)
        wrong = (i for i, draft in enumerate(drafts) if draft != tokens[at + 1 + i])
        n = next(wrong, chain)
        accepted = [count + (i < n) for i, count in enumerate(accepted)]
        at, rounds = at + n + 1, rounds + 1
    return rounds, accepted


def tensors(head, stored):
    """The stored ones, with new states, logits and drafts. Says how far these and g are from the stored."""
    out = dict(stored)
    for k in sorted({name.partition(".")[0] for name in stored}):
        g = head.linear("fc", stored[f"{k}.features"].float())
        states, _ = head.layer(stored[f"{k}.tokens"][1:].long(), g)
        made = {"prenorm": states[-LAST:], "logits": head.logits(states[-LAST_LOGITS:])}
        for name, new in {"g": g[-LAST:], **made}.items():
            old = stored[f"{k}.{name}"]
            off = (new - old).abs().max() / old.abs().max() if new.shape == old.shape else "another shape"
            print(f"{k}.{name}: differs by {off}")
        made["draft_ids_step0"] = torch.tensor(head.best(states), dtype=torch.int32)
        old = stored[f"{k}.draft_ids_step0"]
        print(f"{k}.draft_ids_step0: {(made['draft_ids_step0'] != old).sum()} of {len(old)} differ")
        out |= {f"{k}.{name}": new.contiguous() for name, new in made.items()}
    return out


def main():
    parser = argparse.ArgumentParser(description="Recompute what tests/data says of its reference head.")
    parser.add_argument("model", type=Path, help="SmolLM2-135M-Instruct Q4_1")
    parser.add_argument("--write", action="store_true", help="replace what differs")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    model = LlamaForCausalLM.from_pretrained(
        given.model.parent, gguf_file=given.model.name, dtype=torch.float32
    )
    head = Head(DATA / "reference-head", model.model.embed_tokens.weight)
    made = tensors(head, load_file(DATA / "reference.safetensors"))
    expected = json.loads((DATA / "expected.json").read_text())
    chain, differ = expected["chain"], 0
    for text in expected["texts"]:
        read = features(model, [*text["prompt_tokens"], *text["greedy_tokens"]])
        rounds, accepted = simulate(head, text, read, chain)
        differ += (rounds, accepted) != (text["rounds"], text["accepted"])
        text["rounds"], text["accepted"] = rounds, accepted
    expected["rounds"] = rounds = sum(text["rounds"] for text in expected["texts"])
    sums = [sum(counts) for counts in zip(*(text["accepted"] for text in expected["texts"]))]
    expected["accept_per_position"] = [n / rounds for n in sums]
    expected["mean_accepted_length"] = 1 + sum(sums) / rounds
    print(f"rounds of {differ} of {len(expected['texts'])} texts differ: now {rounds}, accepted {sums}")
    if given.write:
        save_file(made, DATA / "reference.safetensors")
        (DATA / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    sys.exit(main())
