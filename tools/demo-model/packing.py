"""Documents to token ids, and packed training sequences."""

import random
import signal

import numpy as np
from tokenizers import Tokenizer

from generator import MAKE, TASKS, needle
from rendering import Renderer

EOS_ID, PAD_ID = 1, 2


def tokenize(tok, render, doc, rng=None):
    """(ids, flags): a flag is 1 on every token that the model must produce, end tokens included."""
    prompt, answer = render(doc, rng)
    ids = tok.encode(prompt, add_special_tokens=False).ids
    if answer is not None:
        answer_ids = tok.encode(answer, add_special_tokens=False).ids
        return ids + answer_ids, [0] * len(ids) + [1] * len(answer_ids)
    assistant, flags = tok.token_to_id("<｜Assistant｜>"), [0] * len(ids)
    state = "outside"
    for i, token in enumerate(ids):
        if token == assistant:
            state = "marker"
        elif state == "marker":  # <think> or </think>, which the prompt gives
            state = "answer"
        elif state == "answer":
            flags[i] = 1
            if token == EOS_ID:
                state = "outside"
    return ids, flags


class Packer:
    """Packs documents into sequences of S tokens: long ones (128 or more) at multiples of 128, short ones at multiples
    of 4, so that each compressed row of a packed document equals the row it would get alone."""

    def __init__(self, tok, render, seed, S, mix, needle_lengths=None):
        self.tok, self.render, self.rng, self.S = tok, render, random.Random(seed), S
        self.needle_lengths = needle_lengths
        self.long, self.short, self.n_long, self.n_short = [], [], 0, 0
        self.names, self.shares = list(mix), list(mix.values())

    def more(self):
        for task in self.rng.choices(self.names, self.shares, k=64):
            if task == "longneedle":
                lo, hi = self.needle_lengths
                doc = needle(self.rng, int(lo * (hi / lo) ** self.rng.random()))
            else:
                doc = MAKE[task](self.rng)
            ids, flags = tokenize(self.tok, self.render, doc, self.rng)
            if len(ids) > self.S:
                continue
            entry = (ids, flags, TASKS.index(doc["task"]))
            if len(ids) >= 128:
                self.long.append(entry)
                self.n_long += len(ids)
            else:
                self.short.append(entry)
                self.n_short += len(ids)

    def sequence(self):
        """(ids, document numbers with -1 for padding, label weights, task numbers)."""
        S = self.S
        sheet = Sheet(S)
        while sheet.pos < S:
            if self.n_long + self.n_short < 4 * S:
                self.more()
            if self.n_long >= self.n_short and self._put_long(sheet):
                continue
            end = min(S, sheet.pos + 256) if self.n_long < self.n_short else S
            before = sheet.pos
            self._put_short(sheet, end)
            if sheet.pos == before and (not self.short or end == S):
                break
            if sheet.pos == before:
                sheet.pos = (sheet.pos + 127) // 128 * 128 + (128 if sheet.pos % 128 == 0 else 0)
        return sheet.ids, sheet.doc, sheet.weight, sheet.task

    def _put_short(self, sheet, end):
        while sheet.pos < end and self.short and sheet.pos + len(self.short[-1][0]) <= end:
            entry = self.short.pop()
            self.n_short -= len(entry[0])
            sheet.put(entry)

    def _put_long(self, sheet):
        base = (sheet.pos + 127) // 128 * 128
        self._put_short(sheet, base)
        sheet.pos = base
        fits = (i for i in range(min(40, len(self.long))) if sheet.pos + len(self.long[i][0]) <= self.S)
        at = next(fits, None)
        if at is None:
            return False
        entry = self.long.pop(at)
        self.n_long -= len(entry[0])
        sheet.put(entry)
        return True


class Sheet:
    """One sequence being filled."""

    def __init__(self, S):
        self.ids, self.doc = np.full(S, PAD_ID, np.int16), np.full(S, -1, np.int16)
        self.weight, self.task = np.zeros(S, np.float16), np.full(S, 255, np.uint8)
        self.pos, self.n_docs = 0, 0

    def put(self, entry):
        ids, flags, task = entry
        span = slice(self.pos, self.pos + len(ids))
        self.ids[span], self.doc[span], self.task[span] = ids, self.n_docs, task
        flags = np.asarray(flags, np.float32)
        # Short answers weigh more a token than long ones; prompt tokens only mark that a label exists.
        self.weight[span] = np.where(flags > 0, min(1.6, (10.0 / max(1, flags.sum())) ** 0.5), 0.001)
        self.n_docs += 1
        self.pos += (len(ids) + 3) // 4 * 4


def worker(queue, tokenizer_path, render_options, seed, S, mix, needle_lengths, n_sequences):
    """Fills a queue with stacked sequences for ever; the target of a feeding process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tok = Tokenizer.from_file(tokenizer_path)
    packer = Packer(tok, Renderer(**render_options), seed, S, mix, needle_lengths)
    while True:
        queue.put([np.stack(part) for part in zip(*[packer.sequence() for _ in range(n_sequences)])])
