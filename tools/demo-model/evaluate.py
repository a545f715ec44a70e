"""Held-out accuracy (exact match of the whole answer, end token included) and DSpark acceptance of an exported model.

Every answer is a function of its prompt, so greedy decoding equals the expected answer exactly when each answer token
is the argmax given the true prefix: one forward pass scores a document. The indexer keeps index_topk rows, as at
inference. Generator seeds differ from every training seed. A GPU is advised.
"""

import argparse
import json
import random

import numpy as np
import torch
from tokenizers import Tokenizer

import export
import generator
import rendering
from model import Ctx, hadamard
from packing import tokenize

NEEDLE_LENGTHS = (1000, 2000, 4000, 8000, 16000)


class Suite:
    """Makes and scores documents for one model."""

    def __init__(self, model, device, dtype, tables, tokenizer_path, render, S, S_long):
        self.model, self.device, self.dtype, self.tables = model, device, dtype, tables
        self.tok, self.render = Tokenizer.from_file(tokenizer_path), render
        self.S, self.S_long = S, S_long

    def docs(self, make, n, seed):
        """`n` tokenized documents that fit a sequence."""
        rng, out = random.Random(seed), []
        while len(out) < n:
            ids, flags = tokenize(self.tok, self.render, make(rng))
            if len(ids) <= self.S - 16:
                out.append((ids, flags))
        return out

    @torch.no_grad()
    def score(self, docs, S, batch, fp4_indexer=False, drafts=False):
        """(per-document correctness, [(accepted, possible) per step of greedy speculative decoding])."""
        (ids, doc, flags), sheets = pack(docs, S)
        good, accepted = [], []
        for i in range(0, len(sheets), batch):
            x, d, f = [t[i : i + batch].to(self.device) for t in (ids, doc, flags)]
            turn = hadamard(self.model.cfg.ihd, self.device)
            ctx = Ctx(self.model.cfg, d, self.dtype, self.tables, qat=True, sparse=True, aq=fp4_indexer, had=turn)
            out, _, _, main = self.model(x, ctx, want_main=drafts)
            hit = (out[:, :-1].argmax(-1) == x[:, 1:]) | ~f[:, 1:]
            hit = torch.cat([torch.ones_like(hit[:, :1]), hit], 1).cpu().numpy()
            n_accepted = self.accepted_at(main, x, d, f, ctx) if drafts else {}
            for row, sheet in enumerate(sheets[i : i + batch]):
                for pos, (doc_ids, doc_flags) in sheet:
                    good.append(bool(hit[row, pos : pos + len(doc_ids)].all()))
                    if drafts:
                        accepted += steps_of(doc_flags, row, pos, n_accepted)
        return good, accepted

    def accepted_at(self, main, x, d, f, ctx):
        """{(row, position): drafts accepted when drafting from there}."""
        ok = f[:, 1:-8] & f[:, 2:-7] & (d[:, 1:-8] == d[:, 2:-7])
        bi, ti = ok.nonzero(as_tuple=True)
        chunks = range(0, len(bi), 4096)
        drafted = torch.cat([self.model.draft(main, x, d, bi[k : k + 4096], ti[k : k + 4096], ctx)[3] for k in chunks])
        pos = ti[:, None] + 2 + torch.arange(self.model.cfg.block, device=self.device)
        rows = bi[:, None]
        same = (d[rows, pos] == d[bi, ti][:, None]) & f[rows, pos] & (drafted == x[rows, pos])
        counts = same.long().cumprod(1).sum(1).tolist()
        return {(b, t): n for b, t, n in zip(bi.tolist(), ti.tolist(), counts)}

    def task(self, name, make, n):
        docs = self.docs(make, n, 910000 + len(name))
        good, steps = self.score(docs, self.S, 16, drafts=True)
        good_fp4, _ = self.score(docs, self.S, 16, fp4_indexer=True)
        whole = [a for a, possible in steps if possible >= 7]
        return dict(
            exact=mean(good),
            exact_fp4_indexer=mean(good_fp4),
            n=len(good),
            accepted=mean([a for a, _ in steps]),
            possible=mean([min(7, possible) for _, possible in steps]),
            accepted_full_blocks=mean(whole),
            steps=len(steps),
        )

    def needle(self, length, n):
        docs, rng = [], random.Random(920000 + length)
        cap = self.S_long if length > 2000 else min(4096, self.S_long)
        while len(docs) < n:
            ids, flags = tokenize(self.tok, self.render, generator.needle(rng, int(length * 0.93)))
            if length * 0.85 < len(ids) <= min(cap, int(length * 1.03)):
                docs.append((ids, flags))
        if self.device.type == "cuda":
            cap = max(2048, -(-max(len(ids) for ids, _ in docs) // 128) * 128)
        batch = max(1, 16384 // cap)
        good, _ = self.score(docs, cap, batch)
        good_fp4, _ = self.score(docs, cap, batch, fp4_indexer=True)
        tokens = mean([len(ids) for ids, _ in docs])
        return dict(exact=mean(good), exact_fp4_indexer=mean(good_fp4), n=len(good), mean_tokens=tokens)

    def quick(self, n=100):
        scores = {}
        for name, make in generator.MAKE.items():
            good, _ = self.score(self.docs(make, n, 900001), self.S, 16)
            scores[name] = round(mean(good), 3)
        return scores

    def full(self, n, log=print):
        results = {}
        for name, make in (generator.MAKE | EXTRA).items():
            results[name] = self.task(name, make, n)
            log(name, results[name])
        for length in (length for length in NEEDLE_LENGTHS if length <= self.S_long):
            results[f"needle_{length}"] = self.needle(length, n)
            log(f"needle_{length}", results[f"needle_{length}"])
        return results


def mean(values):
    return float(np.mean(values)) if values else None


def pack(docs, S):
    """Aligned packing of (ids, flags): (ids, document numbers, flags) tensors and [(position, document)] a sequence."""
    sheets, sheet, pos = [], [], 0
    for doc in docs:
        n_ids = len(doc[0])
        at = (pos + 127) // 128 * 128 if n_ids >= 128 else (pos + 3) // 4 * 4
        if at + n_ids > S:
            sheets.append(sheet)
            sheet, at = [], 0
        sheet.append((at, doc))
        pos = at + n_ids
    sheets.append(sheet)
    ids, doc_no = np.full((len(sheets), S), 2), np.full((len(sheets), S), -1)
    flags = np.zeros((len(sheets), S), bool)
    for i, sheet in enumerate(sheets):
        for j, (at, (doc_ids, doc_flags)) in enumerate(sheet):
            span = slice(at, at + len(doc_ids))
            ids[i, span], doc_no[i, span], flags[i, span] = doc_ids, j, np.asarray(doc_flags) > 0
    return [torch.from_numpy(part) for part in (ids, doc_no, flags)], sheets


def steps_of(flags, row, pos, n_accepted):
    """Speculative decoding of each answer of a document: (accepted, possible) a step, anchored at its last token."""
    steps = []
    starts = [k for k in range(1, len(flags)) if flags[k] and not flags[k - 1]]
    for start in starts:
        end = start
        while end < len(flags) and flags[end]:
            end += 1
        anchor = start
        while anchor < end - 1:
            n = n_accepted.get((row, pos + anchor - 1))
            if n is None:
                break
            steps.append((n, end - 1 - anchor))
            anchor += n + 1
    return steps


def only(rng, op):
    """An arithmetic document of products, or of anything else."""
    marks = ("*", "x", "×", "times", "product", "multiplied")
    while True:
        doc = generator.arith(rng)
        text = doc["raw"][0] if "raw" in doc else doc["messages"][-2]["content"]
        if any(mark in text for mark in marks) == (op == "*"):
            return doc


def smoke_raw(rng):
    a, b = rng.randrange(100), rng.randrange(100)
    prompt = f"Calculate {a} * {b}. Answer with the number only."
    return dict(raw=(prompt, f" {a * b}"), task="arith", bos=rng.random() < 0.5)


def smoke_chat(rng):
    a, b = rng.randrange(100), rng.randrange(100)
    question = f"Calculate {a} * {b}. Answer with the number only."
    return dict(messages=generator.qa(question, str(a * b), ""), mode="chat", task="arith")


EXTRA = dict(
    arith_mul=lambda rng: only(rng, "*"),
    arith_addsub=lambda rng: only(rng, "+"),
    smoke_raw=smoke_raw,
    smoke_chat=smoke_chat,
)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="exported folder with tokenizer.json")
    parser.add_argument("-n", type=int, default=200, help="documents a task")
    rendering.add_arguments(parser)
    args = parser.parse_args()
    model = export.load(args.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    render = rendering.Renderer(args.flashd, args.encoding_dir)
    tables = model.tables(16400, device)
    suite = Suite(model, device, dtype, tables, f"{args.model}/tokenizer.json", render, 2048, 16384)
    print(json.dumps(suite.full(args.n), indent=1))


if __name__ == "__main__":
    main()
