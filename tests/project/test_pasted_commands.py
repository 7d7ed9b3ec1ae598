"""README's commands and those of the pages, pasted one after the other behind ./scripts/demo: each works.

The files that they name exist, or a command before makes them. Tiny models stand in for the model, the heads
and the checkpoints, and nothing is downloaded; what takes minutes or installs is only looked at.
"""

import os
import re
import shlex
import shutil
import socket
import sys
from pathlib import Path

import heads
import pytest
import tiny_models
from checkpoints import write_head
from commands import run
from converting import shared
from paths import ROOT
from test_documents import COMMANDS, TEXT
from tiers import each
from typer.testing import CliRunner

from eagle3_llama.cli.main import app
from eagle3_llama.common.options import CONTEXT
from eagle3_llama.heads import guesses
from eagle3_llama.models import shipped_head, smollm2

PAGES = ("README.md", *(f"eagle3_llama/docs/{name}.md" for name in ("use", "heads", "train")))
N_LAYER = 30  # as many as SmolLM2 has: --extract-layers of the pages are its layers
# to take less time
MORE = {"bench": ["--limit", "1", "-n", "8"], "chat": ["-n", "8"], "generate": ["-n", "8"]}
TEXT_LENGTH = 48  # tokens that the self-test reads of each text
ONLY_PARSED = {"train": ["my-head/head.gguf"]}  # and what they would leave
INPUT = {"chat": "Hello\n\n"}


def commands(page):
    """Each command of a page's shell blocks, without its comment."""
    script = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT[page], re.DOTALL)).replace("\\\n", " ")
    return [line for line in script.splitlines() if line.strip() and not line.startswith("#")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny target, a head and a head's checkpoint."""
    d = tmp_path_factory.mktemp("models")
    target = tiny_models.target(d / "target.gguf", n_layer=N_LAYER)
    head = tiny_models.head(d / "head.gguf", layers=(2, 15, 27))
    made = heads.make("SafeAILab", shared(target))
    return target, head, write_head(d / "checkpoint", made.config, made.tensors)


def extras():
    return set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


class Reader:
    """Someone who pastes commands in a folder that looks like a checkout."""

    def __init__(self, folder, models, monkeypatch):
        self.folder, (self.target, self.head, self.checkpoint) = folder, models
        monkeypatch.chdir(folder)
        (folder / "tests/data").mkdir(parents=True)
        (folder / "tests/data/reference-head").symlink_to(self.checkpoint)
        self.env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        self.ran = []

    def paste(self, line):
        if assigned := re.match(r"([A-Z_]+)=", line):
            self.env[assigned[1]] = self.shell(f'{line}\nprintf %s "${assigned[1]}"')
        elif line.startswith("eagle3-llama "):
            self.ours(self.words(line)[1:])
        elif line.startswith("hf download "):
            self.download(*self.words(line)[2:])
        elif not self.is_set_up(line):
            self.shell(line)
            self.use_tiny_models(line)

    def shell(self, line):
        return run(["bash", "-euc", line], env=self.env).stdout

    def words(self, line):
        """As the shell gives them to a command."""
        return self.shell(f"printf '%s\\n' {line}").splitlines()

    def is_set_up(self, line):
        """What has been done for the tests: ./scripts/..., activate, pip install."""
        words = shlex.split(line, comments=True)
        if words[:2] == ["git", "clone"]:
            assert words[2:6] == ["REPOSITORY", "eagle3-llama", "&&", "cd"] and words[-1].startswith(
                "./scripts/"
            )
            assert os.access(ROOT / words[-1], os.X_OK)
        elif words[0].startswith("./scripts/"):
            assert os.access(ROOT / words[0], os.X_OK)
        elif words == ["source", ".venv/bin/activate"]:
            assert (Path(sys.executable).parent / "activate").is_file()
        elif words[:2] == ["pip", "install"]:
            assert words[2:] == ["huggingface_hub"], f"{line}: it would replace the editable installation"
        elif words[:2] == ["python3", "scripts/_env.py"]:
            assert words[2::2] and set(words[2::2]) == {"--extra"} and set(words[3::2]) <= extras()
        else:
            return False
        return True

    def use_tiny_models(self, line):
        """The links lead to the real files; from then on to tiny ones."""
        for name, real, tiny in (
            ("target.gguf", smollm2("BF16"), self.target),
            ("head.gguf", shipped_head(), self.head),
        ):
            if line.startswith("ln ") and line.endswith(f" {name}"):
                assert Path(name).resolve() == Path(real).resolve()
                Path(name).unlink()
                Path(name).symlink_to(tiny)

    def download(self, repository, *words):
        """A file of a repository, or all of it."""
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", repository) and words[-2] == "--local-dir"
        if len(words) == 3:
            shutil.copy(self.target, Path(words[2]) / words[0])
        else:
            shutil.copytree(self.checkpoint, words[1])

    def by_name(self, words):
        """The words with files in the place of hf: names."""
        other = self.checkpoint if words[0] == "convert" else self.head
        return [
            str(self.target if before in ("--model", "-m") else other) if word.startswith("hf:") else word
            for before, word in zip(["", *words], words)
        ]

    def ours(self, words):
        name, words = words[0], self.by_name(words)
        if name in ONLY_PARSED:
            COMMANDS[name].make_context(name, words[1:], resilient_parsing=False, **CONTEXT)
            for path in ONLY_PARSED[name]:
                Path(path).parent.mkdir(exist_ok=True)
                shutil.copy(self.head, path)
            return
        done = CliRunner().invoke(app, [*words, *MORE.get(name, [])], INPUT.get(name))
        assert done.exit_code == 0, (words, done.output, done.exception)
        assert done.stdout.strip() or name in ("generate", "chat"), words  # a tiny model may end at once
        self.ran.append(name)


@pytest.mark.parametrize("n_pages", each([1, len(PAGES)], [1]))
def test_the_pages_in_order(tmp_path, models, monkeypatch, n_pages):
    monkeypatch.setattr(guesses, "LONGEST", TEXT_LENGTH)
    reader = Reader(tmp_path, models, monkeypatch)
    for page in PAGES[:n_pages]:
        for line in commands(page):
            reader.paste(line)
    if n_pages == 1:  # README alone
        assert set(reader.ran) == {"generate", "info"}
        return
    assert set(reader.ran) >= {"generate", "chat", "bench", "convert", "compare", "info"}
    assert Path("out.json").is_file() and Path("converted.gguf").is_file()


def test_the_servers_page(tmp_path, models):
    """In a shell, with its jobs. Only the port is another one, and the models are tiny."""
    pytest.importorskip("uvicorn")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pages = ("eagle3_llama/docs/serve.md", "eagle3_llama/docs/serve_apis.md")  # in the order of reading
    lines = [line for page in pages for line in commands_as_written(page)]
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, command in (
        ("eagle3-llama", f'exec "{sys.executable}" -m eagle3_llama.cli "$@" --port {port}'),
        ("python", f'exec "{sys.executable}" "$@"'),
        ("curl", f'exec {shutil.which("curl")} --fail --show-error "$@"'),
    ):
        (bin / name).write_text(f"#!/bin/sh\n{command}\n")
        (bin / name).chmod(0o755)
    script = "\n".join(lines).replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    script = script.replace("[19556, 665]", "[60, 70]")  # tokens that the tiny model has
    assert script.count("MODEL=") and script.count("HEAD=") and "curl" in script
    script = re.sub(r"^(MODEL|HEAD)=(.*)$", r'\1=\2\ntest -f "$\1"', script, flags=re.MULTILINE)
    script = script.replace("eagle3-llama serve", f"MODEL={models[0]} HEAD={models[1]}; eagle3-llama serve")
    env = {**os.environ, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"}
    end = "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"  # a server that is left would keep the pipes open
    done = run(["bash", "-euc", f"{end}\n{script}"], cwd=tmp_path, env=env, seconds=180)
    assert '"object":"chat.completion"' in done.stdout and '"status":"ok"' in done.stdout


def commands_as_written(page):
    """The lines of a page's shell blocks, without those that set up."""
    script = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT[page], re.DOTALL))
    return [line for line in script.splitlines() if not re.match(r"source |python3 scripts/_env.py ", line)]
