"""The layouts whose one decoder layer is called `midlayer`: SafeAILab, SpecForge, AngelSlim."""

from __future__ import annotations

from .base import Ids, Layout

# GGUF names: upstream llama.cpp, src/models/eagle3.cpp
_TENSORS = {
    "fc.weight": "fc.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "norm.weight": "output_norm.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "d2t": "d2t",
    "t2d": "t2d",  # only checked against d2t
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}
_LAYER_IDS = (
    ("eagle_config.eagle_aux_hidden_state_layer_ids", Ids.OUTPUTS),  # SpecForge; SGLang adds one
    ("eagle_aux_hidden_state_layer_ids", Ids.INPUTS),  # vLLM takes them as they are
)
_IGNORED = ("rotary_emb.inv_freq",)


def _layout(name: str, matches) -> Layout:
    def with_midlayer(config, names) -> bool:
        return any(n.startswith("midlayer.") for n in names) and matches(config)

    return Layout(name, with_midlayer, _TENSORS, _LAYER_IDS, _IGNORED)


ANGELSLIM = _layout("AngelSlim", lambda config: "Eagle3LlamaForCausalLM" in config.architectures())
SPECFORGE = _layout("SpecForge", lambda config: "LlamaForCausalLMEagle3" in config.architectures())
SAFEAILAB = _layout("SafeAILab", lambda config: "LlamaForCausalLM" in config.architectures())
