"""Turns a validated body into calls of llama-cpp-python: a function and its arguments for each choice."""

from __future__ import annotations

import functools
import json
import os
import secrets
import threading
from typing import Any

from ...errors import EagleError
from ...llama.infill import can_infill
from ...runtime.params import EagleParams, Tree
from ..api.chat import ChatBody, Named
from ..api.completions import CompletionBody
from ..api.fields import Sampling, Speculative
from ..jobs.gate import MAX_LOGPROBS
from ..jobs.job import Choice
from ..jobs.limits import Once
from ..sandbox.pool import Sandbox
from ..sandbox.prompt_size import PromptSize
from ..sandbox.sized_cache import SizedCache
from ..settings import ServerSettings
from ..web.errors import wrong
from .formats import ask, call_tool, handler_of, plain_messages, sandboxed_handler, template_setup

ENTRY_BYTES = 512  # one token's logprob in an answer: twice as a Python object, once as JSON
GRAMMAR_CACHE = 1 << 24  # characters of the grammars and schemas that passed the sandbox's check
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
    """Makes choices from bodies, for one model. Owns the sandboxes for templates and for grammars."""

    def __init__(self, settings: ServerSettings, base: Any, model_name: str) -> None:
        self.settings, self.model_name = settings, model_name
        self.n_vocab = base.n_vocab()
        setup = template_setup(base)
        self._templates = Sandbox(settings.template_timeout, templates=setup) if setup else None
        self._grammars = Sandbox(settings.template_timeout, model=os.path.abspath(base.model_path))
        self.size = PromptSize(base, settings.n_ctx)
        self._has_head, self._can_infill = base.engine.has_head, can_infill(base)
        self._eos = setup["eos"] if setup else ""
        self._checked = SizedCache(GRAMMAR_CACHE)

    def start(self) -> None:
        """Starts the sandbox for templates in the background. The one for grammars starts when first used."""
        if self._templates is not None:
            threading.Thread(target=self._templates.start, daemon=True).start()

    def close(self) -> None:
        for sandbox in (self._templates, self._grammars):
            if sandbox is not None:
                sandbox.close()

    # -- chat ---------------------------------------------------------------------------------------------

    def chat(self, body: ChatBody) -> list[Choice]:
        """The choices of a chat request. Raises ApiError 400 for what can be refused before generation."""
        arguments, n = self._sampling(body, body.max_completion_tokens, None), body.n or 1
        newer = body.max_completion_tokens
        if newer is not None and body.max_tokens not in (None, newer):
            raise wrong("max_completion_tokens", "it differs from max_tokens; give only one of them")
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
            raise wrong("grammar", "response_format constrains the answer too; give only one of them")
        messages = plain_messages(body.messages)
        if self._templates is None:  # otherwise sandboxed_handler() checks the rendered prompt
            self.size.check_fits("\n".join(m["content"] for m in messages), "messages")
        arguments |= tools | {"messages": messages, "stream": bool(body.stream)}
        if any_json:
            arguments["response_format"] = {"type": "json_object"}

        grammar = Once(lambda: self._grammar(body.grammar, schema, "response_format"))  # for all choices
        of_tool = Once(lambda: self._grammar(None, forced, "tools"))
        names = ("messages", "functions", "function_call", "tools", "tool_choice")
        shown = {name: arguments.get(name) for name in names}
        sandbox = self._templates
        handler = sandbox and sandboxed_handler(sandbox, self._eos, self.size, shown)

        def call(llm: Any, seed: int) -> Any:
            text = grammar()
            llm.chat_handler = handler or handler_of(llm)
            if (tool := of_tool()) is not None:
                llm.chat_handler = call_tool(llm.chat_handler, tool)
            return llm.create_chat_completion(**arguments, grammar=_parsed(text), seed=seed)

        seed = self._seed(body)
        return [Choice(i, 0, functools.partial(call, seed=seed + i), size) for i in range(n)]

    # -- completions --------------------------------------------------------------------------------------

    def completion(self, body: CompletionBody) -> list[Choice]:
        """One choice for each prompt and each of n."""
        prompts = _prompts(body.prompt)
        arguments = self._sampling(body, None, 16)
        logprobs = None if body.logprobs is False else body.logprobs
        n = body.n or 1
        most = self.settings.most_choices
        if len(prompts) * n > most:
            message = f"{len(prompts)} prompts with {n} choices each are more than {most} choices"
            raise wrong("prompt", f"{message}, the most that this server allows")
        if body.echo and not all(isinstance(p, str) for p in prompts):
            raise wrong("echo", "it needs a prompt that is text, not token ids")
        self._check_prompts(prompts)
        self.size.check_fits(body.suffix or "", "suffix")
        if body.suffix and not self._can_infill:
            raise wrong(
                "suffix", "this model cannot fill in the middle: its vocabulary has no tokens for that"
            )
        if body.suffix is not None and body.echo and logprobs is not None:
            raise wrong("suffix", "echo with logprobs is not possible beside it; leave one of them out")
        sizes = [0] * len(prompts)
        if logprobs is not None:
            # every token has at least one byte
            echoed = [min(len(p.encode()), self.settings.n_ctx) if body.echo else 0 for p in prompts]
            n_choices, explicit = n * len(prompts), body.max_tokens is not None
            sizes = [self._logprobs_size(arguments, logprobs, n_choices, explicit, e) for e in echoed]
        arguments |= {"echo": bool(body.echo), "suffix": body.suffix}
        arguments |= {"logprobs": logprobs, "stream": bool(body.stream)}

        grammar = Once(lambda: self._grammar(body.grammar, None, "grammar"))

        def call(llm: Any, prompt: Any, seed: int) -> Any:
            return llm.create_completion(prompt, **arguments, grammar=_parsed(grammar()), seed=seed)

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
                message = (
                    f"it has the token id {max(prompt)}; the model's token ids are 0..{self.n_vocab - 1}"
                )
                raise wrong("prompt", message)

    # -- both ---------------------------------------------------------------------------------------------

    def _sampling(self, body: Sampling, max_tokens: int | None, default: int | None) -> dict[str, Any]:
        out = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
        if out.get("temperature", 1) < 1e-3:
            out["temperature"] = 0.0  # logits divided by a smaller number overflow
        most = self.settings.most_tokens
        # an answer that is cut short by `most` ends with finish_reason "length"
        out["max_tokens"] = min(max_tokens or body.max_tokens or default or most, most)
        out["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop or []
        out["model"] = self.model_name
        if body.logit_bias:
            out["logit_bias"] = bias = {int(token): value for token, value in body.logit_bias.items()}
            if max(bias) >= self.n_vocab:
                message = f"it has the token id {max(bias)}; the model's token ids are 0..{self.n_vocab - 1}"
                raise wrong("logit_bias", message)
        return out

    def _logprobs_size(
        self, arguments: dict[str, Any], n_top: int, n: int, explicit: bool, echoed: int = 0
    ) -> int:
        """Bytes that the logprobs of one choice of n may take.

        echoed: most prompt tokens that have logprobs too. If the request does not set max_tokens (explicit is
        false), reduces it to what there is room for.
        """
        each = ENTRY_BYTES * (n_top + 1)
        most = max(1, MAX_LOGPROBS // (n * each) - echoed)
        if arguments["max_tokens"] > most and explicit:
            message = f"it is {arguments['max_tokens']}; with these logprobs the server allows at most {most}"
            raise wrong("max_tokens", f"{message}. Reduce max_tokens, n or the number of logprobs")
        arguments["max_tokens"] = min(arguments["max_tokens"], most)
        return each * (arguments["max_tokens"] + echoed)

    def _grammar(self, text: str | None, schema: dict[str, Any] | None, param: str) -> str | None:
        """The GBNF text of a grammar or a JSON schema, checked in the sandbox. None if both are None."""
        if text is not None:
            if "\0" in text:
                raise wrong("grammar", "it has a null character")
            self._checked.get(("check", text), lambda: self._ask_grammars("check", text, "grammar"))
            return text
        if schema is None:
            return None
        message = json.dumps(schema)
        return self._checked.get(("convert", message), lambda: self._ask_grammars("convert", message, param))

    def _ask_grammars(self, do: str, text: str, param: str) -> Any:
        refused = f"the {'schema' if do == 'convert' else 'grammar'} was refused"
        return ask(self._grammars, param, refused, do=do, text=text)

    @staticmethod
    def _seed(body: Sampling) -> int:
        """The request's seed, or a random one. Choice i is generated with seed + i."""
        return body.seed if body.seed is not None else secrets.randbits(31)

    def _text(self, asked: Speculative) -> bool:
        if asked.text and not self.settings.text:
            raise wrong("speculative", "text has no effect: this server was started with --no-text")
        return self.settings.text if asked.text is None else asked.text

    def params(self, asked: Speculative | None) -> EagleParams | None:
        """A request's drafting parameters; None: the planner chooses. Raises ApiError 400."""
        if asked is None or asked == Speculative(report=asked.report):
            return None
        if not asked.enabled:
            if useless := [name for name in ("n_max", "p_min", "tree", "text") if getattr(asked, name)]:
                message = f"{useless[0]} has no effect with enabled: false; leave one of them out"
                raise wrong("speculative", message)
            return EagleParams(0)
        most = self.settings.max_draft
        try:
            tree = Tree.parse(asked.tree) if isinstance(asked.tree, str) else asked.tree
            params = EagleParams(asked.n_max, p_min=asked.p_min, tree=tree, text=self._text(asked))
        except EagleError as e:
            raise wrong("speculative", str(e)) from None
        if (name := params.needs_head) and not self._has_head:
            why = "cannot take back drafts" if self.settings.eagle else "has no head"
            raise wrong(
                "speculative", f"{name} has no effect, because this server's model {why}; leave it out"
            )
        if max(params.n_max or 0, tree.nodes if isinstance(tree, Tree) else 0) > most:
            raise wrong("speculative", f"this server allows at most {most} draft tokens per round")
        return params


def _parsed(grammar: str | None) -> Any:
    from llama_cpp import LlamaGrammar

    return grammar and LlamaGrammar.from_string(grammar, verbose=False)


def _prompts(prompt: Any) -> list[Any]:
    """A list of prompts, from a text, token ids, or a list of either."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def _json_wanted(body: ChatBody) -> tuple[dict[str, Any] | None, bool]:
    """(the schema that the answer must follow, whether the answer may be any JSON object)."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None, False
    schema = wanted.schema_ if wanted.type == "json_object" else wanted.json_schema.schema_
    return schema, schema is None


def _tools(body: ChatBody) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(arguments that describe the tools, the parameters' schema of the tool that must be called)."""
    functions = [_function(f) for f in body.functions or [t.function for t in body.tools or ()]]
    choice = body.function_call if body.functions else body.tool_choice
    name = _forced(functions, choice)
    tool = next((f for f in functions if f["name"] == name), None)
    if name is not None and tool is None:
        raise wrong("function_call" if body.functions else "tool_choice", f"there is no tool {name!r:.80}")
    if choice == "none" or not functions:
        return {}, None
    schema = tool and tool["parameters"]
    if body.functions:
        return {"functions": functions, "function_call": choice if name is None else {"name": name}}, schema
    tools = [{"type": "function", "function": f} for f in functions]
    call = choice if name is None else {"type": "function", "function": {"name": name}}
    return {"tools": tools, "tool_choice": call}, schema


def _forced(functions: list[dict[str, Any]], choice: Any) -> str | None:
    """The name of the function that must be called."""
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        if len(functions) != 1:
            message = "`required` needs exactly one tool; name the tool to call instead"
            raise wrong("tool_choice", message)
        return functions[0]["name"]
    return choice.name if isinstance(choice, Named) else choice.function.name


def _function(function: Any) -> dict[str, Any]:
    return {"parameters": {"type": "object", "properties": {}}, **function.model_dump(exclude_none=True)}
