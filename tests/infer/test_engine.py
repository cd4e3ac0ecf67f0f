import gc
import math
import random
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from depthmix.infer import Engine, Event, Sample, SamplingParams, scores
from depthmix.infer.engine import count_pages
from depthmix.infer.paths.plain import Done, Runner, Work
from depthmix.nn import Transformer
from variants import make_config, make_model, make_tokens

PROMPT = [3, 1, 4, 1, 5]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."


@cache
def get_model(name: str = "mod") -> Transformer:
    """Shared between tests, which must not modify it.

    With a tied head, an untrained model would only repeat itself.
    """
    config = make_config(name, tied_head=False)
    return make_model(config, dtype=torch.float32).requires_grad_(False)


def spell(tokens: list[int]) -> str:
    """Map each of the 64 tokens to a letter."""
    return "".join(LETTERS[token] for token in tokens)


def generate_one(engine: Engine, prompt: Any = PROMPT, **params: Any) -> Sample:
    [result] = engine.generate([prompt], SamplingParams(**params))
    [sample] = result.samples
    return sample


def get_runner(engine: Engine) -> Runner:
    assert isinstance(engine.runner, Runner)
    return engine.runner


def run_to_end(engine: Engine) -> list[Event]:
    events = []
    while engine.has_work:
        events += engine.step()
    return events


def compute_logits(sample: Sample, prompt: Sequence[int] = PROMPT, name: str = "mod") -> Tensor:
    """The full pass's logits for each of the sample's tokens."""
    tokens = torch.tensor([[*prompt, *sample.tokens]])
    selector = "predictor" if get_model(name).config.routed_layers else None
    logits = get_model(name)(tokens, selector=selector).logits
    return logits[0, len(prompt) - 1 : -1]


def assert_empty(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.cache_bytes) == (0, 0, 0)
    assert not engine.has_work


def test_results_come_in_the_prompts_order() -> None:
    prompts = [[1, 2, 3], [4], [5, 6]]
    params = [SamplingParams(max_tokens=n, temperature=0) for n in (9, 1, 4)]
    results = Engine(get_model(), max_batch=2).generate(prompts, params)
    assert [result.prompt for result in results] == [(1, 2, 3), (4,), (5, 6)]
    assert [len(result.samples[0].tokens) for result in results] == [9, 1, 4]
    assert [result.request for result in results] == [0, 1, 2]


def test_no_prompts_no_results() -> None:
    assert Engine(get_model()).generate([]) == []


def test_defaults_are_those_of_the_params() -> None:
    engine = Engine(get_model(), seed=1)
    [result] = engine.generate([PROMPT])
    # 128 are requested, but max_seq_len is 64
    assert len(result.samples[0].tokens) == 64 - len(PROMPT) + 1
    assert result.samples[0].text is None
    assert result.samples[0].logprobs is None
    assert result.samples[0].top_logprobs is None


@pytest.mark.parametrize(("num_prompt", "num_new"), [(1, 64), (63, 2), (64, 1)])
def test_a_sample_ends_at_max_seq_len(num_prompt: int, num_new: int) -> None:
    engine = Engine(get_model(), max_batch=1)
    prompt = make_tokens(engine.config, num_prompt).tolist()
    sample = generate_one(engine, prompt, temperature=0)
    assert len(sample.tokens) == num_new
    assert sample.finish == "length"
    # the last token is returned but never computed: one more than max_seq_len in total
    assert len(sample.depth.blocks) == 64
    assert list(sample.tokens) == compute_longest(prompt)


def compute_longest(prompt: list[int]) -> list[int]:
    """Greedy tokens from full passes, up to the model's maximum length."""
    tokens = list(prompt)
    while len(tokens) <= 64:
        logits = get_model()(torch.tensor([tokens]), selector="predictor").logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_max_tokens() -> None:
    sample = generate_one(Engine(get_model()), max_tokens=3)
    assert (len(sample.tokens), sample.finish) == (3, "length")


def test_a_stop_token_is_the_last_token_and_no_text() -> None:
    engine = Engine(get_model(), decode=spell)
    free = generate_one(engine, max_tokens=20, seed=4)
    stop = free.tokens[7]
    first = free.tokens.index(stop)
    sample = generate_one(engine, max_tokens=20, seed=4, stop_tokens=[stop])
    assert sample.tokens == free.tokens[: first + 1]
    assert sample.finish == "stop"
    assert sample.text == spell(list(free.tokens[:first]))
    # a stop token in the last position still counts as a stop
    sample = generate_one(engine, max_tokens=first + 1, seed=4, stop_tokens=[stop])
    assert sample.finish == "stop"


def test_a_stop_string_is_not_part_of_the_text() -> None:
    engine = Engine(get_model(), decode=spell)
    free = generate_one(engine, max_tokens=20, seed=4)
    text = spell(list(free.tokens))
    assert free.text == text
    stop = text[6:9]
    sample = generate_one(engine, max_tokens=20, seed=4, stop=["never!", stop])
    end = text.index(stop)
    assert sample.finish == "stop"
    assert sample.text == text[:end]
    assert sample.tokens == free.tokens[: end + 3]


def test_events_tell_the_result_bit_by_bit() -> None:
    engine = Engine(get_model(), decode=spell, max_batch=3)
    free = generate_one(engine, max_tokens=12, seed=4)
    assert free.text is not None
    # the first letters of this stop string occur but not the last: they are held back
    begun = free.text[9:11] + "!"
    numbers = [
        engine.add(PROMPT, SamplingParams(max_tokens=12, seed=4, stop=[begun])),
        engine.add([9], SamplingParams(max_tokens=5, seed=5, n=2)),
        engine.add(PROMPT, SamplingParams(max_tokens=11, seed=4, stop=[begun])),
    ]
    texts: dict[Any, str] = defaultdict(str)
    tokens: dict[Any, list[int]] = defaultdict(list)
    paths: dict[Any, list[tuple[bool, ...]]] = defaultdict(list)
    known: dict[Any, Any] = {}
    results = {}
    for event in (event for _ in iter(lambda: engine.has_work, False) for event in engine.step()):
        key = event.request, event.sample
        known[key] = engine.list_paths(*key) or known[key]
        texts[key] += event.text
        assert event.token is not None
        tokens[key].append(event.token)
        paths[key].append(event.path)
        if event.result is not None:
            results[key] = event.result
    assert set(results) == {(numbers[0], 0), (numbers[1], 0), (numbers[1], 1), (numbers[2], 0)}
    for key, result in results.items():
        assert texts[key] == result.text == spell(list(result.tokens))
        assert tokens[key] == list(result.tokens)
        # an event has the previous token's path: the prompt's last one, then its own
        assert tuple(paths[key]) == result.depth.blocks[-len(result.tokens) :]
        # those of all tokens can be asked for while the sample runs
        assert known[key] == result.depth.blocks[:-1]
        assert engine.list_paths(*key) == ()
    assert results[numbers[0], 0].tokens == free.tokens
    # text still held back is emitted at the end
    assert results[numbers[2], 0].text == free.text[:11]


def test_logprobs_are_the_models_own() -> None:
    """Sampling settings do not change them."""
    engine = Engine(get_model())
    wild: dict[str, Any] = {"temperature": 0.7, "top_k": 9, "repetition_penalty": 1.5, "seed": 2}
    sample = generate_one(engine, max_tokens=8, logprobs=3, **wild)
    expected_TV = compute_logits(sample).log_softmax(dim=1)
    assert sample.logprobs is not None
    assert sample.top_logprobs is not None
    assert len(sample.top_logprobs) == 8
    for place, (token, alternatives) in enumerate(
        zip(sample.tokens, sample.top_logprobs, strict=True)
    ):
        assert sample.logprobs[place] == pytest.approx(expected_TV[place, token].item(), abs=1e-5)
        values, ids = expected_TV[place].topk(3)
        assert [a.token for a in alternatives] == ids.tolist()
        assert [a.logprob for a in alternatives] == pytest.approx(values.tolist(), abs=1e-5)


def test_a_text_is_scored_by_the_full_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "CHUNK_TOKENS", 3)
    engine = Engine(get_model(), max_batch=2)
    tokens = make_tokens(get_model().config, 20).tolist()
    # requests that run meanwhile do not mind
    engine.add(PROMPT, SamplingParams(max_tokens=4))
    engine.step()
    found = engine.score(tokens, top=2)
    run_to_end(engine)
    assert_empty(engine)
    logits_TV = get_model()(torch.tensor([tokens]), selector="predictor").logits[0]
    logprobs_TV = logits_TV[:-1].log_softmax(-1)
    expected = logprobs_TV.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([each.logprob for each in found]), expected)
    for place, each in enumerate(found):
        values, ids = logprobs_TV[place].topk(2)
        assert [other.token for other in each.top] == ids.tolist()
        assert [other.logprob for other in each.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert engine.score([5]) == []
    assert [each.top for each in engine.score([5, 6])] == [()]
    for wrong, words in (([], "at least one token"), ([99], "not in the vocabulary")):
        with pytest.raises(ValueError, match=words):
            engine.score(wrong)
    with pytest.raises(ValueError, match="top = -1"):
        engine.score(PROMPT, top=-1)


def test_events_tell_the_new_tokens_logprobs() -> None:
    engine = Engine(get_model(), max_batch=2)
    for number in (None, 0, 2):
        engine.add(PROMPT, SamplingParams(max_tokens=4, logprobs=number))
    events = run_to_end(engine)
    for request, number in enumerate((None, 0, 2)):
        told = [event.score for event in events if event.request == request]
        (sample,) = [e.result for e in events if e.request == request and e.result]
        if number is None:
            assert told == [None] * 4
            continue
        tops = sample.top_logprobs or ((),) * 4
        assert told == list(zip(sample.logprobs or (), tops, strict=True))


def test_each_request_gets_the_logprobs_that_it_asked_for() -> None:
    engine = Engine(get_model())
    wishes = [SamplingParams(max_tokens=4, logprobs=number) for number in (None, 0, 2, 100)]
    results = engine.generate([PROMPT] * 4, wishes)
    nothing, chosen, two, all_of_them = (result.samples[0] for result in results)
    assert (nothing.logprobs, nothing.top_logprobs) == (None, None)
    assert chosen.logprobs is not None
    assert chosen.top_logprobs is None
    for sample, number in ((two, 2), (all_of_them, 64)):
        assert sample.logprobs is not None
        assert sample.top_logprobs is not None
        assert [len(alternatives) for alternatives in sample.top_logprobs] == [number] * 4
    probabilities = [math.exp(a.logprob) for a in (all_of_them.top_logprobs or [()])[0]]
    assert sum(probabilities) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("company", [False, True])
def test_repetition_penalty_sees_prompt_and_output(company: bool) -> None:
    engine = Engine(get_model(), invariant=False)
    wishes = [SamplingParams(max_tokens=20, temperature=0, repetition_penalty=4.0)]
    # requests without a penalty in the same batch neither affect this nor are affected
    wishes += [SamplingParams(max_tokens=20, temperature=0)] * company
    results = engine.generate([PROMPT] * len(wishes), wishes)
    [sample] = results[0].samples
    seen = set(PROMPT)
    for token, logits_V in zip(sample.tokens, compute_logits(sample), strict=True):
        scores = logits_V.clone()
        old = torch.tensor(sorted(seen))
        scores[old] = torch.where(scores[old] > 0, scores[old] / 4, scores[old] * 4)
        assert token == int(scores.argmax())
        seen.add(token)
    plain = generate_one(engine, max_tokens=20, temperature=0)
    assert plain.tokens != sample.tokens
    if company:
        assert results[1].samples[0].tokens == plain.tokens


def test_frequency_and_presence_penalties_see_the_output_only() -> None:
    engine = Engine(get_model(), invariant=False)
    wish = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    sample = generate_one(engine, max_tokens=20, temperature=0, **wish)
    times: Counter[int] = Counter()
    for token, logits_V in zip(sample.tokens, compute_logits(sample), strict=True):
        scores = logits_V.clone()
        for old, count in times.items():
            scores[old] -= 1.5 * count + 0.5
        assert token == int(scores.argmax())
        times[token] += 1
    assert generate_one(engine, max_tokens=20, temperature=0).tokens != sample.tokens


def test_samples_of_a_request() -> None:
    """They differ, are reproducible by seed, and do not depend on their number."""
    engine = Engine(get_model(), max_batch=3)
    [many] = engine.generate([PROMPT], SamplingParams(max_tokens=12, n=5, seed=7))
    tokens = [sample.tokens for sample in many.samples]
    assert len(set(tokens)) == 5
    [again] = Engine(get_model()).generate([PROMPT], SamplingParams(max_tokens=12, n=5, seed=7))
    assert [sample.tokens for sample in again.samples] == tokens
    assert generate_one(engine, max_tokens=12, seed=7).tokens == tokens[0]
    others = engine.generate([PROMPT, [9], PROMPT], SamplingParams(max_tokens=12, n=2, seed=7))
    assert [sample.tokens for sample in others[0].samples] == tokens[:2]
    assert [sample.tokens for sample in others[2].samples] == tokens[:2]


def test_neighbouring_seeds_share_no_sample() -> None:
    engine = Engine(get_model())
    wishes = [SamplingParams(max_tokens=10, n=4, seed=seed) for seed in (0, 1, 2, 2**63 - 1)]
    results = engine.generate([PROMPT] * 4, wishes)
    tokens = Counter(sample.tokens for result in results for sample in result.samples)
    assert len(tokens) == 16


def test_requests_without_a_seed_follow_the_engines() -> None:
    params = SamplingParams(max_tokens=10)

    def draw(seed: int | None) -> list[tuple[int, ...]]:
        results = Engine(get_model(), seed=seed).generate([PROMPT] * 2, params)
        return [result.samples[0].tokens for result in results]

    first = draw(1)
    assert first[0] != first[1], "each request has numbers of its own"
    assert draw(1) == first
    assert draw(2) != first
    assert draw(None) != draw(None)


def test_cancelling() -> None:
    engine = Engine(get_model(), max_batch=1, decode=spell)
    running = engine.add(PROMPT, SamplingParams(max_tokens=30, seed=1))
    waiting = engine.add([7], SamplingParams(max_tokens=30, seed=2))
    both = engine.add([8], SamplingParams(max_tokens=3, seed=3, n=2))
    told = [event for _ in range(3) for event in engine.step()]
    assert {event.request for event in told} == {running}
    assert engine.stats().num_waiting == 3
    assert engine.stats().cache_bytes > 0
    for request, tokens in ((running, [event.token for event in told]), (waiting, [])):
        [event] = engine.cancel(request)
        assert event.result is not None
        assert (event.request, event.token, event.path) == (request, None, ())
        assert event.result.finish == "cancelled"
        assert list(event.result.tokens) == tokens
    assert engine.cancel(running) == []
    assert engine.cancel(12345) == []
    assert [event.sample for event in engine.cancel(both)] == [0, 1]
    assert_empty(engine)


def test_stats() -> None:
    engine = Engine(get_model("dense"), max_batch=2, page_size=4, cache_tokens=64, chunk_tokens=8)
    config = engine.config
    # keys and values of 4 tokens, in float32
    page = 2 * 4 * config.shape.num_kv_heads * config.shape.head_width * 4
    assert engine.stats() == (0, 0, 0, 0, 0, page * 16 * config.num_layers)
    for _ in range(3):
        engine.add([1] * 6, SamplingParams(max_tokens=4))
    engine.step()
    assert engine.stats()[:2] == (1, 2), "the second prompt does not fit into the first's step"
    engine.step()
    stats = engine.stats()
    assert stats[:3] == (2, 1, 0)
    assert stats.cache_bytes == stats.cache_bytes_peak == 4 * page * config.num_layers
    run_to_end(engine)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.cache_bytes) == (0, 0, 0)
    assert stats.cache_bytes_peak > 4 * page * config.num_layers


def test_a_small_cache_makes_requests_wait() -> None:
    prompts = [make_tokens(get_model().config, n, seed=n).tolist() for n in (9, 3, 12, 1, 6)]
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=0)
    wide = Engine(get_model(), max_batch=5).generate(prompts, params)
    engine = Engine(get_model(), max_batch=5, cache_tokens=24, page_size=2)
    narrow = engine.generate(prompts, params)
    assert engine.stats().num_preempted > 0
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.samples[0][:5] == theirs.samples[0][:5]
        assert ours.samples[0].depth.blocks == theirs.samples[0].depth.blocks
    assert_empty(engine)


def test_the_default_cache_holds_a_full_batch() -> None:
    """Even if max_seq_len, here 64, is not a multiple of the page size."""
    for page_size in (48, 100):
        engine = Engine(get_model("dense"), max_batch=2, page_size=page_size)
        prompt = make_tokens(engine.config, 60).tolist()
        engine.generate([prompt, prompt], SamplingParams(max_tokens=5, temperature=0))
        assert engine.stats().num_preempted == 0
        assert engine.stats().cache_bytes_peak == engine.stats().cache_bytes_total


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_batch": 0}, "max_batch = 0 must be at least 1"),
        ({"chunk_tokens": 0}, "chunk_tokens = 0 must be at least 1"),
        ({"page_size": 0}, "page_size = 0 must be at least 1"),
        ({"page_size": -4}, "page_size = -4 must be at least 1"),
        ({"cache_tokens": 8, "page_size": 9}, "cache_tokens = 8 must be at least page_size = 9"),
        ({"selector": "topk"}, "selector 'topk' needs tokens that are not generated yet"),
        ({"selector": "oracle"}, "unknown selector 'oracle'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Engine(get_model(), **options)


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ([], {}, "a prompt needs at least one token"),
        ([1] * 65, {}, "the prompt has 65 tokens, but the model's max_seq_len is 64: shorten it"),
        ([1, 64], {}, "token 64 is not in the vocabulary of 64"),
        ([-1, 1], {}, "token -1 is not in the vocabulary of 64"),
        ([1, 1 << 40], {}, "token 1099511627776 is not in the vocabulary of 64"),
        ([1, -(1 << 80)], {}, "token -1208925819614629174706176 is not in the vocabulary of 64"),
        ([1], {"stop": ["x"]}, "stop strings need text: give the engine a `decode` function"),
        (
            [1] * 9,
            {"max_tokens": 25},
            "max_tokens = 25 after a prompt of 9 tokens needs cache_tokens = 36, but there are 32: "
            "lower max_tokens, shorten the prompt or raise cache_tokens",
        ),
        ([1] * 9, {"max_tokens": 25, "n": 3}, "max_tokens = 25 after a prompt of 9 tokens"),
        # at most max_seq_len tokens are generated, whatever is requested
        ([1] * 9, {"max_tokens": 500}, "max_tokens = 500 .* needs cache_tokens = 64"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(
    prompt: list[int], params: dict[str, Any], sentence: str
) -> None:
    engine, good = Engine(get_model(), cache_tokens=32, page_size=4), SamplingParams(max_tokens=4)
    with pytest.raises(ValueError, match=sentence):
        engine.add(prompt, SamplingParams(**params))
    assert_empty(engine)
    # among valid requests, nothing is left behind either
    with pytest.raises(ValueError, match=sentence):
        engine.generate([[1, 2], prompt, [3]], [good, SamplingParams(**params), good])
    assert_empty(engine)
    # the longest possible
    assert len(generate_one(engine, [1] * 9, max_tokens=24).tokens) == 24


def test_generate_wants_params_for_all_or_for_each() -> None:
    engine = Engine(get_model())
    with pytest.raises(ValueError, match="there are 2 prompts but 1 params: give one for each"):
        engine.generate([[1], [2]], [SamplingParams()])
    assert_empty(engine)


def test_generate_runs_alone() -> None:
    engine = Engine(get_model())
    request = engine.add(PROMPT, SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match=r"generate\(\) runs alone"):
        engine.generate([[1]])
    assert engine.has_work, "the other request is untouched"
    assert [event.request for event in run_to_end(engine)] == [request] * 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("invariant", [True, False])
def test_an_error_in_the_middle_leaves_nothing(
    invariant: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(get_model(), invariant=invariant, page_size=2, chunk_tokens=4)
    prompts = [make_tokens(engine.config, n, seed=n).tolist() for n in (9, 3, 6)]
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=0)
    expected = engine.generate(prompts, params)
    run, num_calls = get_runner(engine).run, 0

    def fail(works: Sequence[Work]) -> list[Done]:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            raise error("in the middle")
        return run(works)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", fail)
        with pytest.raises(error, match="in the middle"):
            engine.generate(prompts, params)
    assert num_calls == 4
    assert_empty(engine)
    again = engine.generate(prompts, params)
    assert [r.samples for r in again] == [r.samples for r in expected]


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("invariant", [True, False])
def test_a_step_that_failed_can_be_tried_again(
    invariant: bool, record: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = get_model()
    engine = Engine(model, invariant=invariant, record=record, page_size=2, chunk_tokens=8)
    params = [SamplingParams(max_tokens=6, temperature=0, logprobs=0)] * 2
    expected = engine.generate([PROMPT, [8]], params)
    for prompt, wish in zip((PROMPT, [8]), params, strict=True):
        engine.add(prompt, wish)
    found = {}
    compute, num_calls = model.layers[2].forward, 0

    def fail_sometimes(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        # by now half of the layers have stored their keys
        if num_calls % 3 == 0:
            raise RuntimeError("out of memory")
        return compute(*args, **kwargs)

    monkeypatch.setattr(model.layers[2], "forward", fail_sometimes)
    num_failures = 0
    while engine.has_work:
        try:
            events = engine.step()
        except RuntimeError:
            num_failures += 1
            continue
        found |= {event.request: event.result for event in events if event.result is not None}
    assert num_failures >= 2
    for ours, theirs in zip(found.values(), expected, strict=True):
        [sample] = theirs.samples
        assert ours.tokens == sample.tokens
        assert ours.logprobs == pytest.approx(sample.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        ("mod", "predictor"),
        ("mod_aux", "router"),
        ("token_choice", "router"),
        ("causal", "predictor"),
        ("dense", None),
        ("moe_token_choice", None),
        ("moe_expert_choice", "predictor"),
        ("moe_gelu_every_2", "router"),
        ("mode_staged", "predictor"),
    ],
)
def test_the_best_selector_is_chosen(name: str, selector: str | None) -> None:
    assert make_config(name).choose_selector(None) == selector
    assert Engine(get_model(name)).selector == selector
    assert make_config(name).choose_selector("all") == "all"


@pytest.mark.parametrize("selector", ["router", "predictor"])
def test_a_random_choice_cannot_decide_causally(selector: str) -> None:
    told = f"^a random choice has no causal head for selector '{selector}': use 'all'$"
    with pytest.raises(ValueError, match=told):
        Engine(get_model("stochastic"), selector=selector)
    assert Engine(get_model("stochastic"), selector="all").selector == "all"


@pytest.mark.parametrize(
    ("name", "overrides", "advice"),
    [
        ("stochastic", {}, "use 'all'"),
        ("mod", {"routing.predictor": False}, "use 'router' or 'all'"),
        ("moe_gelu_every_2", {"experts.aux_loss_weight": 0.0}, "use 'router' or 'all'"),
    ],
)
def test_a_model_without_a_trained_head_is_told_who_decides(
    name: str, overrides: dict[str, Any], advice: str
) -> None:
    model = make_model(make_config(name, **overrides))
    told = f"^this model has no head trained for causal routing, .*: {advice}$"
    with pytest.raises(ValueError, match=told):
        Engine(model)
    assert Engine(model, selector="all").selector == "all"


@pytest.mark.parametrize(
    ("name", "selector", "advice"),
    [
        ("mod", "topk", "not generated yet: use 'predictor' or 'router' or 'all'"),
        ("mod", "oracle", "unknown selector 'oracle': use 'predictor' or 'router' or 'all'"),
        ("mod_aux", "predictor", "needs a predictor: use 'router' or 'all'"),
        ("stochastic", "topk", "not generated yet: use 'all'"),
    ],
)
def test_advice_names_selectors_that_the_engine_takes(
    name: str, selector: str, advice: str
) -> None:
    config = make_config(name)
    with pytest.raises(ValueError, match=f"{advice}$"):
        config.choose_selector(selector)
    for named in advice.partition(": use ")[2].split(" or "):
        assert config.choose_selector(named.strip("'")) == named.strip("'")


def test_a_cpu_is_invariant_unless_told() -> None:
    assert Engine(get_model()).invariant
    assert not Engine(get_model(), invariant=False).invariant


@pytest.mark.parametrize("invariant", [True, False])
def test_invariant_computes_each_request_apart(
    invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(get_model(), invariant=invariant)
    run: Callable[..., list[Done]] = get_runner(engine).run
    sizes = []

    def watch(works: Sequence[Work]) -> list[Done]:
        sizes.append(len(works))
        return run(works)

    monkeypatch.setattr(engine.runner, "run", watch)
    engine.generate([PROMPT, [1], [2]], SamplingParams(max_tokens=3))
    assert sizes == ([1] * 9 if invariant else [3] * 3)


def test_a_text_that_cannot_be_decoded_fails_alone() -> None:
    """Whatever `decode` raises, and however often: others continue, and nothing leaks."""

    def spell_most(tokens: list[int]) -> str:
        if len(tokens) > 2 and tokens[0] == marked:
            raise MemoryError("no room for text")
        return spell(tokens)

    marked = -1
    engine = Engine(get_model(), decode=spell_most, max_batch=3)
    wishes = [SamplingParams(max_tokens=8, seed=seed) for seed in range(3)]
    expected = engine.generate([PROMPT] * 3, wishes)
    marked = expected[1].samples[0].tokens[0]
    assert all(r.samples[0].tokens[0] != marked for r in (expected[0], expected[2]))
    for wish in wishes:
        engine.add(PROMPT, wish)
    found = {e.request: e.result for e in run_to_end(engine) if e.result is not None}
    good, failed, other = (found[number] for number in sorted(found))
    assert failed.finish == "failed"
    assert isinstance(failed.error, MemoryError)
    assert failed.tokens == expected[1].samples[0].tokens[:3]
    assert (good, other) == (expected[0].samples[0], expected[2].samples[0])
    assert_empty(engine)
    with pytest.raises(MemoryError, match="no room for text"):
        engine.generate([PROMPT] * 3, wishes)
    assert_empty(engine)


@pytest.mark.parametrize("call", range(1, 16))
def test_an_interrupt_while_decoding_fails_one_sample(call: int) -> None:
    """Wherever it lands, the other samples finish and the events of that step are not lost."""
    num_calls = 0

    def spell_until_interrupted(tokens: list[int]) -> str:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            raise KeyboardInterrupt
        return spell(tokens)

    wishes = [SamplingParams(max_tokens=5, seed=seed) for seed in range(3)]
    expected = Engine(get_model(), decode=spell, max_batch=3).generate([PROMPT] * 3, wishes)
    engine = Engine(get_model(), decode=spell_until_interrupted, max_batch=3)
    for wish in wishes:
        engine.add(PROMPT, wish)
    events: list[Event] = []
    num_interrupts = 0
    for _ in range(50):
        if not engine.has_work:
            break
        try:
            events += engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 1
    assert_empty(engine)
    tokens = defaultdict(list)
    for event in events:
        tokens[event.request].append(event.token)
    ends = {event.request: event.result for event in events if event.result is not None}
    failed = [request for request, end in ends.items() if end.finish == "failed"]
    assert len(failed) == 1
    for request, result in enumerate(expected):
        sample = ends[request]
        assert tuple(tokens[request]) == sample.tokens
        if request in failed:
            assert isinstance(sample.error, KeyboardInterrupt)
            assert sample.tokens == result.samples[0].tokens[: len(sample.tokens)]
        else:
            # its compute includes what was computed again
            assert sample._replace(depth=result.samples[0].depth) == result.samples[0]


def test_text_that_cannot_be_completed_fails_its_sample() -> None:
    """Text held back for a stop string is decoded at the end, which may raise as well."""
    engine = Engine(get_model(), decode=spell, max_batch=2)
    request = engine.add(PROMPT, SamplingParams(max_tokens=3, stop=("#",), seed=0))
    other = engine.add(PROMPT, SamplingParams(max_tokens=6, seed=1))
    (track, _) = engine._tracks.values()
    assert track.stream is not None
    track.stream.finish = raise_memory_error  # type: ignore[method-assign]
    ends = {e.request: e.result for e in run_to_end(engine) if e.result is not None}
    assert (ends[request].finish, ends[other].finish) == ("failed", "length")
    assert len(ends[request].tokens) == 3
    assert_empty(engine)


def raise_memory_error() -> str:
    raise MemoryError("no room for text")


def test_cancelling_returns_what_an_interrupted_step_left() -> None:
    engine = Engine(get_model(), decode=spell, max_batch=2)
    request = engine.add(PROMPT, SamplingParams(max_tokens=3, seed=0))
    engine.step()

    def interrupt(tokens: list[int]) -> str:
        raise KeyboardInterrupt

    for track in engine._tracks.values():
        assert track.stream is not None
        track.stream._decode = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_work
    [event] = engine.cancel(request)
    assert event.result is not None
    assert event.result.finish == "failed"
    assert_empty(engine)


def test_a_draw_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(get_model(), max_batch=2)
    wishes = [SamplingParams(max_tokens=6, seed=seed) for seed in range(2)]
    expected = engine.generate([PROMPT, [7]], wishes)
    draw, num_calls = get_runner(engine).drawer.draw, 0

    def fail_sometimes(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 2:
            raise MemoryError("no room to draw")
        return draw(*args)

    monkeypatch.setattr(get_runner(engine).drawer, "draw", fail_sometimes)
    for prompt, wish in zip((PROMPT, [7]), wishes, strict=True):
        engine.add(prompt, wish)
    found, num_failures = {}, 0
    for _ in range(100):
        if not engine.has_work:
            break
        try:
            events = engine.step()
        except MemoryError:
            num_failures += 1
            continue
        found |= {event.request: event.result for event in events if event.result is not None}
    assert num_failures >= 6
    assert [r.tokens for r in found.values()] == [r.samples[0].tokens for r in expected]
    assert_empty(engine)


def test_requests_come_and_go_from_other_threads() -> None:
    engine = Engine(get_model(), max_batch=4, page_size=2, cache_tokens=64)
    ends: dict[int, Sample] = {}
    added: list[int] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def come_and_go(seed: int) -> None:
        pick = random.Random(seed)
        try:
            for _ in range(40):
                params = SamplingParams(max_tokens=pick.randint(1, 12), seed=1)
                request = engine.add([pick.randrange(64)] * pick.randint(1, 9), params)
                added.append(request)
                if pick.random() < 0.4:
                    for event in engine.cancel(request):
                        assert event.result is not None
                        ends[event.request] = event.result
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=come_and_go, args=(seed,)) for seed in range(3)]

    def drive() -> None:
        try:
            while engine.has_work or not done.is_set():
                for event in engine.step():
                    if event.result is not None:
                        ends[event.request] = event.result
        except BaseException as error:
            errors.append(error)

    driver = threading.Thread(target=drive)
    for thread in (*threads, driver):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    driver.join(timeout=120)
    assert not driver.is_alive()
    assert errors == []
    assert sorted(ends) == sorted(added)
    assert_empty(engine)


def test_two_threads_cannot_step() -> None:
    engine = Engine(get_model())
    refused: list[str] = []

    def decode(tokens: list[int]) -> str:
        try:
            engine.step()
        except RuntimeError as error:
            refused.append(str(error))
        return ""

    engine.decode = decode
    generate_one(engine, max_tokens=1)
    assert len(refused) == 1
    assert "another thread is stepping this engine" in refused[0]


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("abc", "a prompt is a list of token ids, not text: encode it first"),
        ([1, 2.0], "a prompt is a list of token ids, and 2.0 is not one"),
        ([1, True], "a prompt is a list of token ids, and True is not one"),
        ([1, None], "a prompt is a list of token ids, and None is not one"),
        ([[1, 2]], r"a prompt is a list of token ids, and \[1, 2\] is not one"),
        (torch.tensor([1.0]), "a prompt is a list of token ids, and 1.0 is not one"),
        ([torch.tensor(1.0)], r"a prompt is a list of token ids, and tensor\(1.\) is not one"),
        ([torch.tensor([1, 2])], r"a prompt is a list of token ids, and tensor\(\[1, 2\]\)"),
        ([torch.tensor(True)], r"a prompt is a list of token ids, and tensor\(True\)"),
        (np.array([[1, 2]]), r"a prompt is a list of token ids, and array\(\[1, 2\]\) is not one"),
        (
            np.array([1.0]),
            r"a prompt is a list of token ids, and (np\.float64\()?1.0\)? is not one",
        ),
        (np.array([True]), r"a prompt is a list of token ids, and (np\.)?True_? is not one"),
        (torch.tensor(3), "a prompt is a list of token ids, and generate takes a list of"),
        (3, "a prompt is a list of token ids, and generate takes a list of prompts"),
    ],
)
def test_a_prompt_of_anything_but_ids_is_refused(prompt: Any, sentence: str) -> None:
    engine = Engine(get_model())
    with pytest.raises(ValueError, match=sentence):
        engine.add(prompt)
    assert_empty(engine)


def test_ids_may_come_as_other_whole_numbers() -> None:
    engine = Engine(get_model())
    expected = generate_one(engine, PROMPT, max_tokens=4, seed=1)
    prompts: list[Any] = [torch.tensor(PROMPT), np.array(PROMPT), tuple(PROMPT)]
    prompts += [np.array(PROMPT, dtype=np.uint8), np.array(PROMPT, dtype=object)]
    for prompt in prompts:
        assert generate_one(engine, prompt, max_tokens=4, seed=1).tokens == expected.tokens


def test_the_default_cache_is_sized_by_capacity() -> None:
    config = make_config("mod", max_seq_len=1024, **{"routing.capacity": 0.125})
    dense = count_pages(config, "all", 64, 16)
    assert dense == 64 * 64 * config.num_layers
    # half of the blocks keep an eighth of the tokens, plus a margin
    assert count_pages(config, "predictor", 64, 16) < 0.65 * dense
    # there is always room for one sequence
    assert count_pages(config, "predictor", 1, 16) == 64 * config.num_layers


def test_an_engine_is_freed_at_once() -> None:
    """Without waiting for garbage collection: its cache may be most of a GPU's memory."""
    engine = Engine(get_model("mod"))
    engine.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=3))
    engine.add([5, 6])
    engine.step()
    parts = [weakref.ref(part) for part in (engine, engine.runner, engine.scheduler)]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        del engine
        assert [part() for part in parts] == [None] * 3
    finally:
        if was_enabled:
            gc.enable()
