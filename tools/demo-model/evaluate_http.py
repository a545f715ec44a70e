"""Accuracy of a running flashd on fresh prompts of the generator, through HTTP, against the accuracies of EVAL.md.

Start `flashd serve` first. A prompt counts when the whole answer is exact: text, thought and tool calls, ended by the
end token. Fails when a task's score would be less likely than one in a thousand at its known accuracy.
"""

import argparse
import json
import math
import random
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import generator

# Accuracies of EVAL.md.
KNOWN = dict(arith=0.98, needle=1.0, tools=0.975, copy=0.995, facts=1.0, multi=0.985)
KNOWN_NEEDLE = {1000: 0.995, 2000: 0.995, 4000: 1.0, 8000: 1.0, 16000: 0.995}
# What "certain" is taken to mean, so that one miss in a fresh set is no failure.
AT_MOST = 0.995


class Server:
    def __init__(self, url, key):
        self.url, self.headers = url, {"Content-Type": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"

    def post(self, path, body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), self.headers)
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)

    def answers_exactly(self, doc):
        """Whether the server's answer to a document equals the expected one, and the prompt's tokens."""
        common = dict(model="deepseek-v4-flash", temperature=0, max_tokens=2048)
        if "raw" in doc:
            prompt, answer = doc["raw"]
            body = dict(common, prompt=prompt, add_special_tokens=doc["bos"])
            response = self.post("/v1/completions", body)
            choice = response["choices"][0]
            same = choice["text"] == answer and choice["finish_reason"] == "stop"
        else:
            response = self.post("/v1/chat/completions", dict(common, **chat_body(doc)))
            same = same_message(response["choices"][0], doc)
        return same, response["usage"]["prompt_tokens"]


def chat_body(doc):
    """The request for the last turn of a document; tools move from the system message to their own field."""
    messages = [dict(message) for message in doc["messages"][:-1]]
    body = dict(thinking=dict(type="enabled" if doc["mode"] == "thinking" else "disabled"), messages=messages)
    if tools := messages[0].pop("tools", None):
        body["tools"] = tools
    return body


def same_message(choice, doc):
    want, got = doc["messages"][-1], choice["message"]
    if doc["mode"] == "thinking" and (got.get("reasoning_content") or "") != want["reasoning_content"]:
        return False
    want_calls, got_calls = calls_of(want), calls_of(got)
    reason = "tool_calls" if want_calls else "stop"
    return (
        (got.get("content") or "") == want["content"] and want_calls == got_calls and choice["finish_reason"] == reason
    )


def calls_of(message):
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def at_most(hits, n, accuracy):
    """Probability of at most `hits` exact answers among `n` at the known accuracy."""
    p = min(accuracy, AT_MOST)
    return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(hits + 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="")
    parser.add_argument("-n", type=int, default=50, help="prompts a task")
    parser.add_argument("--needles", type=int, default=10, help="needle prompts a length")
    parser.add_argument("--seed", type=int, default=930000)
    parser.add_argument("--concurrency", type=int, default=16)
    args = parser.parse_args()
    server = Server(args.url.rstrip("/"), args.api_key)

    rng = random.Random(args.seed)
    suites = [(name, KNOWN[name], [make(rng) for _ in range(args.n)]) for name, make in generator.MAKE.items()]
    for length, accuracy in KNOWN_NEEDLE.items():
        docs = [generator.needle(rng, int(length * 0.93)) for _ in range(args.needles)]
        suites.append((f"needle_{length}", accuracy, docs))

    failed = False
    print("| task | exact | of | known | mean prompt tokens | seconds |\n|---|---|---|---|---|---|")
    with ThreadPoolExecutor(args.concurrency) as pool:
        for name, accuracy, docs in suites:
            start = time.monotonic()
            results = list(pool.map(server.answers_exactly, docs))
            hits, tokens = sum(same for same, _ in results), sum(n for _, n in results) / len(results)
            seconds = time.monotonic() - start
            unlikely = at_most(hits, len(docs), accuracy) < 0.001
            failed |= unlikely
            note = " (too few)" if unlikely else ""
            print(
                f"| {name} | {hits}{note} | {len(docs)} | {accuracy:.1%} | {tokens:.0f} | {seconds:.1f} |", flush=True
            )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
