"""What every task shares: drawing from a list, a chat document, a sentence of filler."""

from .words import ADJ, ADV, CITY, FIRST, LAST, NOUN, PLACE, SYSTEM_PROMPTS, VERB, WORDS


def pick(rng, items):
    return items[int(rng.random() * len(items))]


def name(rng):
    return pick(rng, FIRST) + (" " + pick(rng, LAST) if rng.random() < 0.5 else "")


def chat(messages, rng, task, mode=None, system_share=0.35):
    """A chat document; a share of them open with a system prompt, a quarter are in thinking mode."""
    if messages[0]["role"] != "system" and rng.random() < system_share:
        messages = [dict(role="system", content=pick(rng, SYSTEM_PROMPTS))] + messages
    return dict(messages=messages, mode=mode or ("thinking" if rng.random() < 0.25 else "chat"), task=task)


def qa(question, answer, thought):
    """A user turn and the assistant's answer; the thought shows in thinking mode only."""
    return [
        dict(role="user", content=question),
        dict(role="assistant", content=answer, reasoning_content=thought),
    ]


def sentence(rng):
    u = rng.random()
    if u < 0.35:
        subject = f"{pick(rng, ADJ)} {pick(rng, NOUN)}"
        return f"The {subject} {pick(rng, VERB)} the {pick(rng, NOUN)} near the {pick(rng, PLACE)}."
    if u < 0.55:
        return f"{pick(rng, FIRST)} {pick(rng, VERB)} a {pick(rng, ADJ)} {pick(rng, NOUN)} in {pick(rng, CITY)}."
    if u < 0.70:
        return f"In the {pick(rng, PLACE)}, every {pick(rng, NOUN)} was {pick(rng, ADJ)} and {pick(rng, ADJ)}."
    if u < 0.80:
        subject = f"{pick(rng, ADV).capitalize()}, the {pick(rng, NOUN)}"
        return f"{subject} {pick(rng, VERB)} {rng.randrange(2, 500)} {pick(rng, NOUN)}s."
    if u < 0.90:
        subject = f"There were {pick(rng, ADJ)} {pick(rng, NOUN)}s by the {pick(rng, PLACE)}"
        return f"{subject}, and {pick(rng, FIRST)} {pick(rng, VERB)} them {pick(rng, ADV)}."
    return " ".join(pick(rng, WORDS) for _ in range(rng.randrange(5, 12))) + "."
