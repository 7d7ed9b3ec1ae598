"""The body of POST /v1/chat/completions: messages, tools and the format of the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .fields import Body, Echo, Object, Sampling, Word, length, text_alone
from .histories import READABLE

MAX_MESSAGES, MAX_PARTS = 4096, 4096
MAX_TOOLS = 2048  # agents with many MCP servers send hundreds

Name = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(Echo):
    type: Literal["text"]
    text: str


Text = Annotated[TextPart, text_alone("text")]
Texts = Annotated[list[Text], length(MAX_PARTS)]


class FunctionCall(Echo):
    name: Name
    arguments: str


class ToolCall(Echo):
    id: Word
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Echo):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Texts | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], length(MAX_TOOLS)] | None = None
    tool_call_id: Word | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of the same
    # a client sends these back as it got them; the model does not see them
    refusal: str | None = None
    annotations: Annotated[list[Object], length(MAX_PARTS)] | None = None
    audio: None = None


class Function(Echo):
    name: Name
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Echo):
    type: Literal["function"]
    function: Function


class Named(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: Named


class Allowed(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], length(MAX_TOOLS, 1)]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class TextFormat(Body):
    type: Literal["text"]


class JsonObject(Body):
    type: Literal["json_object"]
    schema_: Object | None = Field(None, alias="schema")


class JsonSchema(Body):
    name: Name | None = None
    schema_: Object | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class Prediction(Body):
    type: Literal["content"]
    content: str | Annotated[list[Text], length(MAX_PARTS)]


class Thinking(Echo):
    """As Anthropic's API has it, and clients of GLM and DeepSeek send it in chats."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = Field(None, ge=0, le=1 << 24)


Format = Annotated[TextFormat | JsonObject | JsonSchemaFormat, Field(discriminator="type")]


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], length(MAX_MESSAGES, 1), READABLE]
    max_completion_tokens: int | None = Field(None, ge=1, description="OpenAI's newer name for max_tokens")
    tools: Annotated[list[Tool], length(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    response_format: Format | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20, description="needs logprobs")
    n_probs: int | None = Field(None, ge=0, le=20, description="llama-server's name of both of these")
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    reasoning_effort: Word | None = Field(None, description="a variable of the template; none: no thoughts")
    chat_template_kwargs: Object | None = Field(
        None, description="variables of the template; enable_thinking: false asks for no thoughts"
    )
    thinking_budget_tokens: int | None = Field(
        None, ge=-1, le=1 << 24, description="most tokens of thoughts, which then end; -1: any number"
    )
    continue_final_message: bool | None = Field(None, description="the answer goes on with the last message")
    add_generation_prompt: bool | None = Field(
        None, description="the opposite of continue_final_message, which false stands for in an answer begun"
    )
    # other names of what asks for thoughts, or for none
    enable_thinking: bool | None = Field(None, description="the same variable of the template")
    think: bool | Literal["low", "medium", "high"] | None = Field(
        None, description="Ollama's: enable_thinking, or reasoning_effort"
    )
    thinking: Thinking | None = Field(None, description="enable_thinking, and thinking_budget_tokens")
    prompt_cache_options: Object | None = Field(None, description="no effect")
    verbosity: Word | None = None
    modalities: Annotated[list[Literal["text"]], length(1)] | None = None

    @model_validator(mode="after")
    def _take_n_probs(self) -> ChatBody:
        if self.n_predict == 0:
            raise ValueError("n_predict: it is 0, but the answer of a chat has a token at least")
        if self.n_probs and self.logprobs is None:
            self.logprobs, self.top_logprobs = True, self.n_probs
        if self.n_predict is None and self.max_tokens and self.max_completion_tokens:  # both hold
            self.max_tokens = min(self.max_tokens, self.max_completion_tokens)
            self.max_completion_tokens = self.max_tokens
        return self

    @model_validator(mode="after")
    def _take_thinking(self) -> ChatBody:
        """Raises ValueError for two fields that contradict each other."""
        for field, value in (("think", self.think), ("thinking", self.thinking)):
            if isinstance(value, Thinking):
                self._agree(field, "thinking_budget_tokens", value.budget_tokens)
                value = value.type != "disabled"
            if isinstance(value, str):
                self._agree(field, "reasoning_effort", value)
            elif value is not None:
                self._agree(field, "enable_thinking", value)
        if self.enable_thinking is not None:
            variables = self.chat_template_kwargs or {}
            if variables.get("enable_thinking", self.enable_thinking) is not self.enable_thinking:
                raise ValueError("enable_thinking: it differs from that of chat_template_kwargs")
            self.chat_template_kwargs = {**variables, "enable_thinking": self.enable_thinking}
        return self

    def _agree(self, field: str, ours: str, value: Any) -> None:
        if value is not None and getattr(self, ours) not in (None, value):
            raise ValueError(f"{field}: it differs from {ours}; give only one of them")
        setattr(self, ours, getattr(self, ours) if value is None else value)
