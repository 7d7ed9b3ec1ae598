"""The converter: every layout, and what a config may say that must not be passed over."""

import os

import numpy as np
import pytest
from checkpoints import DRAFT, HEADS, HIDDEN, KV_HEADS, VOCAB, bfloat16, checkpoint, write_head, write_target
from converting import gains, read, refuses, values

from eagle3_llama.errors import EagleError, ErrorKind
from eagle3_llama.heads.convert import convert
from eagle3_llama.heads.convert.cli import convert as command


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target.gguf")


@pytest.mark.parametrize("layout", ["SafeAILab", "SpecForge", "AngelSlim"])
@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_layouts(tmp_path, target, layout, outtype):
    config, tensors = checkpoint(layout, head_dim=24 if layout == "AngelSlim" else 16)
    report = convert(write_head(tmp_path / "head", config, tensors), target, tmp_path / "out.gguf", outtype)
    keys, got = read(tmp_path / "out.gguf")
    assert report.layout == layout
    assert report.layers == keys["eagle3.target_layers"] == ([2, 6, 9])
    assert keys["general.architecture"] == "eagle3" and keys["eagle3.block_count"] == 1
    assert keys["eagle3.attention.key_length"] == (24 if layout == "AngelSlim" else 16)
    assert keys["eagle3.rope.freq_base"] == 50000.0 and keys["eagle3.target_hidden_size"] == HIDDEN
    assert len(keys["tokenizer.ggml.tokens"]) == VOCAB
    assert got["d2t"].tensor_type.name == "I64"
    assert (got["d2t"].data == tensors["d2t"] + np.arange(DRAFT)).all()
    tolerance = {"f32": 0, "f16": 0, "bf16": 1e-3, "q8_0": 2e-3, "q4_0": 0.03}[outtype]
    assert np.abs(values(got["fc.weight"]) - tensors["fc.weight"].astype(np.float32)).max() <= tolerance
    assert got["blk.0.attn_norm_2.weight"].tensor_type.name == "F32"


@pytest.mark.parametrize(
    "nested, layout",
    [
        ({"use_aux_hidden_state": True}, "SpecForge"),  # as SpecForge and `train` write it
        ({"use_aux_hidden_state": True, "use_last_layernorm": True}, "ModelOpt"),
    ],
)
def test_whose_layout_a_midlayer_is(tmp_path, target, nested, layout):
    config, tensors = checkpoint("SpecForge")
    config["eagle_config"] |= nested
    report = convert(write_head(tmp_path / "head", config, tensors), target, tmp_path / "out.gguf")
    assert report.layout == layout and report.layers == [2, 6, 9]


def test_rotary_layout(tmp_path, target):
    """Row i of a head's first half and row i of its second become neighbours."""
    config, tensors = checkpoint()
    convert(write_head(tmp_path / "head", config, tensors), target, tmp_path / "out.gguf", "f32")
    _, got = read(tmp_path / "out.gguf")
    for name, source, n_head in (("blk.0.attn_q.weight", "q", HEADS), ("blk.0.attn_k.weight", "k", KV_HEADS)):
        x, y = tensors[f"midlayer.self_attn.{source}_proj.weight"].astype(np.float32), values(got[name])
        d = len(x) // n_head
        for h in range(n_head):
            for i in range(d // 2):
                assert (y[h * d + 2 * i] == x[h * d + i]).all() and (
                    y[h * d + 2 * i + 1] == x[h * d + d // 2 + i]
                ).all()


def test_shards_and_bfloat16(tmp_path, target):
    config, tensors = checkpoint()
    weights = [n for n in tensors if n not in ("d2t", "t2d")]
    convert(
        write_head(tmp_path / "head", config, tensors, shards=3, bf16=weights),
        target,
        tmp_path / "out.gguf",
        "f32",
    )
    _, got = read(tmp_path / "out.gguf")
    expected = (bfloat16(tensors["fc.weight"]).astype(np.uint32) << 16).view(np.float32)
    assert (values(got["fc.weight"]) == expected).all()


@pytest.mark.parametrize(
    "listed, override, layers",
    [
        ([1, 5, 8], None, [2, 6, 9]),
        ([2, 6, 9], None, [2, 6, 9]),
        ([4, 8, 12], None, [4, 8, 12]),
        (None, None, [2, 6, 9]),
        ([1, 5, 8], "0,3,12", [0, 3, 12]),
    ],
)
def test_layer_ids(tmp_path, target, listed, override, layers):
    config, tensors = checkpoint("SafeAILab")
    if listed:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": listed}
    ids = override and [int(i) for i in override.split(",")]
    report = convert(
        write_head(tmp_path / "head", config, tensors), target, tmp_path / "out.gguf", extract_layers=ids
    )
    assert report.layers == layers and str(layers) in report.notes[0]


KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    "keys, layers, other",
    [
        ({"eagle_config": {KEY: [2, 7, 9]}}, [2, 7, 9], [3, 8, 10]),  # SGLang's reading, and SpecForge's
        ({"eagle_config": {KEY: [0, 4, 9]}}, [0, 4, 9], [1, 5, 10]),
        ({"eagle_config": {KEY: [1, 7, 9]}}, [2, 8, 10], [1, 7, 9]),  # not the usual 1, n/2-1, n-4
        ({"eagle_config": {KEY: [1, 5, 8]}}, [2, 6, 9], None),
        ({"eagle_config": {KEY: [4, 7, 12]}}, [4, 7, 12], None),
        ({KEY: [3, 7, 9]}, [3, 7, 9], None),
        ({"eagle_config": {KEY: [2, 7, 9]}, KEY: [3, 8, 10]}, [3, 8, 10], None),  # both: nothing to decide
        ({"eagle_config": {KEY: [3, 8, 10]}, KEY: [3, 8, 10]}, [3, 8, 10], None),
        ({KEY: [2, 7, 9], "target_layer_ids": [5, 6, 7]}, [2, 7, 9], None),
        ({"target_layer_ids": [2, 7, 9]}, [2, 7, 9], [3, 8, 10]),
        ({"target_hidden_layer_ids": [2, 7, 9]}, [2, 7, 9], [3, 8, 10]),
        ({"eagle_config": {"target_layer_ids": [2, 7, 9]}}, [2, 7, 9], [3, 8, 10]),
    ],
)
def test_a_list_of_layers_with_two_readings(tmp_path, target, keys, layers, other):
    config, tensors = checkpoint("SafeAILab")
    report = convert(
        write_head(tmp_path / "head", {**config, **keys}, tensors), target, tmp_path / "out.gguf"
    )
    assert (report.layers, report.other_layers) == (layers, other)
    assert other is None or str(other) in report.notes[0]


@pytest.mark.parametrize(
    "architecture, n_layer, listed, layers, other",
    [
        # nvidia/gpt-oss-120b-Eagle3-long-context: inputs for SGLang only
        ("gpt-oss", 36, [1, 17, 32], [2, 18, 33], [1, 17, 32]),
        ("llama", 36, [1, 17, 32], [2, 18, 33], None),
        ("gpt-oss", 36, [24, 30, 36], [24, 30, 36], None),  # nvidia/gpt-oss-120b-Eagle3-v3
        ("llama", 44, [1, 21, 40], [2, 22, 41], None),
        ("llama", 48, [1, 21, 40], [2, 22, 41], [1, 21, 40]),
    ],
)
def test_published_lists_of_layers(tmp_path, architecture, n_layer, listed, layers, other):
    target = write_target(tmp_path / "target.gguf", n_layer=n_layer, architecture=architecture)
    config, tensors = checkpoint("SafeAILab")
    config = {**config, "eagle_config": {KEY: listed}}
    report = convert(write_head(tmp_path / "head", config, tensors), target, tmp_path / "out.gguf")
    assert (report.layers, report.other_layers) == (layers, other)


@pytest.mark.parametrize(
    "best, layers, said",
    [
        ([3, 8, 10], [3, 8, 10], "converted again with layers [3, 8, 10]"),
        ([2, 7, 9], [2, 7, 9], "[2, 7, 9] are right"),
        ([2, 7, 8], [2, 7, 9], "convert it again with --extract-layers 2,7,8"),
        (
            None,
            [2, 7, 9],
            "not decided: if few drafts are accepted, convert again with --extract-layers 3,8,10",
        ),
    ],
)
def test_the_self_test_decides_between_two_readings(
    tmp_path, target, capsys, monkeypatch, best, layers, said
):
    """Also without --self-test. This target has no weights, so it cannot run; the trial's result is given."""
    from eagle3_llama.heads import self_test

    if best is not None:
        choices = self_test.neighbours([2, 7, 9], 12)
        monkeypatch.setattr(self_test, "self_test", lambda *_, **__: gains(choices, best))
    config, tensors = checkpoint("SafeAILab")
    head = write_head(tmp_path / "head", {**config, "eagle_config": {KEY: [2, 7, 9]}}, tensors)
    command(head, target, tmp_path / "out.gguf", None, None, False)
    printed = "".join(capsys.readouterr())
    assert said in printed and (best is not None or "cannot run with this target" in printed), printed
    keys, _ = read(tmp_path / "out.gguf")
    assert list(keys["eagle3.target_layers"]) == layers


MODELOPT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {"use_aux_hidden_state": True, "use_last_layernorm": True},
}


@pytest.mark.parametrize(
    "best, said",
    [
        ([2, 6, 9], "[2, 6, 9] are right"),
        ([2, 6, 10], "convert it again with --extract-layers 2,6,10"),
        (None, "set --extract-layers to the layers it was trained on"),
    ],
)
def test_layers_that_a_head_should_have_listed(tmp_path, target, capsys, monkeypatch, best, said):
    """nvidia/Llama-3.3-70B-Instruct-Eagle3 lists none: the self-test runs without being asked for."""
    from eagle3_llama.heads import self_test

    if best is not None:
        choices = self_test.neighbours([2, 6, 9], 12)
        monkeypatch.setattr(self_test, "self_test", lambda *_, **__: gains(choices, best))
    config, tensors = checkpoint("SafeAILab")
    head = write_head(tmp_path / "head", {**config, **MODELOPT}, tensors)
    assert convert(head, target, tmp_path / "out.gguf").guessed_layers
    assert not convert(head, target, tmp_path / "out.gguf", extract_layers=[2, 6, 9]).guessed_layers
    command(head, target, tmp_path / "out.gguf", None, None, False)
    printed = "".join(capsys.readouterr())
    assert "heads of ModelOpt that list none may read others" in printed and said in printed, printed


def without_fc(**more):
    """As nvidia/gpt-oss-120b-Eagle3-short-context: EAGLE-3's layer, use_aux_hidden_state false."""
    config, tensors = checkpoint("SafeAILab")
    nested = {**MODELOPT["eagle_config"], "use_aux_hidden_state": False}
    return {**config, **MODELOPT, "eagle_config": nested, **more}, tensors


@pytest.mark.parametrize("has_fc", [False, True])
def test_a_head_without_features_of_inner_layers(tmp_path, target, has_fc):
    """It reads the last layer's output after the final norm. vLLM and SGLang skip an fc: none is written."""
    config, tensors = without_fc()
    if not has_fc:
        del tensors["fc.weight"]
    report = convert(write_head(tmp_path / "head", config, tensors), target, tmp_path / "out.gguf")
    keys, got = read(tmp_path / "out.gguf")
    assert report.layers == keys["eagle3.target_layers"] == [12]
    assert np.isclose(keys["eagle3.feature_norm_epsilon"], 1e-5) and "fc.weight" not in got
    assert any("the target's last state is the only feature" in note for note in report.notes)
    again = convert(tmp_path / "out.gguf", target, tmp_path / "again.gguf")  # and from a GGUF
    assert again.layers == [12] and "eagle3.feature_norm_epsilon" in read(tmp_path / "again.gguf")[0]


def test_a_head_without_features_that_contradicts_itself(tmp_path, target):
    config, tensors = without_fc(norm_before_fc=True)
    tensors["input_norm.weight"] = np.ones(3 * HIDDEN, np.float16)
    refuses(tmp_path, write_head(tmp_path / "a", config, tensors), target, "use_aux_hidden_state")
    config, tensors = without_fc()
    tensors["fc2.weight"] = np.ones((HIDDEN, 2 * HIDDEN), np.float16)
    refuses(tmp_path, write_head(tmp_path / "b", config, tensors), target, "fc2.weight")
    wide = write_target(tmp_path / "wide.gguf", n_embd=96)
    refuses(tmp_path, write_head(tmp_path / "c", *without_fc()), wide, "hidden size")


def mla(config, tensors):
    """A head of Kimi's and DeepSeek's kind, at vLLM's and SpecForge's names."""
    config.update(architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="deepseek_v3", kv_lora_rank=32)
    for name in ("k_proj", "v_proj"):
        del tensors[f"midlayer.self_attn.{name}.weight"]
    for name, shape in (
        ("kv_a_proj_with_mqa", (40, 2 * HIDDEN)),
        ("kv_a_layernorm", (32,)),
        ("kv_b_proj", (HIDDEN, 32)),
    ):
        tensors[f"midlayer.self_attn.{name}.weight"] = np.ones(shape, np.float16)


@pytest.mark.parametrize(
    "architecture, prefix",
    [
        ("LlamaForCausalLMEEagle3", "midlayer"),  # AngelSlim/Qwen3-1.7B_eagle3
        ("Eagle3LlamaForCausalLM", "layers.0"),
        ("Eagle3Qwen3vlForCausalLM", "midlayer"),
    ],
)
def test_other_names_of_the_architecture(tmp_path, target, architecture, prefix):
    config, tensors = checkpoint("AngelSlim", head_dim=24)
    config.update(architectures=[architecture], tie_word_embeddings=True)
    tensors = {name.replace("midlayer", prefix): tensor for name, tensor in tensors.items()}
    report = convert(write_head(tmp_path / "head", config, tensors), target, tmp_path / "out.gguf")
    keys, got = read(tmp_path / "out.gguf")
    assert (report.layout, report.layers, keys["eagle3.block_count"]) == ("AngelSlim", [2, 6, 9], 1)
    assert got["blk.0.attn_q.weight"].shape.tolist() == [2 * HIDDEN, HEADS * 24] and "output.weight" in got


def test_the_last_layers_output_among_the_features(tmp_path, target):
    """As nvidia/gpt-oss-120b-Eagle3-v3: [24, 30, 36] of 36 layers, and a norm before fc."""
    config, tensors = checkpoint("SafeAILab")
    nested = {**MODELOPT["eagle_config"], KEY: [4, 8, 12]}
    config.update(MODELOPT, eagle_config=nested, norm_before_fc=True)
    tensors["input_norm.weight"] = np.ones(3 * HIDDEN, np.float16)
    report = convert(write_head(tmp_path / "head", config, tensors), target, tmp_path / "out.gguf")
    assert (report.layers, report.other_layers) == ([4, 8, 12], None)
    assert read(tmp_path / "out.gguf")[0]["eagle3.norm_before_fc"] is True


def unnamed_mla(config, tensors):
    mla(config, tensors)
    config["architectures"] = ["LlamaForCausalLMEagle3"]


def peagle(**keys):
    return lambda config, tensors: config.update(keys)


OTHER_KINDS = {
    "MLA": (mla, "MLA head (architecture Eagle3DeepseekV2ForCausalLM)"),
    "MLA by its tensors": (unnamed_mla, "MLA head (tensor midlayer.self_attn.kv_"),
    "P-EAGLE, speculators": (
        peagle(architectures=["PEagleSpeculator"]),
        "P-EAGLE head (architecture PEagleSpeculator)",
    ),
    "P-EAGLE, SpecForge": (
        peagle(architectures=["PEagleDraftModel"]),
        "P-EAGLE head (architecture PEagleDraftModel)",
    ),
    "P-EAGLE by its algorithm": (
        peagle(architectures=["Eagle3DraftModel"], speculators_config={"algorithm": "peagle"}),
        "P-EAGLE head (key speculators_config.algorithm is peagle)",
    ),
    "P-EAGLE, Automodel": (peagle(parallel_drafting=True), "P-EAGLE head (key parallel_drafting is true)"),
    "P-EAGLE by its tensor": (
        lambda config, tensors: tensors.update(mask_hidden=np.ones((1, 3 * HIDDEN), np.float16)),
        "P-EAGLE head (tensor mask_hidden)",
    ),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_heads_of_other_kinds_are_refused_by_name(tmp_path, target, kind):
    change, said = OTHER_KINDS[kind]
    config, tensors = checkpoint()
    change(config, tensors)
    head = write_head(tmp_path / "head", config, tensors)
    refuses(tmp_path, head, target, said)
    with pytest.raises(EagleError, match="supported: take ") as e:
        convert(head, target, tmp_path / "x.gguf")
    assert e.value.kind is ErrorKind.UNSUPPORTED


@pytest.mark.parametrize(
    "name, said",
    [
        ("Qwen3 8B", "config.json names the head's target: Qwen/Qwen3-8B"),
        ("", "config.json names the head's target: Qwen/Qwen3-8B"),
        ("Llama 3.1 8B", "Qwen/Qwen3-8B; target.gguf calls itself llama318b: --self-test tells"),
    ],
)
def test_a_head_that_names_its_target(tmp_path, name, said):
    """RedHatAI's configs do."""
    target = write_target(tmp_path / "target.gguf", name=name)
    config, tensors = checkpoint("SafeAILab")
    verifier = {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"}
    config["speculators_config"] = {"algorithm": "eagle3", "verifier": verifier}
    report = convert(write_head(tmp_path / "head", config, tensors), target, tmp_path / "out.gguf")
    assert said in report.notes[-1] and (name != "Qwen3 8B" or report.notes[-1] == said)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        {
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0, "mrope_section": [4, 2, 2]},
        },
    ],
)
def test_mrope_is_plain_for_text(tmp_path, target, keys):
    """Heads for vision targets: a text token has the same position in all sections."""
    config, tensors = checkpoint("AngelSlim")
    config.update(architectures=["Eagle3Qwen2_5vlForCausalLM"], **keys)
    report = convert(write_head(tmp_path / "head", config, tensors), target, tmp_path / "out.gguf")
    keys, got = read(tmp_path / "out.gguf")
    assert report.layout == "AngelSlim" and keys["eagle3.rope.freq_base"] == 50000.0
    assert not any(key.startswith("eagle3.rope.scaling") for key in keys) and "rope_freqs.weight" not in got


@pytest.mark.parametrize("where", [None, "rope_parameters", "rope_scaling"])
def test_partial_rotary_factor(tmp_path, target, where):
    """Only the first rows of each head are rotated, so only they are reordered. From a GGUF it is kept."""
    config, tensors = checkpoint()
    keys = {"partial_rotary_factor": 0.25}
    config.update(keys if where is None else {where: {"rope_type": "default", **keys}})
    convert(write_head(tmp_path / "head", config, tensors), target, tmp_path / "out.gguf", "f32")
    convert(tmp_path / "out.gguf", target, tmp_path / "again.gguf")
    for file in ("out.gguf", "again.gguf"):
        keys, got = read(tmp_path / file)
        assert keys["eagle3.rope.dimension_count"] == 4 and keys["eagle3.attention.key_length"] == 16
        x = tensors["midlayer.self_attn.q_proj.weight"].astype(np.float32).reshape(HEADS, 16, -1)
        y = values(got["blk.0.attn_q.weight"]).reshape(HEADS, 16, -1)
        assert (y == x[:, [0, 2, 1, 3, *range(4, 16)]]).all()


@pytest.mark.parametrize("factor", [1.5, 0.01, 0.2, "half"])
def test_a_partial_rotary_factor_that_cannot_be(tmp_path, target, factor):
    config, tensors = checkpoint()
    config["partial_rotary_factor"] = factor
    refuses(tmp_path, write_head(tmp_path / "head", config, tensors), target, "partial_rotary_factor")


def test_llama3_rope_factors(tmp_path, target):
    config, tensors = checkpoint()
    config["rope_scaling"] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    convert(write_head(tmp_path / "head", config, tensors), target, tmp_path / "out.gguf")
    factors = read(tmp_path / "out.gguf")[1]["rope_freqs.weight"].data
    assert factors[0] == 1.0 and factors[-1] == 8.0 and (np.diff(factors) >= 0).all()


def test_norm_before_residual_and_rope_parameters(tmp_path, target):
    config, tensors = checkpoint()
    config.update(
        norm_before_residual=True,
        head_dim=None,
        rope_theta=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 7e5,
            "factor": 4.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": 512,
        },
    )
    convert(write_head(tmp_path / "head", config, tensors), target, tmp_path / "out.gguf")
    keys, _ = read(tmp_path / "out.gguf")
    assert keys["eagle3.norm_before_residual"] is True and keys["eagle3.rope.freq_base"] == 7e5
    assert keys["eagle3.rope.scaling.type"] == "yarn"
    assert np.isclose(keys["eagle3.rope.scaling.attn_factor"] * (1 + 0.1 * np.log(4)), 1.0)


def test_rope_of_a_config_that_does_not_say_it(tmp_path, target):
    """10,000, as transformers has it."""
    config, tensors = checkpoint()
    config.pop("rope_theta")
    convert(write_head(tmp_path / "head", config, tensors), target, tmp_path / "out.gguf")
    assert read(tmp_path / "out.gguf")[0]["eagle3.rope.freq_base"] == 1e4


def test_head_of_its_own_width(tmp_path):
    """Embeddings and output matrix of its own: then hidden_size need not be the target's."""
    config, tensors = checkpoint("SafeAILab")
    target = write_target(tmp_path / "wide.gguf", n_embd=96)
    config["target_hidden_size"] = 96
    tensors["fc.weight"] = np.zeros((HIDDEN, 3 * 96), np.float16)
    refuses(tmp_path, write_head(tmp_path / "a", config, tensors), target, "embed_tokens.weight")
    tensors["embed_tokens.weight"] = np.zeros((VOCAB, HIDDEN), np.float16)
    convert(write_head(tmp_path / "b", config, tensors), target, tmp_path / "out.gguf")
    keys, got = read(tmp_path / "out.gguf")
    assert keys["eagle3.target_hidden_size"] == 96 and got["token_embd.weight"].shape.tolist() == [
        HIDDEN,
        VOCAB,
    ]


@pytest.mark.thorough
def test_pickle(tmp_path, target):
    """pytorch_model.bin gives the same file as safetensors. Other pickled objects are refused and not run."""
    torch = pytest.importorskip("torch")
    config, tensors = checkpoint()
    convert(write_head(tmp_path / "safe", config, tensors), target, tmp_path / "safe.gguf", "f16")
    head = write_head(tmp_path / "head", config, tensors)
    (head / "model.safetensors").unlink()
    torch.save(
        {name: torch.from_numpy(np.array(t)) for name, t in tensors.items()}, head / "pytorch_model.bin"
    )
    convert(head, target, tmp_path / "out.gguf", "f16")
    ours, theirs = read(tmp_path / "out.gguf")[1], read(tmp_path / "safe.gguf")[1]
    assert ours.keys() == theirs.keys() and all((ours[k].data == theirs[k].data).all() for k in ours)

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    torch.save({"fc.weight": Evil()}, head / "pytorch_model.bin")
    with pytest.raises(EagleError, match="torch.load refuses"):
        convert(head, target, tmp_path / "evil.gguf", "f16")
    assert not (tmp_path / "run").exists() and not (tmp_path / "evil.gguf").exists()
