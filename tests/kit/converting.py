"""Makes heads, runs the converter, reads what it made, and makes up a report of its self-test."""

import os

import gguf
import heads
import numpy as np
import typer
from checkpoints import write_head
from typer.testing import CliRunner

from eagle3_llama.heads.convert import convert
from eagle3_llama.heads.convert.cli import convert as command


def shared(path):
    """What a target lends, and the epsilon of its norms."""
    reader = gguf.GGUFReader(path)
    weights = {
        t.name: np.array(gguf.quants.dequantize(t.data, t.tensor_type), np.float32)
        for t in reader.tensors
        if t.name in ("token_embd.weight", "output.weight", "output_norm.weight")
    }
    weights.setdefault("output.weight", weights["token_embd.weight"])
    arch = reader.fields["general.architecture"].contents()
    eps = reader.fields.get(f"{arch}.attention.layer_norm_rms_epsilon")
    return {**weights, "eps": eps.contents() if eps else 1e-5}


def converted(folder, name, target, outtype="f32", **size):
    """A head of heads.RECIPES for the target, and the file that the converter makes of it."""
    head = heads.make(name, shared(target), **size)
    out = folder / f"{outtype}.gguf"
    layers = head.layers if size else None
    report = convert(
        write_head(folder / "head", head.config, head.tensors), target, out, outtype, extract_layers=layers
    )
    assert report.layers == head.layers, report.notes
    return head, out


def read(path):
    reader = gguf.GGUFReader(path)
    return {k: f.contents() for k, f in reader.fields.items()}, {t.name: t for t in reader.tensors}


def values(tensor):
    x = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return x.reshape(tuple(reversed(tensor.shape.tolist())))


def gains(choices, best):
    """A self-test's report in which `best` guesses right more often than the other layers."""
    from eagle3_llama.heads import self_test

    rng = np.random.default_rng(0)
    n = 4 * self_test.FEWEST
    hits = np.array([rng.random(n) < (0.6 if c == best else 0.3) for c in choices])
    noise = rng.normal(0, 0.01, n)
    likelihoods = np.array([noise - (1.0 if c == best else 2.0) + rng.normal(0, 0.1, n) for c in choices])
    return self_test.report(choices, rng.integers(0, 1000, n), hits, likelihoods)


def run_command(*args):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(a) for a in args])


def refuses(tmp_path, head, target, named, *more):
    """Runs the command over an existing file and checks that it says one line and changes nothing."""
    out = tmp_path / "out" / "head.gguf"
    out.parent.mkdir(exist_ok=True)
    out.write_bytes(b"precious")
    result = run_command(head, "--target", target, "--out", out, *more)
    assert result.exit_code == 2
    line = result.stderr.strip()
    assert line.startswith("error: ") and "\n" not in line and named in line
    assert out.read_bytes() == b"precious" and os.listdir(out.parent) == ["head.gguf"]
