"""A fixed-shape decoding step equals the full pass, whichever sequences join and leave."""

from functools import cache

import pytest
import torch

from depthmix.infer.cache import PagedCache
from depthmix.infer.pages import Pages
from depthmix.infer.paths.decode import Outputs, RecordedStep
from depthmix.nn import Output, Transformer
from variants import make_model, make_tokens

CASES = [
    ("dense", None),
    ("mod", "predictor"),
    ("mod_first_tokens", "router"),
    ("mod_kv", "predictor"),
    ("early_exit", "predictor"),
    ("token_choice_kv", "router"),
    ("stochastic", "all"),
    ("moe_token_choice", None),
    ("mode_staged", "router"),
    ("mode_integrated_token_choice", None),
]
LENGTHS = [11, 4, 7]
# cache row of each sequence: in no particular order, and one row is unused
ROWS = [3, 0, 4]


@cache
def get_model(name: str) -> Transformer:
    """Shared between tests, which must not modify it."""
    return make_model(name).requires_grad_(False)


class Batch:
    """Sequences that join one after another, in a step of four places."""

    def __init__(self, name: str, selector: str | None) -> None:
        self.model, config = get_model(name), get_model(name).config
        sizes = (60 * config.num_layers, 3, config.num_layers, 5)
        pages = Pages(*sizes, longest=config.max_seq_len)
        device = torch.device("cpu")
        self.cache = PagedCache(config, pages, device=device, dtype=torch.float64)
        # unwritten entries must not be read
        self.cache.key.fill_(torch.nan)
        self.cache.value.fill_(torch.nan)
        self.tokens = [make_tokens(config, n, seed=n) for n in LENGTHS]
        for row, length in zip(ROWS, LENGTHS, strict=True):
            assert pages.reserve(row, length)
        self.cache.follow(pages.drain_changes())
        self.step = RecordedStep(self.model, self.cache, selector, 4)

    def run(self, live: list[tuple[int, int]]) -> Outputs:
        """Compute the tokens at these (sequence, position) pairs."""
        sent = [int(self.tokens[number][position]) for number, position in live]
        self.step.send(sent, [p for _, p in live], [ROWS[number] for number, _ in live])
        return self.step.run()


def list_lines(output: Output, model: Transformer, position: int) -> list[int]:
    """What a step should report about one token, after the best token: see `Outputs.told`."""
    routings = output.routings
    lines = [int(routing.slot[0, position] >= 0) for routing in routings]
    lines += [int(r.memory.slot[0, position] >= 0) for r in routings if r.memory is not None]
    slots = {
        layer: int(routing.slot[0, position])
        for layer, routing in zip(model.config.routed_layers, routings, strict=True)
    }
    layers = model.config.expert_layers
    for layer, routing in zip(layers, output.expert_routings, strict=True):
        slot = slots.get(layer, position)
        lines.append(int(routing.kept[0, slot].sum()) if slot >= 0 else 0)
    return lines


@pytest.mark.parametrize(("name", "selector"), CASES)
def test_a_step_equals_the_full_pass(name: str, selector: str | None) -> None:
    """With one to three of four places in use: the second joins late and leaves early."""
    batch = Batch(name, selector)
    outputs = [batch.model(tokens[None], selector=selector) for tokens in batch.tokens]
    for moment in range(13):
        # the second sequence comes first while present: places are not rows
        order = [1, 0, 2]
        live = [(n, moment - 2 * n) for n in order if 0 <= moment - 2 * n < LENGTHS[n]]
        if not live:
            continue
        found = batch.run(live)
        for place, (number, position) in enumerate(live):
            truth = outputs[number].logits[0, position]
            torch.testing.assert_close(found.logits[place], truth, rtol=0, atol=1e-10)
            told = found.told[:, place].tolist()
            assert told[0] == int(truth.argmax())
            assert told[1:] == list_lines(outputs[number], batch.model, position)
    lengths = batch.cache.lengths
    assert not lengths[:, [1, 2]].any(), "unused rows stay empty"
    for number, row in enumerate(ROWS):
        stored = [LENGTHS[number]] * batch.model.config.num_layers
        layers, routings = batch.model.config.routed_layers, outputs[number].routings
        for layer, routing in zip(layers, routings, strict=True):
            stored[layer] = int(((routing.memory or routing).slot[0] >= 0).sum())
        assert lengths[:, row].tolist() == stored


def test_the_best_token_comes_next_unless_another_is_sent() -> None:
    batch = Batch("mod_gelu_mqa_untied", "predictor")
    tokens, logits = [[5], [9]], []
    batch.step.send([5, 9], [0, 0], [ROWS[0], ROWS[2]])
    for _ in range(5):
        outputs = batch.step.run()
        logits.append(outputs.logits[:2])
        for place, line in enumerate(tokens):
            line.append(int(outputs.told[0, place]))
    for line, found in zip(tokens, torch.stack(logits, dim=1), strict=True):
        (truth,) = batch.model(torch.tensor([line[:-1]]), selector="predictor").logits
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-10)
        assert line[1:] == truth.argmax(dim=1).tolist()


def test_an_empty_place_changes_nothing() -> None:
    batch = Batch("mode_staged", "predictor")
    before = [batch.cache.key.clone(), batch.cache.value.clone(), batch.cache.lengths.clone()]
    batch.step.send([], [], [])
    batch.step.run()
    for ours, theirs in zip((batch.cache.key, batch.cache.value), before, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(batch.cache.lengths, before[2])


def test_no_gradients_are_kept() -> None:
    batch = Batch("dense", None)
    batch.step.model = make_model("dense")
    assert not batch.run([(0, 0)]).logits.requires_grad
