"""Training runs: settings, resuming, what they leave, the command on the real model."""

import dataclasses
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from cores import THREADS
from safetensors.numpy import load_file
from training import lines

from eagle3_llama import EagleError, EagleLlama
from eagle3_llama.models import smollm2

# ruff: noqa: E402 - the imports below need torch, which may be absent
torch = pytest.importorskip("torch")

from eagle3_llama.train.export import head_d2t, write
from eagle3_llama.train.loop import Trainer


@pytest.mark.parametrize(
    "wrong",
    [
        {"targets": ()},
        {"steps": 0},
        {"lr": float("nan")},
        {"weights": (0, 0, 0)},
        {"prompts": ("none.jsonl",)},
        {"max_tokens": 3},
    ],
)
def test_wrong_settings(tiny, wrong):
    with pytest.raises(EagleError):
        dataclasses.replace(tiny, **wrong)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_learns_and_resumes(tiny, corpus, tmp_path, optimizer):
    """A run killed at every few steps ends with the very weights of one that was not."""

    class Stop(Exception):
        pass

    def run(out, kill_every):
        settings = dataclasses.replace(tiny, out=str(out), epochs=5, lr=3e-3, optimizer=optimizer, minutes=60)
        out.mkdir()
        while True:
            trainer = Trainer(settings, corpus, out)
            trainer.save_every = 0
            trainer.resume()
            start = trainer.state["step"]

            def progress(p):
                if kill_every and p.step - start == kill_every:
                    raise Stop

            try:
                trainer.train(progress)
                return trainer
            except Stop:
                pass

    whole, pieces = run(tmp_path / "a", 0), run(tmp_path / "b", 7)
    for (name, p), (_, q) in zip(whole.head.state_dict().items(), pieces.head.state_dict().items()):
        assert torch.equal(p, q), name
    rows = whole.state["rows"]
    assert [r["accept_per_position"] for r in rows] == [
        r["accept_per_position"] for r in pieces.state["rows"]
    ]
    assert rows[-1]["loss"] < 0.8 * rows[1]["loss"]
    assert (tmp_path / "a" / "log.csv").read_text().count("\n") == len(rows) + 1
    with pytest.raises(EagleError, match="other settings .lr."):
        Trainer(
            dataclasses.replace(tiny, epochs=5, lr=0.5, optimizer=optimizer), corpus, tmp_path / "a"
        ).resume()


def test_checkpoint_is_what_servers_read(corpus, head, tmp_path):
    """Names, shapes, dtypes and keys of SpecForge's layout, as vLLM's and SGLang's loaders expect them."""
    write(head, corpus.layers, tmp_path)
    found, s = load_file(tmp_path / "model.safetensors"), head.shape
    h, q, kv = s.n_embd, s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    shapes = {
        "fc.weight": (h, 3 * h),
        "norm.weight": (h,),
        "lm_head.weight": (64, h),
        "d2t": (64,),
        "t2d": (s.n_vocab,),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (s.n_ff, h),
        "midlayer.mlp.up_proj.weight": (s.n_ff, h),
        "midlayer.mlp.down_proj.weight": (h, s.n_ff),
    }
    assert {k: v.shape for k, v in found.items()} == shapes
    assert (
        found["d2t"].dtype == np.int64
        and found["t2d"].dtype == bool
        and found["fc.weight"].dtype == np.float16
    )
    assert (np.flatnonzero(found["t2d"]) == found["d2t"] + np.arange(64)).all()
    config = json.loads((tmp_path / "config.json").read_text())
    assert (
        config["architectures"] == ["LlamaForCausalLMEagle3"]
        and config["model_type"] == "llama"
        and config["num_hidden_layers"] == 1
    )
    assert (
        config["draft_vocab_size"] == 64
        and config["vocab_size"] == s.n_vocab
        and config["torch_dtype"] == "float16"
    )
    assert config["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "use_aux_hidden_state": True,
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert (head_d2t(tmp_path) == head.d2t.numpy()).all()


def killed_at(command, out, seen):
    """Runs the command and kills it as soon as a file of that name exists, long before the end."""
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not list(out.glob(seen)):
        assert child.poll() is None, f"the run ended, {child.returncode}, without {seen}"
        time.sleep(0.01)
    child.kill()
    assert child.wait() == -signal.SIGKILL and not (out / "head.gguf").exists()


def test_real_model_on_a_tiny_budget(tmp_path):
    """The command on SmolLM2, killed in both phases. The head loads and beats a random one."""
    out, prompts = (
        tmp_path / "head",
        lines(
            tmp_path / "p.jsonl",
            ["Why is the sky blue?", "Name three rivers.", "Write a haiku about rain."] * 12,
        ),
    )
    command = [
        sys.executable,
        "-m",
        "eagle3_llama.cli",
        "train",
        "--target",
        smollm2("Q4_0"),
        "--out",
        out,
        "--prompts",
        prompts,
        "--weights",
        "1,1,0",
        "--max-tokens",
        "3000",
        "--n-predict",
        "48",
        "--epochs",
        "1",
        "--eval-every",
        "5",
        "--draft-vocab",
        "2048",
        "--heldout",
        "6",
        "--slots",
        "16",
        "--threads",
        THREADS,
    ]
    command, made = list(map(str, command)), {}
    for seen in ("data/shard-*.safetensors", "log.csv"):
        killed_at(command, out, seen)
        assert made == {p: p.stat().st_mtime_ns for p in made}  # what is there is not made again
        made = {p: p.stat().st_mtime_ns for p in out.glob("data/shard-*.safetensors")}
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert made and made == {p: p.stat().st_mtime_ns for p in out.glob("data/shard-*.safetensors")}
    assert "held-out greedy chains" in done.stdout
    llm = EagleLlama(
        str(smollm2("Q4_0")), eagle_path=str(out / "head.gguf"), n_max=1, n_ctx=512, verbose=False
    )
    llm("The capital of France is", max_tokens=80, temperature=0)
    assert llm.stats.accepted >= 3  # of some 60; a random head's are one in thousands
    llm.close()
