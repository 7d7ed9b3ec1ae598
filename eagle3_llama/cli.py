"""`eagle3-llama`: generate, chat, serve, bench, info, compare, convert, train."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape

from .convert.files import replacing
from .errors import EagleError, ErrorKind
from .params import EagleParams

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="EAGLE speculative decoding for llama.cpp: same seed, same text, only faster.")

Model = Annotated[Path, typer.Option("--model", "-m", help="target, GGUF")]
Head = Annotated[Optional[Path], typer.Option("--eagle", help="its EAGLE-3 head, GGUF; without it plain decoding")]
NMax = Annotated[Optional[int], typer.Option("--n-max", min=0, max=63, help="tokens drafted a round; chosen by measured cost if left out")]
TreeShape = Annotated[Optional[str], typer.Option("--tree", help="draft trees of NODESxDEPTHxWIDTH, e.g. 60x6x10; turns flash attention on")]
FlashAttn = Annotated[bool, typer.Option("--flash-attn", help="flash attention; with it the planner may draft trees")]
NMin = Annotated[int, typer.Option("--n-min", min=0, max=63, help="drop shorter drafts")]
PMin = Annotated[float, typer.Option("--p-min", min=0.0, max=1.0, help="a draft ends below this probability")]
Temp = Annotated[float, typer.Option("--temp", help="0 is greedy")]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0)]
Seed = Annotated[int, typer.Option("--seed")]
Threads = Annotated[Optional[int], typer.Option("--threads", "-t", min=1, help="default: all cores")]
NCtx = Annotated[int, typer.Option("--n-ctx", "-c", min=16)]
NPredict = Annotated[int, typer.Option("--n-predict", "-n", min=1)]
GpuLayers = Annotated[int, typer.Option("--n-gpu-layers", "-ngl")]


def _load(model: Path, eagle: Path | None, params: EagleParams, n_ctx: int, threads: int | None, gpu_layers: int, flash_attn: bool) -> Any:
    from .llama import EagleLlama

    for path in (model, eagle):
        if path is not None and not path.is_file():
            raise EagleError(ErrorKind.BAD_FILE, f"no such file: {path}")
    n = threads or os.cpu_count()
    try:
        return EagleLlama(str(model), eagle_path=str(eagle) if eagle else None, n_max=params.n_max, n_min=params.n_min,
                          p_min=params.p_min, tree=params.tree, n_ctx=n_ctx, n_threads=n, n_threads_batch=n, n_gpu_layers=gpu_layers,
                          flash_attn=flash_attn or params.fixed_tree, verbose=False)
    except ValueError as e:
        raise EagleError(ErrorKind.BAD_FILE, f"{model} cannot be loaded: {e}") from e


def _answer(llm: Any, messages: list[dict[str, str]] | str, raw: bool, n_predict: int, **sampling: Any) -> str:
    from .chat import chat_tokens, stream

    prompt = llm.tokenize(messages.encode()) if raw else chat_tokens(llm, messages)
    if len(prompt) >= llm.n_ctx():
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"the prompt has {len(prompt)} tokens, the context {llm.n_ctx()}: raise --n-ctx")
    llm.stats.reset()
    tokens, _ = stream(llm, prompt, min(n_predict, llm.n_ctx() - len(prompt)), Console(highlight=False), **sampling)
    s = llm.stats
    drafts = f", {s.mean_accepted_length:.2f} tokens a round" if s.drafted else ""
    Console(stderr=True, highlight=False).print(f"[{s.tokens} tokens, {s.tokens_per_second:.1f}/s{drafts}]", style="dim", markup=False)
    return llm.detokenize(tokens).decode("utf-8", "replace")


@app.command()
def generate(model: Model, prompt: Annotated[str, typer.Option("--prompt", "-p")], eagle: Head = None, n_predict: NPredict = 256,
             raw: Annotated[bool, typer.Option(help="no chat template")] = False, temp: Temp = 0.8, top_p: TopP = 0.95,
             seed: Seed = 1, n_max: NMax = None, n_min: NMin = 0, p_min: PMin = 0.0, tree: TreeShape = None, n_ctx: NCtx = 2048,
             threads: Threads = None, n_gpu_layers: GpuLayers = 0, flash_attn: FlashAttn = False) -> None:
    """One answer; drafted and accepted tokens are coloured by their place in the draft."""
    llm = _load(model, eagle, EagleParams(n_max, n_min, p_min, tree), n_ctx, threads, n_gpu_layers, flash_attn)
    llm.set_seed(seed)
    _answer(llm, prompt, raw, n_predict, temp=temp, top_p=top_p)


@app.command()
def chat(model: Model, eagle: Head = None, n_predict: NPredict = 512, system: Annotated[Optional[str], typer.Option()] = None,
         temp: Temp = 0.8, top_p: TopP = 0.95, seed: Seed = 1, n_max: NMax = None, n_min: NMin = 0, p_min: PMin = 0.0, tree: TreeShape = None,
         n_ctx: NCtx = 4096, threads: Threads = None, n_gpu_layers: GpuLayers = 0, flash_attn: FlashAttn = False) -> None:
    """A conversation in the terminal; an empty line or Ctrl-D ends it."""
    llm = _load(model, eagle, EagleParams(n_max, n_min, p_min, tree), n_ctx, threads, n_gpu_layers, flash_attn)
    llm.set_seed(seed)
    messages = [{"role": "system", "content": system}] if system else []
    console = Console()
    while True:
        try:
            text = console.input("[bold]> [/bold]")
        except (EOFError, KeyboardInterrupt):
            return
        if not text.strip():
            return
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": _answer(llm, messages, False, n_predict, temp=temp, top_p=top_p)})


@app.command()
def bench(target: Annotated[list[Path], typer.Option(help="one or more targets, GGUF")],
          prompts: Annotated[Path, typer.Option(help=".jsonl: strings or objects with prompt, category")],
          head: Annotated[Optional[list[Path]], typer.Option(help="EAGLE-3 head, GGUF; several are compared in one run")] = None,
          draft_model: Annotated[Optional[Path], typer.Option(help="a small model, GGUF, for mode draft_model")] = None,
          category: Annotated[Optional[str], typer.Option(help="only these prompts of the file, by topic")] = None,
          n_predict: NPredict = 128, modes: Annotated[str, typer.Option(help="of plain,eagle,prompt_lookup,upstream,draft_model")] = "plain,eagle",
          rounds: Annotated[int, typer.Option(min=1, help="repetitions of each answer; the median counts")] = 1,
          n_max: NMax = None, p_min: PMin = 0.0, tree: TreeShape = None,
          fixed: Annotated[str, typer.Option(help="settings to try beside mode eagle's, e.g. 1,2,3,60x6x10")] = "",
          limit: Annotated[Optional[int], typer.Option(min=1, help="evenly spaced prompts of the file")] = None,
          temp: Temp = 0.0, top_p: TopP = 0.95, threads: Threads = None, n_ctx: NCtx = 2048, flash_attn: FlashAttn = False,
          explain: Annotated[bool, typer.Option("--explain", help="costs, what the planner chose, what it expected")] = False,
          plot: Annotated[Optional[Path], typer.Option(help="draw acceptance, speed and costs into this folder")] = None,
          json_file: Annotated[Optional[Path], typer.Option("--json", help="write the figures here")] = None) -> None:
    """Speed and text of the modes, alternating per prompt in one process."""
    from .bench_modes import parse_modes
    from .bench_run import BenchSettings, run_bench

    split = lambda text: [x.strip() for x in text.split(",") if x.strip()]  # noqa: E731
    wanted = parse_modes(split(modes), [str(h) for h in head or ()], str(draft_model) if draft_model else None,
                         EagleParams(n_max, p_min=p_min, tree=tree), split(fixed))
    trees = any(m.params is not None and m.params.fixed_tree for m in wanted)
    report = run_bench(BenchSettings(tuple(map(str, target)), tuple(wanted), str(prompts), category, limit, n_predict, rounds,
                                     {"temp": temp, "top_p": top_p}, threads or os.cpu_count() or 1, n_ctx, flash_attn or trees, explain))
    if json_file is not None:
        with replacing(json_file) as part:
            part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        from .bench_plot import draw

        draw(report, plot)
    if not all(r["identical"] for r in report["results"] if r["kind"] == "eagle"):
        raise typer.Exit(1)


@app.command()
def info(file: Annotated[Path, typer.Argument(help="a target or a head, GGUF", show_default=False)]) -> None:
    """What a GGUF is: sizes, captured layers, variant, which target it fits. Reads no weights."""
    from rich.table import Table

    from .convert.cli import one_line
    from .info import describe

    table = Table(show_header=False, box=None)
    for name, value in describe(file):
        table.add_row(f"[bold]{name}[/bold]", escape(one_line(value)))
    Console().print(table)


@app.command()
def compare(head: Annotated[Path, typer.Argument(help="head, GGUF", show_default=False)],
            target: Annotated[Path, typer.Option(help="its target, GGUF", show_default=False)],
            prompt: Annotated[str, typer.Option("--prompt", "-p")] = "The capital of France is Paris, and the capital of Italy is",
            threads: Threads = None) -> None:
    """The native head against a reference in NumPy, stage by stage: for whoever adds the next variant."""
    from rich.table import Table

    from .compare import compare as run

    table = Table("stage")
    for name in ("largest error", "largest value", "cosine"):
        table.add_column(name, justify="right")
    for stage in run(head, target, prompt, threads or os.cpu_count() or 1):
        table.add_row(stage.name, f"{stage.error:.3g}", f"{stage.largest:.3g}", f"{stage.cosine:.8f}")
    Console().print(table)


def main() -> None:
    """Entry point: errors a user can mend are one line and exit code 2."""
    from .convert.cli import convert
    from .server.cli import CONTEXT, serve
    from .train.cli import train

    app.command(name="convert")(convert)
    app.command(name="train")(train)
    app.command(name="serve", context_settings=CONTEXT)(serve)
    try:
        app()
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
