"""The model: a stack of blocks that maps tokens to logits and the routers' decisions."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from depthmix.config import ModelConfig
from depthmix.kernels import compute_type
from depthmix.nn.attention import Attention, AttentionCache, Place
from depthmix.nn.block import Block
from depthmix.nn.depth import Decider, MixtureOfDepths
from depthmix.nn.experts import ExpertRouting, Experts
from depthmix.nn.layers import RMSNorm, look_up_phases, make_phase_table
from depthmix.nn.ngrams import Lookup, NgramTables, list_previous
from depthmix.nn.router import Router
from depthmix.nn.routing import Routing

EMBEDDING_STD = 0.02


class Hidden(NamedTuple):
    """The residual stream after the last norm, before the head."""

    hidden: Float[Tensor, "B T D"]
    routings: tuple[Routing, ...]
    expert_routings: tuple[ExpertRouting, ...]
    streams: tuple[Float[Tensor, "B T D"], ...] = ()
    """After each block, if they are to be kept."""


class Output(NamedTuple):
    """The model's output.

    >>> logits, routings, _ = Transformer(load_preset("tiny"))(torch.tensor([[1, 2, 3]]))
    >>> logits.shape, len(routings)
    (torch.Size([1, 3, 256]), 2)
    """

    logits: Float[Tensor, "B T V"]
    routings: tuple[Routing, ...]
    """One for each routed block, in order."""
    expert_routings: tuple[ExpertRouting, ...] = ()
    """One for each block with experts, in order; none for a block that no token entered."""


@runtime_checkable
class ModelCache(Protocol):
    """The caches of all layers; implemented by `Cache` and by the sampling engine."""

    @property
    def layers(self) -> Sequence[AttentionCache]: ...

    def advance(
        self, num_rows: int, num_tokens: int, present: Bool[Tensor, "B T"] | None
    ) -> Int[Tensor, "B T"]:
        """Positions of the next tokens of each row; padding takes none."""
        ...

    def recall(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        present: Bool[Tensor, "B T"] | None,
        count: int,
    ) -> Int[Tensor, "B T past"]:
        """The ids before each token, nearest first; asked of models with a memory only."""
        ...


class Transformer(nn.Module):
    """A decoder-only transformer in which some blocks are Mixtures-of-Depths.

    >>> model = Transformer(load_preset("tiny"))
    >>> model(torch.tensor([[1, 2, 3]]), selector="predictor").logits.shape
    torch.Size([1, 3, 256])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.value_embedding = None
        if config.value_embedding:
            value_width = config.shape.num_kv_heads * config.shape.head_width
            self.value_embedding = nn.Embedding(config.vocab_size, value_width)
        memory_width = config.shape.memory_width
        self.ngrams = NgramTables(config.memory, memory_width) if config.has_memory else None
        self.lookups = nn.ModuleDict()
        """The memory's readers, by where they add: `input`, or the index of a block."""
        if config.memory.place == "input":
            self.lookups["input"] = Lookup(memory_width, config.width)
        for index in config.memory_layers:
            self.lookups[str(index)] = Lookup(memory_width, config.width)
        capacity = dict(zip(config.routed_layers, config.capacities, strict=True))
        self.layers = nn.ModuleList()
        for index in range(config.num_layers):
            block = Block(config, experts=index in config.expert_layers)
            if index in capacity:
                bypass = Lookup(memory_width, config.width) if config.bypass_layers else None
                options = (config.width, config.routing, capacity[index])
                block = MixtureOfDepths(block, *options, bypass=bypass)
            self.layers.append(block)
        self.mix = nn.Parameter(torch.empty(config.num_layers, 2)) if config.residual_mix else None
        """For each block, the factors of the stream and of the embeddings."""
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.register_buffer("phase_table", self.make_phases(), persistent=False)
        self.init_weights()

    def make_phases(self) -> Tensor:
        """The table of rotary phases, which follows from the configuration and is not saved."""
        config = self.config
        frequencies = (config.shape.head_width, config.rope_theta, config.rope_factors)
        return make_phase_table(config.max_seq_len, *frequencies)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Transformer":
        super()._apply(fn, recurse)
        if self.phase_table.dtype.itemsize < 4:
            # in bf16 the angles of neighbouring positions are the same
            self.phase_table = self.make_phases().to(self.phase_table.device)
        return self

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fresh weights; also for a model that was built on the meta device and then allocated."""
        if self.config.tied_head:
            # allocating a meta model gives each name a tensor of its own
            self.head.weight = self.embedding.weight
        # all branches together begin with what they add as large as what they add to: the
        # embeddings. Ten times as large, they drown the tokens in noise, and AdamW takes hundreds
        # of steps to get out (results/log.md)
        out_scale = EMBEDDING_STD * (2 * self.config.num_layers) ** -0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                is_last = name.endswith(("attention.w_out", "mlp.w_out"))
                nn.init.normal_(module.weight, std=std * (out_scale if is_last else 1))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, Router):
                nn.init.normal_(module.weight, std=module.init_std)
            elif isinstance(module, Decider):
                module.init_bias()
            elif isinstance(module, Attention) and module.value_scale is not None:
                nn.init.ones_(module.value_scale)
            elif isinstance(module, Experts):
                nn.init.normal_(module.w_in, std=module.w_in.shape[1] ** -0.5)
                nn.init.normal_(module.w_out, std=out_scale * module.w_out.shape[1] ** -0.5)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        if self.value_embedding is not None:
            nn.init.normal_(self.value_embedding.weight, std=EMBEDDING_STD)
        if self.ngrams is not None:
            nn.init.zeros_(self.ngrams.rows.weight)
        if self.mix is not None:
            nn.init.zeros_(self.mix)
            self.mix[:, 0].fill_(1)
        if not self.config.tied_head:
            nn.init.normal_(self.head.weight, std=EMBEDDING_STD)
        self.phase_table.copy_(self.make_phases())

    def set_capacities(self, capacities: Sequence[float]) -> None:
        """Let routed blocks keep other shares than the configuration says, in their order."""
        for decider, capacity in zip(self._list_deciders(), capacities, strict=True):
            decider.capacity = capacity

    def move_biases(self, shares: Float[Tensor, " blocks"]) -> None:
        """After a step, by the share of tokens that chose each routed block (`bias_rate`)."""
        for decider, share in zip(self._list_deciders(), shares, strict=True):
            decider.move_bias(share)

    def _list_deciders(self) -> list[Decider]:
        return [layer.decider for layer in self.layers if isinstance(layer, MixtureOfDepths)]

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        *,
        selector: str | None = None,
        positions: Int[Tensor, "B T"] | None = None,
        document_ids: Int[Tensor, "B T"] | None = None,
        cache: ModelCache | None = None,
    ) -> Output:
        """Logits of the next token at each place, and every router's decision.

        `selector` chooses how tokens are routed: None for the strategy's own rule (training),
        `topk`, `predictor`, `router` or `all`. `document_ids` separates packed documents; a
        negative id is padding. By default, `positions` count within each document.
        """
        hidden, routings, expert_routings, _ = self.compute_hidden(
            tokens,
            selector=selector,
            positions=positions,
            document_ids=document_ids,
            cache=cache,
        )
        return Output(self.head(hidden), routings, expert_routings)

    def compute_hidden(
        self,
        tokens: Int[Tensor, "B T"],
        *,
        selector: str | None = None,
        positions: Int[Tensor, "B T"] | None = None,
        document_ids: Int[Tensor, "B T"] | None = None,
        cache: ModelCache | None = None,
        keeps_streams: bool = False,
    ) -> Hidden:
        """`forward` without the head, for a loss that never holds all the logits."""
        self._check(tokens, selector, document_ids, cache)
        place, found = self._place(tokens, positions, document_ids, cache)
        x_BTD = self.embedding(tokens)
        # under autocast the float32 table would keep the whole residual stream in float32
        x_BTD = x_BTD.to(compute_type(x_BTD))
        x_BTD = self._add_memory(x_BTD, found, "input")
        embedded_BTD = x_BTD
        routings: list[Routing] = []
        expert_routings: list[ExpertRouting] = []
        streams: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache.layers[index]
            if self.mix is not None:
                x_BTD = self.mix[index, 0] * x_BTD + self.mix[index, 1] * embedded_BTD
            if isinstance(layer, MixtureOfDepths):
                x_BTD, routing, update = layer(
                    x_BTD,
                    place,
                    selector=selector,
                    previous=routings[-1] if routings else None,
                    cache=layer_cache,
                    found=found,
                )
                routings.append(routing)
            else:
                update = layer(x_BTD, place, selector=selector, cache=layer_cache)
                x_BTD = x_BTD + update.update
            x_BTD = self._add_memory(x_BTD, found, str(index))
            if update.experts is not None:
                expert_routings.append(update.experts)
            if keeps_streams:
                streams.append(x_BTD)
        return Hidden(self.norm(x_BTD), tuple(routings), tuple(expert_routings), tuple(streams))

    def _add_memory(self, x_BTD: Tensor, found: Tensor | None, place: str) -> Tensor:
        """Add what was looked up, if this place has a reader."""
        if place not in self.lookups:
            return x_BTD
        assert found is not None
        return x_BTD + self.lookups[place](x_BTD, found)

    def _place(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        document_ids: Tensor | None,
        cache: ModelCache | None,
    ) -> tuple[Place, Float[Tensor, "B T W"] | None]:
        """The tokens' places, and what the tables have for them."""
        num_rows, num_tokens = tokens.shape
        count = self.config.memory.num_previous
        present_BT = None if document_ids is None else document_ids >= 0
        documents_BT = None if document_ids is None else number_documents(document_ids)
        found_BTW = None
        previous_BTn = None
        if cache is not None:
            next_positions_BT = cache.advance(num_rows, num_tokens, present_BT)
            positions = next_positions_BT if positions is None else positions
            if self.ngrams is not None:
                previous_BTn = cache.recall(tokens, next_positions_BT, present_BT, count)
        if self.ngrams is not None:
            if previous_BTn is None:
                previous_BTn = list_previous(tokens, documents_BT, count)
            found_BTW = self.ngrams(tokens, previous_BTn)
            found_BTW = found_BTW.to(compute_type(found_BTW))
        if positions is None and document_ids is not None:
            positions = count_positions(document_ids)
        if positions is not None:
            phase = look_up_phases(self.phase_table, positions)
        else:
            positions = torch.arange(num_tokens, device=tokens.device)[None]
            phase = self.phase_table[None, :num_tokens]
        values_BTE = None
        if self.value_embedding is not None:
            values_BTE = self.value_embedding(tokens)
            values_BTE = values_BTE.to(compute_type(values_BTE))
        return Place(positions, phase, documents_BT, present_BT, values_BTE), found_BTW

    def _check(
        self,
        tokens: Tensor,
        selector: str | None,
        document_ids: Tensor | None,
        cache: ModelCache | None,
    ) -> None:
        config = self.config
        refuse_text(tokens)
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"tokens must be (batch, tokens), not {tuple(tokens.shape)}")
        # a cache knows its own room, and may hold many sequences in one row
        if cache is None and tokens.shape[1] > config.max_seq_len:
            raise ValueError(
                f"{tokens.shape[1]} tokens are more than max_seq_len = {config.max_seq_len}: "
                f"give fewer, or override max_seq_len"
            )
        if document_ids is not None and document_ids.shape != tokens.shape:
            raise ValueError(
                f"document_ids are {tuple(document_ids.shape)}, tokens {tuple(tokens.shape)}"
            )
        problem = config.find_selector_problem(selector)
        if problem is not None:
            raise ValueError(problem)
        if cache is not None and selector in (None, "topk") and config.needs_selector_to_decode:
            raise ValueError(
                "a cache does not hold the future that top-k and capacities look at: decode with "
                "selector 'predictor', 'router' or 'all'"
            )


def refuse_text(tokens: Any) -> None:
    """Refuse text, and anything else that is not a tensor of ids."""
    if not isinstance(tokens, Tensor) or tokens.is_floating_point():
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(
            f"tokens must be a tensor of ids, not {kind}: encode text first, or let "
            f"depthmix.open_model(path).generate do that"
        )


def count_positions(document_ids: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Each token's place in its run of equal ids."""
    place_T = torch.arange(document_ids.shape[1], device=document_ids.device)
    return place_T - torch.where(_find_starts(document_ids), place_T, 0).cummax(dim=1).values


def number_documents(document_ids: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """A number for each run of equal ids, so that an id that comes back is a new document.

    Positions start again in every run: joined by their id, an earlier run could see a later one.
    """
    return _find_starts(document_ids).cumsum(dim=1).where(document_ids >= 0, -1)


def _find_starts(document_ids: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    return F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
