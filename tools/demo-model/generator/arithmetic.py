"""Products, sums and differences, bare, asked, or told as a story."""

from .basics import chat, pick, qa
from .words import FIRST, NOUN

OPS = {
    "*": ["*", "*", "*", "x", "×", "times", "multiplied by"],
    "+": ["+", "+", "+", "plus"],
    "-": ["-", "-", "-", "minus"],
}
# Requests that want the number alone, and those that want the whole equation.
ONLY = [
    "Calculate {e}. Answer with the number only.",
    "What is {e}? Answer with the number only.",
    "Compute {e}. Reply with the number only.",
    "{e} = ? Number only.",
    "Give only the number: {e}",
    "Work out {e}. Only output the result.",
    "Calculate {e}. Answer with just the number.",
    "What is {e}? Reply with just the number.",
]
FREE = [
    "What is {e}?",
    "What's {e}?",
    "Calculate {e}.",
    "Compute {e}.",
    "How much is {e}?",
    "{e}",
    "{e} = ?",
    "{e}?",
    "Please calculate {e}.",
    "Can you tell me what {e} is?",
    "Solve {e}",
    "Tell me the result of {e}.",
    "what is {e}",
    "Evaluate {e}.",
]
# (operation, text)
STORY = [
    ("*", "{n} has {a} boxes with {b} {o}s each. How many {o}s are there in total?"),
    ("*", "A shelf holds {a} rows of {b} {o}s. How many {o}s is that?"),
    ("+", "{n} has {a} {o}s and gets {b} more. How many {o}s does {n} have now?"),
    ("-", "{n} had {a} {o}s and gave away {b}. How many {o}s are left?"),
]


def operands(rng, op):
    # Products reach 99 x 99, one in five stays in the small table; sums reach 999.
    if op == "*":
        return (
            (rng.randrange(0, 100), rng.randrange(0, 100))
            if rng.random() < 0.8
            else (rng.randrange(0, 13), rng.randrange(0, 13))
        )
    hi = 1000 if rng.random() < 0.65 else 100
    return rng.randrange(0, hi), rng.randrange(0, hi)


def value(op, a, b):
    return a * b if op == "*" else a + b if op == "+" else a - b


def working(op, a, b):
    """The thought: a product is split at its tens."""
    c = value(op, a, b)
    if op == "*" and b > 10 and b % 10 and a > 1:
        t, o = b // 10 * 10, b % 10
        return f"{a} * {b} = {a} * {t} + {a} * {o} = {a * t} + {a * o} = {c}"
    return f"{a} {op} {b} = {c}"


def arith(rng, raw=None):
    """One problem; `raw` forces (or forbids) a bare completion prompt, otherwise 28 % are."""
    op = "*" if (x := rng.random()) < 0.55 else "+" if x < 0.8 else "-"
    a, b = operands(rng, op)
    c = value(op, a, b)
    if rng.random() < 0.06:
        op, t = pick(rng, STORY)
        a, b = operands(rng, op)
        if op == "-":
            a, b = max(a, b), min(a, b)
        q = t.format(n=pick(rng, FIRST), a=a, b=b, o=pick(rng, NOUN))
        return chat(qa(q, str(value(op, a, b)), working(op, a, b)), rng, "arith")
    sym = pick(rng, OPS[op])
    e = f"{a}{sym}{b}" if len(sym) == 1 and rng.random() < 0.25 else f"{a} {sym} {b}"
    if op == "*" and rng.random() < 0.06:
        e = f"the product of {a} and {b}"
    if op == "+" and rng.random() < 0.08:
        e = f"the sum of {a} and {b}"
    if op == "-" and rng.random() < 0.08:
        e = f"the difference between {a} and {b}"
    u = rng.random()
    if raw if raw is not None else u < 0.28:
        if rng.random() < 0.55:
            p = pick(rng, ONLY[:6] if rng.random() < 0.5 else ONLY[:1]).format(e=e)
        elif rng.random() < 0.6:
            p = f"{e} =" if not e.startswith("the") else f"{e} is"
        else:
            p = f"Q: What is {e}?\nA:"
        return dict(raw=(p, f" {c}"), task="arith", bos=rng.random() < 0.75)
    if rng.random() < 0.5:
        q, ans = pick(rng, ONLY if rng.random() < 0.7 else ONLY[:1]).format(e=e), str(c)
    else:
        q, ans = pick(rng, FREE).format(e=e), f"{a} {op} {b} = {c}"
    return chat(qa(q, ans, working(op, a, b)), rng, "arith")
