"""The body of POST /v1/responses: items of a conversation, flat tools, and the format of the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from ..body.chat import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Name, Thinking
from ..body.fields import Body, Echo, Generation, Object, Word, length, text_alone
from ..body.histories import READABLE
from .foreign_items import of_ours
from .tools import ResponseTool, ToolChoice, complete, one_of

LOGPROBS = "message.output_text.logprobs"
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
    "additional_tools": ("tools",),
}


_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


class Part(Echo):
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> Part:
        return complete(self, ("refusal" if self.type == "refusal" else "text",))


Parts = Annotated[list[Annotated[Part, text_alone(*_PARTS)]], length(MAX_PARTS)]


class ResponseItem(Echo):
    """A message, a call, its result, or thoughts. `type` says which of the fields must be there."""

    type: Annotated[
        Literal[
            "message",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
            "reasoning",
            "additional_tools",
        ],
        one_of(tuple(_NEEDED), "an item of this type"),
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    call_id: Word | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None
    status: Word | None = None
    tools: Annotated[list[ResponseTool], length(MAX_TOOLS)] | None = Field(
        None, description="that can be called from here on, of additional_tools and of what found them"
    )

    @model_validator(mode="before")
    @classmethod
    def _in_our_words(cls, item: Any) -> Any:
        return of_ours(item)

    @model_validator(mode="after")
    def _whole(self) -> ResponseItem:
        return complete(self, _NEEDED[self.type])


_FORMATS = ("text", "json_object", "json_schema")


class Format(Body):
    type: Annotated[Literal["text", "json_object", "json_schema"], one_of(_FORMATS, "this format")]
    name: Name | None = None
    schema_: Object | None = Field(None, alias="schema", description="of json_schema")
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _whole(self) -> Format:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError("json_schema needs name and schema")
        return self


class TextConfig(Body):
    format: Format | None = None
    verbosity: Word | None = None


class Reasoning(Body):
    effort: Word | None = Field(None, description="a variable of the template; none: no thoughts")
    summary: Word | None = None
    generate_summary: Word | None = None
    context: Word | None = None
    mode: Word | None = None


def _no_background(value: bool | None) -> bool | None:
    if value:
        raise ValueError("this server answers no requests in the background: leave it out, or use stream")
    return value


def _no_conversation(value: Any) -> Any:
    if value is not None:
        raise ValueError("this server keeps no conversations: name the last answer by previous_response_id")
    return value


def _no_prompt(value: Any) -> Any:
    if value is not None:
        raise ValueError("this server has no stored prompts: use instructions and input")
    return value


Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class ResponseBody(Generation):
    """POST /v1/responses."""

    input: Annotated[str | Annotated[list[ResponseItem], length(MAX_MESSAGES)], READABLE] = ""
    instructions: str | None = Field(None, description="a system message before the input")
    previous_response_id: Word | None = Field(
        None, description="a stored answer, which the input goes on from"
    )
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Annotated[list[ResponseTool], length(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Include], length(16)] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: Object | None = Field(
        None, description="variables of the template; enable_thinking: false asks for no thoughts"
    )
    enable_thinking: bool | None = Field(None, description="the same as in chat_template_kwargs")
    thinking: Thinking | None = Field(None, description="type disabled: the same as enable_thinking: false")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="no effect: a prompt that does not fit is refused"
    )
    max_tool_calls: int | None = Field(None, ge=0, description="no effect: the client runs the tools")
    client_metadata: Object | None = Field(None, description="no effect, as prompt_cache_options")
    prompt_cache_options: Object | None = None
    background: Annotated[bool | None, AfterValidator(_no_background)] = None
    conversation: Annotated[Word | Object | None, AfterValidator(_no_conversation)] = None
    prompt: Annotated[Object | None, AfterValidator(_no_prompt)] = None

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
