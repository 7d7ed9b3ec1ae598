"""Options that several commands share. Each has the same name, meaning and default everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

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
    Path,
    typer.Option(
        "--model", "-m", help="target model: a GGUF file, or hf:OWNER/REPO[:FORMAT]", show_default=False
    ),
]
Eagle = Annotated[
    Path | None,
    typer.Option(
        "--eagle",
        help="EAGLE head of the model: a GGUF file, hf:OWNER/REPO, or auto, which looks for one;"
        " default: drafts from the text alone",
    ),
]
NMax = Annotated[
    int | None,
    typer.Option("--n-max", min=0, max=MAX_DRAFT, help="draft tokens per round; default: by measured cost"),
]
NMin = Annotated[
    int, typer.Option("--n-min", min=0, max=MAX_DRAFT, help="discard drafts of fewer tokens; needs --n-max")
]
PMin = Annotated[
    float,
    typer.Option(
        "--p-min",
        min=0.0,
        max=1.0,
        help="end a chain before a less probable token, and leave out the nodes of a tree whose path is less"
        " probable; needs --n-max or --tree",
    ),
]
TreeShape = Annotated[
    str | None, typer.Option("--tree", help="draft trees of this shape, NODESxDEPTHxWIDTH, such as 60x6x10")
]
FromText = Annotated[
    bool,
    typer.Option(
        "--text/--no-text",
        metavar="",
        show_default=False,
        help="draft also from the text itself, where it repeats itself; with or without a head; default: on",
    ),
]


def size(name: str, help: str) -> Any:
    """The option for a size in bytes. name: what the size is of, for the error."""
    return option(help, of=int, parser=lambda given: parse_size(given, name), metavar="SIZE")


TextMemorySize = size(
    "text_memory",
    "bytes (64M) in which answers are kept, to draft later ones of the same API key from; 0: none",
)
TextMemoryPrompts = Annotated[
    bool, typer.Option("--text-memory-prompts", metavar="", help="keep prompts in --text-memory, too")
]
FlashAttn = Annotated[
    bool | None,
    typer.Option(
        "--flash-attn/--no-flash-attn",
        metavar="",
        show_default=False,
        help="flash attention, required for draft trees; default: on if the backend supports it",
    ),
]
SwaFull = Annotated[
    bool,
    typer.Option(
        "--swa-full/--no-swa-full",
        metavar="",
        help="no: layers with a sliding window keep the window alone, which takes less memory",
    ),
]
CacheTypeK = Annotated[
    str,
    typer.Option(
        "--cache-type-k",
        "-ctk",
        metavar="TYPE",
        help=f"type of keys in the KV cache: {', '.join(CACHE_TYPES)}",
    ),
]
CacheTypeV = Annotated[
    str,
    typer.Option(
        "--cache-type-v", "-ctv", metavar="TYPE", help="type of values; a quantised one needs flash attention"
    ),
]
Lora = Annotated[Path | None, typer.Option(help="LoRA adapter of the model: a GGUF file", show_default=False)]
LoraScale = Annotated[float, typer.Option(help="weight of the LoRA adapter")]
Temp = Annotated[float, typer.Option("--temp", min=0.0, help="sampling temperature; 0 is greedy decoding")]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        min=0.0,
        max=1.0,
        help="sample from the most likely tokens whose probabilities add up to this",
    ),
]
TopK = Annotated[
    int, typer.Option("--top-k", min=0, help="sample from this many of the most likely tokens; 0: from all")
]
Prompt = Annotated[
    str, typer.Option("--prompt", "-p", help="the user's message", show_default=False, callback=utf8)
]
SystemMessage = Annotated[
    str | None,
    typer.Option(
        "--system", help="system message; it stays when the oldest messages are left out", callback=utf8
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="seed for sampling; the same seed gives the same text")]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", "-t", min=1, help="CPU threads; default: one for each core that this process may use"
    ),
]
NCtx = Annotated[
    int,
    typer.Option(
        "--n-ctx", "-c", min=16, help="tokens of prompt and answer; rounded up to a multiple of 256"
    ),
]
NPredict = Annotated[
    int, typer.Option("--max-tokens", "--n-predict", "-n", min=1, help="most tokens to generate per answer")
]
GpuLayers = Annotated[
    int, typer.Option("--n-gpu-layers", "-ngl", help="layers to offload to the GPU; -1: all of them")
]
