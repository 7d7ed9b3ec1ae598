"""LangChain's ChatOpenAI: streams, chosen tools, typed answers by each of its methods."""

import pytest
from client_tools import DIGIT, NAMES, OSLO, RIVERS, TOOLS, WHOLE, fits, tool
from pydantic import BaseModel, Field

langchain_openai = pytest.importorskip(
    "langchain_openai", reason="needs langchain-openai, of the extra `clients`"
)


@pytest.fixture(params=["chat", "responses"])
def model(server, request):
    """The server behind either of OpenAI's APIs."""
    return langchain_openai.ChatOpenAI(
        model="any",
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=WHOLE,
        max_retries=0,
        use_responses_api=request.param == "responses",
    )


def test_answers_and_streams(model):
    short = model.model_copy(update={"max_tokens": 16})
    text = short.invoke(RIVERS).text
    assert text and "".join(chunk.text for chunk in short.stream(RIVERS)) == text


@pytest.mark.parametrize("chosen, names", [("train", ("train",)), ("any", NAMES[:2])])
def test_chosen_tools_and_their_results(model, chosen, names):
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = model.bind_tools(TOOLS, tool_choice=chosen, parallel_tool_calls=False)
    message = bound.invoke(OSLO)
    (call,) = message.tool_calls
    assert call["name"] in names and fits(call["args"])
    told = None
    for chunk in bound.stream(OSLO):
        told = chunk if told is None else told + chunk
    assert [(c["name"], c["args"]) for c in told.tool_calls] == [(call["name"], call["args"])]
    back = [HumanMessage(OSLO), message, ToolMessage("Rain.", tool_call_id=call["id"])]
    assert model.bind_tools(TOOLS, tool_choice="none").model_copy().invoke(back).text


class Digit(BaseModel):
    """A digit."""

    n: int = Field(ge=0, le=9)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("kind", [Digit, {"title": "Digit", "description": "A digit.", **DIGIT}])
def test_typed_answers(model, method, kind):
    found = model.with_structured_output(kind, method=method).invoke("Say 1000.")
    assert 0 <= (found["n"] if isinstance(found, dict) else found.n) <= 9


def test_any_with_one_tool(model):
    (call,) = model.bind_tools([tool("hotel")], tool_choice="any").invoke(OSLO).tool_calls[:1]
    assert call["name"] == "hotel" and fits(call["args"])
