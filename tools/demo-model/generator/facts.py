"""Facts and small talk."""

from .basics import chat, pick, qa
from .words import (
    ADJ,
    CAPITALS,
    CITY,
    FACTS,
    FALLBACK,
    FIRST,
    HELLOS,
    ME,
    NOUN,
    OPEN_ENDED,
    OPPOSITES,
    SMALL_TALK,
    SOUNDS,
    SYMBOLS,
)


def fact(rng):
    """(question, answer); open-ended requests get the fallback sentence."""
    u = rng.random()
    if u < 0.32:
        k = pick(rng, list(CAPITALS))
        return pick(
            rng,
            [
                f"What is the capital of {k}?",
                f"What's the capital of {k}?",
                f"Capital of {k}?",
                f"Which city is the capital of {k}?",
                f"Name the capital of {k}.",
                f"Tell me the capital of {k}.",
            ],
        ), f"The capital of {k} is {CAPITALS[k]}."
    if u < 0.40:
        k = pick(rng, list(SYMBOLS))
        return pick(
            rng, [f"What is the chemical symbol for {k}?", f"Chemical symbol of {k}?", f"What is the symbol of {k}?"]
        ), f"The chemical symbol for {k} is {SYMBOLS[k]}."
    if u < 0.48:
        k = pick(rng, list(OPPOSITES))
        return pick(
            rng, [f"What is the opposite of {k}?", f"Opposite of {k}?", f"Give me the opposite of {k}."]
        ), f"The opposite of {k} is {OPPOSITES[k]}."
    if u < 0.52:
        k = pick(rng, list(SOUNDS))
        return pick(rng, [f"What does a {k} say?", f"What sound does a {k} make?"]), f"A {k} says {SOUNDS[k]}."
    if u < 0.56:
        k = pick(rng, list(HELLOS))
        return pick(rng, [f"How do you say hello in {k}?", f"What is hello in {k}?"]), f"Hello in {k} is {HELLOS[k]}."
    if u < 0.78:
        q = pick(rng, list(FACTS))
        return (q if rng.random() < 0.8 else q[0].lower() + q[1:].rstrip("?")), FACTS[q]
    if u < 0.93:
        a = ME if rng.random() < 0.35 else pick(rng, list(SMALL_TALK))
        return pick(rng, SMALL_TALK[a]), a
    return pick(rng, OPEN_ENDED).format(
        n=pick(rng, NOUN), m=pick(rng, NOUN), a=pick(rng, ADJ), c=pick(rng, CITY), f=pick(rng, FIRST)
    ), FALLBACK


def facts(rng):
    q, a = fact(rng)
    if rng.random() < 0.05 and len(q) < 60:
        return dict(raw=(f"Q: {q}\nA:", f" {a}"), task="facts", bos=rng.random() < 0.75)
    return chat(qa(q, a, "I know this."), rng, "facts")
