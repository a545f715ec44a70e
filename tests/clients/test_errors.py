"""Errors in OpenAI's shape: what is refused, with which status, naming the field."""

import httpx
import openai
import pytest

from conftest import MODEL

MESSAGES = [{"role": "user", "content": "ping"}]


def test_wrong_fields_name_themselves(client):
    cases = [
        ("temperature", dict(temperature=3)),
        ("temperature", dict(temperature=-1)),
        ("top_p", dict(top_p=0)),
        ("n", dict(n=0)),
        ("stop", dict(stop="")),
        ("logit_bias", dict(logit_bias={"0": 101})),
        ("logit_bias", dict(logit_bias={"999999": 1})),
        ("top_logprobs", dict(top_logprobs=2)),
        ("stream_options", dict(stream_options={"include_usage": True})),
        ("tool_choice", dict(tool_choice="required")),
        ("reasoning_effort", dict(reasoning_effort="enormous")),
        ("response_format", dict(response_format={"type": "json_object"})),
        ("min_p", dict(extra_body={"min_p": 2})),
        ("structured_outputs", dict(extra_body={"structured_outputs": {"json": {}}})),
    ]
    for field, options in cases:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, **options)
        error = refused.value
        assert error.status_code == 400
        assert field in (error.param or "") or field in error.message, (field, error.message)


def test_effort_error_lists_the_values(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, reasoning_effort="enormous")
    for value in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        assert value in refused.value.message


def test_context_length(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=[5] * 70_000, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"
    assert "65536" in refused.value.message


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-x", messages=MESSAGES)
    assert refused.value.code == "model_not_found"
    assert "gpt-x" in refused.value.message


def test_bodies_that_are_no_request(server):
    url = f"{server.url}/v1/chat/completions"
    json_type = {"content-type": "application/json"}
    cases = [
        (httpx.post(url, content=b"{", headers=json_type), 400),
        (httpx.post(url, content=b"[1]", headers=json_type), 400),
        (httpx.post(url, content=b"\xff\xfe", headers=json_type), 400),
        (httpx.post(url, json={"model": MODEL}), 400),
        (httpx.post(url, json={"model": MODEL, "messages": []}), 400),
        (httpx.post(url, json={"model": MODEL, "messages": "hi"}), 400),
        (httpx.get(url), 405),
        (httpx.get(f"{server.url}/v1/nothing"), 404),
    ]
    for response, status in cases:
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert isinstance(error["message"], str) and error["message"]
        assert error["type"]


def test_keys(start):
    server = start("--api-key", "first", "second")
    assert httpx.get(f"{server.url}/health").status_code == 200
    for key in ("first", "second"):
        assert server.client(api_key=key).models.list().data[0].id == MODEL
        assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": key}).status_code == 200
    with pytest.raises(openai.AuthenticationError) as refused:
        server.client(api_key="third").models.list()
    assert refused.value.code == "invalid_api_key"
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    # Keys do not reach the log.
    assert "first" not in server.log() and "third" not in server.log()
    assert server.stop() == 0


def test_a_port_in_use_is_one_clear_line(server, request):
    import subprocess

    port = server.url.rsplit(":", 1)[1]
    command = [request.config.getoption("--flashd"), "serve", "--port", port]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode != 0
    assert port in second.stderr
    assert "panicked" not in second.stderr
