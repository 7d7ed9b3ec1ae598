"""The wheels of scripts/release/build_wheels.py, as somebody installs them who has no compiler.

    python3 scripts/release/build_wheels.py && .venv/bin/python -m pytest tests/by_hand/wheels.py

Not part of ./scripts/test, because the wheels take ten minutes to compile. EAGLE3_WHEELS names another folder
than dist. Where qemu-x86_64-static is installed (Debian: qemu-user-static), older processors are tried too.
The wheel for arm64 is tried with a Python for arm64, where EAGLE3_ARM64_ROOT names a root that
scripts/release/arm64_root.py has made.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from commands import run
from paths import ROOT

from eagle3_llama.models import shipped_head, smollm2
from eagle3_llama.runtime.library import find_lib_dir

DIST = Path(os.environ.get("EAGLE3_WHEELS") or ROOT / "dist").absolute()
QEMU = shutil.which("qemu-x86_64-static")
ARM64 = os.environ.get("EAGLE3_ARM64_ROOT")
GENERATES = """
import sys
{first}
from eagle3_llama import EagleLlama
{last}
llm = EagleLlama(sys.argv[1], eagle=sys.argv[2], n_ctx=256, n_threads=2, verbose=False)
prompt = b"<|im_start|>user\\nWhy is the sky blue?<|im_end|>\\n<|im_start|>assistant\\n"
text, tokens = b"", llm.tokenize(prompt, special=True)
for token, _ in zip(llm.generate(tokens, temp=0.0), range({n})):
    text += llm.detokenize([token])
print(text, llm.stats.drafted > 0)
"""

# What the head drafts does not change the text. Fixed drafts: the planner would measure an emulator's speed.
COMPARES = """
import sys
from eagle3_llama import EagleLlama
from eagle3_llama.runtime.variants import _chosen
prompt = b"<|im_start|>user\\nWhy is the sky blue?<|im_end|>\\n<|im_start|>assistant\\n"
texts = []
for how in ({"eagle": sys.argv[2], "n_max": 3, "text": False}, {"n_max": 0}):
    llm = EagleLlama(sys.argv[1], n_ctx=256, n_threads=2, verbose=False, **how)
    tokens = llm.tokenize(prompt, special=True)
    texts.append(llm.detokenize([t for t, _ in zip(llm.generate(tokens, temp=0.0), range(12))]))
    drafted = llm.stats.drafted if len(texts) == 1 else drafted
print([[c.name, c.dropped, c.remark] for c in _chosen.values()], drafted > 0, texts[0] == texts[1])
print(texts[0])
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """A virtual environment with what pip installs from the wheels, where no compiler is in PATH."""
    place = tmp_path_factory.mktemp("site")
    run([sys.executable, "-m", "venv", place / "venv"])
    path = str(place / "venv" / "bin")
    assert not any(shutil.which(name, path=path) for name in ("cc", "gcc", "c++", "g++", "clang", "cmake"))
    pip = [
        place / "venv" / "bin" / "pip",
        "install",
        "--no-cache-dir",
        "--only-binary=:all:",
        "--find-links",
        DIST,
    ]
    done = run([*pip, "eagle3-llama"], env={**environment(place), "PATH": path})
    assert "Building wheel" not in done.stdout
    return place


def environment(place, **env):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EAGLE3_", "LLAMA_"))}
    return {**kept, "PATH": str(place / "venv" / "bin"), "EAGLE3_LLAMA_CACHE": str(place / "cache"), **env}


def generate(place, kind="Q8_0", before=(), first="", last="", n=24, python=None, **env):
    code = GENERATES.format(first=first, last=last, n=n)
    command = [
        *before,
        python or place / "venv" / "bin" / "python",
        "-c",
        code,
        smollm2(kind),
        shipped_head(),
    ]
    return run(command, env=environment(place, **env), cwd="/", seconds=1800)


def lib_of(place):
    [lib] = place.glob("venv/lib/python*/site-packages/eagle3_llama/lib")
    return lib


def system(place, **env):
    command = [place / "venv" / "bin" / "eagle3-llama", "info", "--system"]
    told = run(command, env=environment(place, **env))
    return dict(line.partition(": ")[::2] for line in told.stdout.splitlines())


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_0", "Q4_K_M"])
def test_the_text_is_the_native_builds(site, kind):
    """From a folder with a backend of its own name, which must not be loaded."""
    own = generate(site, kind, python=sys.executable, EAGLE3_LLAMA_LIB_DIR=str(find_lib_dir()))
    theirs = generate(site, kind)
    assert theirs.stdout == own.stdout and theirs.stdout.rstrip().endswith("True")


def test_the_system_is_told(site):
    generate(site)
    rows = system(site)
    assert re.match(r"\w+, chosen here; to name another: EAGLE3_LLAMA_CPU, of alderlake, ", rows["variant"])
    assert rows["products"] == "right on this processor" and rows["library"].startswith("loads")
    assert rows["used"] and "CPU : " in rows["ggml"]
    assert system(site, EAGLE3_LLAMA_CPU="sse42")["used"] == "sse4_2, ssse3"


def test_a_product_with_a_trap(site, tmp_path):
    """The best variant's products end the process: the next lower one is used, which one line says."""
    best = system(site)["variant"].partition(",")[0]
    lib = shutil.copytree(lib_of(site), tmp_path / "eagle3_llama" / "lib")
    shutil.copytree(lib_of(site).parents[1] / "eagle3_llama.libs", tmp_path / "eagle3_llama.libs")
    trapped = lib / f"libggml-cpu-{best}.so"
    told = run(["nm", "-D", trapped]).stdout
    at = int(re.search(r"^([0-9a-f]+) T ggml_compute_forward_mul_mat$", told, re.MULTILINE)[1], 16)
    with trapped.open("r+b") as file:  # its code lies in the file where it lies in memory
        file.seek(at)
        file.write(b"\x0f\x0b")  # ud2
    done = generate(site, EAGLE3_LLAMA_LIB_DIR=str(lib))
    said = [line for line in done.stderr.splitlines() if "trying the variant" in line]
    assert len(said) == 1 and "end with SIGILL on this processor: trying the variant" in said[0]
    assert said[0].endswith(f"not {best}]")
    rows = system(site, EAGLE3_LLAMA_LIB_DIR=str(lib))
    assert rows["not used here"].startswith(f"the variant {best}, because ") and not rows[
        "variant"
    ].startswith(best)
    assert "variant" not in generate(site, EAGLE3_LLAMA_LIB_DIR=str(lib)).stderr


@pytest.mark.skipif(QEMU is None, reason="no qemu-x86_64-static is installed")
@pytest.mark.parametrize("cpu, name", [("Haswell", "haswell"), ("IvyBridge", "ivybridge")])
def test_older_processors(site, cpu, name):
    """An emulator without the instructions ends a process that uses one."""
    show = "from eagle3_llama.runtime.variants import _chosen; print([c.name for c in _chosen.values()])"
    done = generate(site, before=[QEMU, "-cpu", cpu], last=show, n=8)
    assert done.stdout.splitlines()[0] == f"['{name}']" and "True" in done.stdout


@pytest.mark.skipif(QEMU is None, reason="no qemu-x86_64-static is installed")
def test_a_processor_without_avx(site):
    """The library alone: NumPy's own wheel cannot be imported on this one."""
    lib = lib_of(site)
    proof = [QEMU, "-cpu", "Nehalem", lib / "eagle3-proof"]
    scores = {
        name: int(run([*proof, "--score", lib / f"libggml-cpu-{name}.so"]).stdout)
        for name in ("x64", "sse42", "sandybridge", "haswell")
    }
    assert scores["sse42"] > scores["x64"] > 0 and scores["sandybridge"] == scores["haswell"] == 0
    assert run([*proof, "--few", lib / "libggml-cpu-sse42.so"]).stdout.splitlines()[-1] == "ok"


@pytest.mark.parametrize("when", ["first", "last"])
def test_beside_torch(site, when):
    """Its wheel has an OpenMP of its own: both compute, whichever comes first."""
    torch = "import torch; torch.ones(512, 512) @ torch.ones(512, 512)"
    where = run([sys.executable, "-c", "import torch; print(torch.__path__[0])"], code=None)
    if where.returncode:
        pytest.skip("torch is not installed")
    packages = str(Path(where.stdout.strip()).parent)
    reach = f"sys.path.append({packages!r})"  # behind the wheel's own packages
    code = {"first": f"{reach}\n{torch}"} if when == "first" else {"first": reach, "last": torch}
    assert generate(site, **code).stdout == generate(site).stdout


@pytest.fixture(scope="session")
def arm64(tmp_path_factory):
    """Runs code with the wheel for arm64, in a virtual environment of the root's own Python."""
    place = tmp_path_factory.mktemp("arm64")
    binds = [place, DIST, shipped_head().parent, smollm2("Q8_0").parent]
    start = [sys.executable, ROOT / "scripts" / "release" / "arm64_root.py", "run"]
    start += [word for folder in binds for word in ("--bind", folder)] + [ARM64]
    env = {**environment(place), "PATH": os.environ["PATH"]}  # of the tools that start it

    def within(*command, **more):
        return run([*start, *command], env={**env, **more}, seconds=3600)

    within("/usr/bin/python3", "-m", "venv", place / "venv")
    python, options = place / "venv" / "bin" / "python", ["--no-cache-dir", "--only-binary=:all:"]
    within(python, "-m", "pip", "install", *options, "--find-links", DIST, "eagle3-llama")
    assert not Path("/proc/sys/fs/binfmt_misc/arm64").exists()  # nothing is registered outside of it
    # each processor has a cache of its own: /proc/cpuinfo is this machine's for all that are emulated
    return lambda cpu, *words: within(python, *words, QEMU_CPU=cpu, EAGLE3_LLAMA_CACHE=str(place / cpu))


@pytest.mark.skipif(not ARM64, reason="EAGLE3_ARM64_ROOT names no root for arm64")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize(
    "cpu, name", [("cortex-a72", "armv8.0_1"), ("neoverse-n1", "armv8.2_2"), ("max,sme=off", "armv8.6_2")]
)
def test_arm64(site, arm64, cpu, name, kind):
    """The variant that suits best is taken. One text with the head, without it, and on this machine."""
    done = arm64(cpu, "-c", COMPARES, smollm2(kind), shipped_head())
    chosen, text = done.stdout.splitlines()[-2:]
    assert chosen == f"[['{name}', [], '']] True True"
    own = [site / "venv" / "bin" / "python", "-c", COMPARES, smollm2(kind), shipped_head()]
    assert run(own, env=environment(site), cwd="/").stdout.splitlines()[-1] == text
