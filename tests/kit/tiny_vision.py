"""Tiny random projectors (mmproj GGUF files) for tiny_models' targets: for mechanics, not for sense.

And pictures and sounds for them.
"""

import base64
import os
import re
import struct
import zlib

import gguf
import numpy as np
import pytest
import tiny_models

# Only who left it out goes without these tests. Where a build forgot it, they fail.
needs_mtmd = pytest.mark.skipif(
    re.search(r"LLAMA_BUILD_MTMD(:\w+)?=(OFF|0|FALSE|NO)\b", os.environ.get("CMAKE_ARGS", ""), re.IGNORECASE)
    is not None,
    reason="CMAKE_ARGS has LLAMA_BUILD_MTMD=OFF",
)
N_EMBD, N_HEAD, N_LAYER, PATCH, SIDE = 32, 2, 2, 14, 56
N_MEL, STACK = 80, 10
CHAT = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


def projector(path, kind="mlp", seed=3, hears=False):
    """kind: mlp is LLaVA's, a position an image token; qwen2vl_merger goes with M-RoPE, where it takes fewer.

    hears: sound too, with Whisper's encoder and Ultravox's projector.
    """
    rng, w = np.random.default_rng(seed), gguf.GGUFWriter(path, "clip")
    w.add_clip_has_vision_encoder(True)
    w.add_clip_vision_projector_type(kind)
    w.add_vision_image_size(SIDE)
    w.add_vision_patch_size(PATCH)
    w.add_vision_embedding_length(N_EMBD)
    w.add_vision_feed_forward_length(2 * N_EMBD)
    w.add_vision_projection_dim(tiny_models.N_EMBD)
    w.add_vision_block_count(N_LAYER)
    w.add_vision_head_count(N_HEAD)
    w.add_vision_attention_layernorm_eps(1e-5)
    w.add_vision_image_mean([0.5] * 3)
    w.add_vision_image_std([0.5] * 3)
    shapes = _shapes(merged=4 if kind == "qwen2vl_merger" else 1)
    if hears:
        _hearing(w)
        shapes.update(_hearing_shapes())
    for name, shape in shapes.items():
        ones = ("ln" in name or "norm" in name) and name.endswith("weight")
        x = np.ones(shape) if ones else rng.standard_normal(shape) * 0.3
        w.add_tensor(
            name, x.astype(np.float16 if "conv1d" in name and name.endswith("weight") else np.float32)
        )
    tiny_models._finish(w)
    return path


def _shapes(merged):
    """merged: patches that the projector makes one token of."""
    n_in, n_out = merged * N_EMBD, tiny_models.N_EMBD
    shapes = {
        "v.patch_embd.weight": (N_EMBD, 3, PATCH, PATCH),
        "mm.0.weight": (n_in, n_in),
        "mm.0.bias": (n_in,),
        "mm.2.weight": (n_out, n_in),
        "mm.2.bias": (n_out,),
    }
    if merged > 1:
        shapes["v.patch_embd.weight.1"] = shapes["v.patch_embd.weight"]
    else:
        shapes["v.position_embd.weight"] = ((SIDE // PATCH) ** 2, N_EMBD)
    return {**shapes, **_layers("v")}


def _layers(prefix):
    """Of an encoder; Whisper's has no bias of k."""
    shapes = {}
    for i in range(N_LAYER):
        for name, (n_rows, n_cols) in {
            "attn_q": (N_EMBD, N_EMBD),
            "attn_k": (N_EMBD, N_EMBD),
            "attn_v": (N_EMBD, N_EMBD),
            "attn_out": (N_EMBD, N_EMBD),
            "ffn_up": (2 * N_EMBD, N_EMBD),
            "ffn_down": (N_EMBD, 2 * N_EMBD),
        }.items():
            shapes[f"{prefix}.blk.{i}.{name}.weight"], shapes[f"{prefix}.blk.{i}.{name}.bias"] = (
                (n_rows, n_cols),
                (n_rows,),
            )
        for name in ("ln1", "ln2"):
            shapes[f"{prefix}.blk.{i}.{name}.weight"] = shapes[f"{prefix}.blk.{i}.{name}.bias"] = (N_EMBD,)
        if prefix == "a":
            del shapes[f"a.blk.{i}.attn_k.bias"]
    return shapes


def _hearing(w):
    w.add_clip_has_audio_encoder(True)
    w.add_clip_audio_projector_type("ultravox")
    for name, value in {
        "embedding_length": N_EMBD,
        "feed_forward_length": 2 * N_EMBD,
        "block_count": N_LAYER,
        "attention.head_count": N_HEAD,
        "projection_dim": tiny_models.N_EMBD,
        "num_mel_bins": N_MEL,
        "projector.stack_factor": STACK,
    }.items():
        w.add_uint32(f"clip.audio.{name}", value)
    w.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)


def _hearing_shapes():
    stacked = STACK * N_EMBD
    return {
        "a.conv1d.1.weight": (N_EMBD, N_MEL, 3),
        "a.conv1d.1.bias": (N_EMBD, 1),
        "a.conv1d.2.weight": (N_EMBD, N_EMBD, 3),
        "a.conv1d.2.bias": (N_EMBD, 1),
        "a.position_embd.weight": (1500, N_EMBD),
        "a.post_ln.weight": (N_EMBD,),
        "a.post_ln.bias": (N_EMBD,),
        "mm.a.mlp.1.weight": (2 * stacked, stacked),
        "mm.a.mlp.2.weight": (tiny_models.N_EMBD, stacked),
        "mm.a.norm_pre.weight": (stacked,),
        "mm.a.norm_mid.weight": (stacked,),
        **_layers("a"),
    }


def sound(seed):
    """A second of noise as a WAV's data URL."""
    samples = np.random.default_rng(seed).integers(-9000, 9000, 16000, np.int16).tobytes()
    header = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        36 + len(samples),
        b"WAVE",
        b"fmt ",
        16,
        1,
        1,
        16000,
        32000,
        2,
        16,
        b"data",
        len(samples),
    )
    return "data:audio/wav;base64," + base64.b64encode(header + samples).decode()


def picture(seed, width=SIDE, height=SIDE):
    """A PNG of random pixels as a data URL."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width * 3), np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # no filter
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(png).decode()


def asks(text, *urls):
    """A user's message of pictures and text."""
    return {
        "role": "user",
        "content": [
            *({"type": "image_url", "image_url": {"url": u}} for u in urls),
            {"type": "text", "text": text},
        ],
    }
