"""The decoding kernel equals the model's full pass; without a GPU it runs in Triton's interpreter.

There a launch is one program, so its barriers pass at once. On a GPU the same tests run with as
many programs as fit. The interpreter takes tenths of a second per block, so every case has few
blocks, and few tokens over small pages.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.config import ModelConfig
from depthmix.nn import MixtureOfDepths, Transformer
from depthmix.nn.layers import MLP
from depthmix.nn.router import Predictor
from variants import make_model, make_tokens

decode = pytest.importorskip("depthmix.kernels.decode.step")
plan = pytest.importorskip("depthmix.kernels.decode.plan")

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 2
ROOM = 8
TOKENS = 3

DENSE: dict[str, Any] = {"routing.strategy": "none"}
MOD: dict[str, Any] = {
    "routing.strategy": "expert_choice",
    "routing.capacity": 0.5,
    "routing.predictor_width": 24,
}
EARLY_EXIT: dict[str, Any] = {"routing.strategy": "early_exit", "routing.every": 1}


def make_config(**overrides: Any) -> ModelConfig:
    plain = ModelConfig(vocab_size=97, max_seq_len=32, num_layers=2, width=64, num_heads=2)
    return plain.override({"mlp_width": 80, "head_width": 16, **overrides})


def stack(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.detach() for tensor in tensors]).contiguous()


def stack_weights(model: Transformer) -> Any:
    """The model's tensors in the form the kernel takes."""
    blocks: list[Any] = [x.block if isinstance(x, MixtureOfDepths) else x for x in model.layers]
    routed: list[Any] = [
        layer.decider for layer in model.layers if isinstance(layer, MixtureOfDepths)
    ]
    more: dict[str, Tensor] = {}
    if model.config.qk_norm:
        more["norm_query"] = stack([b.attention.norm_query.weight for b in blocks])
        more["norm_key"] = stack([b.attention.norm_key.weight for b in blocks])
    if routed:
        more["router"] = stack([d.router.weight[0] for d in routed])
    if routed and routed[0].predictor is not None:
        more["predictor_in"] = stack([d.predictor.w_in.weight for d in routed])
        more["predictor_out"] = stack([d.predictor.w_out.weight[0] for d in routed])
        more["predictor_bias"] = stack([d.predictor.w_out.bias[0] for d in routed])
    return plan.Weights(
        embedding=model.embedding.weight.detach(),
        phase_table=model.phase_table,
        norm_attention=stack([b.norm_attention.weight for b in blocks]),
        w_qkv=stack(
            [torch.cat([b.attention.w_qk.weight, b.attention.w_value.weight]) for b in blocks]
        ),
        w_attn_out=stack([b.attention.w_out.weight for b in blocks]),
        norm_mlp=stack([b.norm_mlp.weight for b in blocks]),
        w_in=stack([join_in(b.mlp) for b in blocks]),
        w_mlp_out=stack([b.mlp.w_out.weight for b in blocks]),
        norm=model.norm.weight.detach(),
        head=model.head.weight.detach(),
        **more,
    )


def join_in(mlp: MLP) -> Tensor:
    if mlp.w_gate is None:
        return mlp.w_up.weight
    return torch.cat([mlp.w_gate.weight, mlp.w_up.weight])


class Session:
    """A sequence and its pages, with NaN in everything unwritten."""

    def __init__(
        self,
        model: Transformer,
        selector: str | None,
        tuning: Any = None,
        dtype: torch.dtype = torch.float32,
        page_dtype: torch.dtype = torch.float32,
    ) -> None:
        config = model.config
        self.model, self.num_layers = model, config.num_layers
        max_pages = ROOM // PAGE
        shape = (self.num_layers * max_pages + 1, config.shape.num_kv_heads, PAGE)
        shape = (*shape, config.shape.head_width)
        self.keys = torch.full(shape, torch.nan, device=DEVICE, dtype=page_dtype)
        self.values = torch.full_like(self.keys, torch.nan)
        # a row of a larger table, its pages in random order; one page belongs to no block
        order = torch.randperm(shape[0])[1:].view(self.num_layers, max_pages)
        tables = torch.full((self.num_layers, 3, max_pages), 10**6, dtype=torch.int32)
        tables[:, 1] = order
        self.table = tables.to(DEVICE)[:, 1]
        self.lengths = torch.zeros((3, self.num_layers), dtype=torch.int32, device=DEVICE)
        self.rules = plan.Rules(
            num_heads=config.num_heads,
            norm_eps=config.norm_eps,
            routed_layers=config.routed_layers,
            selector="all" if selector is None else selector,
            gate=config.routing.gate,
            normalize=config.routing.normalize_input,
            first_tokens=config.routing.first_tokens,
            early_exit=config.routing.strategy == "early_exit",
        )
        weights = stack_weights(model)
        wide = {"router": weights.router, "phase_table": weights.phase_table}
        weights = plan.Weights(*(w if w is None else w.to(dtype) for w in weights))
        weights = weights._replace(**wide)
        self.step = decode.DecodeStep(weights, self.rules, self.keys, self.values, tuning)
        for tensor in (*self.step._scratch, self.step.logits):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        self.step.told.fill_(-7)

    def decode(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits at each token, and which routed blocks ran."""
        logits, taken = [], []
        for position, token in enumerate(tokens):
            at, given = torch.tensor(position, device=DEVICE), token.clone()
            logits.append(self.step(given, at, self.table, self.lengths[1]).clone())
            best, *ran = self.step.told.tolist()
            assert (best, int(at)) == (int(given), position + 1)
            assert best == int(logits[-1].argmax())
            taken.append(torch.tensor(ran))
        return torch.stack(logits), torch.stack(taken)

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """A block's keys and values in order, (tokens, G, H)."""
        length = int(self.lengths[1, layer])
        pages = self.table[layer].long()
        both = [p[pages].transpose(1, 2).flatten(0, 1)[:length] for p in (self.keys, self.values)]
        return both[0], both[1]


def check(
    model: Transformer,
    selector: str | None,
    *,
    num_tokens: int = TOKENS,
    tuning: Any = None,
    dtype: torch.dtype = torch.float32,
) -> Session:
    """Decode token by token; logits, decisions and the cache equal the full pass.

    `dtype` is the weights' in the kernel; the model has the same numbers in float32.
    """
    model = model.to(DEVICE, dtype).float().requires_grad_(False)
    tokens = make_tokens(model.config, num_tokens).to(DEVICE)
    session = Session(model, selector, tuning, dtype)
    logits, taken = session.decode(tokens)
    output = model(tokens[None], selector=selector)
    torch.testing.assert_close(logits, output.logits[0], rtol=0, atol=1e-4)
    kept = [routing.slot[0] >= 0 for routing in output.routings]
    lengths = [num_tokens] * model.config.num_layers
    for route, layer in enumerate(model.config.routed_layers):
        assert taken[:, route].tolist() == kept[route].int().tolist()
        lengths[layer] = int(kept[route].sum())
    assert session.lengths.tolist() == [[0] * len(lengths), lengths, [0] * len(lengths)]
    check_pages(session, lengths)
    return session


def check_pages(session: Session, lengths: list[int]) -> None:
    """Exactly the slots of stored tokens were written."""
    written = 0
    for layer, length in enumerate(lengths):
        for part in session.stored(layer):
            assert part.shape[0] == length
            assert not part.isnan().any()
        written += length
    for pages in (session.keys, session.values):
        assert int((~pages.isnan()).all(dim=3).all(dim=1).sum()) == written
        assert int((~pages.isnan()).any(dim=3).any(dim=1).sum()) == written


def make(**overrides: Any) -> Transformer:
    model = make_model(make_config(**overrides), dtype=torch.float32)
    predictors = [m for m in model.modules() if isinstance(m, Predictor)]
    for number, predictor in enumerate(predictors):
        # so far apart that using another block's bias would change the decision
        predictor.w_out.bias.data.fill_(0.5 if number % 2 == 0 else -1.0)
    return model


def name_case(value: object) -> str | None:
    if isinstance(value, dict):
        return "-".join(f"{k.split('.')[-1]}={v}" for k, v in value.items()) or "plain"
    return None


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"mlp": "gelu", "num_heads": 3, "num_kv_heads": 1, "qk_norm": True},
        {"num_heads": 4, "num_kv_heads": 2, "head_width": 32, "tied_head": False},
    ],
    ids=name_case,
)
def test_dense(overrides: dict[str, Any]) -> None:
    check(make(**DENSE, **overrides), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mlp_width", [70, 35], ids=["pairs", "no_pairs"])
def test_weights_of_16_bits(dtype: torch.dtype, mlp_width: int) -> None:
    """They are read two at a time if rows have an even length."""
    sizes = {"width": 50, "mlp_width": mlp_width, "num_heads": 3, "num_kv_heads": 1}
    tuning = Session(make(**MOD).to(DEVICE), "predictor").step.tuning
    tuning = tuning._replace(tile=512, min_columns=32)
    session = check(make(**MOD, **sizes), "predictor", tuning=tuning, dtype=dtype)
    assert session.step.plan.qkv.pack == 2
    assert session.step.plan.mlp_out.pack == (2 if mlp_width == 70 else 1)


def test_a_longer_sequence() -> None:
    """Over several pages, and with a routed block before a dense one and at the end."""
    session = check(make(**MOD, num_layers=4), "predictor", num_tokens=5)
    assert session.rules.routed_layers == (1, 3)
    assert session.lengths[1].tolist()[::2] == [5, 5]
    assert int(session.lengths[1].max()) > 2 * PAGE
    assert 0 < int(session.lengths[1, [1, 3]].sum()) < 10


@pytest.mark.parametrize(
    ("gate", "selector"),
    [
        ("sigmoid", "predictor"),
        ("tanh1", "predictor"),
        ("unit", "predictor"),
        ("tanh1", "router"),
        ("raw", "all"),
    ],
)
def test_mixture_of_depths(selector: str, gate: str) -> None:
    session = check(make(**MOD, **{"routing.gate": gate}), selector)
    total = int(session.lengths[1, 1])
    some = 0 < total < TOKENS
    assert total == TOKENS if selector == "all" else some, "some tokens are kept, some not"


@pytest.mark.parametrize(
    ("selector", "overrides"),
    [
        # consecutive routed blocks need three; a forced token also skips the work done ahead
        ("predictor", {"num_layers": 3, "routing.every": 1}),
        ("router", {"num_layers": 3, "routing.every": 1, "routing.first_dense": 1}),
        ("predictor", {"num_layers": 3, "routing.first_tokens": 2}),
        ("router", {"routing.first_tokens": 2, "routing.normalize_input": False}),
        ("predictor", {**EARLY_EXIT, "num_layers": 3}),
        ("router", {**EARLY_EXIT, "routing.first_tokens": 2}),
        ("predictor", {"routing.strategy": "causal", "routing.normalize_input": False}),
        ("router", {"routing.strategy": "token_choice", "num_heads": 3, "num_kv_heads": 1}),
    ],
    ids=name_case,
)
def test_routing(selector: str, overrides: dict[str, Any]) -> None:
    session = check(make(**{**MOD, **overrides}), selector, num_tokens=4)
    routed = list(session.rules.routed_layers)
    assert 0 < int(session.lengths[1, routed].sum()) < 4 * len(routed)


@pytest.mark.parametrize("overrides", [{**DENSE, "num_layers": 1}, MOD], ids=["dense", "mod"])
def test_tiles_and_splits_that_divide_nothing(overrides: dict[str, Any]) -> None:
    """Several tiles in each direction, several parts of the context, and masks at every end."""
    model = make(**overrides, width=50, mlp_width=35, vocab_size=41, num_heads=3, num_kv_heads=1)
    selector = "predictor" if model.config.routed_layers else None
    tuning = Session(model.to(DEVICE), selector).step.tuning
    # on a GPU a program has one row, and its tile spans all columns unless it is small
    tile = 1024 if DEVICE == "cpu" else 32
    tuning = tuning._replace(tile=tile, min_columns=32, chunk=2, max_splits=4)
    # two tokens per part: the last of three parts has one
    session = check(model, selector, num_tokens=5, tuning=tuning)
    plan = session.step.plan
    for cut in (plan.qkv, plan.attn_out, plan.mlp_in, plan.mlp_out, plan.head):
        assert cut.padded > cut.columns
        assert DEVICE == "cuda" or cut.num_rows > cut.step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pages_of_16_bits(dtype: torch.dtype) -> None:
    model = make(**DENSE).to(DEVICE).requires_grad_(False)
    tokens = make_tokens(model.config, 4).to(DEVICE)
    wide, narrow = Session(model, None), Session(model, None, page_dtype=dtype)
    assert narrow.step.plan.heads.pack == 2
    truth, ours = wide.decode(tokens)[0], narrow.decode(tokens)[0]
    # only keys and values are rounded
    assert ((ours - truth).norm() / truth.norm()).item() < 4e-3
    for whole, rounded in zip(wide.stored(0), narrow.stored(0), strict=True):
        # the interpreter truncates where a GPU rounds
        torch.testing.assert_close(rounded.float(), whole, rtol=2**-7, atol=1e-6)


def test_the_first_of_equal_logits_is_the_best() -> None:
    session = Session(make(**DENSE).to(DEVICE), None)
    session.step.weights.head.zero_()
    token, at = (torch.tensor(n, device=DEVICE) for n in (5, 0))
    session.step(token, at, session.table, session.lengths[1])
    assert session.step.logits.abs().max() == 0
    assert int(token) == int(session.step.told[0]) == 0


def test_a_launch_leaves_its_counters_as_it_found_them() -> None:
    session = Session(make(**MOD).to(DEVICE), "predictor")
    session.decode(make_tokens(session.model.config, 2).to(DEVICE))
    *_, arrivals, counter, best = session.step._scratch
    assert arrivals.tolist() == [0] * arrivals.numel()
    assert counter.tolist() == [0, 0]
    assert best.tolist() == [-(2**63)]


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("rules", {"gate": "soft"}, "there is no gate 'soft'"),
        ("rules", {"selector": "topk"}, "there is no selector 'topk'"),
        ("rules", {"num_heads": 3}, "num_heads = 3 must be a multiple"),
        ("rules", {"num_heads": 4}, "w_qkv must be"),
        ("rules", {"routed_layers": (0, 1)}, "router must be"),
        ("weights", {"router": None}, "routed_layers need the router"),
        ("weights", {"predictor_in": None}, "'predictor' needs the predictor"),
        ("weights", {"norm": torch.ones(5)}, "norm must be"),
        ("weights", {"norm": torch.ones(128)[::2]}, "norm must be contiguous"),
        ("tuning", {"chunk": 3}, "chunk must be a power of two"),
    ],
)
def test_mistakes_are_told(part: str, changes: dict[str, Any], message: str) -> None:
    session = Session(make(**MOD), "predictor")
    step = session.step
    parts = {"weights": step.weights, "rules": session.rules, "tuning": step.tuning}
    parts[part] = parts[part]._replace(**changes)
    with pytest.raises(ValueError, match=message):
        decode.DecodeStep(key_pages=session.keys, value_pages=session.values, **parts)


def test_heads_of_odd_widths_are_refused() -> None:
    session = Session(make(**DENSE), None)
    pages = torch.zeros(2, 2, PAGE, 24)
    with pytest.raises(ValueError, match="power of two"):
        decode.DecodeStep(session.step.weights, session.rules, pages, pages)
    with pytest.raises(ValueError, match="value_pages must have"):
        decode.DecodeStep(session.step.weights, session.rules, session.keys, session.keys.half())


def test_a_call_says_which_argument_is_wrong() -> None:
    session = Session(make(**DENSE), None)
    token, table, lengths = torch.tensor(1, device=DEVICE), session.table, session.lengths[1]
    for arguments, message in (
        ((token.int(), token, table, lengths), "token must be int64"),
        ((token, token.int(), table, lengths), "position must be int64"),
        ((token, token, table.long(), lengths), "table must be int32"),
        ((token, token, table[:1], lengths[:1]), "each of the 2 blocks"),
        ((token, token, table.T.contiguous().T, lengths), "table must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            session.step(*arguments)
