"""Runs llama-cpp-python's own tests from its sdist on local models, with Llama or with EagleLlama."""

import json
import os
import sys
import tarfile
from pathlib import Path

import gguf
import tiny_models
from commands import run as run_command
from converting import converted
from cores import THREADS
from native_programs import program
from paths import ROOT

from eagle3_llama.models import shipped_head, smollm2

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "native"))
import fetch  # noqa: E402 - in the folder that sys.path has now

VOCABULARY = "vendor/llama.cpp/models/ggml-vocab-llama-spm.gguf"
CHAT_MODEL = "Qwen3.5-0.8B-Q8_0.gguf"
HYBRID_MODEL = "Falcon-H1-Tiny-90M-Instruct-Q2_K.gguf"
HYBRIDS = ("qwen35", "lfm2")  # with snapshots, which the tests' own models have not
SIZE = {"n_embd": 256, "n_layer": 2, "n_vocab": 128}  # of what llama.cpp's generator makes


def unpack(folder):
    """The sdist's tests/ and the vocabulary that they read; returns the folder to run them in."""
    top = f"llama_cpp_python-{fetch.VERSION}/"
    with tarfile.open(fetch.sdist()) as tar:
        for member in tar:
            name = member.name.removeprefix(top)
            if member.isfile() and (name == VOCABULARY or name.startswith("tests/") and ".." not in name):
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(tar.extractfile(member).read())
    return folder


def random_models(folder):
    """{architecture: [model, head]}: random models with recurrent states, and heads for them."""
    tool, made = program("architectures"), {}
    for arch in ("mamba", "falcon-h1", *HYBRIDS):
        (folder / arch).mkdir()
        run_command([tool, "save", arch, folder / arch])
        model = with_letters(folder / arch / f"{arch}-dense.gguf", folder / f"{arch}.gguf")
        made[arch] = [str(model), str(converted(folder / arch, "speculators, llama", model, **SIZE)[1])]
    return made


def models(folder, made):
    """The files in the hub's place: {file that the tests ask for: [model, head]}. made: random_models()."""
    pooled = [
        str(tiny_models.target(folder / "pooled.gguf", pooling=gguf.PoolingType.MEAN)),
        str(tiny_models.head(folder / "head.gguf")),
    ]
    real = [str(smollm2("Q8_0")), str(shipped_head())]
    return {
        CHAT_MODEL: real,
        "tinyllamas/stories15M-q4_0.gguf": real,
        "bge-small-en-v1.5-q4_k_m.gguf": pooled,
        "mamba-130m-hf.Q2_K.gguf": made["mamba"],
        HYBRID_MODEL: made["falcon-h1"],
    }


def with_letters(model, out):
    """The model with BOS, EOS and a token for each letter, which the generator's tokenizer does not have."""
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", *"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"]
    tokens += [f"▁{i}" for i in range(SIZE["n_vocab"] - len(tokens))]
    reader = gguf.GGUFReader(model)
    w = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(("tokenizer.", "GGUF.", "general.architecture")) and field.contents() != []:
            w.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    tiny_models._tokenizer(w, tokens, [2, 3, 3, 6] + [1] * (len(tokens) - 4))
    for t in reader.tensors:
        w.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    tiny_models._finish(w)
    return out


def run(folder, files, eagle, only=""):
    """{"tests": {name: {"outcome", "line", "why"}}, "drafted": {model: n}}. line: of a failure. only: -k.

    drafted has the models that something drafts for, by what the library says of them.
    """
    report = folder / f"report-{'eagle' if eagle else 'llama'}.json"
    about = {"files": files, "eagle": eagle, "threads": THREADS, "report": str(report)}
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"PEER": json.dumps(about), "PYTHONPATH": str(HERE)}
    (folder / "pytest.ini").write_text("[pytest]\n")  # none of ours
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "peer_plugin",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-k",
        only,
        "tests",
    ]
    report.unlink(missing_ok=True)
    done = run_command(command, None, cwd=folder, env=env)
    assert report.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads(report.read_text())
    # the report is written before the interpreter ends, which may yet crash
    failed = any(r["outcome"] == "failed" for r in results["tests"].values())
    assert done.returncode == failed, (done.returncode, done.stdout[-3000:] + done.stderr[-3000:])
    return results
