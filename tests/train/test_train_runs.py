"""Training runs: settings, resuming, what they leave, the command on the real model."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commands import SECONDS
from commands import run as run_command
from cores import THREADS
from safetensors.numpy import load_file, save_file
from training import lines

from eagle3_llama import EagleError, EagleLlama
from eagle3_llama.errors import ErrorKind
from eagle3_llama.models import smollm2

# ruff: noqa: E402 - the imports below need torch, which may be absent
torch = pytest.importorskip("torch")

from eagle3_llama.train.export import head_d2t, write
from eagle3_llama.train.loop import Trainer


@pytest.mark.parametrize(
    "wrong, kind, said",
    [
        ({"targets": ()}, ErrorKind.BAD_ARGUMENT, "at least one GGUF with --model"),
        ({"steps": 0}, ErrorKind.BAD_ARGUMENT, "steps is 0, expected at least 1"),
        ({"lr": float("nan")}, ErrorKind.BAD_ARGUMENT, "lr is nan, expected 0..1"),
        ({"weights": (0, 0, 0)}, ErrorKind.BAD_ARGUMENT, "weights are (0, 0, 0), expected"),
        ({"prompts": ("none.jsonl",)}, ErrorKind.BAD_FILE, "no such file: none.jsonl"),
        ({"layers": (1, 99)}, ErrorKind.BAD_ARGUMENT, "layers has 99, expected numbers 1..4"),
        ({"layers": (0, 1)}, ErrorKind.BAD_ARGUMENT, "layers has 0, expected numbers 1..4"),
        ({"capture_layers": (1, 2)}, ErrorKind.BAD_ARGUMENT, "capture_layers lacks [3]"),
        ({"init_from": "none"}, ErrorKind.BAD_FILE, "init_from is none, expected the folder"),
        ({"max_tokens": 3}, ErrorKind.BAD_ARGUMENT, "max_tokens is 3, expected at least 256"),
    ],
)
def test_wrong_settings(tiny, wrong, kind, said):
    with pytest.raises(EagleError, match=re.escape(said)) as e:
        dataclasses.replace(tiny, **wrong)
    assert e.value.kind is kind


@pytest.mark.parametrize("when", ["reading the prompts", "loading the target", "the first answers"])
def test_a_failed_run_leaves_nothing(tiny, tmp_path, when, monkeypatch):
    """So the corrected command finds no data of other settings."""
    from eagle3_llama.train import generate
    from eagle3_llama.train.run import train

    out = tmp_path / "out"
    bad, wrong = tmp_path / "bad.jsonl", {}
    if when == "reading the prompts":
        bad.write_text("no JSON")
        wrong = {"conversations": (str(bad),)}
    elif when == "loading the target":
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(Path(tiny.targets[0]).read_bytes()[:-200])
        wrong = {"targets": (str(cut),)}
    else:
        monkeypatch.setattr(generate, "read", lambda *_: 1 / 0)
    with pytest.raises((EagleError, ZeroDivisionError)):
        train(dataclasses.replace(tiny, out=str(out), **wrong))
    assert not out.exists()


def said_by(run, settings, capsys, stops=False):
    """What a run says, line by line."""
    if stops:
        with pytest.raises(KeyboardInterrupt):
            run.train(settings)
    else:
        run.train(settings)
    return capsys.readouterr().err.splitlines()


def test_progress_says_what_happens(tiny, tmp_path, monkeypatch, capsys):
    """Rates count from the first work of this run; each bar counts one thing; times are said at once."""
    from eagle3_llama.common import progress
    from eagle3_llama.train import run

    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setattr(run, "MEASURED", 0.0)
    settings = dataclasses.replace(tiny, out=str(tmp_path / "out"), epochs=1)
    began = time.monotonic()
    said = said_by(run, settings, capsys)
    took = time.monotonic() - began
    data = [line for line in said if line.startswith("data: ") and "tokens/s" in line]
    for line in data:
        found = re.match(
            r"data: ([\d,]+) of [\d,]+ tokens, \d+ s, (?:finishing running answers, )?(\d+) tokens/s", line
        )
        assert found, line
        count, rate = found.groups()
        assert int(rate) >= int(count.replace(",", "")) / took - 1, line
    totals = {
        name: {line.partition(" of ")[2].partition(",")[0] for line in said if line.startswith(f"{name}: ")}
        for name in ("training", "least-squares start")
    }
    assert all(len(of - {""}) == 1 for of in totals.values()), totals
    for what in ("making the data takes about", "training takes about"):
        assert sum(what in line for line in said) == 1, said
    (tmp_path / "out" / "checkpoint.pt").unlink()
    again = [line for line in said_by(run, settings, capsys) if line.startswith("data: ")]
    assert again and not [line for line in again if "tokens/s" in line or "finishing" in line], again


@pytest.mark.parametrize("when", ["the first answers", "training"])
def test_ctrl_c_says_what_is_kept(tiny, tmp_path, monkeypatch, capsys, when):
    """And the checkpoint is of the last step, whatever the time since the one before."""
    from eagle3_llama.train import generate, run

    settings = dataclasses.replace(tiny, out=str(tmp_path / "out"))
    if when == "training":
        whole = Trainer._step

        def step(self, *args):
            done = whole(self, *args)
            if self.state["step"] == 2:
                signal.raise_signal(signal.SIGINT)
            return done

        monkeypatch.setattr(Trainer, "_step", step)
    else:
        monkeypatch.setattr(generate, "read", lambda *_: signal.raise_signal(signal.SIGINT))
    said = said_by(run, settings, capsys, stops=True)[-1]
    kept = tmp_path / "out" / "checkpoint.pt"
    if when == "training":
        assert said.startswith("stopped. Kept: ") and "tokens of training data in" in said
        assert str(kept) in said and said.endswith("The same command goes on from there")
        monkeypatch.undo()
        assert "continuing at step 3" in said_by(run, settings, capsys)
    else:
        assert said.startswith("stopped. Nothing is kept yet") and not kept.exists()


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


def test_training_goes_on_from_a_published_head(tiny, corpus, tmp_path):
    """--init-from starts with that head's weights and vocabulary; each kind of wrong head is refused."""
    settings = dataclasses.replace(tiny, epochs=6, lr=3e-3, init_from=None, data=str(Path(tiny.out) / "data"))
    (tmp_path / "first").mkdir()
    first = Trainer(dataclasses.replace(settings, out=str(tmp_path / "first")), corpus, tmp_path / "first")
    first.train(lambda _: None)
    write(first.head, corpus.layers, tmp_path / "head")

    more = dataclasses.replace(
        settings, out=str(tmp_path / "more"), epochs=1, init_from=str(tmp_path / "head")
    )
    (tmp_path / "more").mkdir()
    second = Trainer(more, corpus, tmp_path / "more")
    assert (second.head.d2t == first.head.d2t).all()
    for (name, p), (_, q) in zip(first.head.state_dict().items(), second.head.state_dict().items()):
        assert torch.equal(p.half().float(), q.float()) or "d2t" in name, name  # float16 in the file
    second.train(lambda _: None)
    fresh, learned = (first.state["rows"][i]["mean_accepted_length"] for i in (0, -1))
    start = second.state["rows"][0]
    assert start["step"] == 0 and learned > fresh
    assert start["mean_accepted_length"] > (fresh + learned) / 2
    assert not torch.equal(next(first.head.parameters()), next(second.head.parameters()))

    save_file({"fc.weight": np.zeros((4, 4), np.float16)}, tmp_path / "head" / "model.safetensors")
    with pytest.raises(EagleError, match="no d2t: --init-from needs"):
        Trainer(more, corpus, tmp_path / "more")


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
    child, end = subprocess.Popen(command, stderr=subprocess.DEVNULL), time.monotonic() + SECONDS
    try:
        while not list(out.glob(seen)):
            assert child.poll() is None, f"the run ended, {child.returncode}, without {seen}"
            assert time.monotonic() < end, f"no {seen} in {SECONDS} s"
            time.sleep(0.01)
    finally:
        child.kill()
    assert child.wait() == -signal.SIGKILL and not (out / "head.gguf").exists()


def test_real_model_on_a_tiny_budget(tmp_path):
    """The command on SmolLM2, killed in both phases. The head loads and beats a random one."""
    out, prompts = (
        tmp_path / "head",
        lines(
            tmp_path / "p.jsonl",
            ["Why is the sky blue?", "Name three rivers.", "Write a haiku about rain."] * 8,
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
        "4000",
        "--n-predict",
        "32",
        "--epochs",
        "1",
        "--eval-every",
        "5",
        "--draft-vocab",
        "2048",
        "--heldout",
        "4",
        "--slots",
        "6",
        "--threads",
        THREADS,
    ]
    command, made = list(map(str, command)), {}
    for seen in ("data/shard-*.safetensors", "log.csv"):
        killed_at(command, out, seen)
        assert made == {p: p.stat().st_mtime_ns for p in made}  # what is there is not made again
        made = {p: p.stat().st_mtime_ns for p in out.glob("data/shard-*.safetensors")}
    done = run_command(command)
    assert made and made == {p: p.stat().st_mtime_ns for p in out.glob("data/shard-*.safetensors")}
    assert "held-out greedy chains" in done.stdout
    llm = EagleLlama(
        str(smollm2("Q4_0")), eagle_path=str(out / "head.gguf"), n_max=1, n_ctx=512, verbose=False
    )
    llm("The capital of France is", max_tokens=80, temperature=0)
    assert llm.stats.accepted >= 3  # of some 60; a random head's are one in thousands
    llm.close()
