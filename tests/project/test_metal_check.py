"""Metal's sources in the pinned tree compute what our graphs need, and the check sees where they do not."""

import sys

import pytest
from commands import run
from paths import ROOT

sys.path.insert(0, str(ROOT / "native"))
sys.path.insert(0, str(ROOT / "scripts" / "release"))
sys.path.insert(0, str(ROOT / "scripts" / "device"))
import fetch
import metal_check
import operations

SCRIPT = ROOT / "scripts" / "release" / "metal_check.py"


@pytest.fixture(scope="module")
def files():
    return metal_check.sources(fetch.VERSION)


def test_metal_computes_what_our_graphs_need(files):
    """At an upgrade: what is missing runs on the processor, and is slow there."""
    wanted = metal_check.used_operations(files[metal_check.GRAPHS])
    assert all(each.good for each in metal_check.supports(wanted, files[metal_check.METAL]))


@pytest.mark.thorough
def test_the_command():
    done = run([sys.executable, SCRIPT])
    assert "TOP_K: on every GPU" in done.stdout and "FLASH_ATTN_EXT: with SIMD-group matrices" in done.stdout


def test_operations_are_found_by_their_functions(files):
    """Also those that a function leaves to another one, as ggml_swiglu_split does."""
    of = metal_check.operations(files[metal_check.GRAPHS])
    assert of["ggml_mul_mat"] == {"MUL_MAT"} and of["ggml_swiglu_split"] == {"GLU"}
    assert of["ggml_rope_ext"] == {"ROPE"} and of["ggml_top_k"] == {"TOP_K"}


def test_devices_are_asked_for_the_same_operations(files):
    """scripts/device/operations.py asks a device; this check reads sources."""
    from eagle3_llama.runtime import library

    library.load()
    asked = {name.split()[0] for name, _ in operations.ggml().graph()}
    assert asked >= metal_check.used_operations(files[metal_check.GRAPHS])


@pytest.mark.parametrize(
    "old, new, missing",
    [
        ("        case GGML_OP_TOP_K:\n", "", "TOP_K"),
        ("            return has_simdgroup_reduction;\n        case GGML_OP_NORM:",
         "            return false;\n        case GGML_OP_NORM:", "ARGMAX"),
        ("                case GGML_GLU_OP_SWIGLU:\n", "", "GLU"),
    ],
)  # fmt: skip
def test_what_metal_no_longer_computes_is_named(files, old, new, missing):
    metal = files[metal_check.METAL]
    assert old in metal
    wanted = metal_check.used_operations(files[metal_check.GRAPHS])
    bad = [each for each in metal_check.supports(wanted, metal.replace(old, new)) if not each.good]
    assert [each.operation for each in bad] == [missing]


def test_a_head_size_without_a_kernel_is_seen(files):
    metal = files[metal_check.METAL]
    fewer = metal.replace("                op->src[0]->ne[0] != 128 &&\n", "")
    assert metal_check.head_sizes(metal) - metal_check.head_sizes(fewer) == {128}
    assert set(metal_check.SIZES) <= metal_check.head_sizes(metal)


def test_sources_that_changed_too_much_are_refused(files):
    with pytest.raises(ValueError, match="has no ggml_metal_device_supports_op: mend metal_check.py"):
        metal_check.cases("nothing")
    with pytest.raises(ValueError, match="gives operations in another way"):
        metal_check.used_operations(files[metal_check.GRAPHS].replace("->op", "->operation"))
