"""What `info` says of targets and heads."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import heads
import pytest
import tiny_models
from converting import converted
from paths import ROOT
from typer.testing import CliRunner

from eagle3_llama import EagleError
from eagle3_llama.cli import main as cli
from eagle3_llama.heads import auto
from eagle3_llama.heads.info import describe
from eagle3_llama.models import shipped_head
from eagle3_llama.runtime import checking, devices, machine
from eagle3_llama.runtime import system as runtime_system
from eagle3_llama.runtime.hook import SUFFIX
from eagle3_llama.runtime.library import find_lib_dir

sys.path.insert(0, str(ROOT / "native"))

import fetch


def test_target(target):
    rows = dict(describe(target))
    assert (
        rows["kind"] == "target, architecture llama"
        and rows["layers"] == "12"
        and rows["hidden size"] == "64"
    )
    assert rows["vocabulary"] == "320" and "F32" in rows["weights"]


def test_a_target_whose_head_is_known(target, tmp_path, monkeypatch):
    """In its folder, or in the list by its name; what does not fit is none. Nothing is fetched."""
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(auto, "fetch_head", lambda *_: pytest.fail("it fetches"))
    model = shutil.copy(target, tmp_path / "model.gguf")
    assert dict(describe(model))["--eagle auto"].startswith("no head: none beside it")
    listed = (auto.PublishedHead("me/head", "me/model", "here"), auto.PublishedHead("me/x", "me/y", "here"))
    monkeypatch.setattr(auto, "published", lambda: listed)
    monkeypatch.setattr(auto, "names_of", lambda _: {"me/model"})
    assert dict(describe(model))["--eagle auto"] == "me/head on the Hub, published for it"
    tiny_models.head(tmp_path / "eagle3-b.gguf", n_embd=128)
    tiny_models.head(tmp_path / "head.gguf")
    assert dict(describe(model))["--eagle auto"] == "head.gguf, beside it"


def test_shipped_head():
    rows = dict(describe(shipped_head()))
    assert rows["memory"].startswith("12.3 MB, 768 bytes for each token")
    assert rows["kind"] == "EAGLE-3 head" and rows["captured layers"].startswith("[2, 15, 27]")
    assert (
        rows["draft vocabulary"] == "8192 of 49152"
        and "hidden size 576, 49152 tokens" in rows["fits a target of"]
    )


@pytest.mark.parametrize(
    "name, said",
    [
        ("speculators, qwen3", "q/k norms"),
        ("SpecForge, EAGLE-3.1", "norm_output, fc_norm"),
        ("two projections", "two projections"),
        ("speculators, llama", "norm_before_residual, norm_before_fc"),
        ("yarn rope", "yarn rope"),
        ("SpecForge, no final norm", "no final norm"),
        ("EAGLE-1", "fc bias"),
        ("ModelOpt, without fc", "without fc"),
        ("partial rope", "partial rope"),
    ],
)
def test_variants(tmp_path, target, name, said):
    rows = dict(describe(converted(tmp_path, name, target, "q8_0")[1]))
    assert said in rows["variant"]
    assert rows["decoder layers"] == str(heads.RECIPES[name].n_blocks)
    assert rows["kind"] == ("EAGLE-1 head" if name == "EAGLE-1" else "EAGLE-3 head")


@pytest.mark.parametrize(
    "layers, said",
    [
        ([2, 6, 9], None),
        ([2, 18, 33], None),
        ([1, 17, 32], "[1, 17, 32] are outputs by EAGLE's rule for 36 layers"),
        ([3, 19, 34], "EAGLE's rule gives 2, n/2, n-3"),
        ([24, 30, 36], "EAGLE's rule gives 2, n/2, n-3"),
        ([2, 4, 6, 8, 10], None),
    ],
)
@pytest.mark.parametrize("key", ["target_layers", "extract_layers"])
def test_layers_that_contradict_the_rule(tmp_path, layers, said, key):
    """A head of upstream's, which does not say how many layers its target has."""
    w = gguf.GGUFWriter(tmp_path / "eagle3-upstream.gguf", "eagle3")
    for name, size in (("block_count", 1), ("embedding_length", 64), ("vocab_size", 128)):
        w.add_uint32(f"eagle3.{name}", size)
    w.add_array(f"eagle3.{key}", layers)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    rows = dict(describe(tmp_path / "eagle3-upstream.gguf"))
    assert rows["captured layers"].startswith(str(layers))
    hint = rows.get("are they right?")
    if said is None:
        assert hint is None
    else:
        assert said in hint and "convert eagle3-upstream.gguf --model TARGET.gguf" in hint
        assert "--self-test" in hint


def test_command(tmp_path, target):
    done = CliRunner().invoke(cli.app, ["info", str(target)])
    assert done.exit_code == 0 and "architecture llama" in done.stdout
    (tmp_path / "no.gguf").write_bytes(b"nothing")
    with pytest.raises(EagleError, match="no.gguf is not a GGUF"):
        describe(tmp_path / "no.gguf")
    with pytest.raises(EagleError, match="no such file"):
        describe(tmp_path / "none.gguf")


def system(**env):
    """What `eagle3-llama info --system` prints: its rows, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "eagle3_llama.cli", "info", "--system"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **env},
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return [line.partition(": ")[::2] for line in done.stdout.splitlines()]


def test_system():
    told = dict(system(CMAKE_ARGS="-DSOME=thing", OMP_NUM_THREADS="2", HOME=str(Path.home())))
    assert told["eagle3-llama"] and told["llama-cpp-python"] == fetch.VERSION
    assert told["processor"] == machine.model() and told["cores"].startswith(f"{machine.cores()} usable")
    assert told["library"].startswith("loads, ABI ") and "CPU" in told["ggml"]
    named = [line.split(",")[0] for line in devices.beside_the_processor(find_lib_dir())]
    assert told["device"].split(",")[0] in (named or ["none"])
    assert fetch.COMMIT in told["llama.cpp"] and told["compiled by"]
    assert told["products"] == "right on this processor" and told["checked when built"] == "yes"
    used = json.loads((find_lib_dir() / "proof.json").read_text())["used"]
    assert used and told["used"].split(", ") == used
    assert "CMAKE_ARGS=-DSOME=thing" in told["environment"] and "OMP_NUM_THREADS=2" in told["environment"]


def test_system_tells_of_the_cache_and_no_secrets(tmp_path):
    """The cache's size, and a command that removes it, whatever it is called."""
    cache = tmp_path / "a b"
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "x.gguf").write_bytes(b"0" * 3_000_000)
    env = {"EAGLE3_LLAMA_CACHE": str(cache), "EAGLE3_LLAMA_COSTS": str(tmp_path / "c")}
    told = system(**env, EAGLE3_LLAMA_TOKEN="hidden", HOME=str(tmp_path))
    assert "hidden" not in str(told) and str(tmp_path) not in str(told) and "~/c" in str(told)
    about = dict(told)["cache"]
    assert about == "~/a b, 3 MB (models 3); to remove it: rm -r ~/a\\ b"
    remove, env = about.partition("to remove it: ")[2], {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    subprocess.run(["sh", "-c", remove], check=True, timeout=60, env=env)
    assert not cache.exists()


@pytest.fixture
def broken(tmp_path):
    """A folder of libraries that end the process that loads them, with a record of an earlier fault."""
    source = tmp_path / "trap.c"
    source.write_text("__attribute__((constructor)) static void end(void) { __builtin_trap(); }")
    lib = tmp_path / "lib"
    lib.mkdir()
    for name in ("libllama", "libeagle3"):
        flags = ["-shared", "-fPIC", source, "-o", lib / f"{name}{SUFFIX}"]
        subprocess.run(["cc", *flags], check=True, timeout=120)
    shutil.copy(find_lib_dir() / "eagle3.h", lib)
    left_out = {"what": "AMX", "sets": ["amx_int8"], "why": "products in q4_0 (AMX) end with SIGSEGV"}
    record = {"checked": True, "used": ["ssse3"], "left_out": [left_out]}
    (lib / "proof.json").write_text(json.dumps(record))
    return lib


def test_system_with_a_library_that_crashes(broken):
    told = dict(system(EAGLE3_LLAMA_LIB_DIR=str(broken)))
    assert re.match(r"cannot be loaded: the process ends with SIG(ILL|TRAP)$", told["library"])
    assert told["left out"] == "AMX, because products in q4_0 (AMX) end with SIGSEGV"
    assert told["used"] == "ssse3" and told["processor"]


def test_system_with_products_that_crash(broken):
    program = broken / "eagle3-proof"
    program.write_text('#!/bin/sh\necho "products in q8_0 (AMX)"\nkill -SEGV $$\n')
    program.chmod(0o755)
    told = dict(system(EAGLE3_LLAMA_LIB_DIR=str(broken)))
    assert told["products"] == "products in q8_0 (AMX) end with SIGSEGV"


def test_system_with_a_check_that_is_not_done(broken, monkeypatch):
    """When the library was built, and now: the machine is too busy, which is no fault of the library's."""
    record = {"checked": False, "why_not": "the start took more than 60 minutes", "used": [], "left_out": []}
    (broken / "proof.json").write_text(json.dumps(record))
    program = broken / "eagle3-proof"
    program.write_text('#!/bin/sh\necho "products in q8_0"\nkill -STOP $$\n')
    program.chmod(0o755)
    monkeypatch.setenv("EAGLE3_LLAMA_LIB_DIR", str(broken))
    monkeypatch.setattr(runtime_system, "_LIMITS", checking.Limits(wall=10))
    told = dict(runtime_system.describe())
    assert told["checked when built"] == "not checked: the start took more than 60 minutes"
    assert told["products"] == "not checked: products in q8_0 took more than 10 s, as the machine is too busy"

    program.write_text('#!/bin/sh\necho "products in q8_0"\nwhile :; do :; done\n')
    monkeypatch.setattr(runtime_system, "_LIMITS", checking.Limits(computing=2, wall=120))
    assert dict(runtime_system.describe())["products"] == "products in q8_0 do not end"


def test_system_without_a_library(tmp_path):
    told = dict(system(EAGLE3_LLAMA_LIB_DIR=str(tmp_path)))
    assert told["library"].startswith("cannot be loaded: libeagle3") and "missing" in told["library"]


def test_a_file_or_the_system():
    for arguments in (["info"], ["info", "--system", "head.gguf"]):
        error = CliRunner().invoke(cli.app, arguments).exception
        assert isinstance(error, EagleError) and "or --system" in str(error)
