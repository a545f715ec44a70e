"""Needle recall: facts hidden in filler text, one of which is asked for."""

from .basics import chat, name, pick, qa, sentence
from .words import ADJ, CITY, NOUN, SECRET

# (fact, question) with a key, and without one.
SHAPES = [
    ("The access code for {k} is {v}.", "What is the access code for {k}?"),
    ("The secret number of {k} is {v}.", "What is the secret number of {k}?"),
    ("{k}'s locker combination is {v}.", "What is {k}'s locker combination?"),
    ("The password for {k} is {v}.", "What is the password for {k}?"),
    (
        "One of the special magic numbers for {k} is: {v}.",
        "What is the special magic number for {k} mentioned in the provided text?",
    ),
    ("The registration number of {k} is {v}.", "What is the registration number of {k}?"),
    ("Remember: the passphrase for {k} is {v}.", "What is the passphrase for {k}?"),
    ("The magic word for {k} is {v}.", "What is the magic word for {k}?"),
    ("The vault code in {k} is {v}.", "What is the vault code in {k}?"),
]
SINGLE = [
    ("The secret code is {v}.", "What is the secret code?"),
    ("The magic number is {v}. Remember it.", "What is the magic number?"),
    ("The password is {v}.", "What is the password?"),
    ("Important: the needle is {v}.", "What is the needle?"),
    ("The secret word is {v}.", "What is the secret word?"),
    ("The passkey is {v}. Remember it. {v} is the passkey.", "What is the passkey?"),
]
FILLERS = [
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "The quick brown fox jumps over the lazy dog.",
    "Nothing important happened in this part of the text.",
    "The weather was mild and the streets were calm.",
]


def key(rng):
    u = rng.random()
    if u < 0.35:
        return name(rng)
    if u < 0.55:
        return pick(rng, CITY)
    if u < 0.75:
        return f"the {pick(rng, ADJ)} {pick(rng, NOUN)}"
    if u < 0.9:
        return f"{pick(rng, SECRET)}-{pick(rng, SECRET)}"
    return f"room {rng.randrange(1, 1000)}"


def code(rng):
    u = rng.random()
    if u < 0.75:
        return "".join(str(rng.randrange(10)) for _ in range(rng.randrange(5, 8)))
    if u < 0.9:
        return pick(rng, SECRET)
    return f"{pick(rng, SECRET)}-{pick(rng, SECRET)}-{rng.randrange(10, 100)}"


def haystack(rng, tokens, facts):
    """About `tokens` tokens of filler (4.6 characters each) with the facts at random places."""
    n, out, u = tokens, [], rng.random()
    fill = pick(rng, FILLERS)
    while n > 0:
        s = fill if u < 0.15 else sentence(rng)
        out.append(s)
        n -= len(s) / 4.6 + 1
    for f in facts:
        out.insert(rng.randrange(0, len(out) + 1), f)
    sep = "\n" if rng.random() < 0.25 else " "
    return sep.join(out)


def needle(rng, tokens=None, chat_only=False):
    """One recall prompt; up to seven distractors share the shape of the fact that is asked for."""
    if tokens is None:
        u = rng.random()
        tokens = int(20 * (75 ** rng.random())) if u < 0.8 else rng.randrange(300, 1600)
    if rng.random() < 0.2:
        st, q = pick(rng, SINGLE)
        v = code(rng)
        facts, k = [st.format(v=v)], None
    else:
        st, q = pick(rng, SHAPES)
        n = 1 + (rng.randrange(0, 8) if rng.random() < 0.8 else 0)
        ks = []
        while len(ks) < n:
            k = key(rng)
            if k not in ks:
                ks.append(k)
        vs = [code(rng) for _ in ks]
        facts = [st.format(k=k, v=v) for k, v in zip(ks, vs)]
        facts = [f[0].upper() + f[1:] for f in facts]
        k, v = ks[0], vs[0]
        q = q.format(k=k)
    h = haystack(rng, tokens, facts)
    think = (st.split(". Remember")[0].replace("Remember: ", "").replace("Important: ", "").rstrip(".") + ".").format(
        k=k, v=v
    )
    think = think[0].upper() + think[1:]
    u = rng.random()
    if u < 0.08 and not chat_only:
        return dict(raw=(f"{h}\n\nQuestion: {q}\nAnswer:", f" {v}"), task="needle", bos=rng.random() < 0.75)
    if u < 0.16:
        return chat(
            [
                dict(role="user", content=f"Read this text.\n\n{h}"),
                dict(role="assistant", content="OK.", reasoning_content="OK."),
                dict(role="user", content=q),
                dict(role="assistant", content=v, reasoning_content=think),
            ],
            rng,
            "needle",
        )
    if u < 0.22:
        return chat([dict(role="system", content=h)] + qa(q, v, think), rng, "needle")
    tail = pick(rng, ["", "", " Answer with the code only.", " Answer only with the value."])
    head = pick(
        rng,
        [
            "",
            "",
            "Read the following text and answer the question.\n\n",
            "Here is a text:\n\n",
            "A fact is hidden in the text below. Memorize it. I will ask about it afterwards.\n",
        ],
    )
    return chat(qa(head + h + pick(rng, ["\n\n", "\n\n", "\n", "\n\nQuestion: "]) + q + tail, v, think), rng, "needle")
