"""litellm as a proxy uses it: chats, streams, tools, and messages sent back in both of its forms."""

import json
import os

import pytest
from client_tools import OSLO, RIVERS, TOOLS, WHOLE, fits

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it loads prices from the net
litellm = pytest.importorskip("litellm", reason="needs litellm, of the extra `clients`")

pytestmark = pytest.mark.filterwarnings("ignore")  # of litellm's own use of pydantic
litellm.telemetry = False
litellm.suppress_debug_info = True


@pytest.fixture
def ask(server):
    def asked(messages=RIVERS, **more):
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return litellm.completion(
            model="openai/any",
            api_base=f"{server.url}/v1",
            api_key="none",
            messages=given,
            num_retries=0,
            **{"max_tokens": 16, "temperature": 0, **more},
        )

    return asked


def test_chats_and_streams(ask):
    whole = ask()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_required_tools_come_back_as_objects_and_as_dictionaries(ask):
    more = {"tools": TOOLS, "max_tokens": WHOLE, "parallel_tool_calls": False}
    message = ask(OSLO, tool_choice="required", **more).choices[0].message
    (call,) = message.tool_calls
    assert fits(json.loads(call.function.arguments))
    chunks = list(ask(OSLO, tool_choice="required", stream=True, **more))
    (told,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert told.function.arguments == call.function.arguments and told.function.name == call.function.name
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    user = {"role": "user", "content": OSLO}
    none = {"tools": TOOLS, "tool_choice": "none"}
    answers = [ask([user, echo, result], **none) for echo in (message, message.model_dump())]
    assert len({a.choices[0].message.content for a in answers}) == 1
    assert answers[0].choices[0].message.content
