"""Whole-sequence (cache-free) training model in the DeepSeek-V4-Flash architecture.

Several documents are packed in one sequence and fully isolated from each other by masks. Documents of
128 tokens or more start at a multiple of 128, shorter ones at a multiple of 4, so that every compressed
row of a packed document equals the row it would get alone. All rotary use is relative, so a document
computes the same values wherever it lies.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    vocab: int = 3072
    dim: int = 256
    layers: int = 6
    ratios: tuple = (0, 0, 4, 128, 4, 128)
    heads: int = 4
    hd: int = 512
    rd: int = 64
    groups: int = 2
    q_lora: int = 128
    o_lora: int = 128
    inter: int = 256
    experts: int = 8
    topk: int = 2
    n_hash: int = 2
    iheads: int = 4
    ihd: int = 128
    itopk: int = 128
    win: int = 128
    hc: int = 4
    hc_iters: int = 20
    theta: float = 10000.0
    ctheta: float = 160000.0
    factor: float = 16.0
    orig: int = 4096
    beta_fast: int = 32
    beta_slow: int = 1
    max_pos: int = 65536
    route_scale: float = 1.5
    limit: float = 10.0
    eps: float = 1e-6
    block: int = 7
    stages: int = 3
    targets: tuple = (3, 4, 5)
    rank: int = 64
    noise: int = 3


# ---------------------------------------------------------------- fake quantisation
FP4_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def fp8_parts(w):
    """[.., out, in] -> (values on the e4m3 grid, exponents) per 128x128 block."""
    o, i = w.shape[-2:]
    b = w.reshape(*w.shape[:-2], o // 128, 128, i // 128, 128)
    amax = b.abs().amax(dim=(-3, -1), keepdim=True).clamp_min(1e-20)
    ex = torch.ceil(torch.log2(amax / 448.0))
    return (b * torch.exp2(-ex)).clamp(-448, 448), ex


def fp8_round(w):
    b, ex = fp8_parts(w)
    return (b.to(torch.float8_e4m3fn).float() * torch.exp2(ex)).reshape(w.shape)


def fp4_parts(w):
    """-> (magnitude index 0..7, negative?, exponents) per 32 inputs."""
    b = w.reshape(*w.shape[:-1], w.shape[-1] // 32, 32)
    amax = b.abs().amax(dim=-1, keepdim=True).clamp_min(1e-20)
    ex = torch.ceil(torch.log2(amax / 6.0))
    s = (b * torch.exp2(-ex)).clamp(-6, 6)
    a = s.abs()
    idx = torch.zeros_like(a)
    for e in FP4_EDGES:
        idx = idx + (a > e).to(a.dtype)
    return idx, s < 0, ex


def fp4_round(w):
    idx, neg, ex = fp4_parts(w)
    # grid 0 .5 1 1.5 2 3 4 6 from the index
    v = torch.where(idx <= 4, idx * 0.5, torch.where(idx == 5, 3.0, torch.where(idx == 6, 4.0, 6.0)))
    return (torch.where(neg, -v, v) * torch.exp2(ex)).reshape(w.shape)


def ste(w, q):
    return w + (q - w).detach()


# ---------------------------------------------------------------- Sinkhorn with implicit backward
def _sinkhorn_torch(logits, iters, eps=1e-6):  # [4,4,N]
    p = torch.softmax(logits, dim=1) + eps
    p = p / (p.sum(0, keepdim=True) + eps)
    for _ in range(iters - 1):
        p = p / (p.sum(1, keepdim=True) + eps)
        p = p / (p.sum(0, keepdim=True) + eps)
    return p


def _sinkhorn_grad_torch(p, g, iters):  # adjoint of the converged projection
    pg = p * g
    r, c = pg.sum(1), pg.sum(0)
    b = torch.zeros_like(c)
    a = r
    for _ in range(iters):
        a = r - (p * b.unsqueeze(0)).sum(1)
        b = c - (p * a.unsqueeze(1)).sum(0)
    return p * (g - a.unsqueeze(1) - b.unsqueeze(0))


try:
    import triton
    import triton.language as tl

    @triton.jit
    def _sk_fwd(x_ptr, y_ptr, n, ITERS: tl.constexpr, BLOCK: tl.constexpr):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, 4)
        off = t[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        ok = (t < n)[:, None, None] & (i < 4)[None, :, None] & (i < 4)[None, None, :]
        x = tl.load(x_ptr + off, mask=ok, other=0.0).to(tl.float32)
        x = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
        p = x / tl.sum(x, axis=2, keep_dims=True) + 1e-6
        p = p / (tl.sum(p, axis=1, keep_dims=True) + 1e-6)
        for _ in range(ITERS - 1):
            p = p / (tl.sum(p, axis=2, keep_dims=True) + 1e-6)
            p = p / (tl.sum(p, axis=1, keep_dims=True) + 1e-6)
        tl.store(y_ptr + off, p, mask=ok)

    @triton.jit
    def _sk_bwd(p_ptr, g_ptr, o_ptr, n, ITERS: tl.constexpr, BLOCK: tl.constexpr):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, 4)
        off = t[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        ok = (t < n)[:, None, None] & (i < 4)[None, :, None] & (i < 4)[None, None, :]
        p = tl.load(p_ptr + off, mask=ok, other=0.0)
        g = tl.load(g_ptr + off, mask=ok, other=0.0).to(tl.float32)
        r = tl.sum(p * g, axis=2, keep_dims=True)
        c = tl.sum(p * g, axis=1, keep_dims=True)
        a = r
        b = c - tl.sum(p * a, axis=1, keep_dims=True)
        for _ in range(ITERS - 1):
            a = r - tl.sum(p * b, axis=2, keep_dims=True)
            b = c - tl.sum(p * a, axis=1, keep_dims=True)
        tl.store(o_ptr + off, p * (g - a - b), mask=ok)

    HAVE_TRITON = True
except Exception:  # no Triton on this machine
    HAVE_TRITON = False


@torch.library.custom_op("demo::sinkhorn", mutates_args=())
def sinkhorn(logits: torch.Tensor, iters: int) -> torch.Tensor:  # [N,4,4] float32
    if logits.is_cuda and HAVE_TRITON:
        x = logits.contiguous()
        y = torch.empty(x.shape, device=x.device, dtype=torch.float32)
        n = x.shape[0]
        _sk_fwd[(triton.cdiv(n, 128),)](x, y, n, iters, 128)
        return y
    p = _sinkhorn_torch(logits.permute(1, 2, 0).contiguous().float(), iters)
    return p.permute(2, 0, 1).contiguous()


@sinkhorn.register_fake
def _(logits, iters):
    return torch.empty(logits.shape, device=logits.device, dtype=torch.float32)


@torch.library.custom_op("demo::sinkhorn_grad", mutates_args=())
def sinkhorn_grad(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    if p.is_cuda and HAVE_TRITON:
        g = g.contiguous()
        o = torch.empty_like(p)
        n = p.shape[0]
        _sk_bwd[(triton.cdiv(n, 128),)](p, g, o, n, 12, 128)
        return o
    o = _sinkhorn_grad_torch(p.permute(1, 2, 0).contiguous(), g.permute(1, 2, 0).contiguous().float(), 12)
    return o.permute(2, 0, 1).contiguous()


@sinkhorn_grad.register_fake
def _(p, g):
    return torch.empty(p.shape, device=p.device, dtype=torch.float32)


def _sk_setup(ctx, inputs, output):
    ctx.save_for_backward(output)


def _sk_backward(ctx, g):
    (p,) = ctx.saved_tensors
    return sinkhorn_grad(p, g), None


sinkhorn.register_autograd(_sk_backward, setup_context=_sk_setup)


# ---------------------------------------------------------------- pieces
def rope_table(cfg, n, compressed, device):
    half = cfg.rd // 2
    base = cfg.ctheta if compressed else cfg.theta
    f = base ** (-torch.arange(0, cfg.rd, 2, dtype=torch.float32) / cfg.rd)
    if compressed:

        def corr(rot):
            return cfg.rd * math.log(cfg.orig / (rot * 2 * math.pi)) / (2 * math.log(base))

        lo, hi = max(math.floor(corr(cfg.beta_fast)), 0), min(math.ceil(corr(cfg.beta_slow)), cfg.rd - 1)
        if lo == hi:
            hi += 0.001
        keep = 1 - ((torch.arange(half, dtype=torch.float32) - lo) / (hi - lo)).clamp(0, 1)
        f = f / cfg.factor * (1 - keep) + f * keep
    ang = torch.outer(torch.arange(n, dtype=torch.float32), f)
    return ang.cos().to(device), ang.sin().to(device)


def rope(x, cos, sin, inverse=False):
    """Rotate the last 64 channels (interleaved pairs). cos/sin broadcast against x[..., :32]."""
    a, b = x[..., :-64], x[..., -64:].float()
    e, o = b[..., 0::2], b[..., 1::2]
    if inverse:
        sin = -sin
    r = torch.stack([e * cos - o * sin, e * sin + o * cos], dim=-1).flatten(-2)
    return torch.cat([a, r.to(x.dtype)], dim=-1)


def rms(x, w, eps):
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * w if w is not None else y).to(x.dtype)


class Norm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))


class Lin(nn.Module):
    """kind: fp8, fp4 (stacked experts), bf16. Fake-quantised when ctx.qat is on."""

    def __init__(self, shape, kind, std):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(*shape) * std)

    def w(self, ctx):
        p = self.weight
        if ctx.qat:
            if self.kind == "fp8":
                p = ste(p, fp8_round(p))
            elif self.kind == "fp4":
                p = ste(p, fp4_round(p))
            else:
                p = ste(p, p.to(torch.bfloat16).float())
        return p.to(ctx.dt)


class Compressor(nn.Module):
    def __init__(self, cfg, ratio, hd):
        super().__init__()
        c = 2 if ratio == 4 else 1
        self.ratio, self.hd, self.eps, self.c = ratio, hd, cfg.eps, c
        self.ape = nn.Parameter(torch.randn(ratio, c * hd) * 0.02)
        self.wkv = Lin((c * hd, cfg.dim), "bf16", cfg.dim**-0.5)
        self.wgate = Lin((c * hd, cfg.dim), "bf16", 0.2 * cfg.dim**-0.5)
        self.norm = Norm(hd)

    def forward(self, x, ctx):
        B, S, _ = x.shape
        r, d = self.ratio, self.hd
        kv = F.linear(x, self.wkv.w(ctx)).view(B, S // r, r, self.c * d)
        sc = F.linear(x, self.wgate.w(ctx)).view(B, S // r, r, self.c * d).float() + self.ape
        if self.c == 2:
            pk = torch.cat([torch.zeros_like(kv[:, :1, :, :d]), kv[:, :-1, :, :d]], 1)
            ps = torch.cat([torch.zeros_like(sc[:, :1, :, :d]), sc[:, :-1, :, :d]], 1)
            ps = ps.masked_fill(ctx.first4[:, :, None, None], float("-inf"))
            kv = torch.cat([pk, kv[..., d:]], 2)
            sc = torch.cat([ps, sc[..., d:]], 2)
        y = (kv.float() * sc.softmax(2)).sum(2).to(ctx.dt)
        y = rms(y, self.norm.weight, self.eps)
        return rope(y, ctx.ccos[:S:r], ctx.csin[:S:r])


class Indexer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.wq_b = Lin((cfg.iheads * cfg.ihd, cfg.q_lora), "fp8", cfg.q_lora**-0.5)
        self.weights_proj = Lin((cfg.iheads, cfg.dim), "bf16", cfg.dim**-0.5)
        self.compressor = Compressor(cfg, 4, cfg.ihd)

    def forward(self, x, qr, ctx):
        c = self.cfg
        B, S, _ = x.shape
        q = F.linear(qr, self.wq_b.w(ctx)).view(B, S, c.iheads, c.ihd)
        q = rope(q, ctx.ccos[:S, None], ctx.csin[:S, None])
        k = self.compressor(x, ctx)
        if ctx.aq:  # fp4 caches of the indexer, after the Hadamard rotation
            h = ctx.had
            q = ste(q, fp4_round(q.float() @ h).to(q.dtype) @ h.to(q.dtype))
            k = ste(k, fp4_round(k.float() @ h).to(k.dtype) @ h.to(k.dtype))
        w = F.linear(x, self.weights_proj.w(ctx)) * (c.ihd**-0.5 * c.iheads**-0.5)
        s = torch.bmm(q.reshape(B, S * c.iheads, c.ihd), k.transpose(1, 2)).view(B, S, c.iheads, S // 4)
        return (s.relu().float() * w.float().unsqueeze(-1)).sum(2)


def local_scores(q, kv, lmask, scale):
    B, S, H, d = q.shape
    n = S // 128
    k = kv.view(B, n, 128, d)
    k = torch.cat([torch.cat([torch.zeros_like(k[:, :1]), k[:, :-1]], 1), k], 2).view(B * n, 256, d)
    s = torch.bmm(q.reshape(B * n, 128 * H, d), k.transpose(1, 2)).view(B, n, 128, H, 256).float() * scale
    return s.masked_fill(~lmask.unsqueeze(3), float("-inf")), k


class Attention(nn.Module):
    def __init__(self, cfg, ratio):
        super().__init__()
        self.cfg, self.ratio = cfg, ratio
        c = cfg
        self.attn_sink = nn.Parameter(torch.zeros(c.heads))
        self.wq_a = Lin((c.q_lora, c.dim), "fp8", c.dim**-0.5)
        self.q_norm = Norm(c.q_lora)
        self.wq_b = Lin((c.heads * c.hd, c.q_lora), "fp8", c.q_lora**-0.5)
        self.wkv = Lin((c.hd, c.dim), "fp8", c.dim**-0.5)
        self.kv_norm = Norm(c.hd)
        self.wo_a = Lin((c.groups, c.o_lora, c.heads * c.hd // c.groups), "fp8", (c.heads * c.hd // c.groups) ** -0.5)
        self.wo_b = Lin((c.dim, c.groups * c.o_lora), "fp8", 0.3 * (c.groups * c.o_lora) ** -0.5)
        if ratio:
            self.compressor = Compressor(cfg, ratio, c.hd)
        if ratio == 4:
            self.indexer = Indexer(cfg)

    def queries(self, x, ctx, cos, sin):
        c = self.cfg
        qr = rms(F.linear(x, self.wq_a.w(ctx)), self.q_norm.weight, c.eps)
        q = F.linear(qr, self.wq_b.w(ctx)).unflatten(-1, (c.heads, c.hd))
        q = rms(q, None, c.eps)
        return qr, rope(q, cos, sin)

    def keys(self, x, ctx, cos, sin):
        kv = rms(F.linear(x, self.wkv.w(ctx)), self.kv_norm.weight, self.cfg.eps)
        return rope(kv, cos, sin)

    def out(self, o, ctx):
        c = self.cfg
        o = o.flatten(-2).unflatten(-1, (c.groups, -1))
        w = self.wo_a.w(ctx)
        y = torch.cat([F.linear(o[..., g, :], w[g]) for g in range(c.groups)], -1)
        return F.linear(y, self.wo_b.w(ctx))

    def forward(self, x, ctx):
        c = self.cfg
        B, S, _ = x.shape
        cos, sin = (ctx.ccos, ctx.csin) if self.ratio else (ctx.cos, ctx.sin)
        cos, sin = cos[:S], sin[:S]
        qr, q = self.queries(x, ctx, cos[:, None], sin[:, None])
        kv = self.keys(x, ctx, cos, sin)
        scale = c.hd**-0.5
        sl, kk = local_scores(q, kv, ctx.lmask, scale)
        H = c.heads
        m = torch.maximum(sl.detach().amax(-1), self.attn_sink.detach())  # [B,n,128,H]
        aux = x.new_zeros((), dtype=torch.float32)
        if self.ratio:
            ck = self.compressor(x, ctx)
            R = S // self.ratio
            cm = ctx.cmask4 if self.ratio == 4 else ctx.cmask128  # [B,S,R]
            index = None
            if self.ratio == 4 and (ctx.kl or ctx.sparse):
                index = self.indexer(x.detach(), qr.detach(), ctx).masked_fill(~cm, float("-inf"))
                if ctx.sparse and R > c.itopk:
                    kth = index.detach().topk(c.itopk, dim=-1).values[..., -1:]
                    cm = cm & (index.detach() >= kth)
            sc = torch.bmm(q.reshape(B, S * H, c.hd), ck.transpose(1, 2)).view(B, S, H, R).float() * scale
            sc = sc.masked_fill(~cm.unsqueeze(2), float("-inf"))
            m = torch.maximum(m.view(B, S, H), sc.detach().amax(-1)).view(B, S // 128, 128, H)
            pc = torch.exp(sc - m.view(B, S, H, 1))
        pl = torch.exp(sl - m.unsqueeze(-1))
        den = pl.sum(-1) + torch.exp(self.attn_sink - m)
        o = torch.bmm(pl.to(ctx.dt).view(-1, 128 * H, 256), kk).view(B, S, H, c.hd)
        den = den.view(B, S, H, 1)
        if self.ratio:
            den = den + pc.sum(-1, keepdim=True)
            o = o + torch.bmm(pc.to(ctx.dt).view(B, S * H, R), ck).view(B, S, H, c.hd)
            if index is not None and ctx.kl:
                t = (pc / den).detach().sum(2)
                mass = t.sum(-1, keepdim=True)
                t = t / mass.clamp_min(1e-9)
                lp = torch.log_softmax(index.masked_fill(~cm, -1e4), -1)
                kl = (t * ((t + 1e-9).log() - lp)).sum(-1)
                w = ctx.klw * (mass.squeeze(-1) / H > 1e-3)
                aux = (kl * w).sum() / w.sum().clamp_min(1.0)
        o = (o.float() / den).to(ctx.dt)
        o = rope(o, cos[:, None], sin[:, None], inverse=True)
        return self.out(o, ctx), aux


class MoE(nn.Module):
    """All experts computed densely; the weights of the unselected ones are zero."""

    def __init__(self, cfg, hashed):
        super().__init__()
        c = self.cfg = cfg
        self.hashed = hashed
        self.gate = Lin((c.experts, c.dim), "bf16", c.dim**-0.5)
        if hashed:
            g = torch.Generator().manual_seed(1)
            t = torch.stack([torch.randperm(c.experts, generator=g)[: c.topk] for _ in range(c.vocab)])
            self.register_buffer("tid2eid", t)
        else:
            self.register_buffer("bias", torch.zeros(c.experts))
        for k, (o, i) in dict(w1=(c.inter, c.dim), w3=(c.inter, c.dim), w2=(c.dim, c.inter)).items():
            std = i**-0.5 * (0.3 if k == "w2" else 1)
            setattr(self, k, Lin((c.experts, o, i), "fp4", std))
            setattr(self, "s" + k, Lin((o, i), "fp8", std))

    def forward(self, x, ids, ctx):
        c = self.cfg
        s = F.linear(x.float(), self.gate.w(ctx).float())
        s = F.softplus(s).sqrt()
        if self.hashed:
            idx = self.tid2eid[ids]
        else:
            idx = (s.detach() + self.bias).topk(c.topk, dim=-1).indices
        sel = torch.zeros_like(s).scatter(-1, idx, 1.0)
        g = s * sel
        g = g / g.sum(-1, keepdim=True) * c.route_scale
        a = F.linear(x, self.w1.w(ctx).flatten(0, 1)).float().clamp(max=c.limit)
        b = F.linear(x, self.w3.w(ctx).flatten(0, 1)).float().clamp(-c.limit, c.limit)
        h = (F.silu(a) * b).unflatten(-1, (c.experts, c.inter)) * g.unsqueeze(-1)
        y = F.linear(h.flatten(-2).to(ctx.dt), self.w2.w(ctx).transpose(0, 1).flatten(1))
        a = F.linear(x, self.sw1.w(ctx)).float().clamp(max=c.limit)
        b = F.linear(x, self.sw3.w(ctx)).float().clamp(-c.limit, c.limit)
        y = y + F.linear((F.silu(a) * b).to(ctx.dt), self.sw2.w(ctx))
        return y, sel.detach().flatten(0, -2).mean(0)


class HC(nn.Module):
    """One mHC site: 24 mixes -> pre (4), post (4), comb (4x4, doubly stochastic)."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        n = 4 * cfg.dim
        self.fn = nn.Parameter(torch.randn(24, n) * 0.5 * n**-0.5)
        base = torch.cat([torch.randn(4) * 0.7, torch.randn(4) * 0.7, (2.0 * torch.eye(4)).flatten()])
        self.base = nn.Parameter(base)
        self.scale = nn.Parameter(torch.full((3,), 0.1))

    def pre(self, x, ctx):
        c = self.cfg
        f = x.flatten(-2)
        r = torch.rsqrt(f.float().square().mean(-1, keepdim=True) + c.eps)
        m = F.linear(f, self.fn.to(ctx.dt)).float() * r
        pre = torch.sigmoid(m[..., :4] * self.scale[0] + self.base[:4]) + 1e-6
        post = 2 * torch.sigmoid(m[..., 4:8] * self.scale[1] + self.base[4:8])
        comb = m[..., 8:] * self.scale[2] + self.base[8:]
        comb = sinkhorn(comb.reshape(-1, 4, 4), c.hc_iters).view(*x.shape[:-2], 4, 4)
        y = (pre.unsqueeze(-1) * x.float()).sum(-2).to(ctx.dt)
        return y, post, comb

    @staticmethod
    def post(y, x, post, comb):
        # out[j] = post[j] * y + sum_i comb[i][j] x[i]
        xf = x.float()
        out = post.unsqueeze(-1) * y.float().unsqueeze(-2)
        for i in range(4):
            out = out + comb[..., i, :].unsqueeze(-1) * xf[..., i : i + 1, :]
        return out.to(x.dtype)


class HCHead(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        n = 4 * cfg.dim
        self.fn = nn.Parameter(torch.randn(4, n) * 0.5 * n**-0.5)
        self.base = nn.Parameter(torch.randn(4) * 0.5)
        self.scale = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x, ctx, eps):
        f = x.flatten(-2)
        r = torch.rsqrt(f.float().square().mean(-1, keepdim=True) + eps)
        m = F.linear(f, self.fn.to(ctx.dt)).float() * r
        p = torch.sigmoid(m * self.scale + self.base) + 1e-6
        return (p.unsqueeze(-1) * x.float()).sum(-2).to(ctx.dt)


class Block(nn.Module):
    def __init__(self, cfg, ratio, hashed):
        super().__init__()
        self.cfg = cfg
        self.attn = Attention(cfg, ratio)
        self.ffn = MoE(cfg, hashed)
        self.attn_norm, self.ffn_norm = Norm(cfg.dim), Norm(cfg.dim)
        self.hc_attn, self.hc_ffn = HC(cfg), HC(cfg)

    def forward(self, x, ids, ctx):
        y, post, comb = self.hc_attn.pre(x, ctx)
        y, aux = self.attn(rms(y, self.attn_norm.weight, self.cfg.eps), ctx)
        x = HC.post(y, x, post, comb)
        y, post, comb = self.hc_ffn.pre(x, ctx)
        y, load = self.ffn(rms(y, self.ffn_norm.weight, self.cfg.eps), ids, ctx)
        return HC.post(y, x, post, comb), aux, load


class Stage(Block):
    """A DSpark stage: the block of `block` draft positions reads main keys of the last 128 positions."""

    def __init__(self, cfg, last, first):
        super().__init__(cfg, 0, False)
        c = cfg
        if first:
            self.main_proj = Lin((c.dim, c.dim * len(c.targets)), "fp8", (c.dim * len(c.targets)) ** -0.5)
            self.main_norm = Norm(c.dim)
        if last:
            self.norm = Norm(c.dim)
            self.hc_head = HCHead(c)
            self.markov_w1 = Lin((c.vocab, c.rank), "bf16", 0.5)
            self.markov_w2 = Lin((c.vocab, c.rank), "bf16", 0.02)
            self.conf = Lin((1, c.dim + c.rank), "bf16", 0.02)

    def forward(self, x, main_x, gidx, gok, bcos, bsin, ctx):
        """x [N,7,4,D]; main_x [T,D] flat; gidx [N,128] flat indices with validity gok; b* [N,7,32] rope."""
        c, a = self.cfg, self.attn
        y, post, comb = self.hc_attn.pre(x, ctx)
        y = rms(y, self.attn_norm.weight, c.eps)
        mkv = rms(F.linear(main_x, a.wkv.w(ctx)), a.kv_norm.weight, c.eps)
        mkv = rope(mkv, ctx.mcos, ctx.msin)
        _, q = a.queries(y, ctx, bcos.unsqueeze(2), bsin.unsqueeze(2))
        kv = a.keys(y, ctx, bcos, bsin)
        keys = torch.cat([mkv[gidx], kv], 1)  # [N,128+7,512]
        N, K, H = x.shape[0], c.block, c.heads
        s = torch.bmm(q.reshape(N, K * H, c.hd), keys.transpose(1, 2)).view(N, K, H, -1).float() * c.hd**-0.5
        ok = torch.cat([gok, gok.new_ones(N, K)], 1)
        s = s.masked_fill(~ok[:, None, None], float("-inf"))
        s = torch.cat([s, a.attn_sink.view(1, 1, H, 1).expand(N, K, H, 1)], -1)
        p = s.softmax(-1)[..., :-1].to(ctx.dt)
        o = torch.bmm(p.view(N, K * H, -1), keys).view(N, K, H, c.hd)
        o = rope(o, bcos.unsqueeze(2), bsin.unsqueeze(2), inverse=True)
        x = HC.post(a.out(o, ctx), x, post, comb)
        y, post, comb = self.hc_ffn.pre(x, ctx)
        y, load = self.ffn(rms(y, self.ffn_norm.weight, c.eps), None, ctx)
        return HC.post(y, x, post, comb), load


class Ctx:
    """Masks and rope tables of one packed batch, plus switches."""

    def __init__(self, cfg, doc, dt, tables, qat=False, kl=False, sparse=False, aq=False, klw=None, had=None):
        B, S = doc.shape
        dev = doc.device
        self.dt, self.qat, self.kl, self.sparse, self.aq, self.klw, self.had = dt, qat, kl, sparse, aq, klw, had
        self.cos, self.sin, self.ccos, self.csin = tables
        n = S // 128
        i = torch.arange(128, device=dev)[:, None] + 128
        j = torch.arange(256, device=dev)[None]
        near = (j <= i) & (j > i - 128)
        d = doc.view(B, n, 128)
        prev = torch.cat([torch.full_like(d[:, :1], -2), d[:, :-1]], 1)
        self.lmask = near & (d.unsqueeze(3) == torch.cat([prev, d], 2).unsqueeze(2))
        d4 = doc.view(B, S // 4, 4)
        whole4 = (d4 == d4[..., :1]).all(-1)
        first = d4[..., 0]
        self.first4 = torch.cat([torch.ones_like(first[:, :1], dtype=torch.bool), first[:, 1:] != first[:, :-1]], 1)
        t = torch.arange(S, device=dev)
        r4 = torch.arange(S // 4, device=dev)
        self.cmask4 = (r4[None] < (t[:, None] + 1) // 4) & whole4[:, None] & (doc.unsqueeze(2) == first.unsqueeze(1))
        d128 = doc.view(B, n, 128)
        whole128 = (d128 == d128[..., :1]).all(-1)
        r = torch.arange(n, device=dev)
        self.cmask128 = (
            (r[None] < (t[:, None] + 1) // 128) & whole128[:, None] & (doc.unsqueeze(2) == d128[:, None, :, 0])
        )


class Model(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = c = cfg
        self.embed = Lin((c.vocab, c.dim), "bf16", 0.5)
        self.layers = nn.ModuleList([Block(c, r, i < c.n_hash) for i, r in enumerate(c.ratios)])
        self.norm = Norm(c.dim)
        self.head = Lin((c.vocab, c.dim), "bf16", 0.5 * c.dim**-0.5)
        self.hc_head = HCHead(c)
        self.mtp = nn.ModuleList([Stage(c, s == c.stages - 1, s == 0) for s in range(c.stages)])
        self.block_fn = lambda blk, *a: blk(*a)

    def tables(self, n, device):
        return rope_table(self.cfg, n, False, device) + rope_table(self.cfg, n, True, device)

    def forward(self, ids, ctx, want_main=False, head=True):
        x = F.embedding(ids, self.embed.w(ctx)).unsqueeze(2).expand(-1, -1, 4, -1).contiguous()
        aux, loads, main = 0.0, [], []
        for i, l in enumerate(self.layers):
            x, a, load = self.block_fn(l, x, ids, ctx)
            aux = aux + a
            loads.append(load)
            if want_main and i in self.cfg.targets:
                main.append(x.float().mean(2).to(ctx.dt))
        out = None
        if head:
            y = rms(self.hc_head(x, ctx, self.cfg.eps), self.norm.weight, self.cfg.eps)
            out = F.linear(y, self.head.w(ctx))
        return out, aux, loads, (torch.cat(main, -1) if want_main else None)

    def draft(self, main, ids, doc, bi, ti, ctx, forced=None):
        """Drafts at N anchors: main hidden of position ti, anchor token ids[bi, ti+1].
        forced: [N,7] tokens that precede each drafted one (training); None: greedy.
        Returns logits [N,7,V], confidence [N,7], loads, greedy ids [N,7]."""
        c = self.cfg
        B, S = ids.shape
        N = bi.shape[0]
        s0 = self.mtp[0]
        main_x = rms(F.linear(main.view(B * S, -1), s0.main_proj.w(ctx)), s0.main_norm.weight, c.eps)
        ctx.mcos, ctx.msin = ctx.cos[:S].repeat(B, 1), ctx.sin[:S].repeat(B, 1)
        off = ti[:, None] - 127 + torch.arange(128, device=ids.device)
        gidx = bi[:, None] * S + off.clamp_min(0)
        gok = (off >= 0) & (doc.view(-1)[gidx] == doc[bi, ti][:, None])
        pos = ti[:, None] + 1 + torch.arange(c.block, device=ids.device)
        bcos, bsin = ctx.cos[pos], ctx.sin[pos]
        tok = torch.full((N, c.block), c.noise, device=ids.device, dtype=torch.long)
        tok[:, 0] = ids[bi, ti + 1]
        E = self.embed.w(ctx).detach()
        x = F.embedding(tok, E).unsqueeze(2).expand(-1, -1, 4, -1).contiguous()
        loads = []
        for st in self.mtp:
            x, load = self.block_fn(st, x, main_x, gidx, gok, bcos, bsin, ctx)
            loads.append(load)
        st = self.mtp[-1]
        h = st.hc_head(x, ctx, c.eps)
        logits = F.linear(rms(h, st.norm.weight, c.eps), self.head.w(ctx).detach()).float()
        w1, w2 = st.markov_w1.w(ctx), st.markov_w2.w(ctx)
        cw = st.conf.w(ctx)
        if forced is not None:
            me = F.embedding(forced, w1)
            logits = logits + F.linear(me, w2).float()
            out = logits.argmax(-1)
        else:
            prev, outs, mes, lg = tok[:, 0], [], [], []
            for i in range(c.block):
                me = F.embedding(prev, w1)
                l = logits[:, i] + F.linear(me, w2).float()
                prev = l.argmax(-1)
                outs.append(prev), mes.append(me), lg.append(l)
            out, me, logits = torch.stack(outs, 1), torch.stack(mes, 1), torch.stack(lg, 1)
        conf = F.linear(torch.cat([h.detach() if forced is not None else h, me.detach()], -1), cw).squeeze(-1).float()
        return logits, conf, loads, out


def hadamard(n, device="cpu"):
    h = torch.ones(1, 1)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return (h * n**-0.5).to(device)
