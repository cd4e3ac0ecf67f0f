"""Prompts in padded, unchanging shapes equal the full pass; on a GPU they are CUDA graphs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthmix.infer.cache import PagedCache
from depthmix.infer.pages import Pages
from depthmix.infer.prompt import PromptStep, can_record_prompts, choose_size
from depthmix.infer.runner import Done, Runner, Work
from depthmix.infer.scheduler import Chunk
from depthmix.nn import Transformer
from depthmix.nn.depth import MixtureOfDepths
from variants import causal_cases, make_model, make_tokens

CASES = causal_cases()
PAGE, SIZE = 3, 24


def has_static_shapes(name: str) -> bool:
    return can_record_prompts(make_model(name).config)


STATIC_CASES = [case for case in CASES if has_static_shapes(case[0])]


class Bench:
    """A runner whose cache holds nothing that may be read."""

    def __init__(
        self, model: Transformer, selector: str | None, num_rows: int, *, compile: bool = False
    ) -> None:
        config = model.config
        self.model, self.selector = model.requires_grad_(False), selector
        self.pages = Pages(60 * config.num_layers, PAGE, config.num_layers, num_rows)
        self.runner = Runner(model, self.pages, selector, record=True, compile=compile, pad=True)
        self.cache = self.runner.cache
        self.cache.key.fill_(torch.nan)
        self.cache.value.fill_(torch.nan)

    def run(self, row: int, tokens: torch.Tensor, start: int, stop: int) -> Done:
        assert self.pages.reserve(row, stop - start)
        chunk = Chunk(row, row, start, stop - start, samples=True)
        (done,) = self.runner.run([Work(chunk, tokens[start:stop].tolist())])
        self.pages.settle(row, done.stored)
        return done


@pytest.mark.parametrize(("name", "selector"), STATIC_CASES)
def test_a_recorded_prompt_equals_the_full_pass(name: str, selector: str | None) -> None:
    """Of a size that came before; what it stored serves the tokens that follow."""
    bench = Bench(make_model(name), selector, 3)
    lengths = [SIZE - 1, SIZE, SIZE - 5]
    longest = bench.model.config.max_seq_len
    assert {choose_size(n, longest) for n in lengths} == {choose_size(SIZE, longest)}
    for row, length in enumerate(lengths):
        tokens = make_tokens(bench.model.config, length + 2, seed=row)
        output = bench.model(tokens[None], selector=selector)
        done = bench.run(row, tokens, 0, length)
        (step,) = bench.runner.prompts.values()
        assert (step is None) == (row == 0)
        torch.testing.assert_close(done.logits, output.logits[0, length - 1])
        kept = [(routing.slot[0, :length] >= 0).tolist() for routing in output.routings]
        assert done.paths == ([tuple(p) for p in zip(*kept, strict=True)] or [()] * length)
        routed = dict(zip(bench.model.config.routed_layers, map(sum, kept), strict=True))
        num_layers = bench.model.config.num_layers
        assert done.stored == [routed.get(layer, length) for layer in range(num_layers)]
        assert done.used.num_stored == sum(done.stored)
        assert done.used.num_pairs == sum(n * (n + 1) // 2 for n in done.stored)
        for place in (length, length + 1):
            done = bench.run(row, tokens, place, place + 1)
            torch.testing.assert_close(done.logits, output.logits[0, place])


@pytest.mark.compile
@pytest.mark.parametrize("name", ["mod", "dense_mha_qk_norm_untied"])
def test_a_compiled_prompt_equals_the_full_pass(name: str) -> None:
    """And one of another size that comes later, and the tokens that follow."""
    torch._dynamo.reset()
    model = make_model(name)
    selector = model.config.causal_selector
    bench = Bench(model, selector, 4, compile=True)
    graphs = torch._dynamo.utils.counters["stats"]
    for row, length in enumerate([SIZE, SIZE - 1, SIZE + 8, SIZE + 7]):
        tokens = make_tokens(model.config, length + 1, seed=row)
        output = model(tokens[None], selector=selector)
        for start, stop in ((0, length), (length, length + 1)):
            before = graphs["unique_graphs"]
            done = bench.run(row, tokens, start, stop)
            # once for each kind of layer: the second prompt of a size, and the first token
            new = row in (1, 3) if start == 0 else row == 0
            assert (graphs["unique_graphs"] > before) == new
            torch.testing.assert_close(done.logits, output.logits[0, stop - 1])
    torch._dynamo.reset()


def test_padding_is_not_written() -> None:
    model = make_model("mod").requires_grad_(False)
    config = model.config
    pages = Pages(40 * config.num_layers, PAGE, config.num_layers, 2)
    cache = PagedCache(config, pages, device=torch.device("cpu"), dtype=torch.float64)
    cache.key.fill_(torch.nan)
    assert pages.reserve(1, 7)
    cache.follow(pages.drain_changes())
    step = PromptStep(model, cache, config.causal_selector, SIZE)
    assert step.run(make_tokens(config, 7).tolist(), 1) is not None
    written = (~cache.key.isnan().all(dim=3)).any(dim=2)[0].nonzero().flatten().tolist()
    mine = {page for layer in pages.tables[1] for page in layer}
    assert written
    assert set(written) <= mine


def test_a_prompt_that_needs_more_places_is_computed_the_other_way() -> None:
    model = make_model("mod").requires_grad_(False)
    for layer in model.layers:
        if isinstance(layer, MixtureOfDepths):
            assert layer.decider.predictor is not None
            layer.decider.predictor.w_out.bias.fill_(100.0)
    bench = Bench(model, "predictor", 2)
    longest = model.config.max_seq_len
    for row in range(2):
        tokens = make_tokens(model.config, longest - 2, seed=row)
        done = bench.run(row, tokens, 0, longest - 2)
        assert done.stored == [longest - 2] * model.config.num_layers
        output = model(tokens[None], selector="predictor")
        torch.testing.assert_close(done.logits, output.logits[0, -1])
    (step,) = bench.runner.prompts.values()
    assert step is not None
    assert max(step.most) < longest - 2
    assert step.run(tokens.tolist(), 1) is None


@given(st.integers(2, 5000), st.integers(2, 5000))
def test_sizes_hold_the_prompt_and_are_few(num_tokens: int, longest: int) -> None:
    num_tokens = min(num_tokens, longest)
    size = choose_size(num_tokens, longest)
    assert num_tokens <= size <= longest
    assert size == longest or size <= max(32, 1.5 * num_tokens)
    assert size == longest or size & (size - 1) == 0 or size % 3 == 0


def test_experts_and_decoupled_routing_are_not_recorded() -> None:
    recorded = {name for name, _ in STATIC_CASES}
    assert {"mod", "dense", "early_exit"} <= recorded
    for name, _ in CASES:
        config = make_model(name).config
        static = not config.expert_layers and config.routing.kv_capacity is None
        assert (name in recorded) == static
