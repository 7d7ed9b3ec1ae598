"""EagleLlama: a llama_cpp.Llama that drafts. Its own context is the source of the tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..common import keywords
from ..common.loaded_files import loaded
from ..common.memory_size import check_memory, parse_size
from ..common.model_names import AUTO
from ..errors import EagleError, ErrorKind
from ..runtime.at_exit import close_at_exit
from ..runtime.binding import LlamaState
from ..runtime.machine import default_threads
from ..runtime.memory_use import MemoryUse, report
from ..runtime.params import NO_HEAD, EagleParams
from ..runtime.stats import EagleStats
from . import guards, model_costs, named, one_token, saved_state, snapshots
from .adapters import check_taken
from .calls import Calls
from .generation import GenerateCall, GeneratingLlama, reads_rows
from .local_tokens import LocalTokens
from .opening import open_engine
from .ownership import Ownership
from .processors import GuardedProcessors
from .scores import reserved_rows
from .text import ContextText, Text, has_window
from .usage import TokenUsage


class EagleLlama(named.NamedLlama, model_costs.MeasuredLlama, GeneratingLlama):
    """A faster `llama_cpp.Llama`: same arguments with the same defaults, same methods, and the
    text that this package's `Llama` gives. Another build's may differ where two tokens are nearly as likely.

    eagle: a head (GGUF) that was trained for this model; with None, drafts come from the text alone; with
    "auto", one is looked for. (eagle_path and head are other names for it.) Model and head may be hf: names.
    draft_model: a small model (GGUF) of the same vocabulary that drafts in a head's place. An object or a
    function, as Llama takes it, drafts by itself, and llama-cpp-python decodes.
    flash_attn: False as in Llama, because it changes the text where two tokens are nearly equally likely.
    None, as in the commands, the server and Batcher: on if the backend supports it. Trees need it.
    extract_layers: the target layers whose inputs the head reads, if its file names the wrong ones.
    n_max, n_min, p_min, tree, text: see EagleParams. By default the planner chooses the drafts by their cost
    and their acceptance rate on this machine. The costs are measured when a model is loaded with a head for
    the first time (two seconds), without a head when a text first repeats itself, or a grammar forces it;
    the cache keeps them.
    text=False without a head decodes plainly, with the same code.
    n_rs_seq: how many rows of a draft a hybrid target takes back by snapshots of its state; by default as
    many as cost little, up to 16, which a first load may measure for a second. Farther back it goes by
    checkpoints, which need no setting.
    text_memory: bytes (64M) for answers that later ones are drafted from; text_memory_prompts: prompts too.

    Raises EagleError HEAD_MISMATCH if the head belongs to another target, and BAD_ARGUMENT for a keyword that
    means one of these. It warns once about any other keyword that Llama would silently ignore. Some targets
    cannot be drafted for (architectures.md lists them; embedding=True): they are decoded plainly, with one
    warning.
    """

    _processors: GuardedProcessors | None = None  # those in _sampler

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        eagle: str | os.PathLike[str] | None = None,
        n_max: int | None = None,
        n_min: int = 0,
        p_min: float = 0.0,
        tree: Any = None,
        text: bool = True,
        text_memory: int | str = 0,
        text_memory_prompts: bool = False,
        extract_layers: Sequence[int] | None = None,
        logits_all: bool = False,
        flash_attn: bool | None = False,
        n_rs_seq: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._n_rs_seq, self._snapshots = snapshots.checked(n_rs_seq), snapshots.NOT_CHOSEN
        self._owner = Ownership()
        self._stack = contextlib.ExitStack()
        self.calls = Calls(self._closed_error)
        eagle_path = named.drafter(eagle, kwargs)
        ignored = sorted(kwargs.keys() - guards.LLAMA_NAMES)
        keywords.check_ignored(ignored, guards.LLAMA_NAMES, guards.CALL_NAMES)
        self._params = EagleParams(n_max, n_min, p_min, tree, text)
        keywords.check_unused(eagle_path, self._params, extract_layers, kwargs)
        guards.check_files(kwargs)
        self._memory = parse_size(text_memory), bool(text_memory_prompts)
        check_memory(*self._memory, text, kwargs.get("draft_model"))
        self._auto = eagle_path == AUTO
        model_path, self._eagle_path, self._params, self._extract_layers = named.find(
            model_path, eagle_path, self._params, extract_layers, whole=not kwargs.get("vocab_only")
        )
        self._files = loaded(model_path, self._eagle_path, kwargs.get("lora_path"))
        kwargs.update(default_threads(kwargs))
        self._text, self._used = Text(), TokenUsage()
        delegates = kwargs.get("draft_model") is not None or any(map(kwargs.get, ("embedding", "vocab_only")))
        try:
            all_rows = bool(logits_all and delegates)
            super().__init__(model_path, logits_all=all_rows, flash_attn=flash_attn, **kwargs)
            check_taken(self)
            if not delegates:
                self._begin(logits_all)
        except ValueError as e:
            self.close()
            raise guards.load_error(model_path, e, kwargs.get("n_gpu_layers")) from e
        except BaseException:
            self.close()  # the traceback holds this object, which would hold the model
            raise

    def _fit_context(self, params: Any) -> None:
        drafts = self._eagle_path is not None or self._params.text
        if self._n_rs_seq is not None:
            params.n_rs_seq = self._n_rs_seq
        elif drafts and params.n_rs_seq == 0:
            self._snapshots = model_costs.choose_snapshots(self, params)
            params.n_rs_seq = self._snapshots.n

    def _begin(self, logits_all: bool) -> None:
        # Logits are kept only where they are read. With False, llama-cpp-python would refuse logprobs.
        self._logits_all = logits_all or None  # type: ignore[assignment]
        scores = reserved_rows(self._n_ctx, self._n_vocab) if logits_all else self.scores
        close_at_exit(self)
        self._engine = open_engine(self, self._eagle_path, self._n_slots, self._extract_layers, self._auto)
        self._stack.callback(self._engine.close)
        # Llama allocates n_ctx ids as it was given; the context may have rounded n_ctx up.
        ids = np.zeros(self._n_ctx, np.intc)
        self._text = ContextText(self._engine, self._ctx, ids, scores, logits_all, self.n_batch)
        self._context.open_memory(*self._memory, self._stack)
        self.eagle_params = self._params
        snapshots.report(self._snapshots, self.verbose)
        report(self.memory(), self.verbose)
        model_costs.report_flash(self)

    def close(self) -> None:
        """Frees head and model; may be called twice. A running generation cannot continue."""
        if hasattr(self, "_stack"):  # false if the constructor was never entered
            with self._owner.call("close()"):
                self.calls.close()
                super().close()
                self._model = self._ctx = self.tokenizer_ = guards.Closed()  # type: ignore[assignment]

    def __enter__(self) -> EagleLlama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- settings and counters ----------------------------------------------------------------------------

    @property
    def eagle_params(self) -> EagleParams:
        """The drafting parameters; may be set between calls."""
        return self._params

    @eagle_params.setter
    def eagle_params(self, params: EagleParams) -> None:
        if not isinstance(params, EagleParams):
            raise EagleError(
                ErrorKind.BAD_ARGUMENT, f"eagle_params is {params!r:.80}, expected EagleParams(...)"
            )
        if self._eagle_path is None:
            params.check_no_head(NO_HEAD)
        if self._engine is not None:
            guards.check_trees(self._engine, params)
            if self._engine.drafter and params.n_max != 0 and self._engine.planner.costs is None:
                self._measure()
            elif params.from_text and self._engine.drafts_from_text and self._engine.planner.costs is None:
                model_costs.read(self)
            with self._held("setting eagle_params"):
                self._engine.set_capture(params.n_max != 0)
        self._params = params

    def _measure(self) -> None:
        """Gives the planner its costs, measured or from the cache. The context is empty afterwards."""
        with self._owner.call("measuring the costs of rows and drafts"):
            model_costs.measure(self)
            self.reset()

    @contextlib.contextmanager
    def _held(self, who: str) -> Iterator[None]:
        """Holds the context for a call that leaves the text as it is. Raises EagleError BUSY in a round."""
        with self._owner.hold(who):
            if self._engine is not None and self._engine.in_round:
                raise EagleError(
                    ErrorKind.BUSY,
                    f"{who} is not possible in a logits processor, where a round is under way: do it between"
                    " two tokens or in a stopping criterion",
                )
            yield

    @property
    def _context(self) -> ContextText:
        assert isinstance(self._text, ContextText), "llama-cpp-python decodes itself"
        return self._text

    @property
    def _delegates(self) -> bool:
        return self._engine is None

    def memory(self) -> MemoryUse:
        """The bytes that model and head take now; bounded, however long texts and drafts become.

        Raises EagleError BUSY during another thread's step.
        """
        with self._owner.hold("memory()"):
            return self.engine.memory()

    @property
    def stats(self) -> EagleStats:
        """Counters of all generations since load or stats.reset()."""
        return self._engine.stats if self._engine is not None else EagleStats()

    # -- evaluation ---------------------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens after the present text, in batches of n_batch."""
        with self._owner.call("eval()"):
            if self._engine is None:
                n = self.n_tokens
                if not has_window(self._ctx, n):  # llama-cpp-python has cut the text back, and does not ask
                    self.n_tokens = 0
                    super().eval(self.input_ids[:n].tolist())
                super().eval(tokens)
            else:
                self._context.rows = None
                self._context.eval(tokens)

    def reset(self) -> None:
        """Forgets the text."""
        with self._owner.call("reset()"):
            super().reset()  # type: ignore[no-untyped-call]  # llama-cpp-python's
            if self._engine is not None:
                self._context.settle()  # an image's rows may follow, and begin at 0

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """Same as Llama.create_chat_completion.

        A chat handler decodes images by itself. Meanwhile nobody else gets the context.
        """
        if self.chat_handler is None:
            return super().create_chat_completion(*args, **kwargs)
        with self._owner.call("create_chat_completion()"):
            return super().create_chat_completion(*args, **kwargs)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Same as Llama.embed."""
        with self._owner.call("embed()"):
            return super().embed(*args, **kwargs)

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """Same as Llama.sample. After a generation it uses that generation's sampler, whatever is asked."""
        with self._owner.call("sample()"):
            if self._engine is None:
                return int(super().sample(*args, **kwargs))
            asked = one_token.arguments(self, *args, **kwargs)
            used = self._sampler, self._processors
            return one_token.sample(self._context, self._ctx.ctx, used, self._samplers, asked)

    def _samplers(self, arguments: dict[str, Any]) -> tuple[Any, GuardedProcessors | None]:
        """A sampler of these arguments of generate(), and its processors."""
        processors = self._guarded(arguments["logits_processor"])
        return self._new_sampler(arguments, processors), processors

    def _guarded(self, processors: Sequence[Any] | None) -> GuardedProcessors | None:
        text = self._context
        return GuardedProcessors(processors, lambda: text.ids) if processors is not None else None

    def _tokens_from(self, call: GenerateCall) -> LocalTokens:
        a = call.arguments
        if call.options.record == "none" and reads_rows(call.stopping):
            call.options.record = "last"
        sampler, processors = self._samplers(a)
        last = self._sampler
        self._sampler = sampler
        self._processors = processors
        if last is not None:
            last.close()  # it refers to itself: else only the collector of cycles would free it
        return LocalTokens(
            self._context,
            call.prompt,
            self._params_for(bool(a["logits_processor"]), self.engine),
            sampler,
            processors,
            self._used,
            functools.partial(self._owner.release, call.claim),
            call.options,
            reset=a["reset"],
            verbose=self.verbose,
        )

    # -- state --------------------------------------------------------------------------------------------

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        return saved_state.identity(self, self._files)

    def save_state(self) -> LlamaState:
        """The state of target and head, with logits_all the scores too. A running generation can continue."""
        with self._held("save_state()"):
            if self._engine is None:
                return super().save_state()
            return saved_state.save(self._context, self._seed, self._identity)

    def load_state(self, state: LlamaState) -> None:
        """Restores save_state(). The state of a plain Llama, which has none of a head, works too."""
        with self._owner.call("load_state()"):
            if self._engine is None:
                super().load_state(state)
            else:
                saved_state.load(self._context, state, self._identity)
                self._seed = state.seed

    def __getstate__(self) -> dict[str, Any]:
        ours = {f.name: getattr(self._params, f.name) for f in dataclasses.fields(self._params)}
        ours.update(
            eagle_path=self._eagle_path,
            extract_layers=self._extract_layers,
            text_memory=self._memory[0],
            text_memory_prompts=self._memory[1],
            n_rs_seq=self._n_rs_seq,
            logits_all=bool(self._logits_all),
        )
        return {**super().__getstate__(), **ours}
