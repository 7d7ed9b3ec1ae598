"""What costs are kept under: machine, placement, cache."""

import pytest

from eagle3_llama import EagleLlama
from eagle3_llama.runtime import machine
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


def test_devices_are_those_that_ggml_sees():
    described = machine.devices(find_lib_dir())
    assert described and all(described), described


@pytest.fixture
def key(files):
    def key(**given):
        llm = EagleLlama(files[0], eagle=files[1], **{**COMMON, **given})
        out = [str(k) for k in llm._cost_key()]
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


def tiny_lora(path):
    """An adapter of rank 2 for one matrix of the tiny target."""
    import gguf
    import numpy as np
    import tiny_models

    w, n = gguf.GGUFWriter(path, "llama"), tiny_models.N_EMBD
    w.add_type(gguf.GGUFType.ADAPTER)
    w.add_string(gguf.Keys.Adapter.TYPE, "lora")
    w.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 2.0)
    w.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((2, n), np.float32))
    w.add_tensor("blk.0.attn_q.weight.lora_b", np.ones((n, 2), np.float32))
    tiny_models._finish(w)
    return path
