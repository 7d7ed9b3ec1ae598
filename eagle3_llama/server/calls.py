"""A checked body as calls of llama-cpp-python: which function with which arguments, for each choice."""

from __future__ import annotations

import functools
import json
import os
import secrets
import threading
from typing import Any

from ..errors import EagleError
from ..runtime.params import EagleParams, Tree
from .chat_format import ask, call_tool, handler_of, plain_messages, sandboxed_handler, template_setup
from .errors import wrong
from .generation import MAX_LOGPROBS, Choice
from .prompt_size import PromptSize
from .sandbox import Sandbox
from .schema import ChatBody, CompletionBody, Named, Sampling, Speculative
from .settings import ServerSettings
from .sized_cache import SizedCache
from .work import Once

ENTRY_BYTES = 384  # of one likely token in an answer: twice as an object of Python, and as JSON
GRAMMAR_CACHE = 1 << 24  # characters of grammars and schemas that were found harmless
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "mirostat_mode",
    "mirostat_tau",
    "mirostat_eta",
)


class Caller:
    """Makes choices of bodies for one model. Its sandboxes start with the server."""

    def __init__(self, settings: ServerSettings, base: Any, model_name: str) -> None:
        self.settings, self.model_name = settings, model_name
        self.n_vocab = base.n_vocab()
        setup = template_setup(base)
        self._templates = Sandbox(settings.template_timeout, templates=setup) if setup else None
        self._grammars = Sandbox(settings.template_timeout, model=os.path.abspath(base.model_path))
        self.size = PromptSize(base, settings.n_ctx)
        self._eos = setup["eos"] if setup else ""
        self._checked = SizedCache(GRAMMAR_CACHE)

    def start(self) -> None:
        """Starts the template's process in the background; grammars' starts when it is first needed."""
        if self._templates is not None:
            threading.Thread(target=self._templates.start, daemon=True).start()

    def close(self) -> None:
        for sandbox in (self._templates, self._grammars):
            if sandbox is not None:
                sandbox.close()

    # -- chat ---------------------------------------------------------------------------------------------

    def chat(self, body: ChatBody) -> list[Choice]:
        """Raises ApiError 400 for what is wrong whatever the model says."""
        arguments, n = self._sampling(body, body.max_completion_tokens, None), body.n or 1
        if body.max_completion_tokens is not None and body.max_tokens not in (
            None,
            body.max_completion_tokens,
        ):
            raise wrong("max_completion_tokens", "it differs from max_tokens; give one")
        if body.top_logprobs is not None and not body.logprobs:
            raise wrong("top_logprobs", "it needs logprobs: true")
        size = 0
        if body.logprobs:
            arguments |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
            explicit = body.max_tokens is not None or body.max_completion_tokens is not None
            size = self._logprobs_size(arguments, body.top_logprobs or 0, n, explicit)
        tools, forced = _tools(body)
        schema, any_json = _json_wanted(body)
        if body.grammar is not None and (schema is not None or any_json):
            raise wrong("grammar", "response_format says what the answer looks like, too; give one")
        messages = plain_messages(body.messages)
        if self._templates is None:  # else the whole prompt is looked at
            self.size.check_fits("\n".join(m["content"] for m in messages), "messages")
        arguments |= tools | {"messages": messages, "stream": bool(body.stream)}
        if any_json:
            arguments["response_format"] = {"type": "json_object"}

        grammar = Once(lambda: self._grammar(body.grammar, schema, "response_format"))  # of all choices
        of_tool = Once(lambda: self._grammar(None, forced, "tools"))
        shown = {
            name: arguments.get(name)
            for name in ("messages", "functions", "function_call", "tools", "tool_choice")
        }
        handler = (
            sandboxed_handler(self._templates, self._eos, self.size, shown)
            if self._templates is not None
            else None
        )

        def call(llm: Any, seed: int) -> Any:
            from llama_cpp import LlamaGrammar

            text = grammar()
            llm.chat_handler = handler or handler_of(llm)
            if forced is not None:
                llm.chat_handler = call_tool(llm.chat_handler, of_tool())
            return llm.create_chat_completion(
                **arguments, grammar=text and LlamaGrammar.from_string(text, verbose=False), seed=seed
            )

        seed = self._seed(body)
        return [Choice(i, 0, functools.partial(call, seed=seed + i), size) for i in range(n)]

    # -- completions --------------------------------------------------------------------------------------

    def completion(self, body: CompletionBody) -> list[Choice]:
        """One choice for each prompt and each of n."""
        prompts = _prompts(body.prompt)
        arguments = self._sampling(body, None, 16)
        logprobs = None if body.logprobs is False else body.logprobs
        n = body.n or 1
        if len(prompts) * n > self.settings.max_n:
            raise wrong(
                "prompt",
                f"{len(prompts)} prompts of {n} choices are more than the {self.settings.max_n} allowed",
            )
        if body.echo and not all(isinstance(p, str) for p in prompts):
            raise wrong("echo", "it needs a prompt of text")
        self._check_prompts(prompts)
        self.size.check_fits(body.suffix or "", "suffix")
        sizes = [0] * len(prompts)
        if logprobs is not None:
            echoed = [
                min(len(p.encode()), self.settings.n_ctx) if body.echo else 0 for p in prompts
            ]  # a token has a byte at least
            sizes = [
                self._logprobs_size(arguments, logprobs, n * len(prompts), body.max_tokens is not None, e)
                for e in echoed
            ]
        arguments |= {
            "echo": bool(body.echo),
            "suffix": body.suffix,
            "logprobs": logprobs,
            "stream": bool(body.stream),
        }

        grammar = Once(lambda: self._grammar(body.grammar, None, "grammar"))

        def call(llm: Any, prompt: Any, seed: int) -> Any:
            from llama_cpp import LlamaGrammar

            text = grammar()
            return llm.create_completion(
                prompt, **arguments, grammar=text and LlamaGrammar.from_string(text, verbose=False), seed=seed
            )

        seed = self._seed(body)
        return [
            Choice(p * n + i, p, functools.partial(call, prompt=prompt, seed=seed + i), sizes[p])
            for p, prompt in enumerate(prompts)
            for i in range(n)
        ]

    def _check_prompts(self, prompts: list[Any]) -> None:
        for prompt in prompts:
            if isinstance(prompt, str):
                self.size.check_fits(prompt, "prompt")
            elif max(prompt) >= self.n_vocab:
                raise wrong("prompt", f"it has token {max(prompt)}, the model's are 0..{self.n_vocab - 1}")

    # -- both ---------------------------------------------------------------------------------------------

    def _sampling(self, body: Sampling, max_tokens: int | None, default: int | None) -> dict[str, Any]:
        out = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
        if out.get("temperature", 1) < 1e-3:
            out["temperature"] = 0.0  # logits divided by less overflow
        most = self.settings.most_tokens
        out["max_tokens"] = min(
            max_tokens or body.max_tokens or default or most, most
        )  # what more is asked for ends with `length`
        out["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop or []
        out["model"] = self.model_name
        if body.logit_bias:
            out["logit_bias"] = bias = {int(token): value for token, value in body.logit_bias.items()}
            if max(bias) >= self.n_vocab:
                raise wrong("logit_bias", f"it has token {max(bias)}, the model's are 0..{self.n_vocab - 1}")
        return out

    def _logprobs_size(
        self, arguments: dict[str, Any], n_top: int, n: int, explicit: bool, echoed: int = 0
    ) -> int:
        """Bytes that the logprobs of one choice of n may have; where the request left max_tokens open it becomes what there is room for.
        echoed: most tokens of the prompt that have some, too."""
        each = ENTRY_BYTES * (n_top + 1)
        most = max(1, MAX_LOGPROBS // (n * each) - echoed)
        if arguments["max_tokens"] > most and explicit:
            raise wrong(
                "max_tokens",
                f"logprobs of {arguments['max_tokens']} tokens are asked for, this server keeps those of {most}",
            )
        arguments["max_tokens"] = min(arguments["max_tokens"], most)
        return each * (arguments["max_tokens"] + echoed)

    def _grammar(self, text: str | None, schema: dict[str, Any] | None, param: str) -> str | None:
        """The GBNF of a grammar or a schema that the sandbox found harmless, if there is one."""
        if text is not None:
            if "\0" in text:
                raise wrong("grammar", "it has a null character")
            self._checked.get(("check", text), lambda: self._ask_grammars("check", text, "grammar"))
            return text
        if schema is None:
            return None
        said = json.dumps(schema)
        return self._checked.get(("convert", said), lambda: self._ask_grammars("convert", said, param))

    def _ask_grammars(self, do: str, text: str, param: str) -> Any:
        return ask(
            self._grammars,
            param,
            "the schema was refused" if do == "convert" else "the grammar was refused",
            do=do,
            text=text,
        )

    @staticmethod
    def _seed(body: Sampling) -> int:
        """The request's, or one drawn here: choices count on from it."""
        return body.seed if body.seed is not None else secrets.randbits(31)

    def params(self, asked: Speculative | None) -> EagleParams | None:
        """How to draft for a request; None leaves it to the planner."""
        if asked is None or asked == Speculative(report=asked.report):
            return None
        if not asked.enabled:
            return EagleParams(0)
        most = self.settings.max_draft
        try:
            params = EagleParams(asked.n_max, p_min=asked.p_min, tree=asked.tree)
        except EagleError as e:
            raise wrong("speculative", str(e)) from None
        if max(params.n_max or 0, params.tree.nodes if isinstance(params.tree, Tree) else 0) > most:
            raise wrong("speculative", f"at most {most} tokens may be drafted a round")
        return params


def _prompts(prompt: Any) -> list[Any]:
    """A text, token ids, or a list of either: always a list of prompts."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def _json_wanted(body: ChatBody) -> tuple[dict[str, Any] | None, bool]:
    """(the schema the answer must follow, whether any JSON object will do)."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None, False
    schema = wanted.schema_ if wanted.type == "json_object" else wanted.json_schema.schema_
    return schema, schema is None


def _tools(body: ChatBody) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(arguments about tools, the schema of the one whose call is forced)."""
    functions = [_function(f) for f in body.functions or [t.function for t in body.tools or ()]]
    choice = body.function_call if body.functions else body.tool_choice
    name = _forced(functions, choice)
    tool = next((f for f in functions if f["name"] == name), None)
    if name is not None and tool is None:
        raise wrong("function_call" if body.functions else "tool_choice", f"there is no tool {name!r:.80}")
    if choice == "none" or not functions:
        return {}, None
    if body.functions:
        return {
            "functions": functions,
            "function_call": choice if name is None else {"name": name},
        }, tool and tool["parameters"]
    tools = [{"type": "function", "function": f} for f in functions]
    return {
        "tools": tools,
        "tool_choice": choice if name is None else {"type": "function", "function": {"name": name}},
    }, tool and tool["parameters"]


def _forced(functions: list[dict[str, Any]], choice: Any) -> str | None:
    """The name of the function that must be called."""
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        if len(functions) != 1:
            raise wrong("tool_choice", "required needs exactly one tool; name the one to call")
        return functions[0]["name"]
    return choice.name if isinstance(choice, Named) else choice.function.name


def _function(function: Any) -> dict[str, Any]:
    return {"parameters": {"type": "object", "properties": {}}, **function.model_dump(exclude_none=True)}
