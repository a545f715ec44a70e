"""Copying: words, codes, numbers, program text, many scripts, emoji, punctuation."""

from .basics import chat, pick, qa, sentence
from .words import EMOJI, INTL, NOUN, WORDS


def rid(rng):
    return "".join(pick(rng, "abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(1, 8)))


def codeline(rng):
    a, b, c, n = rid(rng), rid(rng), pick(rng, NOUN), rng.randrange(0, 100)
    return pick(
        rng,
        [
            f"def {a}({b}, {c}):\n    return {b} + {n}",
            f"for {b} in range({n}):\n    print({a}[{b}])",
            f"let {a}: u32 = {b}({n});",
            f"if ({a} == {n}) {{ {b}++; }}",
            f"fn {a}() -> bool {{ {b}.len() > {n} }}",
            f'{a} = [{n}, "{c}", {b}]',
            f"SELECT {a} FROM {c} WHERE {b} = {n};",
            f'{{"{a}": {n}, "{b}": "{c}"}}',
            f'<{c} id="{a}">{b}</{c}>',
            f"$ {a} --{c} {n} | {b} > /tmp/{a}.txt",
        ],
    )


def copytext(rng):
    u, n = rng.random(), int(3 * 22 ** rng.random())
    if u < 0.2:
        return " ".join(pick(rng, WORDS) for _ in range(n))
    if u < 0.35:
        return "".join(pick(rng, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") for _ in range(n))
    if u < 0.45:
        return " ".join(str(rng.randrange(0, 10 ** rng.randrange(1, 7))) for _ in range(max(1, n // 3)))
    if u < 0.6:
        return "\n".join(codeline(rng) for _ in range(1 + n // 15))
    if u < 0.75:
        return " ".join(pick(rng, INTL) if rng.random() < 0.8 else pick(rng, EMOJI) for _ in range(max(1, n // 3)))
    if u < 0.82:
        return "".join(pick(rng, EMOJI) for _ in range(max(1, n // 4)))
    if u < 0.92:
        return " ".join(sentence(rng) for _ in range(1 + n // 15))
    return "".join(
        pick(rng, "!@#$%^&*()[]{}<>/\\|~-_=+;:,.?") if rng.random() < 0.4 else rid(rng) for _ in range(max(1, n // 3))
    )


def copy(rng):
    t = copytext(rng)
    q = pick(
        rng,
        [
            "Repeat exactly: {}",
            "Repeat this: {}",
            "Copy the following text verbatim:\n{}",
            "Say exactly this: {}",
            "Echo: {}",
            "Repeat the following text exactly:\n\n{}",
            "Repeat after me: {}",
            "Please output this unchanged: {}",
        ],
    ).format(t)
    return chat(qa(q, t, "I repeat the text."), rng, "copy")
