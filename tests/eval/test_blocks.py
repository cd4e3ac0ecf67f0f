"""Blocks that a text misses least: found in order, measured right, and the model is left whole."""

import copy
from collections.abc import Iterable

import pytest
import torch

from depthmix.config import load_preset
from depthmix.eval import blocks
from depthmix.eval.blocks import find_least_blocks, leave_out
from depthmix.eval.perplexity import measure_stream
from depthmix.eval.stream import Stream
from depthmix.nn import Transformer

NUM_LAYERS = 6


def find_outputs(model: Transformer, layers: Iterable[int]) -> list[torch.Tensor]:
    """The matrices by which these blocks write to the residual stream."""
    named = dict(model.named_parameters())
    parts = ("attention.w_out.weight", "mlp.w_out.weight")
    return [named[f"layers.{layer}.{part}"] for layer in layers for part in parts]


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    dense = {"routing.strategy": "none", "num_layers": NUM_LAYERS}
    network = Transformer(load_preset("tiny", **dense)).double()
    with torch.no_grad():
        for weight in find_outputs(network, range(NUM_LAYERS)):
            # fresh blocks add next to nothing
            weight *= 50
    return network


@pytest.fixture
def stream(model: Transformer) -> Stream:
    torch.manual_seed(1)
    tokens = torch.randint(model.config.vocab_size, (150,)).tolist()
    return Stream(tokens, None, None)


def silence(model: Transformer, layers: tuple[int, ...]) -> Transformer:
    """The same model, in which these blocks compute zeros."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for weight in find_outputs(changed, layers):
            weight.zero_()
    return changed


def learn(model: Transformer, stream: Stream, *, frozen: tuple[int, ...]) -> None:
    """Know the stream by heart, so that blocks are missed, without those that are frozen."""
    model.layers.requires_grad_(True)
    for layer in frozen:
        model.layers[layer].requires_grad_(False)
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=3e-3)
    rows = torch.tensor(stream.tokens[:121]).unfold(0, 41, 40)
    for _ in range(40):
        optimizer.zero_grad()
        logits = model(rows[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()


def lose(model: Transformer, stream: Stream) -> float:
    return measure_stream(model, stream, seq_len=40)["rules"]["dense"]["loss"]


def test_blocks_that_add_nothing_are_found_first(model: Transformer, stream: Stream) -> None:
    idle = silence(model, (1, 4))
    learn(idle, stream, frozen=(1, 4))
    least = find_least_blocks(idle, stream, 3, seq_len=40)
    assert {each.layer for each in least.found[:2]} == {1, 4}
    assert least.whole == lose(idle, stream)
    for each in least.found[:2]:
        assert each.loss == pytest.approx(least.whole, rel=1e-12)
    assert abs(least.found[2].loss - least.whole) > 1e-4


def test_losses_are_those_of_the_model_without_the_blocks(
    model: Transformer, stream: Stream
) -> None:
    least = find_least_blocks(model, stream, NUM_LAYERS, seq_len=40)
    order = tuple(each.layer for each in least.found)
    assert sorted(order) == list(range(NUM_LAYERS))
    assert least.whole == pytest.approx(lose(model, stream), rel=1e-12)
    for number, each in enumerate(least.found, 1):
        wanted = lose(silence(model, order[:number]), stream)
        assert each.loss == pytest.approx(wanted, rel=1e-12)
    # nothing was measured better alone than the first
    alone = [lose(silence(model, (layer,)), stream) for layer in range(NUM_LAYERS)]
    assert least.found[0].loss == pytest.approx(min(alone), rel=1e-12)


def test_a_block_is_judged_beside_those_already_out(
    model: Transformer, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(_: Transformer, left_out: tuple[int, ...], *__: object) -> float:
        measured.append(left_out)
        # blocks 0 and 1 do the same: one of them is enough
        alone = sum((0.1, 0.2, 0.3, 0.4, 0.5, 0.6)[layer] for layer in left_out)
        return 2.0 + alone + 10 * ({0, 1} <= set(left_out))

    monkeypatch.setattr(blocks, "_measure_without", measure)
    least = find_least_blocks(model, stream, 3)
    assert [each.layer for each in least.found] == [0, 2, 3]
    assert [each.loss for each in least.found] == pytest.approx([2.1, 2.4, 2.8])
    # 1 looks best once, is measured again, and then no more
    assert measured[NUM_LAYERS + 1 :] == [(0, 1), (0, 2), (0, 2, 3)]


def test_progress_is_reported(model: Transformer, stream: Stream) -> None:
    told: list[tuple[int, ...]] = []
    find_least_blocks(model, stream, 2, report=lambda *pair: told.append(pair), seq_len=40)
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert all(done <= total for done, total in told)
    assert told[-1][0] == told[-1][1] >= NUM_LAYERS + 2


def test_leaving_out_does_not_change_the_model(model: Transformer, stream: Stream) -> None:
    """Not even while it is measured, so that an interrupt has nothing to undo."""
    before, parts = list(model.layers), dict(model.named_modules())
    shallow = leave_out(model, (1, 4))
    assert lose(shallow, stream) == pytest.approx(lose(silence(model, (1, 4)), stream), rel=1e-12)
    assert all(a is b for a, b in zip(model.layers, before, strict=True))
    assert dict(model.named_modules()) == parts
    assert {id(weight) for weight in shallow.parameters()} < {id(w) for w in model.parameters()}
    assert shallow.embedding is model.embedding
    assert shallow.layers[0] is model.layers[0]


def test_blocks_may_have_experts(stream: Stream) -> None:
    torch.manual_seed(0)
    experts = {"routing.strategy": "none", "experts.strategy": "expert_choice"}
    network = Transformer(load_preset("tiny", **experts, **{"experts.num_experts": 2})).double()
    least = find_least_blocks(network, stream, 1, seq_len=40)
    rules = measure_stream(network, stream, seq_len=40)["rules"]
    assert list(rules) == ["topk", "causal"]
    assert least.whole == rules["topk"]["loss"]


def test_refusals(model: Transformer, stream: Stream) -> None:
    for count in (0, NUM_LAYERS + 1):
        with pytest.raises(ValueError, match=f"count = {count} must be from 1 to {NUM_LAYERS}"):
            find_least_blocks(model, stream, count)
    with pytest.raises(ValueError, match="this one has routed blocks"):
        find_least_blocks(Transformer(load_preset("tiny")), stream, 1)
