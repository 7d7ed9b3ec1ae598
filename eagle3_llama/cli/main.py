"""`eagle3-llama`: generate, chat, serve, bench, info, compare, convert, train."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from .. import __version__
from ..common.files import replacing
from ..common.options import (
    CONTEXT,
    N_CTX,
    Eagle,
    FlashAttn,
    GpuLayers,
    Model,
    NCtx,
    NMax,
    NMin,
    NPredict,
    PMin,
    Seed,
    Temp,
    Threads,
    TopP,
    TreeShape,
)
from ..errors import EagleError, ErrorKind
from ..heads.convert.cli import convert, one_line
from ..runtime.params import EagleParams
from ..server.cli import serve
from ..train.cli import train

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=CONTEXT)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"eagle3-llama {__version__}")
        raise typer.Exit


@app.callback()
def eagle3_llama(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and end")
    ] = False,
) -> None:
    """EAGLE speculative decoding for llama.cpp: same seed, same text, only faster."""


def _load(
    model: Path,
    eagle: Path | None,
    params: EagleParams,
    n_ctx: int,
    threads: int | None,
    gpu_layers: int,
    flash_attn: bool | None,
) -> Any:
    from ..llama.eagle_llama import EagleLlama

    for path in (model, eagle):
        if path is not None and not path.is_file():
            raise EagleError(ErrorKind.BAD_FILE, f"no such file: {path}")
    n = threads or os.cpu_count()
    try:
        return EagleLlama(
            model,
            eagle=eagle,
            n_max=params.n_max,
            n_min=params.n_min,
            p_min=params.p_min,
            tree=params.tree,
            n_ctx=n_ctx,
            n_threads=n,
            n_threads_batch=n,
            n_gpu_layers=gpu_layers,
            flash_attn=flash_attn,
            verbose=False,
        )
    except ValueError as e:
        raise EagleError(ErrorKind.BAD_FILE, f"{model} cannot be loaded: {e}") from e


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="what to ask", show_default=False)],
    eagle: Eagle = None,
    n_predict: NPredict = 256,
    raw: Annotated[bool, typer.Option(help="no chat template")] = False,
    temp: Temp = 0.8,
    top_p: TopP = 0.95,
    seed: Seed = 1,
    n_max: NMax = None,
    n_min: NMin = 0,
    p_min: PMin = 0.0,
    tree: TreeShape = None,
    n_ctx: NCtx = N_CTX,
    threads: Threads = None,
    n_gpu_layers: GpuLayers = 0,
    flash_attn: FlashAttn = None,
) -> None:
    """One answer; drafted and accepted tokens are coloured by their place in the draft."""
    from ..llama.chat import chat_tokens
    from .conversation import answer

    llm = _load(
        model, eagle, EagleParams(n_max, n_min, p_min, tree), n_ctx, threads, n_gpu_layers, flash_attn
    )
    llm.set_seed(seed)
    tokens = llm.tokenize(prompt.encode()) if raw else chat_tokens(llm, prompt)
    if len(tokens) >= llm.n_ctx():
        raise EagleError(
            ErrorKind.BAD_ARGUMENT,
            f"the prompt has {len(tokens)} tokens, the context {llm.n_ctx()}: raise --n-ctx",
        )
    answer(llm, tokens, n_predict, Console(highlight=False), temp=temp, top_p=top_p)


@app.command()
def chat(
    model: Model,
    eagle: Eagle = None,
    n_predict: NPredict = 512,
    system: Annotated[
        str | None, typer.Option(help="system message, which stays when the oldest turns are left out")
    ] = None,
    temp: Temp = 0.8,
    top_p: TopP = 0.95,
    seed: Seed = 1,
    n_max: NMax = None,
    n_min: NMin = 0,
    p_min: PMin = 0.0,
    tree: TreeShape = None,
    n_ctx: NCtx = N_CTX,
    threads: Threads = None,
    n_gpu_layers: GpuLayers = 0,
    flash_attn: FlashAttn = None,
) -> None:
    """A conversation in the terminal; an empty line or Ctrl-D ends it, Ctrl-C stops an answer."""
    from .conversation import converse

    llm = _load(
        model, eagle, EagleParams(n_max, n_min, p_min, tree), n_ctx, threads, n_gpu_layers, flash_attn
    )
    llm.set_seed(seed)
    converse(llm, n_predict, system, Console(highlight=False), temp=temp, top_p=top_p)


@app.command()
def bench(
    model: Annotated[
        list[Path], typer.Option("--model", "-m", help="target, GGUF; may be repeated", show_default=False)
    ],
    prompts: Annotated[
        Path, typer.Option(help=".jsonl: strings or objects with prompt, category", show_default=False)
    ],
    eagle: Annotated[
        list[Path] | None,
        typer.Option("--eagle", help="its EAGLE head, GGUF; may be repeated to compare several"),
    ] = None,
    draft_model: Annotated[
        Path | None, typer.Option(help="a small model, GGUF, for mode draft_model")
    ] = None,
    category: Annotated[str | None, typer.Option(help="only these prompts of the file, by topic")] = None,
    n_predict: NPredict = 128,
    modes: Annotated[
        str, typer.Option(help="of plain,eagle,prompt_lookup,upstream,draft_model")
    ] = "plain,eagle",
    rounds: Annotated[int, typer.Option(min=1, help="repetitions of each answer; the median counts")] = 1,
    n_max: NMax = None,
    n_min: NMin = 0,
    p_min: PMin = 0.0,
    tree: TreeShape = None,
    fixed: Annotated[str, typer.Option(help="settings to try beside mode eagle's, e.g. 1,2,3,60x6x10")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="evenly spaced prompts of the file")] = None,
    temp: Temp = 0.0,
    top_p: TopP = 0.95,
    threads: Threads = None,
    n_ctx: NCtx = N_CTX,
    flash_attn: FlashAttn = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="costs, what the planner chose, what it expected")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="draw acceptance, speed and costs into this folder")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Speed and text of the modes, alternating per prompt in one process."""
    from ..bench.modes import parse_modes
    from ..bench.run import BenchSettings, run_bench

    split = lambda text: [x.strip() for x in text.split(",") if x.strip()]
    wanted = parse_modes(
        split(modes),
        [str(h) for h in eagle or ()],
        str(draft_model) if draft_model else None,
        EagleParams(n_max, n_min, p_min, tree),
        split(fixed),
    )
    report = run_bench(
        BenchSettings(
            tuple(map(str, model)),
            tuple(wanted),
            str(prompts),
            category,
            limit,
            n_predict,
            rounds,
            {"temp": temp, "top_p": top_p},
            threads or os.cpu_count() or 1,
            n_ctx,
            flash_attn,
            explain,
        )
    )
    if json_file is not None:
        with replacing(json_file) as part:
            part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        from ..bench.plot import draw

        draw(report, plot)
    if not all(r["identical"] for r in report["results"] if r["kind"] == "eagle"):
        raise typer.Exit(1)


@app.command()
def info(file: Annotated[Path, typer.Argument(help="a target or a head, GGUF", show_default=False)]) -> None:
    """What a GGUF is: sizes, captured layers, variant, which target it fits. Reads no weights."""
    from rich.table import Table

    from ..heads.info import describe

    table = Table(show_header=False, box=None)
    for name, value in describe(file):
        table.add_row(f"[bold]{name}[/bold]", escape(one_line(value)))
    Console().print(table)


@app.command()
def compare(
    head: Annotated[Path, typer.Argument(help="head, GGUF", show_default=False)],
    model: Model,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="text that both are computed for")
    ] = "The capital of France is Paris, and the capital of Italy is",
    threads: Threads = None,
) -> None:
    """The native head against a reference in NumPy, stage by stage: for whoever adds the next variant."""
    from rich.table import Table

    from ..heads.compare import compare as run

    table = Table("stage")
    for name in ("largest error", "largest value", "cosine"):
        table.add_column(name, justify="right")
    for stage in run(head, model, prompt, threads or os.cpu_count() or 1):
        table.add_row(stage.name, f"{stage.error:.3g}", f"{stage.largest:.3g}", f"{stage.cosine:.8f}")
    Console().print(table)


app.command()(convert)
app.command()(train)
app.command()(serve)


def main() -> None:
    """Entry point: errors a user can mend are one line and exit code 2."""
    try:
        app()
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
