"""A slow, obvious second implementation of what ccviz computes, to test ccviz against.

It shares no code with ccviz (and imports nothing of it): the weights are read out of a stock Hugging Face module,
and everything else (norms, rope, attention under explicit masks, the refresh loop, the strategies) is written out
here in float64, on a plain list of entries. No forward of the model, no cache class, attention or mask function of
transformers is called. Where the code could be fast or plain, it is plain.

    run(model, prompt_ids, strategy, cache_size, chunk_size, max_new_tokens, ...) -> OracleRun
        observe=True: also the counter-causal surprise of every entry at every refresh
        follow=[ids]: feed these instead of the greedy choices, and measure how far each prediction is from the full one
    newest_attention(net, entries, w) -> what the newest w entries attend to, to check it against the stock model
    full_logits(model, ids) -> logits of every row under the full cache, to check the oracle itself
    tiny_model(family, seed) -> a small random model whose attention and logits are far from uniform

Architectures (by `model.config.model_type`): llama, qwen2, qwen3, mistral, gemma2, gemma3_text, gpt2, gpt_neox, with
the default rope type. In comments and shapes: R rows (queries), N entries (keys), H query heads, G key-value heads,
D head dimension, C hidden size, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

NAN = float("nan")


@dataclass
class OracleRefresh:
    tokens_seen: int
    before: list[int]  # positions held before the refresh, in order
    kept: list[int]  # positions held after it, in order
    scores: list[float] | None  # one per entry of `before`, NaN where unscored; None when nothing was scored
    surprise: list[float] | None = None  # one per entry of `before`, the newest NaN; None unless observed


@dataclass
class OracleRun:
    tokens: list[int]  # generated ids, with the final eos if it stopped on one
    refreshes: list[OracleRefresh]
    kl: list[float] = field(default_factory=list)  # nats, one per token of `follow`: KL(P_full || P_lane)
    agrees: list[bool] = field(default_factory=list)  # one per token of `follow`: the same most likely token


@dataclass
class Entry:
    """One token as the cache holds it; nothing here changes after the token was fed, except `total`."""

    position: int
    token: int
    keys: list[Tensor] = field(default_factory=list)  # per layer (G, D), after k-norm and rope
    values: list[Tensor] = field(default_factory=list)  # per layer (G, D)
    last_input: Tensor | None = None  # (C,), what entered the last decoder layer
    total: float = 0.0  # heavy_hitter's running total


# == Pieces of arithmetic


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps) * weight + bias


def activation(name: str, x: Tensor) -> Tensor:
    if name == "silu":
        return x / (1.0 + torch.exp(-x))
    if name == "gelu":
        return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    raise NotImplementedError(f"activation {name}")


def softmax(x: Tensor) -> Tensor:
    """Over the last dimension; -inf gets weight 0."""
    e = torch.exp(x - x.max(-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def rotate(x: Tensor, positions: list[int], theta: float, dims: int) -> Tensor:
    """Rope on the first `dims` of x (R, heads, D): dimension a is paired with a + dims/2.

    transformers computes the angles in float32 whatever the model's dtype, so they are rounded to float32 here too.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    angles = torch.tensor(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    cos, sin = torch.cos(angles.double())[:, None, :], torch.sin(angles.double())[:, None, :]
    first, second, rest = x[..., : dims // 2], x[..., dims // 2 : dims], x[..., dims:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def attention(q: Tensor, k: Tensor, visible: list[list[bool]], scale: float, cap: float | None) -> list[Tensor]:
    """q (R, H, D), k (N, G, D), visible[row][entry] -> the weights (R, N) of each query head, one after the other."""
    mask = torch.tensor(visible, dtype=torch.bool)
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    weights = []
    for head in range(heads):
        kv = head // group  # neighbouring query heads share a key-value head
        logits = soft_cap(q[:, head] @ k[:, kv].T * scale, cap)
        weights.append(softmax(logits.masked_fill(~mask, -math.inf)))
    return weights


def mix(weights: list[Tensor], v: Tensor) -> Tensor:
    """The heads' weights (R, N) and values v (N, G, D) -> (R, H * D)."""
    group = len(weights) // v.shape[1]
    return torch.cat([weight @ v[:, head // group] for head, weight in enumerate(weights)], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: list[list[bool]], scale: float, cap: float | None) -> Tensor:
    """q (R, H, D), k and v (N, G, D), visible[row][entry] -> (R, H * D)."""
    return mix(attention(q, k, visible, scale, cap), v)


# == The model's weights and what one layer does with them


class Net:
    """Float64 weights of a stock module, and the row-wise parts of its layers."""

    LLAMA_LIKE = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text")

    def __init__(self, model):
        self.config = c = model.config
        self.kind = c.model_type
        if self.kind not in (*self.LLAMA_LIKE, "gpt2", "gpt_neox"):
            raise NotImplementedError(self.kind)
        if getattr(c, "use_bidirectional_attention", None):
            raise NotImplementedError("bidirectional attention")
        state = model.state_dict()
        self.w = {name: tensor.detach().cpu().double() for name, tensor in state.items()}
        self.gemma = self.kind in ("gemma2", "gemma3_text")
        self.layers = c.num_hidden_layers
        self.heads = c.num_attention_heads
        self.kv_heads = getattr(c, "num_key_value_heads", None) or self.heads
        self.head_dim = getattr(c, "head_dim", None) or c.hidden_size // self.heads
        self.act = c.hidden_activation if self.gemma else c.activation_function if self.kind == "gpt2" else c.hidden_act
        # transformers holds Gemma's embedding normaliser in float32 and rounds it to the dtype of the weights
        dtype = next(t.dtype for n, t in state.items() if "embed" in n or "wte" in n)
        self.embed_scale = torch.tensor(c.hidden_size**0.5, dtype=torch.float32).to(dtype).double()
        self.attention_cap = c.attn_logit_softcapping if self.kind == "gemma2" else None  # gemma3's is never applied
        self.final_cap = c.final_logit_softcapping if self.gemma else None
        head = "lm_head.weight" if "lm_head.weight" in self.w else "embed_out.weight"
        self.head_weight = self.w[head]  # a tied head is in the state dict under its own name too
        if self.kind != "gpt2":
            for layer in range(self.layers):
                if self.rope(layer).get("rope_type", "default") != "default":
                    raise NotImplementedError(f"rope {self.rope(layer)}")

    # -- what differs from layer to layer

    def layer_type(self, layer: int) -> str:
        if self.kind == "mistral":  # one window, or None, for all layers
            return "sliding_attention"
        types = getattr(self.config, "layer_types", None)
        return types[layer] if types else "full_attention"

    def window(self, layer: int) -> int | None:
        return self.config.sliding_window if self.layer_type(layer) == "sliding_attention" else None

    def rope(self, layer: int) -> dict:
        parameters = self.config.rope_parameters
        return parameters[self.layer_type(layer)] if self.kind == "gemma3_text" else parameters

    def scale(self, layer: int) -> float:
        if self.gemma:
            return self.config.query_pre_attn_scalar**-0.5
        if self.kind == "gpt2":
            scale = self.head_dim**-0.5 if self.config.scale_attn_weights else 1.0
            return scale / (layer + 1) if self.config.scale_attn_by_inverse_layer_idx else scale
        return self.head_dim**-0.5

    # -- linear maps and norms by name

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.w[name + ".weight"], self.w.get(name + ".bias")
        y = x @ weight if self.kind == "gpt2" else x @ weight.T  # GPT-2's Conv1D stores (in, out)
        return y if bias is None else y + bias

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.w[name + ".weight"]
        if self.kind == "gpt2":
            return layer_norm(x, weight, self.w[name + ".bias"], self.config.layer_norm_epsilon)
        if self.kind == "gpt_neox":
            return layer_norm(x, weight, self.w[name + ".bias"], self.config.layer_norm_eps)
        return rms_norm(x, 1.0 + weight if self.gemma else weight, self.config.rms_norm_eps)

    # -- the row-wise parts of the model

    def embed(self, tokens: list[int], positions: list[int]) -> Tensor:
        if self.kind == "gpt2":
            return self.w["transformer.wte.weight"][tokens] + self.w["transformer.wpe.weight"][positions]
        if self.kind == "gpt_neox":
            return self.w["gpt_neox.embed_in.weight"][tokens]
        x = self.w["model.embed_tokens.weight"][tokens]
        return x * self.embed_scale if self.gemma else x

    def qkv(self, layer: int, x: Tensor, positions: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (R, H, D), keys and values (R, G, D) of the layer's input rows x (R, C)."""
        rows, dim = len(x), self.head_dim
        if self.kind == "gpt2":
            h = self.linear(f"transformer.h.{layer}.attn.c_attn", self.norm(f"transformer.h.{layer}.ln_1", x))
            q, k, v = (part.reshape(rows, self.heads, dim) for part in h.chunk(3, dim=-1))
            return q, k, v
        theta = self.rope(layer)["rope_theta"]
        if self.kind == "gpt_neox":
            at = f"gpt_neox.layers.{layer}."
            h = self.linear(at + "attention.query_key_value", self.norm(at + "input_layernorm", x))
            h = h.reshape(rows, self.heads, 3 * dim)  # each head's query, key, value side by side
            q, k, v = h[..., :dim], h[..., dim : 2 * dim], h[..., 2 * dim :]
            turned = int(dim * self.rope(layer).get("partial_rotary_factor", 1.0))
            return rotate(q, positions, theta, turned), rotate(k, positions, theta, turned), v
        at = f"model.layers.{layer}."
        h = self.norm(at + "input_layernorm", x)
        q = self.linear(at + "self_attn.q_proj", h).reshape(rows, self.heads, dim)
        k = self.linear(at + "self_attn.k_proj", h).reshape(rows, self.kv_heads, dim)
        v = self.linear(at + "self_attn.v_proj", h).reshape(rows, self.kv_heads, dim)
        if self.kind in ("qwen3", "gemma3_text"):
            q, k = self.norm(at + "self_attn.q_norm", q), self.norm(at + "self_attn.k_norm", k)
        return rotate(q, positions, theta, dim), rotate(k, positions, theta, dim), v

    def attention_branch(self, layer: int, mixed: Tensor) -> Tensor:
        """What the attention adds to the residual, from the heads' mixed values (R, H * D)."""
        if self.kind == "gpt2":
            return self.linear(f"transformer.h.{layer}.attn.c_proj", mixed)
        if self.kind == "gpt_neox":
            return self.linear(f"gpt_neox.layers.{layer}.attention.dense", mixed)
        out = self.linear(f"model.layers.{layer}.self_attn.o_proj", mixed)
        return self.norm(f"model.layers.{layer}.post_attention_layernorm", out) if self.gemma else out

    def ffn_branch(self, layer: int, x: Tensor) -> Tensor:
        """What the feed-forward part adds to the residual."""
        if self.kind == "gpt2":
            at = f"transformer.h.{layer}."
            h = activation(self.act, self.linear(at + "mlp.c_fc", self.norm(at + "ln_2", x)))
            return self.linear(at + "mlp.c_proj", h)
        if self.kind == "gpt_neox":
            at = f"gpt_neox.layers.{layer}."
            h = self.linear(at + "mlp.dense_h_to_4h", self.norm(at + "post_attention_layernorm", x))
            return self.linear(at + "mlp.dense_4h_to_h", activation(self.act, h))
        at = f"model.layers.{layer}."
        h = self.norm(at + ("pre_feedforward_layernorm" if self.gemma else "post_attention_layernorm"), x)
        h = activation(self.act, self.linear(at + "mlp.gate_proj", h)) * self.linear(at + "mlp.up_proj", h)
        h = self.linear(at + "mlp.down_proj", h)
        return self.norm(at + "post_feedforward_layernorm", h) if self.gemma else h

    def layer_output(self, layer: int, x: Tensor, mixed: Tensor, ffn: bool = True) -> Tensor:
        """x is the layer's input; the residual stream after the layer."""
        after = x + self.attention_branch(layer, mixed)
        if not ffn:
            return after
        parallel = self.kind == "gpt_neox" and self.config.use_parallel_residual
        return after + self.ffn_branch(layer, x if parallel else after)

    def head(self, x: Tensor) -> Tensor:
        """Logits (R, V) of the residual stream after the last layer."""
        final = {"gpt2": "transformer.ln_f", "gpt_neox": "gpt_neox.final_layer_norm"}.get(self.kind, "model.norm")
        return soft_cap(self.norm(final, x) @ self.head_weight.T, self.final_cap)


# == Forward passes over a list of entries


def stacked(entries: list[Entry], layer: int) -> tuple[Tensor, Tensor]:
    """Cached keys and values of one layer, (N, G, D) each."""
    return torch.stack([e.keys[layer] for e in entries]), torch.stack([e.values[layer] for e in entries])


def feed(net: Net, cached: list[Entry], tokens: list[int], start: int) -> tuple[list[Entry], Tensor]:
    """One chunk: tokens at positions start, start + 1, ... attend to the cached entries and causally to each other.

    Returns their new entries and the residual stream after the last layer, (R, C).
    """
    new = [Entry(start + i, token) for i, token in enumerate(tokens)]
    positions = [e.position for e in new]
    everyone = cached + new
    x = net.embed(tokens, positions)
    for layer in range(net.layers):
        q, k, v = net.qkv(layer, x, positions)
        for row, entry in enumerate(new):
            entry.keys.append(k[row])
            entry.values.append(v[row])
            if layer == net.layers - 1:
                entry.last_input = x[row]
        visible = causal_visible(positions, everyone, net.window(layer))
        keys, values = stacked(everyone, layer)
        mixed = attend(q, keys, values, visible, net.scale(layer), net.attention_cap)
        x = net.layer_output(layer, x, mixed)
    return new, x


def causal_visible(positions: list[int], entries: list[Entry], window: int | None) -> list[list[bool]]:
    """A query at a position sees the entries up to it, those within the window where there is one."""
    return [[0 <= p - other.position < (window or math.inf) for other in entries] for p in positions]


def newest_attention(net: Net, entries: list[Entry], w: int) -> list[list[Tensor]]:
    """What the newest w entries attend to: weights (w, N) of every layer's every query head.

    Their queries are computed again, from their tokens on: at each layer they see the stored keys and values of the
    entries up to themselves. Nothing is stored.
    """
    newest = entries[len(entries) - w :]
    positions = [e.position for e in newest]
    x = net.embed([e.token for e in newest], positions)
    of_layers = []
    for layer in range(net.layers):
        queries, _, _ = net.qkv(layer, x, positions)
        keys, values = stacked(entries, layer)
        visible = causal_visible(positions, entries, net.window(layer))
        of_layers.append(attention(queries, keys, visible, net.scale(layer), net.attention_cap))
        x = net.layer_output(layer, x, mix(of_layers[-1], values))
    return of_layers


def counter_visible(entries: list[Entry], min_gap: int, window: int | None) -> list[list[bool]]:
    """Row i sees entries j > i + min_gap (slots), within the window ahead (positions); else only itself."""
    visible = []
    for i, row in enumerate(entries):
        sees = []
        for j, other in enumerate(entries):
            ahead = other.position - row.position
            sees.append(j > i + min_gap and (window is None or 0 < ahead < window))
        if not any(sees):
            sees[i] = True
        visible.append(sees)
    return visible


def counter_layer(net: Net, entries: list[Entry], layer: int, x: Tensor, min_gap: int, ffn: bool) -> Tensor:
    """One layer of a counter-causal pass: queries from x, keys and values only from the cache."""
    queries, _, _ = net.qkv(layer, x, [e.position for e in entries])
    keys, values = stacked(entries, layer)
    visible = counter_visible(entries, min_gap, net.window(layer))
    mixed = attend(queries, keys, values, visible, net.scale(layer), net.attention_cap)
    return net.layer_output(layer, x, mixed, ffn)


# == Scores


def importance_scores(net: Net, entries: list[Entry], frozen_size: int, queries: str) -> list[float]:
    """Last layer only. Frozen entries are left out and score NaN."""
    free = [e for e in entries if e.position >= frozen_size]
    keys, _ = stacked(free, net.layers - 1)
    n = len(free)
    per_head = []
    for g in range(net.kv_heads):
        k = keys[:, g]
        if queries == "last":
            per_head.append(k @ k[-1])
        else:
            hidden = torch.tensor([[b > a for b in range(n)] for a in range(n)])
            weights = softmax((k @ k.T / math.sqrt(net.head_dim)).masked_fill(hidden, -math.inf))
            per_head.append(weights.mean(0))
    scores = iter(torch.stack(per_head).mean(0).tolist())
    return [NAN if e.position < frozen_size else next(scores) for e in entries]


def heavy_hitter_scores(net: Net, entries: list[Entry], frozen_size: int, recent: int) -> list[float]:
    """Adds this refresh's attention to the entries' totals and returns the totals. Frozen entries score NaN."""
    free = [e for e in entries if e.position >= frozen_size]
    recent = min(recent, len(free))
    received = [0.0] * len(free)
    for layer in range(net.layers if free else 0):
        keys, _ = stacked(free, layer)
        for g in range(net.kv_heads):
            k = keys[:, g]
            weights = softmax(k[len(free) - recent :] @ k.T / math.sqrt(net.head_dim))  # (recent, N)
            for i, weight in enumerate(weights.sum(0).tolist()):
                received[i] += weight
    for entry, weight in zip(free, received, strict=True):
        entry.total += weight / (net.layers * net.kv_heads)
    return [NAN if e.position < frozen_size else e.total for e in entries]


def counter_scores(net: Net, entries: list[Entry], options: dict, fast: bool) -> list[float]:
    """How little each token is expected from what comes after it. Every entry is scored."""
    min_gap = options.get("min_gap", 0)
    tokens = [e.token for e in entries]
    if fast:
        x = torch.stack([e.last_input for e in entries])
        x = counter_layer(net, entries, net.layers - 1, x, min_gap, ffn=options.get("ffn", False))
    else:
        x = net.embed(tokens, [e.position for e in entries])
        for layer in range(net.layers):
            x = counter_layer(net, entries, layer, x, min_gap, ffn=True)
    scores = []
    for row, token in zip(net.head(x), tokens, strict=True):
        if options.get("score", "logit") == "logit":
            scores.append(-row[token].item())
        else:
            scores.append(1.0 - softmax(row)[token].item())
    return scores


def received_attention(net: Net, entries: list[Entry], w: int) -> list[float]:
    """The attention that each entry gets from the newest w, mean over layers, query heads and the w queries."""
    received = [0.0] * len(entries)
    for of_layer in newest_attention(net, entries, w):
        for weights in of_layer:
            for row in weights.tolist():
                for i, weight in enumerate(row):
                    received[i] += weight / (net.layers * net.heads * w)
    return received


def pooled(values: list[float], kernel: int, pooling: str) -> list[float]:
    """Each value's mean or maximum with its neighbours, `kernel` in all; in the mean, those beyond an end are zeros."""
    result = []
    for i in range(len(values)):
        around = values[max(0, i - kernel // 2) : i + kernel // 2 + 1]
        result.append(max(around) if pooling == "max" else sum(around) / kernel)
    return result


def snapkv_scores(net: Net, entries: list[Entry], window: int, options: dict) -> list[float]:
    """The attention from the newest `window` entries, pooled over neighbouring slots; they themselves score NaN."""
    received = received_attention(net, entries, window)[: len(entries) - window]
    scores = pooled(received, options.get("kernel", 5), options.get("pooling", "avg"))
    return scores + [NAN] * window


def key_diff_scores(net: Net, entries: list[Entry]) -> list[float]:
    """How far each key points from where the keys point on average. Every entry is scored."""
    total = torch.zeros(len(entries), dtype=torch.float64)
    for layer in range(net.layers):
        keys, _ = stacked(entries, layer)
        for g in range(net.kv_heads):
            unit = keys[:, g] / torch.sqrt((keys[:, g] ** 2).sum(-1, keepdim=True))
            anchor = unit.mean(0)
            total += unit @ anchor / torch.sqrt((anchor**2).sum())
    return (-total / (net.layers * net.kv_heads)).tolist()


def random_scores(entries: list[Entry], seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + entries[-1].position)
    return torch.rand(len(entries), generator=generator).tolist()  # in float32, as the engine ranks them


SENTENCE_ENDS = ".!?\n。！？"
PHRASE_ENDS = SENTENCE_ENDS + ",;:、，；：–—"


def spans(entries: list[Entry], unit: str, decode: Callable[[int], str]) -> list[list[int]]:
    """The slots of each sentence or phrase; a gap in the positions ends one too."""
    ends = SENTENCE_ENDS if unit == "sentence" else PHRASE_ENDS
    found: list[list[int]] = [[]]
    for slot, entry in enumerate(entries):
        if slot > 0:
            last = entries[slot - 1]
            if entry.position != last.position + 1 or any(end in decode(last.token) for end in ends):
                found.append([])
        found[-1].append(slot)
    return found


def span_scores(net: Net, entries: list[Entry], options: dict, decode: Callable[[int], str]) -> list[float]:
    """Each span's mean or highest surprise, for all its entries; NaN where none of them sees anything ahead."""
    surprise = counter_scores(net, entries, options, fast=False)
    scorable = len(entries) - (options.get("min_gap", 0) + 1)
    scores = [NAN] * len(entries)
    for span in spans(entries, options.get("unit", "sentence"), decode):
        of_span = [surprise[slot] for slot in span if slot < scorable]
        for slot in span if of_span else []:
            scores[slot] = max(of_span) if options.get("pool", "mean") == "max" else sum(of_span) / len(of_span)
    return scores


def recent_scores(net: Net, entries: list[Entry], options: dict) -> list[float]:
    """A weighted sum of each entry's place by surprise and its place in the cache, both from 0 for the first to go."""
    surprise = torch.tensor(counter_scores(net, entries, options, fast=False), dtype=torch.float32).tolist()
    unseen = options.get("min_gap", 0) + 1  # the newest, which no later entry predicts: lowest, whatever they scored
    surprise = [*surprise[: len(surprise) - unseen], *[NAN] * min(unseen, len(surprise))]
    recency = options.get("recency", 50)
    scores = []
    for slot, s in enumerate(surprise):
        below = 0
        for other, t in enumerate(surprise):
            both = (not math.isnan(t), 0.0 if math.isnan(t) else t, other)
            below += both < (not math.isnan(s), 0.0 if math.isnan(s) else s, slot)
        scores.append(float((100 - recency) * below + recency * slot))
    return scores


# ----------------------------------------------------------------------------------------------------------------
# The refresh and the loop
# ----------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "full": {},
    "sliding_window": {},
    "importance": {"queries": ("last", "all")},
    "heavy_hitter": {"recent": None},
    "counter_causal": {"score": ("logit", "probability"), "min_gap": None, "recent": None},
    "counter_causal_fast": {"score": ("logit", "probability"), "min_gap": None, "recent": None, "ffn": (False, True)},
    "streaming_llm": {"sinks": None},
    "tova": {},
    "snapkv": {"window": None, "kernel": None, "pooling": ("avg", "max")},
    "key_diff": {},
    "random": {"seed": None},
}
OPTIONS["counter_causal_span"] = OPTIONS["counter_causal"] | {"unit": ("sentence", "phrase"), "pool": ("mean", "max")}
OPTIONS["counter_causal_recent"] = OPTIONS["counter_causal"] | {"recency": None}


def survivors(entries: list[Entry], scores: list[float], protected: set[int], size: int) -> list[Entry]:
    """All protected positions, then the best of the rest; ties go to the later position, NaN ranks lowest."""
    if len(protected) > size:
        raise ValueError(f"{len(protected)} protected entries do not fit in a cache of {size}")
    ranked = []
    for entry, score in zip(
        entries, torch.tensor(scores, dtype=torch.float32).tolist(), strict=True
    ):  # DESIGN: ranked in float32
        if entry.position not in protected:
            number = not math.isnan(score)
            ranked.append((number, score if number else 0.0, entry.position))
    best = sorted(ranked, reverse=True)[: size - len(protected)]
    keep = protected | {position for _, _, position in best}
    return [e for e in entries if e.position in keep]


def refresh(net: Net, entries: list[Entry], strategy: str, size: int, frozen_size: int, options: dict, decode=None):
    """One refresh: the entries that stay, and the scores (None where nothing was scored)."""
    n = len(entries)
    first = frozen_size  # how many of the first positions are protected
    evicting = n > size and strategy != "full"
    newest = 0  # how many of the newest entries are protected
    scores = None
    if strategy == "heavy_hitter":
        newest = options.get("recent", (size - frozen_size) // 2)
        scores = heavy_hitter_scores(net, entries, frozen_size, newest)
    elif evicting and strategy == "sliding_window":
        scores = [float(e.position) for e in entries]
    elif evicting and strategy == "importance":
        scores = importance_scores(net, entries, frozen_size, options.get("queries", "last"))
    elif evicting and strategy == "streaming_llm":
        first = max(frozen_size, options.get("sinks", 4))
        scores = [float(e.position) for e in entries]
    elif evicting and strategy == "tova":
        scores = received_attention(net, entries, 1)
    elif evicting and strategy == "snapkv":
        newest = min(n, options.get("window", max(1, min(32, (size - frozen_size) // 2))))
        scores = snapkv_scores(net, entries, newest, options)
    elif evicting and strategy == "key_diff":
        scores = key_diff_scores(net, entries)
    elif evicting and strategy == "random":
        scores = random_scores(entries, options.get("seed", 0))
    elif evicting:
        newest = max(options.get("min_gap", 0) + 1, options.get("recent", 0))
        if strategy == "counter_causal_span":
            scores = span_scores(net, entries, options, decode)
        elif strategy == "counter_causal_recent":
            scores = recent_scores(net, entries, options)
        else:
            scores = counter_scores(net, entries, options, fast=strategy == "counter_causal_fast")
    kept = entries
    if evicting:
        protected = {e.position for e in entries if e.position < first}
        protected |= {e.position for e in entries[max(0, n - newest) :]}
        kept = survivors(entries, scores, protected, size)
    if scores is not None and all(math.isnan(s) for s in scores):
        scores = None
    return kept, scores


@torch.no_grad()
def run(
    model,
    prompt_ids: list[int],
    strategy: str,
    cache_size: int,
    chunk_size: int,
    max_new_tokens: int,
    frozen_size: int = 0,
    refresh_mode: str = "chunked",
    options: dict | None = None,
    eos_ids: set[int] = frozenset(),
    decode: Callable[[int], str] | None = None,
    observe: bool = False,
    follow: list[int] | None = None,
) -> OracleRun:
    """Feed the prompt in chunks, decode greedily, refresh by the rules of DESIGN section 2.

    `decode` gives the text of one token id, for counter_causal_span. With `follow`, its tokens are the answer, all of
    them, whatever `max_new_tokens` and `eos_ids` say.
    """
    options = {name: value for name, value in (options or {}).items() if value is not None}  # None: the default
    if not prompt_ids or refresh_mode not in ("chunked", "prefill_end", "both"):
        raise ValueError(f"empty prompt or unknown refresh_mode {refresh_mode!r}")
    for name, value in options.items():
        if name not in OPTIONS[strategy] or value not in (OPTIONS[strategy][name] or (value,)):
            raise ValueError(f"{strategy}: option {name}={value!r}")
    net = Net(model)
    entries: list[Entry] = []
    result = OracleRun([], [])
    seen = 0

    def feed_then_refresh(tokens: list[int]) -> Tensor:
        """Returns the logits (V,) of the next token, which do not depend on the refresh that follows."""
        nonlocal entries, seen
        new, x = feed(net, entries, tokens, seen)
        entries, seen = entries + new, seen + len(tokens)
        chunk_end = refresh_mode in ("chunked", "both") and seen % chunk_size == 0
        prompt_end = refresh_mode in ("prefill_end", "both") and seen == len(prompt_ids)
        if chunk_end or prompt_end:
            surprise = [*counter_scores(net, entries, {}, fast=False)[:-1], NAN] if observe else None
            kept, scores = refresh(net, entries, strategy, cache_size, frozen_size, options, decode)
            before = [e.position for e in entries]
            result.refreshes.append(OracleRefresh(seen, before, [e.position for e in kept], scores, surprise))
            entries = kept
        return net.head(x[-1:])[0]

    for start in range(0, len(prompt_ids), chunk_size):
        logits = feed_then_refresh(prompt_ids[start : start + chunk_size])
    if follow is not None:
        full = full_logits(model, prompt_ids + follow[:-1])
        for step, token in enumerate(follow):
            row = full[len(prompt_ids) - 1 + step]
            p = softmax(row)
            result.kl.append((p * (torch.log(p) - torch.log(softmax(logits)))).sum().item())
            result.agrees.append(row.argmax().item() == logits.argmax().item())
            result.tokens.append(token)
            if step < len(follow) - 1:
                logits = feed_then_refresh([token])
        return result
    while len(result.tokens) < max_new_tokens:
        token = logits.argmax().item()
        result.tokens.append(token)
        if token in eos_ids or len(result.tokens) == max_new_tokens:
            break
        logits = feed_then_refresh([token])
    return result


@torch.no_grad()
def full_logits(model, ids: list[int]) -> Tensor:
    """Logits (N, V) of every row under the full cache, in float64; to check the oracle against the stock model."""
    net = Net(model)
    _, x = feed(net, [], ids, 0)
    return net.head(x)


# ----------------------------------------------------------------------------------------------------------------
# Tiny models
# ----------------------------------------------------------------------------------------------------------------

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox")


def tiny_model(family: str, seed: int = 0):
    """A small random float32 model in eval mode (vocabulary 97, 512 positions), the same for the same seed.

    The weights are spread so widely that attention is peaked and logits are far apart. All of mistral's layers have a
    window of 12; gemma2 alternates and ends in a full layer, gemma3 ends in a sliding one. Heads: qwen2, gemma2 and
    gpt2 are tied, the others not.
    """
    import transformers as tf  # only the maker needs it

    common = {"vocab_size": 97, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    llama = dict(common, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4)
    llama.update(num_key_value_heads=2, max_position_embeddings=512)
    gemma = dict(llama, num_hidden_layers=4, head_dim=16, query_pre_attn_scalar=24, sliding_window=12)
    local, far = "sliding_attention", "full_attention"
    if family == "llama":
        config, maker = tf.LlamaConfig(**llama), tf.LlamaForCausalLM
    elif family == "qwen2":
        config, maker = tf.Qwen2Config(**llama, tie_word_embeddings=True), tf.Qwen2ForCausalLM
    elif family == "qwen3":
        config, maker = tf.Qwen3Config(**llama, head_dim=16), tf.Qwen3ForCausalLM
    elif family == "mistral":
        config, maker = tf.MistralConfig(**llama, sliding_window=12), tf.MistralForCausalLM
    elif family == "gemma2":
        gemma.update(layer_types=[local, far] * 2, attn_logit_softcapping=6.0, final_logit_softcapping=12.0)
        config, maker = tf.Gemma2Config(**gemma), tf.Gemma2ForCausalLM
    elif family == "gemma3":
        gemma.update(layer_types=[local, local, far, local], tie_word_embeddings=False)
        config, maker = tf.Gemma3TextConfig(**gemma), tf.Gemma3ForCausalLM
    elif family == "gpt2":
        sizes = {"n_embd": 48, "n_inner": 80, "n_layer": 3, "n_head": 4, "n_positions": 512}
        config, maker = tf.GPT2Config(**common, **sizes), tf.GPT2LMHeadModel
    elif family == "gpt_neox":
        llama.pop("num_key_value_heads")
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        config, maker = tf.GPTNeoXConfig(**llama, rope_parameters=rope), tf.GPTNeoXForCausalLM
    else:
        raise ValueError(f"family {family!r}; one of {', '.join(FAMILIES)}")
    with torch.random.fork_rng():
        model = maker(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if family.startswith("gemma") and "embed_tokens" in name:
                parameter.copy_(0.08 * noise)  # it is scaled up by sqrt(48); more of it would repeat one token forever
            elif parameter.dim() == 2:
                parameter.copy_(0.3 * noise)
            else:  # norms and biases: jitter around what the config class made
                parameter.add_(0.2 * noise)
        if family == "gemma2":
            model.model.norm.weight.add_(3.0)  # the tied head is small with the embedding; make up for it
    model.requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = None
    return model
