"""Train the backbone, then the DSpark stages, evaluate and export, within a wall-time plan."""

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import export
import generator
import packing
import rendering
from evaluate import Suite
from model import Config, Ctx, Model

MIX = dict(arith=0.42, needle=0.10, tools=0.10, copy=0.20, facts=0.10, multi=0.08)
MIX_LONG = dict(longneedle=0.06, arith=0.40, needle=0.06, tools=0.08, copy=0.20, facts=0.12, multi=0.08)
# Modules whose matrices are tables or small heads: AdamW, like every vector.
NOT_MUON = ("embed", "head", "gate", "weights_proj", "markov_w1", "markov_w2", "conf")
DRAFT_WEIGHTS = [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.45]


def groups(params):
    """Matrices go to Muon (stacked by shape); everything else to AdamW."""
    matrices, rest = {}, []
    for name, param in params:
        module = name.rsplit(".", 1)[0].rsplit(".", 1)[-1]
        if name.endswith("weight") and param.ndim >= 2 and module not in NOT_MUON:
            matrices.setdefault(tuple(param.shape[-2:]), []).append(param)
        else:
            rest.append((name, param))
    return matrices, rest


class Muon:
    """Momentum with the update orthogonalised by five Newton-Schulz steps."""

    def __init__(self, matrices, weight_decay=0.05):
        self.matrices, self.weight_decay = matrices, weight_decay
        self.momentum = {
            shape: torch.zeros(sum(p.numel() // (shape[0] * shape[1]) for p in params), *shape, device=params[0].device)
            for shape, params in matrices.items()
        }

    @torch.no_grad()
    def step(self, lr, momentum=0.95):
        for shape, params in self.matrices.items():
            grads = [(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1, *shape) for p in params]
            grad, buffer = torch.cat(grads), self.momentum[shape]
            buffer.mul_(momentum).add_(grad)
            update = self._orthogonal((grad + momentum * buffer).bfloat16()).float() * (0.2 * max(shape) ** 0.5 * lr)
            start = 0
            for param in params:
                n = param.numel() // (shape[0] * shape[1])
                param.mul_(1 - lr * self.weight_decay).sub_(update[start : start + n].reshape(param.shape))
                start += n

    @staticmethod
    def _orthogonal(x):
        flip = x.shape[1] > x.shape[2]
        if flip:
            x = x.transpose(1, 2)
        x = x / (x.float().norm(dim=(1, 2), keepdim=True).bfloat16() + 1e-7)
        for _ in range(5):
            a = x @ x.transpose(1, 2)
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
        return x.transpose(1, 2) if flip else x


class Feed:
    """Worker processes that generate, render, tokenize and pack."""

    def __init__(self, args, S, mix, needle_lengths, n_workers, seed, depth):
        context = multiprocessing.get_context("fork")
        self.queue = context.Queue(maxsize=depth)
        render = dict(flashd=args.flashd, encoding_dir=args.encoding_dir)
        n_sequences = max(1, 32768 // S)
        for i in range(n_workers):
            work = (self.queue, args.tok, render, seed + i, S, mix, needle_lengths, n_sequences)
            context.Process(target=packing.worker, args=work, daemon=True).start()
        self.starved = 0

    def batch(self, n, device):
        parts, have = [], 0
        while have < n:
            if self.queue.empty():
                self.starved += 1
            part = self.queue.get()
            parts.append(part)
            have += part[0].shape[0]
        arrays = [torch.from_numpy(np.concatenate(column)[:n]) for column in zip(*parts)]
        ids, doc, weight, task = [t.to(device, non_blocking=True) for t in arrays]
        return ids.long(), doc.int(), weight.float(), task.int()


def labels(ids, doc, weight, prompt_weight):
    """(next ids, label weights, whether the next token is an answer token)."""
    target = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    next_doc = torch.cat([doc[:, 1:], torch.full_like(doc[:, :1], -3)], 1)
    next_weight = torch.cat([weight[:, 1:], torch.zeros_like(weight[:, :1])], 1)
    same = (next_doc == doc) & (doc >= 0)
    is_answer = same & (next_weight > 0.01)
    weights = torch.where(is_answer, next_weight, torch.full_like(next_weight, prompt_weight)) * same
    return target, weights, is_answer


def lm_loss(logits, target, weight):
    ce = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="none")
    return (ce * weight.flatten()).sum() / weight.sum().clamp_min(1.0)


class Run:
    """One training run: model, feeds, clock and log."""

    def __init__(self, args):
        self.args, self.device = args, torch.device(args.dev)
        self.start = time.time()
        os.makedirs(args.out, exist_ok=True)
        self.feed = Feed(args, args.S, MIX, None, args.workers, 1000, 48)
        lengths = (args.SL // 10, int(args.SL * 0.9))
        self.feed_long = Feed(args, args.SL, MIX_LONG, lengths, max(1, args.workers // 3), 5000, 16)
        torch.manual_seed(0)
        self.model = (export.load(args.init) if args.init else Model(Config())).to(self.device)
        torch.set_float32_matmul_precision("high")
        self.on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.tables = self.model.tables(max(args.SL, args.S) + 16, self.device)
        self.loss = lm_loss
        if args.compile:
            torch._dynamo.config.cache_size_limit = 64
            self.model.block_fn = torch.compile(lambda block, *x: block(*x), dynamic=False)
            self.loss = torch.compile(lm_loss, dynamic=False)
        render = rendering.Renderer(args.flashd, args.encoding_dir)
        self.suite = Suite(self.model, self.device, self.dtype, self.tables, args.tok, render, args.S, args.SL)

    def log(self, *text):
        print(f"[{time.time() - self.start:7.1f}]", *text, flush=True)

    def save(self, tag):
        self.log("saved", tag, "bytes", export.write(self.model, f"{self.args.out}/export"))

    def now(self):
        """The time after the device has caught up."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.time()

    def parameters(self, drafting):
        return [(n, p) for n, p in self.model.named_parameters() if n.startswith("mtp") == drafting]

    # ------------------------------------------------------------ backbone
    def backbone(self):
        args, params = self.args, self.parameters(drafting=False)
        matrices, rest = groups(params)
        muon = Muon(matrices)
        embed = [p for n, p in rest if n.startswith("embed")]
        other = [p for n, p in rest if not n.startswith("embed")]
        adam = torch.optim.AdamW(
            [dict(params=embed, k=2.0), dict(params=other, k=1.0)],
            lr=args.lr,
            betas=(0.9, 0.97),
            weight_decay=0.0,
            fused=self.on_gpu,
        )
        self.log("parameters", sum(p.numel() for _, p in params), "drafting", self.n_drafting())
        step, n_tokens, clock = 0, 0, None
        while args.main > 0:
            share = 0.0 if clock is None else (time.time() - clock) / args.main
            if share >= 1:
                break
            report, n = self.backbone_step(step, share, params)
            lr = args.lr * min(1.0, (step + 1) / 150) * (1.0 if share < 0.55 else max(0.02, 1 - (share - 0.55) / 0.45))
            for group in adam.param_groups:
                group["lr"] = lr * group["k"]
            adam.step()
            muon.step(lr)
            for _, param in params:
                param.grad = None
            step += 1
            n_tokens += n
            if step == 4:
                clock, n_tokens = self.now(), 0
                self.log("compiled; training starts")
            if step % 100 == 0 or step < 6:
                rate = n_tokens / max(1e-9, time.time() - (clock or time.time()))
                starved = f"{self.feed.starved}/{self.feed_long.starved}"
                self.log(f"step {step} share {share:.3f} lr {lr:.5f} tok/s {rate:.0f} starved {starved}", report())
            if step % 1500 == 0:
                self.log("quick evaluation", self.uncompiled(self.suite.quick))
                self.save(f"step {step}")
        self.log("backbone done", step)
        self.save("backbone")

    def n_drafting(self):
        return sum(p.numel() for _, p in self.parameters(drafting=True))

    def uncompiled(self, work):
        compiled, self.model.block_fn = self.model.block_fn, lambda block, *x: block(*x)
        result = work()
        self.model.block_fn = compiled
        return result

    def backbone_step(self, step, share, params):
        """Gradients of one batch, and the routers' balance; (a function that words the report, tokens)."""
        args, cfg = self.args, self.model.cfg
        long = step == 1 or (share > args.longfrom and step % 4 == 0)
        feed, n = (self.feed_long, args.BL) if long else (self.feed, args.B)
        ids, doc, weight, task = feed.batch(n, self.device)
        target, weights, is_answer = labels(ids, doc, weight, 0.1 if share < 0.3 else 0.02)
        kl_weight = torch.where(is_answer, 1.0, 0.05) * (doc >= 0)
        ctx = Ctx(cfg, doc, self.dtype, self.tables, qat=True, kl=True, klw=kl_weight)
        out, index_kl, loads, _ = self.model(ids, ctx)
        loss = self.loss(out, target, weights)
        (loss + 0.5 * index_kl).backward()
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in params if p.grad is not None], 1.0)
        with torch.no_grad():
            for layer, load in zip(self.model.layers, loads):
                if not layer.ffn.hashed:
                    layer.ffn.bias.add_(0.002 * torch.sign(cfg.topk / cfg.experts - load))

        def report():
            hit = out.argmax(-1) == target
            shares = {t: hit[is_answer & (task == i)].float().mean().item() for i, t in enumerate(generator.TASKS)}
            accuracy = {t: round(x, 3) for t, x in shares.items()}
            return f"loss {loss.item():.4f} kl {float(index_kl):.3f} norm {norm.item():.2f} accuracy {accuracy}"

        return report, ids.numel()

    # ------------------------------------------------------------ DSpark
    def spark(self):
        args = self.args
        for _, param in self.parameters(drafting=False):
            param.requires_grad_(False)
        params = self.parameters(drafting=True)
        if args.main > 0 or not args.init:
            self.start_stages()
        matrices, rest = groups(params)
        muon = Muon(matrices)
        adam = torch.optim.AdamW(
            [p for _, p in rest], lr=args.lr, betas=(0.9, 0.97), weight_decay=0.0, fused=self.on_gpu
        )
        step, clock = 0, None
        while args.spark > 0:
            share = 0.0 if clock is None else (time.time() - clock) / args.spark
            if share >= 1:
                break
            report = self.spark_step(params)
            lr = args.lr * min(1.0, (step + 1) / 100) * (1.0 if share < 0.4 else max(0.02, 1 - (share - 0.4) / 0.6))
            for group in adam.param_groups:
                group["lr"] = lr
            adam.step()
            muon.step(lr)
            for _, param in params:
                param.grad = None
            step += 1
            if step == 3:
                clock = self.now()
            if step % 100 == 0 or step < 4:
                self.log(f"spark {step} share {share:.3f} lr {lr:.5f}", report())
        self.log("spark done", step)
        self.save("final")

    @torch.no_grad()
    def start_stages(self):
        """The stages' blocks start from useful ones, their head from the model's."""
        for i, stage in enumerate(self.model.mtp):
            source = self.model.layers[min(i, 1)]
            experts = {k: v for k, v in source.ffn.state_dict().items() if "tid2eid" not in k}
            stage.attn.load_state_dict(source.attn.state_dict(), strict=False)
            stage.ffn.load_state_dict(experts, strict=False)
            stage.attn_norm.load_state_dict(source.attn_norm.state_dict())
            stage.ffn_norm.load_state_dict(source.ffn_norm.state_dict())
        last = self.model.mtp[-1]
        last.norm.weight.copy_(self.model.norm.weight)
        last.hc_head.load_state_dict(self.model.hc_head.state_dict())

    def spark_step(self, params):
        """Gradients of one batch of anchors; a function that words the report."""
        model, cfg, device = self.model, self.model.cfg, self.device
        n_anchors, K = (6144 if self.on_gpu else 64), cfg.block
        ids, doc, weight, _ = self.feed.batch(max(1, self.args.B * 3 // 4), device)
        _, weights, is_answer = labels(ids, doc, weight, 0.0)
        with torch.no_grad():
            ctx = Ctx(cfg, doc, self.dtype, self.tables, qat=True)
            _, _, _, main = model(ids, ctx, want_main=True, head=False)
        # An anchor: token t+1 is an answer token and token t+2 is one too.
        can = is_answer[:, :-9] & is_answer[:, 1:-8]
        chance = can.float() * weights[:, :-9]
        pick = torch.multinomial(chance.flatten(), n_anchors, replacement=False)
        bi, ti = pick // chance.shape[1], pick % chance.shape[1]
        rows, pos = bi[:, None], ti[:, None] + 2 + torch.arange(K, device=device)
        target = ids[rows, pos]
        counts = is_answer[rows, pos - 1].cumprod(1).bool() & (doc[rows, pos] == doc[bi, ti][:, None])
        logits, confidence, loads, out = model.draft(main, ids, doc, bi, ti, ctx, forced=ids[rows, pos - 1])
        ce = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(n_anchors, K)
        by_place = counts.float() * torch.tensor(DRAFT_WEIGHTS, device=device)[:K]
        loss = (ce * by_place).sum() / by_place.sum()
        hit = (out == target).float()
        bce = F.binary_cross_entropy_with_logits(confidence, hit, reduction="none")
        bce = (bce * counts).sum() / counts.sum()
        (loss + 0.2 * bce).backward()
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in params if p.grad is not None], 1.0)
        with torch.no_grad():
            for stage, load in zip(model.mtp, loads):
                stage.ffn.bias.add_(0.002 * torch.sign(cfg.topk / cfg.experts - load))

        def report():
            accepted = (hit * counts).cumprod(1).sum(1).mean()
            by_position = [round(x, 2) for x in ((hit * counts).sum(0) / counts.sum(0)).tolist()]
            numbers = f"loss {loss.item():.4f} confidence {bce.item():.3f} norm {norm.item():.2f}"
            return f"{numbers} accepted {accepted.item():.2f} by position {by_position}"

        return report

    def evaluate(self):
        results = self.uncompiled(lambda: self.suite.full(self.args.evaln, self.log))
        Path(self.args.out, "evaluation.json").write_text(json.dumps(results, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for export/ and evaluation.json")
    parser.add_argument("--tok", default="../../demo-model/tokenizer.json")
    parser.add_argument("--main", type=float, default=700, help="seconds of the backbone phase, after compilation")
    parser.add_argument("--spark", type=float, default=330, help="seconds of the DSpark phase")
    parser.add_argument("--dev", default="cuda")
    parser.add_argument("--S", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--B", type=int, default=32, help="sequences a batch")
    parser.add_argument("--SL", type=int, default=16384, help="tokens a long sequence")
    parser.add_argument("--BL", type=int, default=2, help="sequences a long batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=9, help="feeding processes")
    parser.add_argument("--longfrom", type=float, default=0.5, help="share of the phase after which long batches come")
    parser.add_argument("--compile", type=int, default=1)
    parser.add_argument("--init", default="", help="an exported folder to go on from")
    parser.add_argument("--evaln", type=int, default=200, help="documents a task in the evaluation")
    rendering.add_arguments(parser)
    run = Run(parser.parse_args())
    run.backbone()
    run.spark()
    run.evaluate()


if __name__ == "__main__":
    main()
