"""The words of users of llama.cpp, llama-cpp-python, vLLM and Ollama: other names, MODEL without --model.

A name is taken if it means what one of our options means. Otherwise the error says what to write.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

from ..errors import EagleError, ErrorKind

TAKEN = {  # their name -> ours, where the meaning and the values are the same
    "--temperature": "--temp",
    "--ctx-size": "--n-ctx",
    "--max-model-len": "--n-ctx",
    "--predict": "--n-predict",
    "--parallel": "--n-parallel",
    "-np": "--n-parallel",
    "--max-num-seqs": "--n-parallel",
    "--alias": "--model-alias",
    "-a": "--model-alias",
    "--served-model-name": "--model-alias",
    "--gpu-layers": "--n-gpu-layers",
    "-s": "--seed",
    "--system-prompt": "--system",
    "-sys": "--system",
    "--draft-max": "--n-max",
    "--draft-min": "--n-min",
    "--draft-p-min": "--p-min",
    "-md": "--draft-model",
    "--model-draft": "--draft-model",
}
_HUB = "write --model hf:OWNER/REPO, or hf:OWNER/REPO:FORMAT"
_HEAD = "write --eagle FILE for a head, and --draft-model FILE for a small model that drafts"
_ALWAYS = "it is always on here: leave it out"
ANSWERED = {  # their name -> what to write, where an option of ours does something similar
    "-hf": _HUB,
    "-hfr": _HUB,
    "--hf-repo": _HUB,
    "--hf-model-repo-id": _HUB,
    "-md": _HEAD,
    "--model-draft": _HEAD,
    "--draft-model": _HEAD,
    "--spec-type": _HEAD,
    "--speculative-config": _HEAD,
    "-fa": "write --flash-attn or --no-flash-attn",
    "-b": "write --n-batch, the most prompt tokens that are decoded between two rounds",
    "--batch-size": "write --n-batch, the most prompt tokens that are decoded between two rounds",
    "-tb": "write --threads, which counts for prompts too",
    "--threads-batch": "write --threads, which counts for prompts too",
    "--chat-template": "write --chat-template-file FILE",
    "--jinja": _ALWAYS,
    "--metrics": _ALWAYS,
    "-cb": _ALWAYS,
    "--cont-batching": _ALWAYS,
}
_SLOTS = "write --n-ctx, the context of one request; llama.cpp's --ctx-size is divided among the slots"


class Command(TyperCommand):
    """A command that also takes these names and, if it has no arguments of its own, MODEL without --model."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)
        return [*pieces, "[MODEL]"] if self._takes_model() else pieces

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # which completes a line, and must not fail
            args = list(self._ours(ctx, args))
        return super().parse_args(ctx, args)

    def _ours(self, ctx: Any, args: list[str]) -> Iterator[str]:
        """The arguments in our names. Raises EagleError BAD_ARGUMENT for a name that is answered."""
        own = {name: p for p in self.get_params(ctx) for name in (*p.opts, *p.secondary_opts)}
        rest, models = iter(args), []
        for arg in rest:
            if arg == "--":
                yield arg
                yield from rest
                break
            name, is_set, value = arg.partition("=")
            if name.startswith("-") and name != "-":
                option = self._option(name, own)
                param = _param(option, own, ctx)
                yield option + is_set + value
                if param is not None and param.name == "model":
                    models.append("")
                if not is_set and param is not None and not getattr(param, "is_flag", False):
                    yield from (value for value in [next(rest, None)] if value is not None)
            elif self._takes_model():
                models.append(arg)
                yield "--model"
                yield arg
            else:
                yield arg
        self._check_models(models)

    def _check_models(self, models: list[str]) -> None:
        """models: each that was given, "" if by an option."""
        several = any(p.name == "model" and getattr(p, "multiple", False) for p in self.params)
        if len(models) > 1 and any(models) and not several:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"the command takes one model, and {[m for m in models if m][-1]!r:.60} is one argument too "
                "many: a head is --eagle FILE, and a text is --prompt TEXT",
            )

    def _takes_model(self) -> bool:
        kinds = {p.name: p.param_type_name for p in self.params}
        return kinds.get("model") == "option" and "argument" not in kinds.values()

    def _option(self, typed: str, own: dict[str, Any]) -> str:
        name = typed if typed in own else typed.replace("_", "-")
        if name in own:
            return typed
        ours = TAKEN.get(name)
        if name == "--ctx-size" and "--n-parallel" in own:
            answer: str | None = _SLOTS
        elif ours in own and not getattr(own[ours], "is_flag", False):
            return str(ours)
        else:
            answer = ANSWERED.get(name)
        if answer is not None:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"there is no {name} here: {answer}")
        return typed


def _param(option: str, own: dict[str, Any], ctx: Any) -> Any:
    """The parameter that an option sets, by any of its names; None if there is none."""
    name = option.lstrip("-")
    dashes = option[: len(option) - len(name)]
    return own.get(option) or own.get(dashes + (ctx.token_normalize_func or str)(name))
