"""The variant of a head: which norms it has, and which state it feeds back for the next draft token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import EagleError, ErrorKind
from .config import Config
from .layouts.base import Layout
from .safetensors_file import HeadTensor

_FC_NORM, _INPUT_NORM, _FINAL = "fc_norm.0.weight", "enc.output_norm.weight", "output_norm.weight"
_AUX = "eagle_config.use_aux_hidden_state"


@dataclass(frozen=True)
class Variant:
    final_norm: bool  # there is a norm before the output matrix
    norm_output: bool  # the state after that norm is fed back
    norm_before_residual: bool
    last_state: bool  # the one feature is the target's last state after its final norm
    notes: tuple[str, ...]  # what config.json does not say clearly, one line each


def read_variant(config: Config, layout: Layout, tensors: dict[str, HeadTensor]) -> Variant:
    """Reads the variant. tensors: by GGUF name.

    Raises EagleError: UNSUPPORTED if no graph computes this variant; BAD_CONFIG or MISSING_TENSOR, naming key
    and tensor, if config.json and the tensors contradict each other.
    """
    eagle3 = layout.arch == "eagle3"
    last_state = not config.boolean(_AUX, eagle3)
    _check_graph(config, layout, last_state)
    if last_state:
        _check_last_state(config, tensors)
    for key, names in _flags(config, layout, tensors):
        _agree(config, key, names, layout, tensors)
    final_norm, norm_output = _norms(config, layout, tensors)
    notes = []
    if not final_norm and _is_specforges(config, layout, tensors):
        notes.append("no norm before the output matrix: norm_output false means this in SpecForge's configs")
    if last_state and eagle3:
        notes.append("no fc: use_aux_hidden_state is false, so the target's last state is the only feature")
    if norm_output:
        notes.append("norm_output: the state after the final norm is fed back for the next draft token")
    if config.get("norm_before_residual") is None and layout.norm_before_residual:
        notes.append("norm_before_residual is not in config.json: assumed true, as vLLM does for this layout")
    return Variant(
        final_norm,
        norm_output,
        config.boolean("norm_before_residual", layout.norm_before_residual),
        last_state,
        tuple(notes),
    )


def _check_graph(config: Config, layout: Layout, last_state: bool) -> None:
    """Raises EagleError UNSUPPORTED if no graph computes such a head."""
    act = config.string("hidden_act", "silu")
    if act != "silu":
        raise EagleError(
            ErrorKind.UNSUPPORTED, f"key hidden_act of config.json is {act!r:.40}: only silu is supported"
        )
    if not last_state and layout.arch != "eagle3":
        raise EagleError(
            ErrorKind.UNSUPPORTED,
            f"key {_AUX} of config.json is true, but the tensors are those of an EAGLE-1 head, which reads"
            " one state: correct the key",
        )


def _norms(config: Config, layout: Layout, tensors: dict[str, HeadTensor]) -> tuple[bool, bool]:
    """(there is a norm before the output matrix, the state after it is fed back), as bools."""
    default = _FINAL in tensors or layout.arch == "eagle3"
    final_norm = config.boolean("eagle_config.use_last_layernorm", default)
    norm_output = config.boolean("norm_output", False)
    if _is_specforges(config, layout, tensors):
        return norm_output, False
    if norm_output and not final_norm:
        raise EagleError(
            ErrorKind.MISSING_TENSOR,
            f"tensor {layout.source_name(_FINAL)} is missing, but key norm_output of config.json requires it",
        )
    return final_norm, norm_output


def _is_specforges(config: Config, layout: Layout, tensors: dict[str, HeadTensor]) -> bool:
    """True if norm_output has SpecForge's own meaning, from before EAGLE-3.1: a norm before the output."""
    given = config.get("norm_output") is not None
    return given and layout.norm_output_gates and _FC_NORM not in tensors


def unused_tensors(variant: Variant, layout: Layout) -> Iterator[str]:
    """GGUF names of tensors that the variant does not use, if they are there."""
    if not variant.final_norm:
        yield _FINAL
    if variant.last_state and layout.arch == "eagle3":
        yield from ("fc.weight", "fc.bias")  # vLLM and SGLang skip them too


def _check_last_state(config: Config, tensors: dict[str, HeadTensor]) -> None:
    """Norms of several features and fc2 have nothing to work on if there is one feature and no fc."""
    for name in (_INPUT_NORM, _FC_NORM, "fc_norm.weight", "fc2.weight"):
        if name in tensors:
            raise EagleError(
                ErrorKind.UNSUPPORTED,
                f"key {_AUX} of config.json is false, but there is a tensor {tensors[name].name}, which"
                " belongs to the features of several layers: correct the key",
            )


def _flags(config: Config, layout: Layout, tensors: dict[str, HeadTensor]) -> Iterator[tuple[str, list[str]]]:
    """(config key, tensors that must exist if the key is true, and must not if it is false)."""
    n = len({name.split(".")[1] for name in tensors if name.startswith("blk.")})
    yield "norm_before_fc", [_INPUT_NORM]
    yield "fc_norm", [_FC_NORM]
    yield "eagle_config.use_input_layernorm_in_first_layer", ["blk.0.attn_norm.weight"]
    yield "attention_bias", [f"blk.{i}.attn_q.bias" for i in range(n)]
    yield "mlp_bias", [f"blk.{i}.ffn_up.bias" for i in range(n)]
    if layout.arch == "eagle":
        yield "bias", ["fc.bias"]


def _agree(
    config: Config, key: str, names: list[str], layout: Layout, tensors: dict[str, HeadTensor]
) -> None:
    flag = config.boolean(key, False)
    for name in names:
        if flag and name not in tensors:
            raise EagleError(
                ErrorKind.MISSING_TENSOR,
                f"tensor {layout.source_name(name)} is missing, but key {key} of config.json requires it",
            )
        # norm_before_fc counts even if it is missing: a reader that looks only at the key would skip the norm
        message = config.get(key) is not None or key == "norm_before_fc"
        if not flag and message and name in tensors:
            raise EagleError(
                ErrorKind.BAD_CONFIG,
                f"key {key} of config.json is not true, but there is a tensor {tensors[name].name}: "
                "correct the key",
            )
