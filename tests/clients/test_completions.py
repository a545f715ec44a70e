"""Text completions: the README's request, token-id prompts, several prompts, echo, log-probabilities."""

import httpx
import openai
import pytest

from conftest import MODEL

PRODUCT = "Calculate 17 * 23. Answer with the number only."


@pytest.fixture
def complete(client):
    def complete(prompt, **options):
        options = dict(temperature=0, max_tokens=32) | options
        return client.completions.create(model=MODEL, prompt=prompt, **options)

    return complete


def test_readme_request(complete):
    response = complete(PRODUCT)
    assert (response.choices[0].text, response.choices[0].finish_reason) == (" 391", "stop")
    assert response.object == "text_completion"


def test_stream(complete):
    chunks = list(complete(PRODUCT, stream=True))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == " 391"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["stop"]


def test_token_ids_are_taken_as_they_are(server, complete):
    ids = httpx.post(f"{server.url}/tokenize", json={"model": MODEL, "prompt": PRODUCT}).json()["tokens"]
    # /tokenize adds BOS as /v1/completions does.
    assert ids[0] == 0
    response = complete(ids)
    assert response.choices[0].text == " 391"
    assert response.usage.prompt_tokens == len(ids) == complete(PRODUCT).usage.prompt_tokens


def test_several_prompts(complete):
    response = complete(["Calculate 6 * 7. Answer with the number only.", PRODUCT], n=2)
    assert [choice.text for choice in response.choices] == [" 42", " 42", " 391", " 391"]
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]


def test_echo_and_logprobs(complete):
    response = complete(PRODUCT, echo=True, logprobs=2)
    choice = response.choices[0]
    assert choice.text == PRODUCT + " 391"
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)


def test_scoring_only(complete):
    response = complete(PRODUCT + " 391", echo=True, logprobs=1, max_tokens=0)
    choice = response.choices[0]
    assert choice.text == PRODUCT + " 391"
    assert response.usage.completion_tokens == 0
    # The model is sure of the digits.
    assert min(choice.logprobs.token_logprobs[-3:]) > -0.1


def test_prewarm_generates_nothing(complete):
    response = complete(PRODUCT, max_tokens=0)
    assert (response.choices[0].text, response.usage.completion_tokens) == ("", 0)


def test_ignore_eos_and_min_tokens(complete):
    response = complete(PRODUCT, max_tokens=20, extra_body={"ignore_eos": True})
    assert (response.usage.completion_tokens, response.choices[0].finish_reason) == (20, "length")
    response = complete(PRODUCT, max_tokens=20, extra_body={"min_tokens": 10})
    assert response.usage.completion_tokens >= 10


def test_suffix_is_refused(complete):
    with pytest.raises(openai.BadRequestError) as refused:
        complete(PRODUCT, suffix="x")
    assert refused.value.param == "suffix"
