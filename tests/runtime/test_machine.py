"""What costs are kept under: machine, placement, cache."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_lora

import eagle3_llama
from eagle3_llama import EagleLlama
from eagle3_llama.llama.model_costs import cost_key
from eagle3_llama.runtime import devices, machine
from eagle3_llama.runtime.library import find_lib_dir

COMMON = {"n_ctx": 128, "n_batch": 64, "n_threads": 1, "verbose": False}
X86 = "processor\t: {}\nvendor_id\t: AuthenticAMD\nmodel name\t: {}\ncpu MHz\t\t: {}\nflags\t\t: fpu avx2\n\n"
ARM = "processor\t: {}\nBogoMIPS\t: {}\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: {}\n\n"


def test_processors_are_told_apart(tmp_path):
    """A shared home is read by several machines; one machine's clock and numbering are no part of it."""

    def of(*parts):
        (tmp_path / "cpuinfo").write_text("".join(parts))
        return machine.cpu(tmp_path / "cpuinfo")

    epyc = of(X86.format(0, "AMD EPYC", 2400))
    assert (
        epyc == of(X86.format(0, "AMD EPYC", 1800), X86.format(1, "AMD EPYC", 3100))
        and "AMD EPYC" in epyc
        and "avx2" in epyc
    )
    assert (
        len(
            {
                epyc,
                of(X86.format(0, "AMD Ryzen", 2400)),
                of(ARM.format(0, 50, "0xd0c")),
                of(ARM.format(0, 50, "0xd0c"), ARM.format(1, 50, "0xd05")),
            }
        )
        == 4
    )
    assert machine.cpu(tmp_path / "none")
    assert machine.sets(tmp_path / "cpuinfo") == {"fp", "asimd"} and machine.sets(tmp_path / "none") == set()
    of(X86.format(0, "AMD EPYC", 2400))
    assert machine.sets(tmp_path / "cpuinfo") == {"fpu", "avx2"}
    assert machine.model(tmp_path / "cpuinfo").startswith("AMD EPYC, ")


# A process that may use one core of a machine of eight. What every default number of threads becomes there.
RESTRICTED = """
import json, multiprocessing, os, sys
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
os.cpu_count = multiprocessing.cpu_count = lambda: 8
from eagle3_llama import EagleLlama
from eagle3_llama.llama.model_costs import cost_key
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.cli import main
from eagle3_llama.heads.guesses import Reader
from eagle3_llama.cli.answer_options import AnswerOptions
from eagle3_llama.server.settings import ServerSettings
from pathlib import Path
import typer.testing

PLAIN = ["--modes", "plain"]
model, head = sys.argv[1:]
found = {}
llm = EagleLlama(model, n_ctx=128, verbose=False)
found["EagleLlama"] = [llm.n_threads, llm.n_threads_batch]
given = EagleLlama(model, n_ctx=128, verbose=False, n_threads=3, n_threads_batch=2)
assert [given.n_threads, given.n_threads_batch] == [3, 2]
again = EagleLlama(**llm.__getstate__())
found["pickled"] = [again.n_threads, again.n_threads_batch]
with Batcher(BatchSettings(model, n_parallel=1, n_ctx=128)) as batcher:
    found["Batcher"] = [batcher.base.n_threads, batcher.base.n_threads_batch]
found["server"] = [ServerSettings(model).batch()["n_threads"]]
with Reader(head, model) as reader:
    found["self-test"] = [reader.llm.n_threads, reader.llm.n_threads_batch]
llm = AnswerOptions(Path(model), n_ctx=128).load()
found["generate, chat"] = [llm.n_threads, llm.n_threads_batch]
main.run_bench = lambda settings: found.update(bench=[settings.n_threads]) or {"results": []}
done = typer.testing.CliRunner().invoke(main.app, ["bench", "-m", model, "--prompts", model, *PLAIN])
assert done.exit_code == 0, done
print(json.dumps(found))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_threads_are_those_that_the_process_may_use(files):
    """Not the machine's: eight threads on one core take several times as long as one."""
    done = subprocess.run(
        [sys.executable, "-c", RESTRICTED, *files[:2]], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 7 and all(set(threads) == {1} for threads in found.values()), found


def test_default_threads(monkeypatch):
    """All that the process may use, in Python as in the commands; what is given stays."""
    monkeypatch.setattr(machine, "cores", lambda: 6)
    assert machine.default_threads({}) == {"n_threads": 6, "n_threads_batch": 6}
    assert machine.default_threads({"n_threads": 2, "n_threads_batch": None}) == {"n_threads_batch": 6}


def test_nothing_else_counts_the_machines_cores():
    """Each default comes from machine.cores().

    system.py shows the number and uses it for nothing.
    """
    for path in Path(eagle3_llama.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        counts = "cpu_count" in names or "process_cpu_count" in names
        assert not counts or path.name in ("machine.py", "system.py", "eagle_llama.py"), path


def test_a_containers_share_of_the_cores(tmp_path, monkeypatch):
    """Control groups give a process a quota of time, and it still sees all cores."""
    proc, root, group = tmp_path / "cgroup", tmp_path / "fs", tmp_path / "fs" / "a" / "b"
    group.mkdir(parents=True)
    quota = lambda: machine.quota(proc, root)
    assert quota() == float("inf")  # a system without control groups
    proc.write_text("3:cpu:/other\n0::/a/b\n")
    assert quota() == float("inf")
    for folder, text, expected in (
        (root, "max 100000", float("inf")),
        (root / "a", "350000 100000", 3.5),  # that of a parent counts too
        (group, "50000 100000", 0.5),
        (group, "max 100000", 3.5),
        (group, "nonsense", 3.5),
        (group, "1 0", 3.5),
    ):
        (folder / "cpu.max").write_text(text)
        assert quota() == expected, text
    may = machine.cores()
    for share, expected in ((0.5, 1), (1.0, 1), (1.5, min(2, may)), (1e6, may)):
        monkeypatch.setattr(machine, "quota", lambda share=share: share)
        assert machine.cores() == expected


def test_devices_are_those_that_ggml_sees():
    """The processor is always there; what layers can be put on is the rest."""
    found = devices.devices(find_lib_dir())
    assert [d for d in found if d.type == "CPU" and d.name and d.description and 0 < d.free <= d.total]
    assert len(devices.beside_the_processor(find_lib_dir())) == sum(d.type != "CPU" for d in found)
    assert devices.devices(Path("/nowhere")) == []


def test_a_device_in_words():
    gpu = devices.Device("CUDA0", "NVIDIA H200", "GPU", 3 << 29, 140 << 30)
    assert str(gpu) == "CUDA0 (GPU): NVIDIA H200, 1.5 of 140.0 GiB free"
    assert str(gpu._replace(free=0, total=0)) == "CUDA0 (GPU): NVIDIA H200"


@pytest.fixture
def key(files):
    def key(**given):
        llm = EagleLlama(files[0], eagle=files[1], **{**COMMON, **given})
        out = [str(k) for k in cost_key(llm, llm._eagle_path)]
        llm.close()
        return out

    return key


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_split": [0.5, 0.5]},
        {"split_mode": 0},
        {"main_gpu": 1},
        {"op_offload": False},
        {"swa_full": False},
        {"n_batch": 32},
        {"offload_kqv": False},
        {"use_mmap": False},
        {"kv_overrides": {"llama.expert_used_count": 1}},
        {"n_threads": 2},
        {"type_k": 0},
        {"n_gpu_layers": 1},
    ],
)
def test_costs_are_kept_under_what_decides_them(key, given):
    assert key() == key() != key(**given)


def test_costs_of_a_lora(files, key, tmp_path):
    lora = str(tiny_lora(tmp_path / "lora.gguf"))
    assert key(use_mmap=False) != key(lora_path=lora) != key(lora_path=lora, lora_scale=0.5)
