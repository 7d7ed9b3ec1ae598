"""openai-agents: its runner calls tools, gives their results back, and reads typed answers and streams."""

import asyncio

import openai
import pytest
from client_tools import OSLO, RIVERS, WHOLE, call_of, written
from pydantic import BaseModel, Field

agents = pytest.importorskip("agents", reason="needs openai-agents, of the extra `clients`")

agents.set_tracing_disabled(True)
called = []
ANSWER = "It rains, and the train leaves at nine."


@agents.function_tool
def weather(city: str, day: int) -> str:
    """The weather of a place."""
    called.append("weather")
    return "Rain."


@agents.function_tool
def train(city: str) -> str:
    """The next train to a place."""
    called.append("train")
    return "At nine."


@agents.function_tool
def hotel(city: str) -> str:
    """A hotel in a place."""
    called.append("hotel")
    return "The Grand."


KINDS = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}


def model_of(server, kind):
    """The server behind either of OpenAI's APIs."""
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return KINDS[kind](model="any", openai_client=client)


@pytest.fixture(params=KINDS)
def model(server, request):
    return model_of(server, request.param)


class Answers(agents.AgentHooks):
    """After a tool's result the model writes an answer: it was trained for no tools, and may never end."""

    async def on_tool_end(self, context, agent, tool, result):
        agent.model_settings = agent.model_settings.resolve(agents.ModelSettings(extra_body=written(ANSWER)))


def agent_of(model, tools=(), chosen=None, extra=None, **more):
    settings = agents.ModelSettings(
        temperature=0,
        max_tokens=WHOLE,
        tool_choice=chosen,
        parallel_tool_calls=False if chosen else None,
        extra_body=extra,
    )
    given = {"instructions": "Be brief.", "tools": list(tools), "hooks": Answers(), **more}
    return agents.Agent("guide", model=model, model_settings=settings, **given)


def run(agent, text=OSLO):
    called.clear()
    return asyncio.run(agents.Runner.run(agent, text, max_turns=3))


@pytest.mark.parametrize("chosen, names", [("train", {"train"}), ("required", {"weather", "train", "hotel"})])
def test_a_forced_tool_runs_and_its_result_is_answered(model, chosen, names):
    """In the second turn the runner sends `auto`."""
    result = run(agent_of(model, (weather, train, hotel), chosen))
    assert len(called) == 1 and called[0] in names and result.final_output == ANSWER
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]


@pytest.mark.parametrize("kind", KINDS)
def test_auto_runs_what_the_model_calls(servers, kind):
    call = written(call_of("weather", city="Oslo", day=3))
    result = run(agent_of(model_of(servers["still"], kind), (weather, train), extra=call))
    assert called == ["weather"] and result.final_output == ANSWER


def test_auto_without_a_call(model):
    result = run(agent_of(model, (weather, train), extra=written(ANSWER)))
    assert called == [] and result.final_output == ANSWER


class Digit(BaseModel):
    n: int = Field(ge=0, le=9)


def test_a_typed_answer(model):
    assert 0 <= run(agent_of(model, output_type=Digit), "Say 1000.").final_output.n <= 9


def test_a_stream(model):
    async def told():
        result = agents.Runner.run_streamed(agent_of(model, extra=written(ANSWER)), RIVERS)
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        return "".join(deltas), result.final_output

    assert asyncio.run(told()) == (ANSWER, ANSWER)
