"""The converter on wrong inputs: one line that names the culprit, exit code 2, nothing left behind."""

import json
import os
import resource
import sys

import numpy as np
import pytest
from checkpoints import HEADS, HIDDEN, VOCAB, checkpoint, write_head, write_safetensors, write_target
from commands import run
from converting import refuses, run_command
from paths import ROOT

from eagle3_llama.errors import EagleError, ErrorKind
from eagle3_llama.heads.convert import convert


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target.gguf")


def change(**changes):
    def apply(config, tensors):
        for name, value in changes.items():
            config[name] = value

    return apply


def drop(name):
    return lambda config, tensors: tensors.pop(name)


def put(name, make):
    def apply(config, tensors):
        tensors[name] = make(tensors.get(name))

    return apply


def nan(x):
    x = x.copy()
    x.flat[7] = np.nan
    return x


def out_of_range(x):
    x = x.copy()
    x[-1] = VOCAB
    return x


def duplicate(x):
    x = x.copy()
    x[5] = x[4] - 1
    return x


WRONG = {
    "missing": (drop("midlayer.mlp.up_proj.weight"), "midlayer.mlp.up_proj.weight", ErrorKind.MISSING_TENSOR),
    "missing d2t": (drop("d2t"), "d2t", ErrorKind.MISSING_TENSOR),
    "missing lm_head": (drop("lm_head.weight"), "lm_head.weight", ErrorKind.MISSING_TENSOR),
    "shape": (
        put("midlayer.mlp.down_proj.weight", lambda x: x[:, :-1]),
        "midlayer.mlp.down_proj.weight",
        ErrorKind.WRONG_SHAPE,
    ),
    "vector shape": (put("norm.weight", lambda x: x[:-1]), "norm.weight", ErrorKind.WRONG_SHAPE),
    "fc width": (put("fc.weight", lambda x: x[:, :-8]), "fc.weight", ErrorKind.WRONG_SHAPE),
    "fc layers": (
        put("fc.weight", lambda x: np.hstack([x, x[:, :HIDDEN]])),
        "fc.weight",
        ErrorKind.BAD_CONFIG,
    ),
    "d2t range": (put("d2t", out_of_range), "d2t", ErrorKind.BAD_VALUE),
    "d2t duplicate": (put("d2t", duplicate), "d2t", ErrorKind.BAD_VALUE),
    "d2t floats": (put("d2t", lambda x: x.astype(np.float32)), "d2t", ErrorKind.BAD_VALUE),
    "t2d": (put("t2d", lambda x: ~x), "t2d", ErrorKind.BAD_VALUE),
    "NaN": (
        put("midlayer.self_attn.o_proj.weight", nan),
        "midlayer.self_attn.o_proj.weight",
        ErrorKind.BAD_VALUE,
    ),
    "integers": (put("norm.weight", lambda x: x.astype(np.int32)), "norm.weight", ErrorKind.BAD_VALUE),
    "vocabulary": (change(vocab_size=VOCAB + 1), "vocab_size", ErrorKind.VOCAB_MISMATCH),
    "architecture": (change(architectures=["GPT2"]), "architectures", ErrorKind.BAD_CONFIG),
    "no heads": (change(num_attention_heads=None), "num_attention_heads", ErrorKind.BAD_CONFIG),
    "hidden": (change(hidden_size=65), "hidden_size", ErrorKind.WRONG_SHAPE),
    "head_dim": (change(head_dim=15), "head_dim", ErrorKind.WRONG_SHAPE),
    "layers": (
        change(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 50]}),
        "eagle_aux_hidden_state_layer_ids",
        ErrorKind.BAD_CONFIG,
    ),
    "layer list": (
        change(eagle_config={"eagle_aux_hidden_state_layer_ids": "x"}),
        "eagle_aux_hidden_state_layer_ids",
        ErrorKind.BAD_CONFIG,
    ),
    "rope": (change(rope_scaling={"type": "mystery"}), "rope_scaling", ErrorKind.BAD_CONFIG),
    "variant": (
        put("fc_norm.0.weight", lambda _: np.ones(HIDDEN, np.float16)),
        "fc_norm.1.weight",
        ErrorKind.MISSING_TENSOR,
    ),
    "unknown": (
        put("midlayer.router.weight", lambda _: np.ones(HIDDEN, np.float16)),
        "midlayer.router.weight",
        ErrorKind.UNSUPPORTED,
    ),
    "decoder layers": (change(num_hidden_layers=2), "num_hidden_layers", ErrorKind.WRONG_SHAPE),
    "one norm of q and k": (
        put("midlayer.self_attn.q_norm.weight", lambda _: np.ones(HIDDEN // HEADS, np.float16)),
        "midlayer.self_attn.k_norm.weight",
        ErrorKind.MISSING_TENSOR,
    ),
    "norm that config denies": (
        lambda c, t: (
            c.update(norm_before_fc=False),
            t.update({"input_norm.weight": np.ones(3 * HIDDEN, np.float16)}),
        ),
        "norm_before_fc",
        ErrorKind.BAD_CONFIG,
    ),
    "bias that config asks for": (change(attention_bias=True), "attention_bias", ErrorKind.MISSING_TENSOR),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_head(tmp_path, target, what):
    spoil, named, kind = WRONG[what]
    config, tensors = checkpoint()
    spoil(config, tensors)
    head = write_head(tmp_path / "head", config, tensors)
    with pytest.raises(EagleError) as e:
        convert(head, target, tmp_path / "x.gguf")
    assert e.value.kind is kind
    refuses(tmp_path, head, target, named)


def test_wrong_target(tmp_path, target):
    head = write_head(tmp_path / "head", *checkpoint())
    refuses(tmp_path, head, write_target(tmp_path / "a.gguf", n_vocab=VOCAB - 1), "vocab_size")
    refuses(tmp_path, head, write_target(tmp_path / "b.gguf", n_embd=HIDDEN * 2), "hidden size")
    refuses(tmp_path, head, write_target(tmp_path / "c.gguf", n_layer=6), "eagle_aux_hidden_state_layer_ids")
    refuses(tmp_path, head, tmp_path / "none.gguf", "none.gguf")
    data = target.read_bytes()
    for n in (0, 3, 20, len(data) // 2):
        (tmp_path / "cut.gguf").write_bytes(data[:n])
        refuses(tmp_path, head, tmp_path / "cut.gguf", "cut.gguf")


def test_damaged_files(tmp_path, target, monkeypatch):
    head = write_head(tmp_path / "head", *checkpoint())
    file = head / "model.safetensors"
    data = file.read_bytes()
    for n in (0, 7, 100, len(data) - 1):
        file.write_bytes(data[:n])
        refuses(tmp_path, head, target, "model.safetensors")
    file.write_bytes(b"\xff" * 8 + data[8:])
    refuses(tmp_path, head, target, "model.safetensors")
    file.write_bytes(data[:8] + b"[" + data[9:])
    refuses(tmp_path, head, target, "model.safetensors")
    file.write_bytes(data.replace(b'"F16"', b'"F99"', 1))
    refuses(tmp_path, head, target, "F99")
    file.write_bytes(data)
    (head / "config.json").write_text("{")
    refuses(tmp_path, head, target, "config.json")
    (head / "config.json").write_text(json.dumps(checkpoint()[0]))
    file.rename(head / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed: it takes seconds to import
    refuses(tmp_path, head, target, "is a pickle: install torch")


def test_bad_options(tmp_path, target):
    head = write_head(tmp_path / "head", *checkpoint())
    refuses(tmp_path, head, target, "--outtype", "--outtype", "q9")
    refuses(tmp_path, head, target, "--extract-layers", "--extract-layers", "a,b")
    refuses(tmp_path, head, target, "fc.weight", "--extract-layers", "1,2")


def test_no_space_left(tmp_path, target):
    """The script itself under a limit on the size of files: one line, exit code 2, nothing left."""
    head = write_head(tmp_path / "head", *checkpoint())
    out = tmp_path / "out"
    out.mkdir()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    done = run(
        [
            sys.executable,
            ROOT / "scripts" / "convert_eagle.py",
            head,
            "--target",
            target,
            "--out",
            out / "h.gguf",
        ],
        code=2,
        preexec_fn=limit,
    )
    assert "h.gguf" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert os.listdir(out) == []


def test_tensor_in_two_shards(tmp_path, target):
    config, tensors = checkpoint()
    head = write_head(tmp_path / "head", config, tensors, shards=2)
    write_safetensors(head / "model-00002-of-00002.safetensors", tensors)
    refuses(tmp_path, head, target, "two files")


@pytest.mark.parametrize(
    "key, value",
    [
        ("hidden_act", "gelu"),
        ("norm_before_fc", True),
        ("max_position_embeddings", 5_000_000_000),
        ("max_position_embeddings", 10**400),
        ("norm_before_residual", "yes"),
    ],
)
def test_refused_keys(tmp_path, target, key, value):
    config, tensors = checkpoint()
    refuses(tmp_path, write_head(tmp_path / "head", {**config, key: value}, tensors), target, key)


@pytest.mark.parametrize(
    "name", ["midlayer.self_attn.v_proj.bias", "fc_norm.1.weight", "fc2.weight", "\x1b[31m\nx"]
)
def test_unknown_tensors(tmp_path, target, name):
    config, tensors = checkpoint()
    tensors[name] = np.ones(HIDDEN, np.float16)
    refuses(
        tmp_path,
        write_head(tmp_path / "head", config, tensors),
        target,
        name.replace("\x1b", "?").replace("\n", " "),
    )


@pytest.mark.parametrize("name", ["target.gguf", "head/model.safetensors", "head/config.json"])
def test_inputs_are_never_overwritten(tmp_path, target, name):
    head = write_head(tmp_path / "head", *checkpoint())
    before = (tmp_path / name).read_bytes()
    assert run_command(head, "--target", target, "--out", tmp_path / name).exit_code == 2
    assert (tmp_path / name).read_bytes() == before


def test_weights_beyond_float16(tmp_path, target):
    config, tensors = checkpoint()
    tensors["fc.weight"] = np.full((HIDDEN, 3 * HIDDEN), 1e38, np.float32)
    head = write_head(tmp_path / "head", config, tensors)
    for outtype in ("f16", "q8_0", "q4_0"):
        refuses(tmp_path, head, target, "fc.weight", "--outtype", outtype)


def test_the_script_in_a_python_without_packages():
    """The system's, for example."""
    done = run([sys.executable, "-S", ROOT / "scripts" / "convert_eagle.py", "--help"], code=1)
    assert done.stderr.startswith("error: this Python has no package ") and done.stderr.count("\n") == 1
    assert "pip install gguf numpy rich typer" in done.stderr
