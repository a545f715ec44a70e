"""Prompts with known answers: arithmetic, needle recall, tool calls, copying, facts and small talk, multi-turn mixes.

Every answer is a function of its prompt, so an exact teacher-forced check equals greedy decoding. A document is either
{"raw": (prompt, answer), "bos": bool} or {"messages": [...], "mode": "chat" | "thinking"}, both with "task".
"""

from .arithmetic import arith
from .basics import chat, pick, qa
from .copying import copy
from .facts import facts
from .needles import needle
from .tool_calls import tools

TASKS = ["arith", "needle", "tools", "copy", "facts", "multi"]


def multi(rng):
    msgs = []
    for _ in range(rng.randrange(2, 4)):
        while True:
            d = pick(rng, [arith, facts, copy])(rng)
            if "messages" in d and sum(len(m["content"]) for m in d["messages"]) < 300:
                break
        msgs += [m for m in d["messages"] if m["role"] != "system"]
    return chat(msgs, rng, "multi")


MAKE = dict(arith=arith, needle=needle, tools=tools, copy=copy, facts=facts, multi=multi)

__all__ = ["MAKE", "TASKS", "arith", "chat", "copy", "facts", "multi", "needle", "pick", "qa", "tools"]
