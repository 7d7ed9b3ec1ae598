"""What llama-cpp-python calls by ctypes does not throw: nothing there could catch it."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny_models
from native_programs import passes
from paths import ROOT

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

# These call one that catches, under its former name or with one argument less.
OTHER_NAMES = """
    llama_copy_state_data llama_get_state_size llama_load_model_from_file llama_load_session_file
    llama_new_context_with_model llama_save_session_file llama_set_state_data llama_state_seq_get_data
    llama_state_seq_get_size llama_state_seq_set_data
""".split()

# They must catch although a name above stands for theirs.
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

# So many boundary_test makes fail; for the others that catch it has no input that does so on every machine.
MADE_TO_FAIL = 34


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


def catches(text):
    return re.search(r"\} (LLAMA|MTMD)_CATCH\(|\bcatch \(", text) is not None


def test_each_function_catches_or_cannot_throw(functions):
    names = declared()
    assert len(names) > 300 and names <= functions.keys()
    open_ = {name for name in names if not catches(functions[name])}
    plain = {name for name in open_ if name.startswith(tuple(PLAIN)) or name.endswith("_default_params")}
    plain |= {name for name in open_ if name.endswith("_params_default")}
    assert open_ - plain - set(OTHER_NAMES) == set()
    assert open_ & set(NOT_PLAIN) == set() and set(NOT_PLAIN) <= names
    for name in OTHER_NAMES:
        called = re.findall(r"\b(llama_\w+)\(", functions[name])
        assert any(other in functions and catches(functions[other]) for other in called), name


def test_functions_that_are_made_to_fail(programs, tmp_path, functions):
    """Under the sanitizers: by what they are given, and by memory that runs out at each place."""
    text = (ROOT / "native" / "tests" / "boundary_test.cpp").read_text()
    failing = {name for name in re.findall(r'(?:fails|runs_out)\(\s*"(\w+)"', text)}
    assert failing <= declared() and len(failing) >= MADE_TO_FAIL
    assert all(catches(functions[name]) for name in failing)
    passes(programs, "boundary_test", tiny_models.target(tmp_path / "target.gguf"), leaks=False)
