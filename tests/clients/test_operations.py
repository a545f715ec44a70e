"""What operators rely on: models, health, metrics, the OpenAPI document, a drain on SIGTERM."""

import threading
import time

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from conftest import MODEL


def test_models(client):
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 65536


def test_aliases(start):
    server = start("--served-model-name", "org/flash", "flash")
    client = server.client()
    assert [model.id for model in client.models.list().data] == ["org/flash", "flash"]
    assert client.models.retrieve("org/flash").id == "org/flash"
    response = client.completions.create(model="flash", prompt="Calculate 6 * 7. Answer with the number only.")
    assert response.model == "org/flash"
    assert server.stop() == 0


def test_health(server):
    for path in ("/livez", "/health", "/readyz"):
        assert httpx.get(server.url + path).status_code == 200


def test_metrics_count_requests_and_tokens(server, client):
    def counts():
        names = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        return [server.metric(name) for name in names]

    before = counts()
    response = client.completions.create(model=MODEL, prompt="Calculate 3 * 3. Answer with the number only.")
    deadline = time.monotonic() + 5
    while counts()[0] == before[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    requests, prompt, generated = [after - old for after, old in zip(counts(), before)]
    assert (requests, generated) == (1, response.usage.completion_tokens)
    assert prompt == response.usage.prompt_tokens


def test_sigterm_lets_a_stream_end(start):
    server = start()
    stream = server.client().completions.create(
        model=MODEL,
        prompt="Calculate 6 * 7.",
        temperature=0,
        max_tokens=300,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = iter(stream)
    next(chunks)
    status = []
    stopper = threading.Thread(target=lambda: status.append(server.stop()))
    stopper.start()
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    stopper.join()
    assert (reasons, status) == (["length"], [0])


@pytest.fixture(scope="session")
def api_schema(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api_schema")


@schema.parametrize()
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_makes_a_server_error(case):
    if isinstance(case.body, dict):
        # Long outputs would only cost time; half of the requests get past the name of the model.
        if "max_tokens" not in case.body or (isinstance(case.body["max_tokens"], int) and case.body["max_tokens"] > 4):
            case.body["max_tokens"] = 4
        case.body.pop("max_completion_tokens", None)
        if len(str(case.body)) % 2:
            case.body["model"] = MODEL
    response = case.call(timeout=60)
    case.validate_response(response, checks=[not_a_server_error])
