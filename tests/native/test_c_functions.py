"""What llama-cpp-python calls by ctypes does not throw: nothing there could catch it."""

import json
import math
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny_models
from commands import run
from native_programs import passes
from paths import ROOT

from eagle3_llama.runtime.library import find_lib_dir

sys.path.insert(0, str(ROOT / "native"))

import fetch

# Functions whose names begin so read fields, take numbers, or free. Or what they ask memory for is some bytes
# of one size: for a lack of that nothing is promised.
PLAIN = """
    llama_adapter_get_alora_ llama_adapter_lora_free llama_adapter_meta_ llama_add_ llama_backend_free
    llama_batch_ext_clear llama_batch_ext_free llama_batch_ext_set_embd_state llama_batch_free
    llama_batch_get_one llama_batch_init llama_chat_builtin_templates llama_flash_attn_type_name llama_free
    llama_ftype_name llama_get_causal_attn llama_get_memory llama_get_model llama_get_sampled_
    llama_load_mode_name llama_log_ llama_max_ llama_memory_can_shift llama_memory_seq_pos_ llama_model_cls_
    llama_model_decoder_start_token llama_model_free llama_model_ftype llama_model_get_vocab
    llama_model_has_ llama_model_is_ llama_model_meta_ llama_model_n_ llama_model_rope_ llama_model_size
    llama_n_ llama_numa_init llama_opt_param_filter_all llama_perf_ llama_pooling_type llama_sampler_chain_get
    llama_sampler_chain_init llama_sampler_chain_n llama_sampler_chain_remove llama_sampler_free
    llama_sampler_get_seed llama_sampler_init llama_set_abort_callback llama_set_causal_attn
    llama_set_embeddings llama_set_warmup llama_split_path llama_supports_ llama_time_us llama_token_
    llama_version llama_vocab_ mtmd_batch_ mtmd_bitmap_ mtmd_decode_use_ mtmd_default_marker mtmd_free
    mtmd_gen_audio_get_info mtmd_gen_inp_default mtmd_get_ mtmd_helper_gen_audio_free mtmd_helper_get_
    mtmd_helper_init_opt_default mtmd_helper_log_set mtmd_helper_support_video mtmd_helper_video_free
    mtmd_helper_video_get_info mtmd_image_tokens_ mtmd_input_chunk_free mtmd_input_chunk_get_
    mtmd_input_chunks_ mtmd_log_set mtmd_support_ mtmd_test_create_input_chunks
""".split()

# They must be guarded although a name above stands for theirs.
NOT_PLAIN = """
    llama_adapter_meta_val_str llama_model_meta_val_str llama_sampler_init_dry llama_sampler_init_grammar
    llama_sampler_init_grammar_lazy llama_sampler_init_grammar_lazy_patterns llama_sampler_init_infill
    llama_sampler_init_logit_bias llama_sampler_init_penalties llama_supports_gpu_offload llama_token_to_piece
    llama_vocab_get_attr llama_vocab_get_score llama_vocab_get_text llama_vocab_is_control
    mtmd_batch_add_chunk mtmd_batch_encode mtmd_bitmap_init mtmd_bitmap_init_from_audio mtmd_bitmap_init_lazy
    mtmd_bitmap_set_id mtmd_get_cap_from_file mtmd_input_chunk_get_placeholder
""".split()

FUNCTION = re.compile(
    r"^[a-z][\w:<>*& ]*?\b(\w+)\s*\(([^;{}]*?\)\s*(?:try )?\{.*?^\}.*?)$", re.MULTILINE | re.DOTALL
)

# What a guarded function returns after an exception; the others return 0, null, false or "".
ERRORS = {
    "llama_adapter_meta_val_str": -1,
    "llama_batch_ext_add": -1,
    "llama_batch_ext_add_embd": -1,
    "llama_batch_ext_add_token": -1,
    "llama_chat_apply_template": -1,
    "llama_decode": -3,
    "llama_encode": -3,
    "llama_load_mode_from_str": -1,
    "llama_model_desc": -1,
    "llama_model_meta_val_str": -1,
    "llama_model_quantize": 1,
    "llama_process": -3,
    "llama_sampler_sample": -1,
    "llama_set_adapter_cvec": -1,
    "llama_set_adapters_lora": -1,
    "llama_tokenize": -1,
    "mtmd_batch_add_chunk": 1,
    "mtmd_helper_decode_image_chunk": -1,
    "mtmd_helper_eval_chunk_single": -1,
    "mtmd_helper_eval_chunks": -1,
    "mtmd_helper_gen_audio_get_output": -1,
    "mtmd_helper_gen_audio_set_input": -1,
    "mtmd_helper_gen_audio_step_gen": -1,
    "mtmd_helper_gen_audio_step_prompt": -1,
    "mtmd_helper_video_read_next": -2,
    "mtmd_input_chunk_save": -1,
}

# Each function that llama_cpp has opened stands on one that throws. Prints the names of the guarded ones, and
# what each returned and logged.
THROWING = """
import ctypes, json, sys
import eagle3_llama
from llama_cpp import llama_cpp, mtmd_cpp
from eagle3_llama.runtime.library import find_lib_dir
from eagle3_llama.runtime.hook import SUFFIX

lines = []
log = llama_cpp.llama_log_callback(lambda level, text, _: lines.append([level, text.decode()]))
llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
throws = ctypes.cast(ctypes.CDLL("libstdc++.so.6")._ZSt17__throw_bad_allocv, ctypes.c_void_p).value
guarded = ctypes.CDLL(str(find_lib_dir() / ("libeagle3" + SUFFIX))).eagle3_guarded
guarded.argtypes, guarded.restype = (ctypes.c_char_p, ctypes.c_void_p), ctypes.c_void_p


def zero(of):
    pointed = issubclass(of, ctypes._Pointer) and issubclass(of._type_, ctypes.Structure)
    return ctypes.pointer(of._type_()) if pointed else of()


def plain(value):
    if isinstance(value, ctypes.Structure):
        return any(plain(getattr(value, name)) for name, *_ in value._fields_)
    if isinstance(value, bytes):
        return value.decode()
    return value if isinstance(value, (int, float)) else bool(value)


out = {}
for library in (llama_cpp._lib, mtmd_cpp._libmtmd):
    for name, function in list(vars(library).items()):
        if not name.startswith(("llama_", "mtmd_")):
            continue
        before = ctypes.cast(function, ctypes.c_void_p).value
        around = guarded(name.encode(), throws)
        if around == throws:
            continue
        assert around == before, name + " was not guarded"
        lines.clear()
        # without a vocabulary it would read from nowhere: boundary_test has it
        value = False if name == "llama_vocab_is_control" else plain(function(*map(zero, function.argtypes)))
        out[name] = [value, list(lines)]
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def thrown():
    """By the name of each guarded function: what it returned, and the lines that were logged."""
    return json.loads(run([sys.executable, "-c", THROWING]).stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def functions():
    """The C functions of the patched tree by name: their text from the parameters on."""
    tree = fetch.patched_tree(None)[0]
    out = {}
    for path in [*tree.glob("src/*.cpp"), *tree.glob("tools/mtmd/mtmd*.cpp")]:
        found = FUNCTION.finditer(path.read_text())
        out.update((match[1], match[2]) for match in found if not match[0].startswith("static"))
    return out


def declared():
    folder = Path(find_spec("llama_cpp").origin).parent  # not imported: that loads the library
    texts = [(folder / name).read_text() for name in ("llama_cpp.py", "mtmd_cpp.py")]
    return {name for text in texts for name in re.findall(r'ctypes_function\w*\(\s*"(\w+)"', text)}


def test_each_function_is_guarded_or_cannot_throw(functions, thrown):
    names = declared()
    assert len(names) > 300 and names <= functions.keys() and thrown.keys() <= names
    open_ = {name for name in names - thrown.keys() if "catch (" not in functions[name]}
    plain = {name for name in open_ if name.startswith(tuple(PLAIN)) or name.endswith("_default_params")}
    plain |= {name for name in open_ if name.endswith("_params_default")}
    assert open_ - plain == set()
    assert open_ & set(NOT_PLAIN) == set() and set(NOT_PLAIN) <= names


def test_each_guarded_function_throws_and_returns_its_error(thrown):
    assert len(thrown) > 110
    for name, (value, lines) in thrown.items():
        if name == "llama_vocab_get_score":
            assert math.isnan(value)
        else:
            assert value == ERRORS.get(name, value) and bool(value) == (name in ERRORS), name
        assert lines == [[4, f"{name}: std::bad_alloc\n"]] or name == "llama_vocab_is_control", (name, lines)


def test_functions_that_are_made_to_fail(programs, tmp_path):
    """Under the sanitizers: by what they are given, and by memory that runs out at each place."""
    passes(programs, "boundary_test", tiny_models.target(tmp_path / "target.gguf"), leaks=False)


@pytest.mark.parametrize("first", ["eagle3_llama", "llama_cpp"])
def test_whatever_is_imported_first(first, tmp_path):
    """A token that is not in the vocabulary: an exception, which would end the process."""
    path = tiny_models.target(tmp_path / "target.gguf")
    program = f"""
import {first}
import llama_cpp
held = llama_cpp.llama_vocab_get_text  # before libeagle3 is there, where llama_cpp is first
from eagle3_llama.runtime.library import load
load()
model = llama_cpp.llama_model_load_from_file({str(path).encode()!r}, llama_cpp.llama_model_default_params())
vocab = llama_cpp.llama_model_get_vocab(model)
print(held(vocab, 1 << 30), llama_cpp.llama_vocab_get_text(vocab, 1 << 30))
"""
    env = {**os.environ, "LLAMA_CPP_LIB_PATH": str(find_lib_dir())}
    done = run([sys.executable, "-c", program], code=None, env=env)
    assert done.returncode == 0 and done.stdout == "None None\n", done.stderr
    assert "llama_vocab_get_text: " in done.stderr
