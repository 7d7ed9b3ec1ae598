"""Options that several commands share. Each has the same name, meaning and default everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from ..errors import EagleError, ErrorKind
from .cache_types import CACHE_TYPES
from .limits import MAX_DRAFT
from .memory_size import parse_size
from .settings import option

N_CTX = 4096  # default context size of every command, in tokens
OTHER_NAMES = {"target": "model", "head": "eagle", "eagle-path": "eagle", "n-threads": "threads"}


def _one_name(name: str) -> str:
    """The current name of an option: users of llama_cpp.server write --n_ctx, and older names still work."""
    name = name.replace("_", "-")
    return OTHER_NAMES.get(name, name)


def utf8(text: str | None) -> str | None:
    """The callback of options whose value is a text for the model. Raises EagleError BAD_ARGUMENT."""
    try:
        (text or "").encode()
    except UnicodeEncodeError as e:  # bytes of the command line that are no UTF-8 became surrogates
        raise EagleError(
            ErrorKind.BAD_ARGUMENT, f"the text is not UTF-8 at character {e.start + 1}: {text!r:.60}"
        ) from e
    return text


CONTEXT = {"token_normalize_func": _one_name, "help_option_names": ["-h", "--help"]}
# For typer.Typer: help without boxes, whose columns cut names on a terminal of 80 columns.
APP: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}

Model = Annotated[
    Path, option("target model: a GGUF file, or hf:OWNER/REPO[:FORMAT]", "--model", "-m", show_default=False)
]
Eagle = Annotated[
    Path | None,
    option(
        "EAGLE head of the model, or a small model that drafts: a GGUF file, hf:OWNER/REPO, or auto, which"
        " looks for a head; default: drafts from the text alone",
        "--eagle",
        "--draft-model",
    ),
]
NMax = Annotated[
    int | None, option("draft tokens per round; default: by measured cost", min=0, max=MAX_DRAFT)
]
NMin = Annotated[int, option("discard drafts of fewer tokens; needs --n-max", min=0, max=MAX_DRAFT)]
PMin = Annotated[
    float,
    option(
        "end a chain before a less probable token, and leave out the nodes of a tree whose path is less"
        " probable; needs --n-max or --tree",
        min=0.0,
        max=1.0,
    ),
]
TreeShape = Annotated[str | None, option("draft trees of this shape, NODESxDEPTHxWIDTH, such as 60x6x10")]
FromText = Annotated[
    bool,
    option(
        "draft also from the text itself, where it repeats itself; with or without a head; default: on",
        "--text/--no-text",
        metavar="",
        show_default=False,
    ),
]


def size(help: str) -> Any:
    """The option for a size in bytes."""
    return Annotated[int, option(help, parser=parse_size, metavar="SIZE")]


TextMemorySize = size(
    "bytes (64M) in which answers are kept, to draft later ones of the same API key from; 0: none"
)
TextMemoryPrompts = Annotated[
    bool, option("keep prompts in --text-memory, too", "--text-memory-prompts", metavar="")
]
FlashAttn = Annotated[
    bool | None,
    option(
        "flash attention, required for draft trees; default: on if the backend supports it",
        "--flash-attn/--no-flash-attn",
        metavar="",
        show_default=False,
    ),
]
SwaFull = Annotated[
    bool,
    option(
        "no: layers with a sliding window keep the window alone, which takes less memory",
        "--swa-full/--no-swa-full",
        metavar="",
    ),
]
CacheTypeK = Annotated[
    str,
    option(
        f"type of keys in the KV cache: {', '.join(CACHE_TYPES)}", "--cache-type-k", "-ctk", metavar="TYPE"
    ),
]
CacheTypeV = Annotated[
    str,
    option("type of values; a quantised one needs flash attention", "--cache-type-v", "-ctv", metavar="TYPE"),
]
Lora = Annotated[Path | None, option("LoRA adapter of the model: a GGUF file", show_default=False)]
LoraScale = Annotated[float, option("weight of the LoRA adapter")]
Temp = Annotated[float, option("sampling temperature; 0 is greedy decoding", min=0.0)]
TopP = Annotated[
    float, option("sample from the most likely tokens whose probabilities add up to this", min=0.0, max=1.0)
]
TopK = Annotated[int, option("sample from this many of the most likely tokens; 0: from all", min=0)]
Prompt = Annotated[str, option("the user's message", "--prompt", "-p", show_default=False, callback=utf8)]
SystemMessage = Annotated[
    str | None, option("system message; it stays when the oldest messages are left out", callback=utf8)
]
Seed = Annotated[int, option("seed for sampling; the same seed gives the same text")]
Threads = Annotated[
    int | None,
    option("CPU threads; default: one for each core that this process may use", "--threads", "-t", min=1),
]
NCtx = Annotated[
    int, option("tokens of prompt and answer; rounded up to a multiple of 256", "--n-ctx", "-c", min=16)
]
NPredict = Annotated[
    int, option("most tokens to generate per answer", "--max-tokens", "--n-predict", "-n", min=1)
]
GpuLayers = Annotated[int, option("layers to offload to the GPU; -1: all of them", "--n-gpu-layers", "-ngl")]
