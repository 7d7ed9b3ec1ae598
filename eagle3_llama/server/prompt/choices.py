"""Turns a validated body into calls of a request: a function and its arguments for each choice."""

from __future__ import annotations

import functools
import json
from typing import Any

from ...batching.samplers import LazyGrammar
from ...errors import EagleError
from ...llama.infill import can_infill
from ...runtime.params import EagleParams, Tree
from ..body.chat import ChatBody
from ..body.completions import MAX_PROMPTS, CompletionBody
from ..body.fields import Speculative
from ..errors import ApiError, wrong
from ..grammar.marks import Marks
from ..grammar.number_bounds import put_numbers
from ..grammar.schema_room import SchemaRoom
from ..grammar.schemas import enforceable, unenforced
from ..jobs.gate import MAX_LOGPROBS
from ..jobs.job import Choice
from ..jobs.work_queue import Lazy, ThreadTurns
from ..sandbox.pool import START_SECONDS, Sandbox
from ..sandbox.prompt_size import PromptSize
from ..sandbox.sized_cache import SizedCache
from ..settings import ServerSettings
from . import message, named_formats
from .completion import complete
from .named_formats import call_tool, handler_of, plain_messages, template_setup
from .sampling import SamplingFields
from .template_client import ChatLibrary, Prepared, ask, refuse_incomplete
from .template_request import as_meant, json_wanted, marks_of, schema_field, strict_of, template_request
from .thoughts import bounded, budget_of
from .tools import tools_of

ENTRY_BYTES = 512  # one token's logprob in an answer: twice as a Python object, once as JSON
CHAT_TEMPERATURE = 0.2  # llama-cpp-python's default for chats
GRAMMAR_CACHE = 1 << 24  # characters of the grammars and schemas that passed the sandbox's check


class ChoiceMaker:
    """Makes choices from bodies, for one model. Owns the sandboxes for templates and for grammars."""

    def __init__(self, settings: ServerSettings, base: Any, model_name: str) -> None:
        self.settings, self.model_name = settings, model_name
        self._sampling = SamplingFields(settings, base)
        self.n_vocab = self._sampling.n_vocab
        setup, seconds = template_setup(base, settings), settings.template_timeout
        self._library = ChatLibrary(seconds, setup, self._converted) if setup else None
        self._grammars = Sandbox(seconds, model=base.model_path, files=base.loaded_files.model)
        self.size = PromptSize(base, settings.n_ctx)
        self._has_head, self._can_infill = base.engine.drafter is not None, can_infill(base)
        self._checked = SizedCache(GRAMMAR_CACHE)
        self._turns = ThreadTurns(Sandbox.CHILDREN, "with chat templates or grammars")

    def start(self) -> None:
        """Starts the children of chats in the background. Those for grammars start when first used."""
        if self._library is not None:
            self._library.start()

    def close(self) -> None:
        if self._library is not None:
            self._library.close()
        self._grammars.close()

    # -- chat ---------------------------------------------------------------------------------------------

    def chat(self, body: ChatBody) -> list[Choice]:
        """The choices of a chat request. Raises ApiError 400 for what can be refused before generation."""
        body = as_meant(body)
        arguments, n = self._sampling.of(body, body.max_completion_tokens, None), body.n or 1
        newer = body.max_completion_tokens
        if newer is not None and body.max_tokens not in (None, newer):
            raise wrong(
                "max_completion_tokens", f"it differs from {body.limit_field()}; give only one of them"
            )
        if body.top_logprobs is not None and not body.logprobs:
            raise wrong("top_logprobs", "it needs logprobs: true")
        if body.add_generation_prompt is bool(body.continue_final_message):
            message = f"{json.dumps(body.add_generation_prompt)} contradicts continue_final_message"
            raise wrong("add_generation_prompt", f"{message}, of which it is the opposite: leave it out")
        size = 0
        if body.logprobs:
            own = "max_completion_tokens" if newer is not None else body.limit_field()
            explicit = None if newer is None and body.max_tokens is None else own
            size = self._logprobs_size(arguments, body.top_logprobs or 0, n, explicit)
        marks = marks_of(body)
        wanted = json_wanted(body, marks)
        if body.grammar is not None and wanted is not None:
            raise wrong("grammar", f"{schema_field(body)} constrains the answer too; give only one of them")
        arguments |= {"stream": bool(body.stream)}
        make = self._named if self._library is None else self._templated
        call, seed = make(body, arguments, wanted, marks), self._sampling.seed(body)
        timed, slot = bool(body.timings_per_token), self._sampling.slot(body)
        return [Choice(i, 0, functools.partial(call, seed=seed + i), size, timed, slot) for i in range(n)]

    def rendered(self, body: ChatBody) -> Prepared:
        """A chat's prompt. Needs no slot. Raises ApiError 400 or 503."""
        if self._library is None:
            message = "a chat format of llama-cpp-python makes its prompt only to answer it"
            raise ApiError(400, f"{message}: it cannot be counted or shown", code="chat_format")
        tools, request = tools_of(body), template_request(body, self.settings)
        marks = marks_of(body)
        made = self._library.prepare(request, tools, json_wanted(body, marks), marks)
        self.size.check_fits(made.prompt, "messages")
        return made

    def count(self, body: ChatBody, base: Any) -> int:
        """The tokens of a chat's prompt, by `base`'s tokenizer. Raises as rendered() does."""
        made = self.rendered(as_meant(body))
        with base.tokenizing:
            return len(base.tokenize(made.prompt.encode(), add_bos=False, special=True))

    def _templated(
        self, body: ChatBody, arguments: dict[str, Any], wanted: dict[str, Any] | None, marks: Marks
    ) -> Any:
        """A choice's call: the prompt by the model's template, the answer read by its parser."""
        library, tools, request = self._library, tools_of(body), template_request(body, self.settings)
        assert library is not None
        if body.grammar is not None and tools.shown and tools.choice == "required":
            raise wrong("grammar", "the call of a tool constrains the answer too; give only one of them")
        budget = budget_of(body, self.settings)
        if body.logprobs:
            arguments["logprobs"] = body.top_logprobs or 0
        arguments.setdefault("temperature", CHAT_TEMPERATURE)

        def prepare() -> tuple[Prepared, str]:
            with self._turns.place(max(START_SECONDS, 10 * self.settings.template_timeout)):
                if wanted is not None:
                    self._schema(wanted, schema_field(body), marks, strict_of(body))
                made = library.prepare(request, tools, wanted, marks)
                self.size.check_fits(made.prompt, "messages")
                refuse_incomplete(made.incomplete, "tools")
                if body.grammar is not None:
                    return made, self._grammar(body.grammar) or ""
                return made, self._readable(made.grammar, "tools", marks)

        prepared = Lazy(prepare)  # for all choices

        def call(llm: Any, seed: int) -> Any:
            made, grammar = prepared()
            lazy = made.patterns and body.grammar is None
            given = {**arguments, "stop": [*arguments["stop"], *made.stops], "seed": seed}
            given["grammar"] = LazyGrammar(grammar, made.patterns) if grammar and lazy else _parsed(grammar)
            given["cuts"] = {*arguments["stop"]} - {*made.stops} if tools.shown else ()
            tags = () if made.thoughts is None else (made.thoughts.start, *made.thoughts.ends)
            tags = tuple(tag.strip() for tag in tags)
            given["thoughts"] = bounded(llm, made.thoughts, budget, waits=bool(grammar and lazy))
            llm.show_tokens(made.preserved)
            prompt = llm.tokenize(made.prompt.encode(), add_bos=False, special=True)
            out = complete(llm, prompt, **given)
            if not body.stream:
                return message.whole(out, made.read, tools.parallel, tags)
            if made.read is None:
                return message.plain(out)
            deltas = message.Deltas(made.read, tools.parallel, tags)
            report = body.speculative is not None and body.speculative.report  # each token is told by itself
            return message.streamed(out, deltas, 0.0 if report else self.settings.stream_interval)

        return call

    def _named(
        self, body: ChatBody, arguments: dict[str, Any], wanted: dict[str, Any] | None, marks: Marks
    ) -> Any:
        """A choice's call with a chat format of llama-cpp-python, by its own create_chat_completion."""
        if body.continue_final_message:
            raise wrong(
                "continue_final_message", "a chat format of llama-cpp-python cannot continue a message"
            )
        tools, forced, strict = named_formats.tools_of(body)
        messages = plain_messages(body.messages)
        self.size.check_fits("\n".join(m["content"] for m in messages), "messages")
        if body.logprobs:
            arguments |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
        arguments |= tools | {"messages": messages, "model": self.model_name}
        grammar = Lazy(lambda: self._grammar(body.grammar) or self._schema(wanted, schema_field(body), marks))
        terms = lambda: forced and enforceable(forced, SchemaRoom(marks, "tools"))
        of_tool = Lazy(lambda: self._schema(terms(), "tools", marks, strict))

        def call(llm: Any, seed: int) -> Any:
            text = grammar()
            llm.cuts_characters = True
            llm.chat_handler = handler_of(llm)
            if tool := of_tool():
                llm.chat_handler = call_tool(llm.chat_handler, tool)
            return llm.create_chat_completion(**arguments, grammar=_parsed(text), seed=seed)

        return call

    # -- completions --------------------------------------------------------------------------------------

    def completion(self, body: CompletionBody) -> list[Choice]:
        """One choice for each prompt and each of n."""
        prompts = [self._prompt(prompt) for prompt in body.prompts()]
        arguments = self._sampling.of(body, None, body.default_tokens)
        logprobs = None if body.logprobs is False else body.logprobs
        n = body.n or 1
        most = max(MAX_PROMPTS, self.settings.most_choices)
        if len(prompts) * n > most:
            message = f"{len(prompts)} prompts with {n} choices each are more than {most} answers"
            raise wrong("prompt", f"{message}, the most of one request: send them in several")
        own_form = body.llama_form
        if body.max_tokens == 0:
            if not body.echo and not own_form:
                raise wrong(body.limit_field(), "with 0 the answer is the prompt, which needs echo: true")
            arguments["max_tokens"] = 0
        self.size.check_fits(body.suffix or "", "suffix")
        if body.suffix and not self._can_infill:
            raise wrong("suffix", "this model cannot fill in the middle: it has no tokens for that")
        if body.suffix is not None and body.echo and logprobs is not None:
            raise wrong("suffix", "echo with logprobs is not possible beside it; leave one of them out")
        sizes = [0] * len(prompts)
        if logprobs is not None:
            # every token has at least one byte
            size = lambda p: len(p.encode()) if isinstance(p, str) else len(p)
            echoed = [min(size(p), self.settings.n_ctx) if body.echo else 0 for p in prompts]
            n_choices, explicit = n * len(prompts), None if body.max_tokens is None else body.limit_field()
            sizes = [self._logprobs_size(arguments, logprobs, n_choices, explicit, e) for e in echoed]
            if sum(sizes) * n > MAX_LOGPROBS:
                raise wrong("prompt", "so many tokens with logprobs never fit: send fewer prompts at once")
        arguments |= {"echo": bool(body.echo), "suffix": body.suffix}
        arguments |= {"logprobs": logprobs, "stream": bool(body.stream), "details": own_form}
        if body.after_sampling() and logprobs is not None:
            arguments["post_sampling"] = True
        if body.json_schema is not None and body.grammar is not None:
            raise wrong("json_schema", "grammar constrains the answer too; give only one of them")
        marks = Marks(body.json_schema)
        schema = enforceable(body.json_schema, SchemaRoom(marks, "json_schema"))  # None stays None
        own = body.grammar
        grammar = Lazy(lambda: self._grammar(own) or self._schema(schema, "json_schema", marks, True))

        def call(llm: Any, prompt: Any, seed: int) -> Any:
            return complete(llm, prompt, **arguments, grammar=_parsed(grammar()), seed=seed)

        seed, timed, slot = self._sampling.seed(body), bool(body.timings_per_token), self._sampling.slot(body)
        return [
            Choice(p * n + i, p, functools.partial(call, prompt=prompt, seed=seed + i), sizes[p], timed, slot)
            for p, prompt in enumerate(prompts)
            for i in range(n)
        ]

    def _prompt(self, prompt: Any) -> Any:
        """A prompt as text or as token ids, once it is known that it may fit. Texts among ids become ids."""
        pieces = [prompt] if isinstance(prompt, str) else prompt
        self.size.check_count(len(pieces), "prompt")  # each text among ids has a token
        for text in (piece for piece in pieces if isinstance(piece, str)):
            self.size.check_fits(text, "prompt")
        if (most := max((t for t in pieces if isinstance(t, int)), default=0)) >= self.n_vocab:
            message = f"it has the token id {most}; the model's token ids are 0..{self.n_vocab - 1}"
            raise wrong("prompt", message)
        return prompt if isinstance(prompt, str) else self._sampling.ids(pieces)

    # -- both ---------------------------------------------------------------------------------------------

    def _logprobs_size(
        self, arguments: dict[str, Any], n_top: int, n: int, explicit: str | None, echoed: int = 0
    ) -> int:
        """Bytes that the logprobs of one choice of n may take.

        echoed: most prompt tokens that have logprobs too. explicit: the field with which the request limits
        its tokens; for None, max_tokens is reduced to what there is room for.
        """
        each = ENTRY_BYTES * (n_top + 1)
        most = max(1, MAX_LOGPROBS // (n * each) - echoed)
        if arguments["max_tokens"] > most and explicit:
            message = f"it is {arguments['max_tokens']}; with these logprobs the server allows at most {most}"
            raise wrong(explicit, f"{message}. Reduce {explicit}, n or the number of logprobs")
        arguments["max_tokens"] = min(arguments["max_tokens"], most)
        return each * (arguments["max_tokens"] + echoed)

    def _grammar(self, text: str | None) -> str | None:
        """A request's own grammar, checked in the sandbox. None for None."""
        if text is None:
            return None
        if "\0" in text:
            raise wrong("grammar", "it has a null character")
        self._checked.get(("check", text), lambda: self._ask_grammars("check", text, "grammar") or "")
        return text

    def _schema(self, schema: dict[str, Any] | None, param: str, marks: Marks, strict: bool = False) -> str:
        """The GBNF text of a JSON schema, converted and checked in the sandbox; "" for None.

        strict: what the grammar does not enforce is refused.
        """
        if schema is None:
            return ""
        if strict and (left := unenforced(schema, marks)):
            message = f"no grammar enforces {', '.join(left)}: leave them out, or set strict: false"
            raise wrong(param, message)
        made = self._converted(schema, param)
        if strict:
            refuse_incomplete(made["incomplete"], param)
        grammar = made["grammar"]  # it was checked as it is
        return grammar if put_numbers(grammar, marks) == grammar else self._readable(grammar, param, marks)

    def _converted(self, schema: dict[str, Any], param: str) -> dict[str, Any]:
        """Grammars.convert in the sandbox, whose results are kept."""
        text = json.dumps(schema)
        make = lambda: json.dumps(self._ask_grammars("convert", text, param))
        return json.loads(self._checked.get(("convert", text), make) or "{}")

    def _readable(self, grammar: str, param: str, marks: Marks) -> str:
        """A grammar of the chat library with the bounds of numbers, once a child could read it; "" for ""."""
        text = put_numbers(grammar, marks)
        if text:
            self._checked.get(("read", text), lambda: self._ask_grammars("read", text, param))
        return text

    def _ask_grammars(self, do: str, text: str, param: str) -> Any:
        refused = f"the {'grammar' if do == 'check' else 'schema'} was refused"
        return ask(self._grammars, param, refused, do=do, text=text)

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

    return LlamaGrammar.from_string(grammar, verbose=False) if grammar else None
