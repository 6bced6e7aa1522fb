"""How a stock Hugging Face model is called: masks, positions, the head, and the last layer alone.

Knows the model's forward protocol on transformers 5; knows nothing of strategies, budgets or refreshes. The model's
layers are never rewritten: every pass is a call of the stock module with an explicit mask, the true positions and a
cache object of ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from ccviz.cache import BoundedCache, CacheRow
from ccviz.errors import UserError

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LAYER_KINDS = {FULL, SLIDING, CHUNKED}
FEED_FORWARD_NAMES = ("mlp", "feed_forward", "block_sparse_moe", "ffn", "fc2")
VOCABULARY_ROWS = 32  # rows of whole-vocabulary logits that exist at one time when scoring or recording

KindMask = Callable[[str], Tensor]


@dataclass
class LanguageModel:
    """A causal language model with its tokenizer, as `load_model` returns it.

    Attributes
    ----------
    model
        The stock Hugging Face module, in evaluation mode.
    tokenizer
        Its tokenizer.
    name
        The name it was asked for by.
    device, dtype
        Where its inputs go, and the type of its weights.
    """

    model: Any
    tokenizer: Any
    name: str
    device: torch.device
    dtype: torch.dtype

    # What the model is

    @cached_property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        count = self.config.num_hidden_layers
        for module in self.model.base_model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise UserError(f"{self.name} ({self.config.model_type}) has no list of {count} decoder layers to read.")

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        return layer_kinds(self.config)

    @cached_property
    def context_length(self) -> int | None:
        """The most positions the model was made for, or None where its configuration does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a generation."""
        stated = getattr(self.model.generation_config, "eos_token_id", None)
        if stated is None:
            stated = getattr(self.tokenizer, "eos_token_id", None)
        if stated is None:
            return frozenset()
        return frozenset(stated if isinstance(stated, (list, tuple)) else [stated])

    @cached_property
    def entry_bytes(self) -> int:
        """Bytes of keys and values that one cached token takes in all layers."""
        cache = BoundedCache()
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self.forward(ids, torch.zeros_like(ids), cache)
        row = cache.row(0)
        tensors = [tensor for layer in range(row.layers) for tensor in (row.keys(layer), row.values(layer))]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    # Passes

    def forward(self, token_ids: Tensor, positions: Tensor, cache: BoundedCache) -> Tensor:
        """Feed tokens (rows, q) at true positions (rows, q), append them to the cache, and return their hidden states.

        Returns
        -------
        Tensor
            (rows, q, hidden size), after the final norm.
        """
        cache.append(token_ids, positions)
        mask = causal_mask(cache.positions, token_ids.shape[1], self.config)
        with self._recording(cache) if cache.record_inputs else contextlib.nullcontext():
            return self.call(token_ids, positions, mask, cache)

    @torch.no_grad()
    def call(self, token_ids: Tensor, positions: Tensor, mask: KindMask, cache: Cache) -> Tensor:
        """The stock model without its head, under one explicit mask a kind of layer (true: may be attended to)."""
        masks = {kind: self._as_the_model_wants(mask(kind)) for kind in sorted(set(self.layer_kinds))}
        output = self.model.base_model(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            cache=cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _as_the_model_wants(self, mask: Tensor) -> Tensor:
        # Torch's own attention takes boolean masks, and so does ours; the eager functions add the mask to the scores.
        if self.model.config._attn_implementation in ("sdpa", "ccviz_reporting"):
            return mask
        least = torch.finfo(self.dtype).min
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, least)

    @contextlib.contextmanager
    def _recording(self, cache: BoundedCache) -> Iterator[None]:
        def keep_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            cache.write_inputs(args[0] if args else kwargs["hidden_states"])

        handle = self.layers[-1].register_forward_pre_hook(keep_input, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def last_layer_alone(self, inputs: Tensor, ffn: bool) -> Iterator[None]:
        """While this is open, a call of the model runs its last layer on ``inputs`` (1, q, hidden size) and no other.

        The stock model still makes its own embeddings, rotary angles and masks; the other layers hand their input
        through, and the last one is given ``inputs`` instead. With ``ffn=False`` the output of its feed-forward
        block is set to zero, which leaves attention and residual, as the released code does.
        """
        last = self.layers[-1]

        def substitute(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (inputs, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": inputs}

        with contextlib.ExitStack() as undo:
            for layer in list(self.layers)[:-1]:
                undo.enter_context(_hand_through(layer, self._layer_returns_tuple))
            undo.callback(last.register_forward_pre_hook(substitute, with_kwargs=True).remove)
            if not ffn:
                undo.callback(self._feed_forward.register_forward_hook(_zero_output).remove)
            yield

    @cached_property
    def _layer_returns_tuple(self) -> bool:
        seen: list[bool] = []
        handle = self.layers[-1].register_forward_hook(lambda _m, _a, output: seen.append(isinstance(output, tuple)))
        try:
            ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            self.forward(ids, torch.zeros_like(ids), BoundedCache())
        finally:
            handle.remove()
        return seen[0]

    @cached_property
    def _feed_forward(self) -> nn.Module:
        last = self.layers[-1]
        for name in FEED_FORWARD_NAMES:
            if hasattr(last, name):
                found: nn.Module = getattr(last, name)
                return found
        raise UserError(f"{self.name}: the feed-forward block of its last layer was not found; use ffn=True.")

    @contextlib.contextmanager
    def grouped_queries(self) -> Iterator[int]:
        """While this is open, query heads that share a key head attend as rows of one head; yields their number.

        The stock function for masked attention copies every key once a query head, memory that grows with the cache.
        Where the model takes attention functions by name, ours folds the query heads into rows instead; elsewhere
        nothing changes and the number is 1. Masks must then hold each row that many times (`fold_rows`).
        """
        config, stock = self.model.config, self.model.config._attn_implementation
        groups = self.config.num_attention_heads // (getattr(self.config, "num_key_value_heads", None) or 1)
        foldable = stock == "sdpa" and getattr(self.model, "_supports_attention_backend", False)
        if not foldable or getattr(self.config, "num_key_value_heads", None) is None or groups == 1:
            yield 1
            return
        config._attn_implementation = "ccviz_grouped"
        try:
            yield groups
        finally:
            config._attn_implementation = stock

    def recent_attention(self, entries: CacheRow, count: int, visit: Callable[[Tensor], None]) -> None:
        """What the newest ``count`` cached tokens attend to, a layer at a time.

        Those tokens run once more at their true positions; each sees the stored keys and values of the entries up to
        itself, its own included, and nothing is written. For tokens read since the last eviction these are the
        queries they had.

        Parameters
        ----------
        entries
            n cached entries.
        visit
            Called for each layer in turn with its weights, (query heads, count, n) float32; a row adds up to 1, or to
            less in models with attention sinks of their own.

        Raises
        ------
        UserError
            If the model's architecture does not take attention functions by name.
        """
        config, stock = self.model.config, self.model.config._attn_implementation
        if not getattr(self.model, "_supports_attention_backend", False):
            raise UserError(
                f"{self.name} ({self.config.model_type}) does not tell what its tokens attend to, which this strategy "
                "ranks by; choose another strategy, such as heavy_hitter or counter_causal."
            )
        visited = 0

        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **given: Any
        ) -> tuple[Tensor, None]:
            nonlocal visited
            visited += 1
            weights = _attention_weights(query, key, attention_mask, **given)
            visit(weights[0])
            heads = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
            return (weights.to(value.dtype) @ heads).transpose(1, 2), None

        AttentionInterface.register("ccviz_reporting", attention)
        newest = slice(entries.size - count, None)
        mask = causal_mask(entries.positions[None], count, self.config)
        config._attn_implementation = "ccviz_reporting"
        try:
            self.call(entries.token_ids[None, newest], entries.positions[None, newest], mask, entries.from_slot(0))
        finally:
            config._attn_implementation = stock
        if visited != len(self.layers):
            raise UserError(
                f"{self.name} ({self.config.model_type}) tells what its tokens attend to in some layers only."
            )

    # The head

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden size) to (..., vocabulary), float32."""
        with torch.no_grad():
            return self._scaled(self.model.get_output_embeddings()(hidden).float())

    def token_logits(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """The logit of one token a row: hidden (n, hidden size), token_ids (n,) to (n,) float32.

        Multiplies by the gathered rows of the head; nothing of size n x vocabulary exists.
        """
        head = self.model.get_output_embeddings()
        ids = token_ids.to(head.weight.device)
        with torch.no_grad():
            logits = (hidden.to(head.weight.device).float() * head.weight[ids].float()).sum(-1)
            if getattr(head, "bias", None) is not None:
                logits = logits + head.bias[ids].float()
            return self._scaled(logits)

    def token_logprobs(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """The log-probability of one token a row, shapes as `token_logits`; `VOCABULARY_ROWS` rows at a time."""
        blocks = [
            self.logits(rows).log_softmax(-1).gather(-1, ids[:, None].to(rows.device)).squeeze(-1)
            for rows, ids in zip(hidden.split(VOCABULARY_ROWS), token_ids.split(VOCABULARY_ROWS), strict=True)
        ]
        return torch.cat(blocks)

    def expectations(self, hidden: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """What each row expects: hidden (n, hidden size), token_ids (n,).

        Returns
        -------
        tuple of Tensor
            The probability of the row's own token (n,); the ``count`` most likely tokens (n, count) int64, likeliest
            first; and their probabilities (n, count). Made `VOCABULARY_ROWS` rows at a time.
        """
        own, ids, chances = [], [], []
        for rows, tokens in zip(hidden.split(VOCABULARY_ROWS), token_ids.split(VOCABULARY_ROWS), strict=True):
            likely = self.logits(rows).softmax(-1)
            own.append(likely.gather(-1, tokens[:, None].to(rows.device)).squeeze(-1))
            best = likely.topk(count, dim=-1)
            ids.append(best.indices)
            chances.append(best.values)
        return torch.cat(own), torch.cat(ids), torch.cat(chances)

    def _scaled(self, logits: Tensor) -> Tensor:
        config = self.config
        if getattr(config, "logits_scaling", None):
            logits = logits / config.logits_scaling
        if getattr(config, "logit_scale", None):
            logits = logits * config.logit_scale
        cap = getattr(config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    def check(self) -> None:
        """Run three tokens both ways and compare, so that an architecture we misread is refused before it misleads.

        Raises
        ------
        UserError
            If the model does not keep one key and value a layer and token, or its logits are not ours.
        """
        kind = self.config.model_type
        ids = torch.tensor([[1, 2, 3]], device=self.device) % self.config.vocab_size
        positions = torch.arange(3, device=self.device)[None]
        cache = BoundedCache()
        with torch.no_grad():
            ours = self.logits(self.forward(ids, positions, cache))
            theirs = self.model(input_ids=ids, use_cache=False).logits.float()
        if len(cache) != self.config.num_hidden_layers:
            raise UserError(f"{self.name} ({kind}) does not cache keys and values in every layer, so it is refused.")
        tolerance = 1e-3 if self.dtype == torch.float32 else 5e-2
        if not torch.allclose(ours, theirs.to(ours.device), atol=tolerance * float(theirs.abs().max() + 1), rtol=0):
            raise UserError(
                f"{self.name} ({kind}) computes logits in a way ccviz does not reproduce, so it is refused."
            )


def layer_kinds(config: Any) -> tuple[str, ...]:
    """What each decoder layer may attend to, from a model's text configuration."""
    stated = getattr(config, "layer_types", None)
    if stated is not None:
        return tuple(str(kind) for kind in stated)
    kind = SLIDING if getattr(config, "sliding_window", None) else FULL
    count: int = config.num_hidden_layers
    return (kind,) * count


def causal_mask(positions: Tensor, queries: int, config: Any) -> KindMask:
    """Which entries each of the last ``queries`` entries may attend to, a mask (rows or 1, 1, q, n) a kind of layer.

    Distances are between true positions, so a window means the same after an eviction as before.
    """
    n = positions.shape[1]
    slots = torch.arange(n, device=positions.device)
    past = slots[None, :] <= slots[n - queries :, None]

    def mask(kind: str) -> Tensor:
        if kind == FULL:
            return past[None, None]
        here, there = positions[:, n - queries :, None], positions[:, None, :]
        return (past & _within(kind, here, there, config))[:, None]

    return mask


def future_mask(positions: Tensor, rows: int, min_gap: int, config: Any) -> KindMask:
    """The counter-causal mask: which of n entries each of the first ``rows`` may attend to, (1, 1, rows, n) a kind.

    Row i sees slots j > i + min_gap, mirrored windows included; a row that can see none sees itself, which keeps the
    softmax finite (paper section 3.1).
    """
    slots = torch.arange(positions.shape[0], device=positions.device)

    def mask(kind: str) -> Tensor:
        # In place throughout: this mask is the one thing in a pass whose size grows with the cache.
        seen = slots[None, :] > slots[:rows, None] + min_gap
        if kind != FULL:
            seen.logical_and_(_within(kind, positions[None, :], positions[:rows, None], config))
        seen.diagonal().logical_or_(~seen.any(-1))
        return seen[None, None]

    return mask


def fold_rows(mask: KindMask, groups: int) -> KindMask:
    """Each row of a mask ``groups`` times over, for `LanguageModel.grouped_queries`."""
    return lambda kind: mask(kind).repeat(1, 1, groups, 1)


def _within(kind: str, later: Tensor, earlier: Tensor, config: Any) -> Tensor:
    if kind == SLIDING:
        return torch.lt(later, earlier + config.sliding_window)
    chunk: int = config.attention_chunk_size
    return torch.eq(later // chunk, earlier // chunk)


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of (1, heads, q, d) over (1, KV heads, n, d) with the heads of a group folded into rows."""
    batch, heads, rows, size = query.shape
    folded = query.reshape(batch, key.shape[1], heads // key.shape[1] * rows, size)
    out = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, heads, rows, value.shape[-1]).transpose(1, 2), None


AttentionInterface.register("ccviz_grouped", _grouped_attention)


def _attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The softmax weights (1, heads, q, n), float32, of queries (1, heads, q, d) over keys (1, KV heads, n, d)."""
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = (query @ keys.mT).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if s_aux is None:
        return scores.softmax(-1)
    sinks = s_aux.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


@contextlib.contextmanager
def _hand_through(layer: nn.Module, as_tuple: bool) -> Iterator[None]:
    def identity(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, None) if as_tuple else hidden

    # accelerate also replaces `forward` on the instance, so what was there is put back, not just removed.
    own = vars(layer).get("forward")
    vars(layer)["forward"] = identity
    try:
        yield
    finally:
        if own is None:
            del vars(layer)["forward"]
        else:
            vars(layer)["forward"] = own


def _zero_output(_module: nn.Module, _args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]), *output[1:])
    return torch.zeros_like(output)
