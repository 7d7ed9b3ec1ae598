"""`eagle3-llama`: generate, chat, bench, convert, train."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console

from .convert.files import replacing
from .errors import EagleError, ErrorKind
from .params import EagleParams

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="EAGLE speculative decoding for llama.cpp: same seed, same text, only faster.")

Model = Annotated[Path, typer.Option("--model", "-m", help="target, GGUF")]
Head = Annotated[Optional[Path], typer.Option("--eagle", help="its EAGLE-3 head, GGUF; without it plain decoding")]
NMax = Annotated[int, typer.Option("--n-max", min=0, max=63, help="most tokens drafted a round")]
NMin = Annotated[int, typer.Option("--n-min", min=0, max=63, help="drop shorter drafts")]
PMin = Annotated[float, typer.Option("--p-min", min=0.0, max=1.0, help="a draft ends below this probability")]
Temp = Annotated[float, typer.Option("--temp", help="0 is greedy")]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0)]
Seed = Annotated[int, typer.Option("--seed")]
Threads = Annotated[Optional[int], typer.Option("--threads", "-t", min=1, help="default: all cores")]
NCtx = Annotated[int, typer.Option("--n-ctx", "-c", min=16)]
NPredict = Annotated[int, typer.Option("--n-predict", "-n", min=1)]
GpuLayers = Annotated[int, typer.Option("--n-gpu-layers", "-ngl")]


def _load(model: Path, eagle: Path | None, params: EagleParams, n_ctx: int, threads: int | None, gpu_layers: int) -> Any:
    from .llama import EagleLlama

    for path in (model, eagle):
        if path is not None and not path.is_file():
            raise EagleError(ErrorKind.BAD_FILE, f"no such file: {path}")
    n = threads or os.cpu_count()
    try:
        return EagleLlama(str(model), eagle_path=str(eagle) if eagle else None, n_max=params.n_max, n_min=params.n_min,
                          p_min=params.p_min, n_ctx=n_ctx, n_threads=n, n_threads_batch=n, n_gpu_layers=gpu_layers, verbose=False)
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
             seed: Seed = 1, n_max: NMax = 1, n_min: NMin = 0, p_min: PMin = 0.0, n_ctx: NCtx = 2048,
             threads: Threads = None, n_gpu_layers: GpuLayers = 0) -> None:
    """One answer; drafted and accepted tokens are coloured by their place in the draft."""
    llm = _load(model, eagle, EagleParams(n_max, n_min, p_min), n_ctx, threads, n_gpu_layers)
    llm.set_seed(seed)
    _answer(llm, prompt, raw, n_predict, temp=temp, top_p=top_p)


@app.command()
def chat(model: Model, eagle: Head = None, n_predict: NPredict = 512, system: Annotated[Optional[str], typer.Option()] = None,
         temp: Temp = 0.8, top_p: TopP = 0.95, seed: Seed = 1, n_max: NMax = 1, n_min: NMin = 0, p_min: PMin = 0.0,
         n_ctx: NCtx = 4096, threads: Threads = None, n_gpu_layers: GpuLayers = 0) -> None:
    """A conversation in the terminal; an empty line or Ctrl-D ends it."""
    llm = _load(model, eagle, EagleParams(n_max, n_min, p_min), n_ctx, threads, n_gpu_layers)
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
          category: Annotated[Optional[str], typer.Option(help="only these prompts of the file, by topic")] = None,
          n_predict: NPredict = 128, modes: Annotated[str, typer.Option(help="of plain,eagle,prompt_lookup")] = "plain,eagle",
          rounds: Annotated[int, typer.Option(min=1, help="repetitions of each answer; the median counts")] = 1,
          n_max: Annotated[str, typer.Option(help="a number, or auto: the best fixed one by measured cost")] = "auto",
          limit: Annotated[Optional[int], typer.Option(min=1, help="evenly spaced prompts of the file")] = None,
          temp: Temp = 0.0, top_p: TopP = 0.95, threads: Threads = None, n_ctx: NCtx = 2048,
          costs: Annotated[bool, typer.Option(help="measure the cost curve and capture's cost")] = True,
          json_file: Annotated[Optional[Path], typer.Option("--json", help="write the figures here")] = None) -> None:
    """Speed and text of the modes, alternating per prompt in one process."""
    from .bench_run import run_bench

    wanted = [m.strip() for m in modes.split(",") if m.strip()]
    report = run_bench([str(t) for t in target], [str(h) for h in head or ()], prompts, category, wanted, n_predict, rounds, n_max, limit,
                       {"temp": temp, "top_p": top_p}, threads or os.cpu_count() or 1, n_ctx, costs)
    if json_file is not None:
        with replacing(json_file) as part:
            part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not all(r["identical"] for r in report["results"]):
        raise typer.Exit(1)


def main() -> None:
    """Entry point: errors a user can mend are one line and exit code 2."""
    from .convert.cli import convert
    from .train.cli import train

    app.command(name="convert")(convert)
    app.command(name="train")(train)
    try:
        app()
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
