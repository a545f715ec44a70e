"""Tool calls through openai-python: whole and streamed, the choice of tools, results sent back."""

import json

import pytest

from conftest import MODEL

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a specific location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location"],
        },
    },
}
TIMER = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "description": "Start a timer",
        "parameters": {
            "type": "object",
            "properties": {"minutes": {"type": "integer"}, "label": {"type": "string"}},
            "required": ["minutes"],
        },
    },
}
QUESTION = [{"role": "user", "content": "What's the weather in Paris?"}]


@pytest.fixture
def call(client):
    def call(messages, **options):
        options = dict(temperature=0, tools=[WEATHER, TIMER]) | options
        return client.chat.completions.create(model=MODEL, messages=messages, **options)

    return call


def test_call_and_result(call):
    choice = call(QUESTION).choices[0]
    assert choice.finish_reason == "tool_calls"
    tool_call = choice.message.tool_calls[0]
    assert len(choice.message.tool_calls) == 1
    assert (tool_call.type, tool_call.function.name) == ("function", "get_weather")
    assert json.loads(tool_call.function.arguments) == {"location": "Paris"}
    result = {"role": "tool", "tool_call_id": tool_call.id, "content": '{"temperature": 21, "condition": "sunny"}'}
    answer = call(QUESTION + [choice.message.model_dump(exclude_none=True), result]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content == "Result from get_weather: temperature is 21, condition is sunny."


def test_arguments_keep_their_types(call):
    message = call([{"role": "user", "content": "Set a timer for 12 minutes labeled bread."}]).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"minutes": 12, "label": "bread"}


def test_two_calls(call):
    text = "What's the weather in Paris? Also: Set a timer for 5 minutes."
    tool_calls = call([{"role": "user", "content": text}]).choices[0].message.tool_calls
    assert [tool_call.function.name for tool_call in tool_calls] == ["get_weather", "set_timer"]
    assert len({tool_call.id for tool_call in tool_calls}) == 2


@pytest.mark.parametrize("thinking", ["disabled", "enabled"])
def test_streamed_call_equals_the_whole(call, thinking):
    extra = {"thinking": {"type": thinking}}
    whole = call(QUESTION, extra_body=extra).choices[0]
    names, ids, arguments, text, reasons = [], [], "", "", []
    for chunk in call(QUESTION, stream=True, extra_body=extra):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for delta in choice.delta.tool_calls or []:
                assert delta.index == 0
                if delta.id:
                    ids.append(delta.id)
                    assert delta.type == "function"
                    names.append(delta.function.name)
                arguments += delta.function.arguments or ""
    assert (names, reasons, len(ids)) == (["get_weather"], ["tool_calls"], 1)
    assert arguments == whole.message.tool_calls[0].function.arguments
    assert text == (whole.message.content or "")
    # The markup of calls is never content.
    assert "DSML" not in text


def test_stream_helper_assembles_the_call(client):
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, temperature=0, tools=[WEATHER]) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"location": "Paris"}


def test_tool_choice(call):
    assert not call(QUESTION, tool_choice="none").choices[0].message.tool_calls
    required = call(QUESTION, tool_choice="required").choices[0]
    assert (required.finish_reason, required.message.tool_calls[0].function.name) == ("tool_calls", "get_weather")
    named = call(QUESTION, tool_choice={"type": "function", "function": {"name": "get_weather"}}).choices[0]
    # As OpenAI's API: a named function ends with "stop".
    assert (named.finish_reason, named.message.tool_calls[0].function.name) == ("stop", "get_weather")


def test_none_leaves_the_tools_out_of_the_prompt(call):
    without = call(QUESTION, tools=[]).usage.prompt_tokens
    assert call(QUESTION, tool_choice="none").usage.prompt_tokens == without
    assert call(QUESTION).usage.prompt_tokens > without + 100


def test_no_tool_fits(call):
    choice = call([{"role": "user", "content": "Delete the file castle.txt."}], tools=[WEATHER]).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content == "None of the available tools can do that."
