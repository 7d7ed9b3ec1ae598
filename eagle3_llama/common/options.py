"""Options that several commands have: one name, one meaning, one default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

N_CTX = 4096  # tokens, of every command
OTHER_NAMES = {"target": "model", "head": "eagle", "eagle-path": "eagle", "n-threads": "threads"}


def _one_name(name: str) -> str:
    """An option as it is called here: llama_cpp.server's users write --n_ctx, others what it was called before."""
    name = name.replace("_", "-")
    return OTHER_NAMES.get(name, name)


CONTEXT = {"token_normalize_func": _one_name}

Model = Annotated[Path, typer.Option("--model", "-m", help="target, GGUF", show_default=False)]
Eagle = Annotated[
    Path | None, typer.Option("--eagle", help="its EAGLE head, GGUF; without it plain decoding")
]
NMax = Annotated[
    int | None,
    typer.Option(
        "--n-max", min=0, max=63, help="tokens drafted a round; chosen by measured cost if left out"
    ),
]
NMin = Annotated[int, typer.Option("--n-min", min=0, max=63, help="drop shorter drafts; needs --n-max")]
PMin = Annotated[
    float,
    typer.Option(
        "--p-min", min=0.0, max=1.0, help="a draft ends below this probability; needs --n-max or --tree"
    ),
]
TreeShape = Annotated[
    str | None, typer.Option("--tree", help="draft trees of NODESxDEPTHxWIDTH, e.g. 60x6x10")
]
FlashAttn = Annotated[
    bool | None,
    typer.Option(
        "--flash-attn/--no-flash-attn",
        show_default=False,
        help="flash attention, which drafting trees needs; default: on where the backend has it",
    ),
]
Temp = Annotated[float, typer.Option("--temp", min=0.0, help="0 is greedy")]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", min=0.0, max=1.0, help="sample from the likeliest tokens of this probability together"
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="of sampling; same seed, same text")]
Threads = Annotated[int | None, typer.Option("--threads", "-t", min=1, help="default: all cores")]
NCtx = Annotated[
    int, typer.Option("--n-ctx", "-c", min=16, help="tokens of the context, prompt and answer together")
]
NPredict = Annotated[int, typer.Option("--n-predict", "-n", min=1, help="most tokens of an answer")]
GpuLayers = Annotated[int, typer.Option("--n-gpu-layers", "-ngl", help="layers computed on the GPU; -1: all")]
