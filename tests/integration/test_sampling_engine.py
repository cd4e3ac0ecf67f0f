"""Whoever shares the batch, a request's numbers are those of the full forward pass."""

import gc
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthmix.infer import Engine, Event, Sample, SamplingParams
from depthmix.infer.pages import Stored
from depthmix.infer.paths.plain import Done, Runner, Work
from depthmix.infer.scheduler import Chunks
from depthmix.nn import Cache, Output, Transformer
from depthmix.nn.depth import MixtureOfDepths
from variants import causal_cases, make_config, make_model, make_tokens

pytestmark = pytest.mark.slow

CASES = causal_cases()
ROUTED = [case for case in CASES if case[1] in ("predictor", "router")]
# Invariant, each token is alone and may find blocks that nobody enters. Every case has each of both
# options on and off, and half of the cases have them together.
VARIED = [
    (*case, invariant, invariant == (number % 2 == 0))
    for number, case in enumerate(CASES)
    for invariant in (False, True)
]


@cache
def get_model(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    """Shared between tests, which must not modify it.

    With the embedding as its head, a fresh model only repeats itself.
    """
    return make_model(make_config(name, tied_head=False), dtype=dtype).requires_grad_(False)


class Wish(NamedTuple):
    """A request, and when it comes and goes."""

    num_prompt: int
    max_tokens: int
    joins: int = 0
    cancelled: int | None = None
    """Steps after it joined."""
    greedy: bool = True
    stops: bool = False
    """Whether one token in eight ends it."""
    seed: int = 0

    def make_prompt(self, model: Transformer) -> list[int]:
        return make_tokens(model.config, self.num_prompt, seed=self.seed).tolist()

    def make_params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0.0 if self.greedy else 1.0,
            stop_tokens=list(range(0, 64, 8)) if self.stops else [],
            logprobs=2,
            seed=self.seed,
        )


class Watcher:
    """Sees every logit of an engine and what its cache holds after each chunk.

    Every request has one sample, so that a sequence's key is its request's number.
    """

    def __init__(self, engine: Engine) -> None:
        self.logits: dict[int, list[Tensor]] = defaultdict(list)
        self.lengths: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        self.engine = engine
        assert isinstance(engine.runner, Runner)
        run, settle = engine.runner.run, engine.scheduler.settle
        pages = engine.pages

        def watch_run(works: Sequence[Work]) -> list[Done]:
            done = run(works)
            for work, outcome in zip(works, done, strict=True):
                assert (outcome.logits is not None) == work.chunk.samples
                if outcome.logits is not None:
                    self.logits[work.chunk.key].append(outcome.logits.clone())
            return done

        def watch_settle(chunks: Chunks, stored: Stored) -> None:
            settle(chunks, stored)
            for chunk in chunks:
                lengths = pages.lengths[chunk.row].tolist()
                self.lengths[chunk.key].append((chunk.start + chunk.count, lengths))
                # nothing is kept beyond the tokens that are stored
                owned = pages.counts[chunk.row].tolist()
                assert owned == [-(-length // pages.page_size) for length in lengths]

        engine.runner.run = watch_run
        engine.scheduler.settle = watch_settle


def drive(engine: Engine, wishes: Sequence[Wish]) -> list[Sample]:
    """Requests join and are cancelled while others run; their samples, in the wishes' order."""
    found: dict[int, Sample] = {}
    told: dict[int, list[int]] = defaultdict(list)
    numbers: dict[int, int] = {}

    def listen(events: list[Event]) -> None:
        for event in events:
            assert event.request not in found, "nothing comes after the end"
            if event.token is not None:
                told[event.request].append(event.token)
            if event.result is not None:
                found[event.request] = event.result

    step = 0
    while len(numbers) < len(wishes) or engine.has_work:
        for place, wish in enumerate(wishes):
            if step == wish.joins:
                numbers[place] = engine.add(wish.make_prompt(engine.model), wish.make_params())
            elif wish.cancelled is not None and step == wish.joins + wish.cancelled:
                listen(engine.cancel(numbers[place]))
        listen(engine.step())
        step += 1
        assert step < 2000, "no progress"
    for number, sample in found.items():
        assert list(sample.tokens) == told[number]
    check_nothing_is_left(engine)
    return [found[numbers[place]] for place in range(len(wishes))]


def check_nothing_is_left(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.cache_bytes) == (0, 0, 0)
    assert engine.pages.num_free == engine.pages.num_pages
    assert not engine.has_work
    assert engine.step() == []


def count_stored(model: Transformer, output: Output, num_tokens: int) -> list[int]:
    """How many of the first tokens each layer stores."""
    counts = [num_tokens] * model.config.num_layers
    for layer, routing in zip(model.config.routed_layers, output.routings, strict=True):
        stored = routing.memory or routing
        counts[layer] = int((stored.slot[0, :num_tokens] >= 0).sum())
    return counts


def check_sample(
    model: Transformer,
    selector: str | None,
    wish: Wish,
    sample: Sample,
    logits: list[Tensor],
    lengths: list[tuple[int, list[int]]],
) -> None:
    """Everything that the engine told equals one pass over the whole text."""
    prompt = wish.make_prompt(model)
    tokens = [*prompt, *sample.tokens]
    output = model(torch.tensor([tokens]), selector=selector)
    num_new = len(sample.tokens)
    expected_TV = output.logits[0, len(prompt) - 1 : len(tokens) - 1]
    assert len(logits) == num_new
    if num_new:
        torch.testing.assert_close(torch.stack(logits), expected_TV, rtol=0, atol=1e-9)
    if wish.greedy:
        assert list(sample.tokens) == expected_TV.argmax(dim=1).tolist()
    logprobs_TV = expected_TV.log_softmax(dim=1)
    chosen = [row[token].item() for row, token in zip(logprobs_TV, sample.tokens, strict=True)]
    assert sample.logprobs == pytest.approx(chosen, abs=1e-5)

    # the last token is told and never computed
    num_computed = len(sample.depth.blocks)
    if sample.finish == "cancelled":
        assert num_computed <= len(tokens)
    else:
        assert num_computed == len(tokens) - 1
    if output.routings:
        kept_TR = torch.stack([routing.slot[0] >= 0 for routing in output.routings], dim=1)
        assert [list(path) for path in sample.depth.blocks] == kept_TR[:num_computed].tolist()
    for num_tokens, found in lengths:
        assert found == count_stored(model, output, num_tokens)


def check_exactness(
    case: tuple[str, str | None], wishes: Sequence[Wish], spare_tokens: int | None, **options: Any
) -> Engine:
    """Run the wishes through one engine; `spare_tokens` beside the longest make a small cache."""
    name, selector = case
    model = get_model(name)
    if spare_tokens is not None:
        size = options["page_size"]
        longest = max(wish.num_prompt + wish.max_tokens - 1 for wish in wishes)
        options["cache_tokens"] = -(-longest // size) * size + spare_tokens
    engine = Engine(model, selector=selector, **options)
    watcher = Watcher(engine)
    samples = drive(engine, wishes)
    order = sorted(range(len(wishes)), key=lambda place: wishes[place].joins)
    for number, place in enumerate(order):
        seen = watcher.logits[number], watcher.lengths[number]
        check_sample(model, selector, wishes[place], samples[place], *seen)
    return engine


def make_wishes(draw: Callable[[Any], Any], most: int) -> list[Wish]:
    wish = st.builds(
        Wish,
        num_prompt=st.integers(1, 14),
        max_tokens=st.integers(1, 8),
        joins=st.integers(0, 8),
        cancelled=st.none() | st.integers(1, 12),
        greedy=st.booleans(),
        stops=st.booleans(),
        seed=st.integers(0, 99),
    )
    return draw(st.lists(wish, min_size=1, max_size=most))


@pytest.mark.parametrize(("name", "selector", "invariant", "record"), VARIED)
def test_every_variant_equals_the_full_pass(
    name: str, selector: str | None, invariant: bool, record: bool
) -> None:
    wishes = [Wish(7, 5, seed=1), Wish(1, 6, seed=2), Wish(12, 4, seed=3, joins=2, greedy=False)]
    options: dict[str, Any] = {"max_batch": 3, "page_size": 4, "chunk_tokens": 5}
    options |= {"invariant": invariant, "record": record}
    check_exactness((name, selector), wishes, None, **options)


@settings(max_examples=20)
@given(st.data())
def test_any_schedule_equals_the_full_pass(data: st.DataObject) -> None:
    check_exactness(
        data.draw(st.sampled_from(CASES)),
        make_wishes(data.draw, most=6),
        data.draw(st.none() | st.integers(0, 24)),
        max_batch=data.draw(st.integers(1, 4)),
        page_size=data.draw(st.integers(1, 9)),
        chunk_tokens=data.draw(st.integers(1, 16)),
        invariant=data.draw(st.booleans()),
        record=data.draw(st.booleans()),
    )


@settings(max_examples=12)
@given(st.data(), st.sampled_from(ROUTED), st.booleans(), st.booleans())
def test_a_full_cache_changes_nothing(
    data: st.DataObject, case: tuple[str, str | None], invariant: bool, record: bool
) -> None:
    """As much as the longest needs and hardly more: the others wait, or give way."""
    wishes = [
        Wish(data.draw(st.integers(1, 6)), data.draw(st.integers(8, 16)), seed=seed)
        for seed in range(data.draw(st.integers(2, 5)))
    ]
    page_size, spare = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 6))
    check_exactness(
        case,
        wishes,
        spare,
        max_batch=4,
        page_size=page_size,
        chunk_tokens=4,
        invariant=invariant,
        record=record,
    )


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("invariant", [True, False])
def test_preemption_happens_and_nobody_notices(invariant: bool, record: bool) -> None:
    wishes = [Wish(4, 20, seed=seed) for seed in range(4)]
    options: dict[str, Any] = {"max_batch": 4, "page_size": 2, "chunk_tokens": 8}
    options |= {"invariant": invariant, "record": record}
    engine = check_exactness(("dense", None), wishes, 8, **options)
    stats = engine.stats()
    assert stats.num_preempted > 0
    assert 0 < stats.cache_bytes_peak <= stats.cache_bytes_total


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("invariant", [True, False])
def test_a_prompt_of_one_token_in_a_row_that_another_left(invariant: bool, record: bool) -> None:
    """It begins like a token that goes on, and must not find what was there before."""
    wishes = [Wish(num, 4, seed=seed) for seed, num in enumerate((1, 1, 5, 1, 1, 7, 1))]
    for max_batch in (1, 3):
        options: dict[str, Any] = {"max_batch": max_batch, "page_size": 2, "chunk_tokens": 4}
        options |= {"invariant": invariant, "record": record}
        check_exactness(("mod", "router"), wishes, None, **options)


def test_tokens_that_only_offer_keys() -> None:
    """Decoupled routing alone in its step: a token is stored in a block that no token enters."""
    wishes = [Wish(3, 24, seed=seed) for seed in range(3)]
    for case in (("mod_kv", "predictor"), ("token_choice_kv", "router")):
        options: dict[str, Any] = {"max_batch": 1, "page_size": 4, "chunk_tokens": 1}
        check_exactness(case, wishes, None, invariant=True, **options)


def strip_depth(sample: Sample) -> Sample:
    """What must be the same to the last bit; the work may have been done twice."""
    return sample._replace(depth=sample.depth._replace(flops=0, dense_flops=0, num_visits=0,
                                                       num_visits_dense=0))  # fmt: skip


@settings(max_examples=12)
@given(st.data())
def test_company_changes_no_bit(data: st.DataObject) -> None:
    name, selector = data.draw(st.sampled_from(CASES))
    model = get_model(name, torch.float32)
    wishes = [wish._replace(cancelled=None) for wish in make_wishes(data.draw, most=5)]
    options: dict[str, Any] = {
        "selector": selector,
        "page_size": data.draw(st.integers(1, 6)),
        "chunk_tokens": data.draw(st.integers(1, 8)),
        "invariant": True,
        "record": data.draw(st.booleans()),
    }
    longest = max(wish.num_prompt + wish.max_tokens for wish in wishes)
    room = longest + options["page_size"] + data.draw(st.integers(0, 20))
    batch = data.draw(st.integers(2, 4))
    company = drive(Engine(model, max_batch=batch, cache_tokens=room, **options), wishes)
    for wish, found in zip(wishes, company, strict=True):
        engine = Engine(model, max_batch=1, **options)
        [alone] = drive(engine, [wish._replace(joins=0)])
        assert strip_depth(alone) == strip_depth(found)


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("name", ["mod", "mode_staged"])
def test_preemption_changes_no_bit(name: str, greedy: bool, record: bool) -> None:
    model = get_model(name, torch.float32)
    wishes = [Wish(5, 20, seed=seed, greedy=greedy) for seed in range(4)]
    options: dict[str, Any] = {"page_size": 2, "chunk_tokens": 4}
    options |= {"invariant": True, "record": record}
    engine = Engine(model, max_batch=4, cache_tokens=32, **options)
    company = drive(engine, wishes)
    assert engine.stats().num_preempted > 0
    for wish, found in zip(wishes, company, strict=True):
        [alone] = drive(Engine(model, max_batch=1, **options), [wish])
        assert strip_depth(alone) == strip_depth(found)


@pytest.mark.parametrize("name", ["mod", "mod_kv", "early_exit", "mode_staged"])
def test_pages_hold_routed_tokens_only(name: str) -> None:
    """Page by page, in order, the keys and values are those of a plain cache."""
    model, prompt = get_model(name), make_tokens(get_model(name).config, 17)
    engine = Engine(model, selector="predictor", page_size=3, chunk_tokens=6, max_batch=2)
    engine.add(make_tokens(model.config, 9, seed=5).tolist(), SamplingParams(max_tokens=9))
    engine.add(prompt.tolist(), SamplingParams(max_tokens=2))
    while not any(event.request == 1 for event in engine.step()):
        pass
    plain = Cache(model.config, 1, 17, dtype=torch.float64)
    model(prompt[None], selector="predictor", cache=plain)
    pages, pools = engine.pages, engine.runner.cache
    for index, layer in enumerate(plain.layers):
        length = int(layer.lengths[0])
        assert pages.lengths[1, index] == length
        assert pages.counts[1, index] == -(-length // 3)
        for pool, expected in ((pools.key, layer.key), (pools.value, layer.value)):
            found_GSH = pool[:, pages.list_pages(1, index)].flatten(1, 2)[:, :length]
            torch.testing.assert_close(
                found_GSH, expected[0, :length].transpose(0, 1), rtol=0, atol=1e-10
            )


def calibrate(model: Transformer, tokens: Tensor, share: float) -> None:
    """Shift each predictor's bias until it keeps this share of the tokens."""
    routed = [layer for layer in model.layers if isinstance(layer, MixtureOfDepths)]
    for number, layer in enumerate(routed):
        scores = model(tokens[None], selector="predictor").routings[number].predictor_logits
        predictor = layer.decider.predictor
        assert predictor is not None
        assert scores is not None
        predictor.w_out.bias -= scores.quantile(1 - share)


def test_a_routed_model_takes_little_more_than_half_the_cache() -> None:
    """Every other block keeps 12.5 %: (1 + 0.125) / 2 of the dense twin's, and the last pages."""
    num_tokens = 2048
    config = make_config("mod", max_seq_len=num_tokens, **{"routing.capacity": 0.125})
    assert config.routed_layers == (1, 3)
    model = make_model(config, dtype=torch.float32).requires_grad_(False)
    calibrate(model, make_tokens(config, num_tokens, seed=1), 0.125)
    twin = make_model(config.dense_twin(), dtype=torch.float32)
    prompt = make_tokens(config, num_tokens - 8, seed=2).tolist()
    peaks = []
    for each in (model, twin):
        engine = Engine(each, max_batch=1, page_size=16)
        engine.generate([prompt], SamplingParams(max_tokens=9))
        stats = engine.stats()
        assert stats.cache_bytes_total >= stats.cache_bytes_peak
        peaks.append(stats.cache_bytes_peak)
    width = config.shape.num_kv_heads * config.shape.head_width
    assert peaks[1] == num_tokens * config.num_layers * width * 2 * 4
    assert 0.5 < peaks[0] / peaks[1] <= 0.58


def test_soak() -> None:
    """A thousand requests come and go through one small cache, and nothing stays behind."""
    config = make_config("mod", width=16, mlp_width=16, num_layers=2, tied_head=False)
    model = make_model(config, dtype=torch.float32).requires_grad_(False)
    engine = Engine(
        model, decode=str, max_batch=6, cache_tokens=48, page_size=4, chunk_tokens=16, seed=1
    )
    chance = random.Random(0)
    alive: set[int] = set()
    finishes: dict[str, int] = defaultdict(int)
    blocks: dict[int, int] = {}
    num_added = 0

    def listen(events: list[Event]) -> None:
        for event in events:
            if event.result is not None:
                finishes[event.result.finish] += 1
                alive.discard(event.request)

    while num_added < 1000 or engine.has_work:
        if num_added < 1000 and chance.random() < 0.5:
            prompt = [chance.randrange(64) for _ in range(chance.randint(1, 24))]
            params = SamplingParams(
                max_tokens=chance.randint(1, 10),
                temperature=chance.choice([0, 1]),
                top_k=chance.choice([0, 0, 5]),
                repetition_penalty=chance.choice([1, 1.3]),
                presence_penalty=chance.choice([0, 0.7]),
                stop_tokens=[chance.randrange(64) for _ in range(3)],
                stop=chance.choice([(), ("7",)]),
                logprobs=chance.choice([None, 2]),
            )
            alive.add(engine.add(prompt, params))
            num_added += 1
            if num_added in (300, 1000):
                # at rest, so that only what was left behind is counted
                for request in list(alive):
                    listen(engine.cancel(request))
                check_nothing_is_left(engine)
                gc.collect()
                blocks[num_added] = sys.getallocatedblocks()
        if alive and chance.random() < 0.1:
            listen(engine.cancel(chance.choice(sorted(alive))))
        listen(engine.step())
    check_nothing_is_left(engine)
    assert not alive
    assert sum(finishes.values()) == 1000
    assert min(finishes[finish] for finish in ("stop", "length", "cancelled")) > 50
    assert engine.stats().num_preempted > 0
    # less than one object for each request in between
    assert blocks[1000] - blocks[300] < 700
