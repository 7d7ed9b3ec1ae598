"""OpenAI's client: the Responses API."""

import json

import openai
import pytest
from client_tools import NAMES, OSLO, PLACE, RIVERS, WHOLE, fits, written

TOOLS = [
    {"type": "function", "name": name, "description": f"Looks up the {name}.", "parameters": PLACE}
    for name in NAMES
]


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client, asked=RIVERS, **more):
    """The response, which the client's own sum of the stream repeats."""
    given = {"model": "any", "input": asked, "max_output_tokens": WHOLE, "temperature": 0, **more}
    whole = client.responses.create(**given)
    with client.responses.stream(**given) as stream:
        final = stream.get_final_response() if [e.type for e in stream] else None
    assert final.output_text == whole.output_text and final.status == whole.status
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    return whole


def test_responses_and_streams(client):
    whole = ask(client, instructions="Be brief.", extra_body=written("The Nile, and two more."))
    assert whole.output_text == "The Nile, and two more." and whole.status == "completed"
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens


@pytest.mark.parametrize("name", ["", *NAMES])
def test_tools_are_enforced(client, name):
    """With "" any of the three."""
    chosen = {"type": "function", "name": name} if name else "required"
    more = {"tools": TOOLS, "parallel_tool_calls": False}
    (call,) = ask(client, OSLO, tool_choice=chosen, **more).output
    assert call.name in ((name,) if name else NAMES) and fits(json.loads(call.arguments))


def test_previous_response(client):
    first = ask(client, extra_body=written("The Nile."))
    then = client.responses.create(
        model="any", input=OSLO, previous_response_id=first.id, max_output_tokens=8, temperature=0
    )
    echoed = [{"role": "user", "content": RIVERS}, *first.output, {"role": "user", "content": OSLO}]
    whole = client.responses.create(model="any", input=echoed, max_output_tokens=8, temperature=0)
    assert then.output_text == whole.output_text and then.usage.input_tokens == whole.usage.input_tokens


def test_custom_tools(client):
    """A tool whose input is a text, called, and answered."""
    patch = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
    said = json.dumps({"name": "apply_patch", "arguments": {"input": '*** "a.py"\n'}})
    forms = said, f"<tool_call>\n{said}\n</tool_call>"  # one is the template's
    made = [item for form in forms for item in ask(client, tools=[patch], extra_body=written(form)).output]
    (called,) = [item for item in made if item.type == "custom_tool_call"]
    assert (called.name, called.input) == ("apply_patch", '*** "a.py"\n')
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "x"}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."}
    asked = [{"role": "user", "content": RIVERS}, call, result]
    assert ask(client, asked, tools=[patch], extra_body=written("So be it.")).output_text == "So be it."
