"""What tests of tools and official clients ask for, and what makes the demo model write a given text."""

import json

import pytest

RIVERS = "Name three rivers."
OSLO = "What is it like in Oslo?"
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "day": {"type": "integer", "maximum": 31}},
    "required": ["city", "day"],
    "additionalProperties": False,
}
NAMES = ("weather", "train", "hotel")
DIGIT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
WHOLE = 300  # tokens that a call has room in


def openai_client(server, key="none"):
    """OpenAI's. Its package takes a second to import, which is not done to collect tests."""
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def refused(call, status=400):
    """The error that OpenAI's client raises, as the server sent it."""
    import openai

    with pytest.raises(openai.APIStatusError) as e:
        call()
    assert e.value.status_code == status, e.value
    return e.value.body


def tool(name, parameters=PLACE, **more):
    """A tool of chat completions."""
    about = {"name": name, "description": f"Looks up the {name}.", "parameters": parameters, **more}
    return {"type": "function", "function": about}


TOOLS = [tool(name) for name in NAMES[:2]]
NAMED = {"type": "function", "function": {"name": "train"}}


def call_of(name, **arguments):
    """A call as Qwen3 writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def written(text):
    """The field that makes the model write this text: it was trained for neither tools nor thoughts."""
    return {"grammar": f"root ::= {json.dumps(text)}"}


def fits(arguments):
    """True if the arguments of a call, as an object, follow PLACE."""
    return set(arguments) == {"city", "day"} and isinstance(arguments["city"], str) and arguments["day"] <= 31
