"""Tiny models on a small local hub, an empty cache, and commands in processes: what tests of names share."""

import sys

import heads
import pytest
import tiny_models
from checkpoints import write_head
from commands import run
from converting import shared
from hub_server import Hub

from eagle3_llama.heads.fitted import HeadFiles

CLI = "import eagle3_llama.cli.main as m; m.main()"
SAY = ["-p", "x", "--raw", "-n", "16", "-t", "1", "-c", "256", "--temp", "0"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(target's file, folder of a head's checkpoint, folder of one for another target)."""
    d = tmp_path_factory.mktemp("made")
    target = tiny_models.target(d / "target.gguf", n_layer=12, ends=False)
    wide = tiny_models.target(d / "wide.gguf", n_layer=12, n_embd=96)
    head = heads.make("SpecForge", shared(target))
    write_head(d / "head", head.config, head.tensors)
    other = heads.make("SafeAILab", shared(target))
    write_head(d / "other", other.config | {"vocab_size": 999}, other.tensors)
    return target, d / "head", d / "other", wide


@pytest.fixture
def hub(made):
    """A hub with a model in one file, a model in two, a head, a head of another model, and a pickle."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    target, head, other, _ = made
    model = target.read_bytes()
    checkpoint = {p.name: p.read_bytes() for p in head.iterdir()}
    made_hub = Hub(
        {
            "me/tiny-GGUF": {"README.md": b"", "tiny-Q8_0.gguf": model, "mmproj-tiny-F16.gguf": b"no model"},
            "me/many-GGUF": {f"many-{f}.gguf": model for f in ("Q8_0", "Q4_0", "F16")},
            "me/head": checkpoint,
            "me/other": {p.name: p.read_bytes() for p in other.iterdir()},
            "me/pickled": {"config.json": checkpoint["config.json"], "pytorch_model.bin": b"not a pickle"},
        }
    )
    yield made_hub
    made_hub.close()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache of its own."""
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def child(env, *args, code=CLI, status=0):
    return run([sys.executable, "-c", code, *args], status, env=env)


def generate(env, model, eagle, *more, **settings):
    return child(env, "generate", "--model", model, "--eagle", eagle, *SAY, *more, **settings)


def left(folder):
    """The names of what is in a folder, none if there is no folder."""
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def files_of(folder, name="me/head"):
    return HeadFiles(name, {p.name: p for p in folder.iterdir()})
