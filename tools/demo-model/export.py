"""Write a Model as a checkpoint in the published layout (safetensors by hand) with its config, and read one back."""

import json
import os
import struct

import torch

from model import Config, Model, fp4_parts, fp8_parts


def tensors(m):
    """-> {official name: (dtype string, tensor)}; m on the CPU in float32."""
    T = {}
    c = m.cfg

    def bf16(n, t):
        T[n] = ("BF16", t.detach().to(torch.bfloat16))

    def f32(n, t):
        T[n] = ("F32", t.detach().float())

    def e8(ex):
        return (ex + 127).clamp(0, 254).to(torch.uint8)

    def fp8(n, w):
        w = w.detach().float()
        b, ex = fp8_parts(w)
        T[n + ".weight"] = ("F8_E4M3", b.reshape(w.shape).to(torch.float8_e4m3fn))
        T[n + ".scale"] = ("F8_E8M0", e8(ex.reshape(w.shape[0] // 128, w.shape[1] // 128)))

    def fp4(n, w):
        w = w.detach().float()
        idx, neg, ex = fp4_parts(w)
        nib = (idx + 8 * neg).to(torch.uint8).reshape(w.shape)
        T[n + ".weight"] = ("I8", (nib[:, 0::2] | (nib[:, 1::2] << 4)).view(torch.int8))
        T[n + ".scale"] = ("F8_E8M0", e8(ex.reshape(w.shape[0], w.shape[1] // 32)))

    def hc_head(p, h):
        f32(p + "hc_head_fn", h.fn), f32(p + "hc_head_base", h.base), f32(p + "hc_head_scale", h.scale)

    def comp(p, k):
        f32(p + ".ape", k.ape), bf16(p + ".norm.weight", k.norm.weight)
        bf16(p + ".wkv.weight", k.wkv.weight), bf16(p + ".wgate.weight", k.wgate.weight)

    def block(p, b):
        a, f = b.attn, b.ffn
        bf16(p + ".attn_norm.weight", b.attn_norm.weight), bf16(p + ".ffn_norm.weight", b.ffn_norm.weight)
        for k, h in (("attn", b.hc_attn), ("ffn", b.hc_ffn)):
            f32(f"{p}.hc_{k}_fn", h.fn), f32(f"{p}.hc_{k}_base", h.base), f32(f"{p}.hc_{k}_scale", h.scale)
        f32(p + ".attn.attn_sink", a.attn_sink)
        bf16(p + ".attn.q_norm.weight", a.q_norm.weight), bf16(p + ".attn.kv_norm.weight", a.kv_norm.weight)
        for k in ("wq_a", "wq_b", "wkv", "wo_b"):
            fp8(f"{p}.attn.{k}", getattr(a, k).weight)
        fp8(p + ".attn.wo_a", a.wo_a.weight.flatten(0, 1))
        if a.ratio:
            comp(p + ".attn.compressor", a.compressor)
        if a.ratio == 4:
            fp8(p + ".attn.indexer.wq_b", a.indexer.wq_b.weight)
            bf16(p + ".attn.indexer.weights_proj.weight", a.indexer.weights_proj.weight)
            comp(p + ".attn.indexer.compressor", a.indexer.compressor)
        bf16(p + ".ffn.gate.weight", f.gate.weight)
        if f.hashed:
            T[p + ".ffn.gate.tid2eid"] = ("I64", f.tid2eid.long())
        else:
            f32(p + ".ffn.gate.bias", f.bias)
        for k in ("w1", "w2", "w3"):
            for e in range(c.experts):
                fp4(f"{p}.ffn.experts.{e}.{k}", getattr(f, k).weight[e])
            fp8(f"{p}.ffn.shared_experts.{k}", getattr(f, "s" + k).weight)

    bf16("embed.weight", m.embed.weight), bf16("head.weight", m.head.weight), bf16("norm.weight", m.norm.weight)
    hc_head("", m.hc_head)
    for i, b in enumerate(m.layers):
        block(f"layers.{i}", b)
    for s, b in enumerate(m.mtp):
        block(f"mtp.{s}", b)
    fp8("mtp.0.main_proj", m.mtp[0].main_proj.weight), bf16("mtp.0.main_norm.weight", m.mtp[0].main_norm.weight)
    p, l = f"mtp.{c.stages - 1}", m.mtp[-1]
    bf16(p + ".norm.weight", l.norm.weight), hc_head(p + ".", l.hc_head)
    bf16(p + ".markov_head.markov_w1.weight", l.markov_w1.weight)
    bf16(p + ".markov_head.markov_w2.weight", l.markov_w2.weight)
    bf16(p + ".confidence_head.proj.weight", l.conf.weight)
    return T


def config_json(c):
    return dict(
        architectures=["DeepseekV4ForCausalLM"],
        model_type="deepseek_v4",
        vocab_size=c.vocab,
        hidden_size=c.dim,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=1,
        head_dim=c.hd,
        qk_rope_head_dim=c.rd,
        q_lora_rank=c.q_lora,
        o_lora_rank=c.o_lora,
        o_groups=c.groups,
        moe_intermediate_size=c.inter,
        n_routed_experts=c.experts,
        n_shared_experts=1,
        num_experts_per_tok=c.topk,
        num_hash_layers=c.n_hash,
        scoring_func="sqrtsoftplus",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        routed_scaling_factor=c.route_scale,
        swiglu_limit=c.limit,
        hidden_act="silu",
        rms_norm_eps=c.eps,
        sliding_window=c.win,
        compress_ratios=list(c.ratios) + [0] * c.stages,
        rope_theta=int(c.theta),
        compress_rope_theta=int(c.ctheta),
        max_position_embeddings=c.max_pos,
        rope_scaling=dict(
            type="yarn",
            factor=int(c.factor),
            beta_fast=c.beta_fast,
            beta_slow=c.beta_slow,
            original_max_position_embeddings=c.orig,
        ),
        index_n_heads=c.iheads,
        index_head_dim=c.ihd,
        index_topk=c.itopk,
        hc_mult=c.hc,
        hc_sinkhorn_iters=c.hc_iters,
        hc_eps=1e-6,
        num_nextn_predict_layers=1,
        dspark_block_size=c.block,
        dspark_noise_token_id=c.noise,
        dspark_markov_rank=c.rank,
        dspark_target_layer_ids=list(c.targets),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        expert_dtype="fp4",
        tie_word_embeddings=False,
        attention_bias=False,
        torch_dtype="bfloat16",
        quantization_config=dict(
            activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", scale_fmt="ue8m0", weight_block_size=[128, 128]
        ),
    )


def write(m, out, shards=2):
    os.makedirs(out, exist_ok=True)
    T = tensors(m)
    raw = {n: t.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for n, (_, t) in T.items()}
    total = sum(map(len, raw.values()))
    parts, cur, acc = [], [], 0
    for n in sorted(T):
        cur.append(n)
        acc += len(raw[n])
        if acc >= total / shards and len(parts) < shards - 1:
            parts.append(cur)
            cur, acc = [], 0
    parts.append(cur)
    index = {}
    for i, names in enumerate(parts):
        fn = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        head, off = {}, 0
        for n in names:
            head[n] = dict(dtype=T[n][0], shape=list(T[n][1].shape), data_offsets=[off, off + len(raw[n])])
            off += len(raw[n])
            index[n] = fn
        h = json.dumps(head).encode()
        h += b" " * (-len(h) % 8)
        with open(f"{out}/{fn}", "wb") as f:
            f.write(struct.pack("<Q", len(h)) + h)
            for n in names:
                f.write(raw[n])
    json.dump(dict(metadata=dict(total_size=total), weight_map=index), open(f"{out}/model.safetensors.index.json", "w"))
    json.dump(config_json(m.cfg), open(f"{out}/config.json", "w"), indent=1)
    return total


def load(folder):
    """Read an exported checkpoint back into a Model (weights as stored: fixed points of the fake quantisation)."""
    j = json.load(open(f"{folder}/config.json"))
    rs, st = j["rope_scaling"], j["compress_ratios"]
    c = Config(
        vocab=j["vocab_size"],
        dim=j["hidden_size"],
        layers=j["num_hidden_layers"],
        ratios=tuple(st[: j["num_hidden_layers"]]),
        heads=j["num_attention_heads"],
        groups=j["o_groups"],
        q_lora=j["q_lora_rank"],
        o_lora=j["o_lora_rank"],
        inter=j["moe_intermediate_size"],
        experts=j["n_routed_experts"],
        topk=j["num_experts_per_tok"],
        n_hash=j["num_hash_layers"],
        iheads=j["index_n_heads"],
        itopk=j["index_topk"],
        factor=rs["factor"],
        orig=rs["original_max_position_embeddings"],
        block=j["dspark_block_size"],
        targets=tuple(j["dspark_target_layer_ids"]),
        rank=j["dspark_markov_rank"],
        noise=j["dspark_noise_token_id"],
        stages=len(st) - j["num_hidden_layers"],
    )
    dts = dict(
        BF16=torch.bfloat16,
        F32=torch.float32,
        I64=torch.int64,
        F8_E4M3=torch.float8_e4m3fn,
        F8_E8M0=torch.uint8,
        I8=torch.uint8,
    )
    T = {}
    for fn in sorted(set(json.load(open(f"{folder}/model.safetensors.index.json"))["weight_map"].values())):
        b = open(f"{folder}/{fn}", "rb").read()
        n = struct.unpack("<Q", b[:8])[0]
        for k, v in json.loads(b[8 : 8 + n]).items():
            lo, hi = v["data_offsets"]
            T[k] = (
                torch.frombuffer(bytearray(b[8 + n + lo : 8 + n + hi]), dtype=torch.uint8)
                .view(dts[v["dtype"]])
                .view(v["shape"])
            )

    def w(n):
        t = T[n + ".weight"]
        if n + ".scale" not in T:
            return t.float()
        s = torch.exp2(T[n + ".scale"].float() - 127)
        if t.dtype == torch.float8_e4m3fn:
            return (t.float().view(s.shape[0], 128, s.shape[1], 128) * s[:, None, :, None]).reshape(t.shape)
        g = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        x = torch.stack([g[(t & 15).long()], g[(t >> 4).long()]], -1).flatten(-2)
        return (x.view(s.shape[0], s.shape[1], 32) * s.unsqueeze(-1)).flatten(1)

    m = Model(c)
    with torch.no_grad():
        for n, p in list(m.named_parameters()) + list(m.named_buffers()):
            o = n.replace("hc_head.", "hc_head_").replace("hc_attn.", "hc_attn_").replace("hc_ffn.", "hc_ffn_")
            o = o.replace(".conf.", ".confidence_head.proj.").replace(".markov_w", ".markov_head.markov_w")
            q = o.split(".")
            if ".ffn." in o and q[-2] in ("w1", "w2", "w3"):
                pre = ".".join(q[:-2])
                p.copy_(torch.stack([w(f"{pre}.experts.{e}.{q[-2]}") for e in range(c.experts)]))
                continue
            if ".ffn." in o and q[-2] in ("sw1", "sw2", "sw3"):
                o = ".".join(q[:-2] + ["shared_experts", q[-2][1:], "weight"])
            o = o.replace(".ffn.bias", ".ffn.gate.bias").replace(".ffn.tid2eid", ".ffn.gate.tid2eid")
            p.copy_((w(o[:-7]) if o.endswith(".weight") else T[o]).reshape(p.shape))
    return m
