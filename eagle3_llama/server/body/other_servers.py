"""Fields of other servers that are not taken: each is refused with the name of what there is here instead."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel


def _else(hint: str, *off: Any) -> Any:
    """A field that is not taken, and why. off: values that change nothing, as clients send all fields."""

    def check(value: Any) -> None:
        if value is not None and not any(type(value) is type(one) and value == one for one in off):
            raise ValueError(hint)

    return AfterValidator(check)


_PATTERN = "give it as `grammar`, in GBNF, or as the `pattern` of a text in `json_schema`"
_GBNF = "the name here is `grammar`, in GBNF"
_LEAST = "no answer here has a least number of tokens: leave it out; `ignore_eos` goes on to max_tokens"
_STARTED = "this is set when the server is started: see `eagle3-llama serve --help`"
_THOUGHTS = "thoughts are always in `reasoning_content`"


class OtherServers(BaseModel):
    """Names of vLLM, SGLang, Ollama, TGI and llama.cpp's server, and OpenAI's of old."""

    guided_regex: Annotated[Any, _else(_PATTERN)] = None
    guided_grammar: Annotated[Any, _else(_GBNF)] = None
    guided_whitespace_pattern: Annotated[
        Any, _else("a grammar allows blanks where JSON does: leave it out")
    ] = None
    structured_outputs: Annotated[
        Any,
        _else(
            "its `json` is `json_schema` here, its `choice` `guided_choice`, its `grammar` `grammar` in GBNF"
        ),
    ] = None
    regex: Annotated[Any, _else(_PATTERN)] = None
    ebnf: Annotated[Any, _else(_GBNF)] = None
    min_tokens: Annotated[Any, _else(_LEAST, 0)] = None
    min_new_tokens: Annotated[Any, _else(_LEAST, 0)] = None
    max_new_tokens: Annotated[Any, _else("the name here is `max_tokens`")] = None
    stop_token_ids: Annotated[Any, _else("name the texts of these tokens in `stop`", [])] = None
    bad_words: Annotated[Any, _else("a `logit_bias` of -100 keeps a token out", [])] = None
    allowed_token_ids: Annotated[Any, _else("a `grammar` says which texts are allowed", [])] = None
    skip_special_tokens: Annotated[Any, _else("special tokens are never in the text: leave it out", True)] = (
        None
    )
    spaces_between_special_tokens: Annotated[
        Any, _else("special tokens are never in the text: leave it out", True, False)
    ] = None
    include_stop_str_in_output: Annotated[
        Any, _else("the text ends before the `stop` string: leave it out", False)
    ] = None
    use_beam_search: Annotated[Any, _else("there is no beam search: leave it out", False)] = None
    length_penalty: Annotated[Any, _else("there is no beam search: leave it out", 1.0, 1, 0, 0.0)] = None
    early_stopping: Annotated[Any, _else("there is no beam search: leave it out", False)] = None
    prompt_logprobs: Annotated[
        Any, _else("`echo` with `logprobs` of /v1/completions has those of the prompt", 0)
    ] = None
    truncate_prompt_tokens: Annotated[Any, _else("no prompt is cut here: send a shorter one", -1)] = None
    return_token_ids: Annotated[Any, _else("`return_tokens` of /completion has the tokens' ids", False)] = (
        None
    )
    include_reasoning: Annotated[Any, _else(_THOUGHTS, True)] = None
    separate_reasoning: Annotated[Any, _else(_THOUGHTS, True)] = None
    stream_reasoning: Annotated[Any, _else(_THOUGHTS, True)] = None
    reasoning_format: Annotated[Any, _else(_THOUGHTS, "auto", "deepseek")] = None
    reasoning: Annotated[
        Any, _else("the name of its effort is `reasoning_effort`, which is `none` for no thoughts")
    ] = None
    priority: Annotated[Any, _else("requests are answered in turn, by client: leave it out", 0)] = None
    request_id: Annotated[Any, _else("send it as the header X-Request-Id")] = None
    chat_template: Annotated[
        Any, _else("--chat-template-file sets the template when the server is started")
    ] = None
    documents: Annotated[
        Any, _else("give them as a variable of the template, in `chat_template_kwargs`", [])
    ] = None
    options: Annotated[
        Any,
        _else(
            "Ollama's options are fields of the request here: `temperature`, `top_k`, `seed` and others;"
            " num_predict is `max_tokens`, and num_ctx is --n-ctx of the server",
            {},
        ),
    ] = None
    num_ctx: Annotated[Any, _else("--n-ctx sets the context's size when the server is started")] = None
    num_predict: Annotated[Any, _else("the name here is `max_tokens`, or `n_predict`")] = None
    num_keep: Annotated[Any, _else("no text is cut to make room: leave it out", 0)] = None
    num_gpu: Annotated[Any, _else(_STARTED)] = None
    num_thread: Annotated[Any, _else(_STARTED)] = None
    num_batch: Annotated[Any, _else(_STARTED)] = None
    tfs_z: Annotated[Any, _else("this server has no tail-free sampling: leave it out", 1, 1.0)] = None
    top_a: Annotated[Any, _else("this server has no top-a sampling: leave it out", 0, 0.0)] = None
    format: Annotated[
        Any, _else('the name here is `response_format`, such as {"type": "json_object"}', "")
    ] = None
    system: Annotated[Any, _else("send it as a message with the role `system`", "")] = None
    template: Annotated[
        Any, _else("--chat-template-file sets the template when the server is started", "")
    ] = None
    raw: Annotated[Any, _else("/v1/completions takes a prompt without a template", False)] = None
    functions: Annotated[Any, _else("OpenAI's older form of `tools`: send these", [])] = None
    function_call: Annotated[Any, _else("OpenAI's older form of `tool_choice`: send this")] = None
    images: Annotated[Any, _else("this server reads text alone: leave it out", [])] = None
