"""Steps that stay on the device equal the forward pass; without a GPU, interpreted.

No hypothesis here: these also run where nothing can be installed.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from depthmix.infer import Engine, SamplingParams
from depthmix.infer import engine as engine_module
from depthmix.infer.paths.plain import Runner, find_shape_obstacle
from depthmix.infer.results import Sample
from depthmix.infer.track import Track
from depthmix.nn import Transformer
from variants import causal_cases, make_config, make_model, make_tokens

fused = pytest.importorskip("depthmix.infer.paths.fused")
places = pytest.importorskip("depthmix.kernels.decode.places")

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES: dict[str, Any] = {"width": 64, "num_heads": 2, "num_kv_heads": 1, "tied_head": False}
if DEVICE.type == "cpu":
    SIZES |= {"width": 32, "vocab_size": 48}
CASES = [
    (name, selector)
    for name, selector in causal_cases()
    if find_shape_obstacle(make_config(name), torch.float32) is None
]


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: Transformer, pages: Any, selector: str | None, **options: Any) -> Any:
        apart, most = options["apart"], options["max_step_tokens"]
        if apart and not options["record"]:
            # the baseline for the others
            return Runner(model, pages, selector, record=False, apart=True)
        return fused.FusedRunner(model, pages, selector, most, apart=apart)

    monkeypatch.setattr(engine_module, "make_runner", make)
    if DEVICE.type == "cpu":
        # in the interpreter every program costs time, even those for padding
        monkeypatch.setattr(fused, "choose_size", lambda count: -(-count // 4) * 4)
        monkeypatch.setattr(places, "PROGRAMS", 3)


def make(name: str, **overrides: Any) -> Transformer:
    config = make_config(name, **{**SIZES, **overrides})
    return make_model(config, dtype=torch.float32).to(DEVICE).requires_grad_(False)


def check(model: Transformer, engine: Engine, prompt: list[int], sample: Sample) -> None:
    """A greedy sample with log-probabilities matches the full pass."""
    tokens = torch.tensor([[*prompt, *sample.tokens]], device=DEVICE)
    output = model(tokens, selector=engine.selector)
    logprobs = output.logits[0, len(prompt) - 1 : -1].float().log_softmax(dim=1)
    chosen, found = torch.tensor(sample.tokens), torch.tensor(sample.logprobs)
    expected = logprobs.cpu().gather(1, chosen[:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    assert (logprobs.cpu().amax(dim=1) - found < 1e-4).all()
    if output.routings:
        kept = torch.stack([r.slot[0] >= 0 for r in output.routings], dim=1)
        assert [list(path) for path in sample.depth.blocks] == kept.tolist()[:-1]


def generate_and_check(
    name: str, selector: str | None, lengths: Sequence[int], **overrides: Any
) -> None:
    """A batch whose sequences join and leave."""
    model = make(name, **overrides)
    engine = Engine(
        model, selector=selector, max_batch=3, page_size=4, chunk_tokens=8, invariant=False
    )
    prompts = [make_tokens(model.config, n, seed=n).tolist() for n in lengths]
    params = [
        SamplingParams(max_tokens=2 + n, temperature=0, logprobs=n) for n in range(len(lengths))
    ]
    for result, prompt in zip(engine.generate(prompts, params), prompts, strict=True):
        check(model, engine, prompt, result.samples[0])
    assert_free(engine)


def assert_free(engine: Engine) -> None:
    """No sequence has left anything behind."""
    pages = engine.pages
    assert pages.num_used == 0
    assert not pages.promised.any()
    assert not engine.has_work


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "selector"), CASES)
def test_a_batch_that_joins_and_leaves_equals_the_forward_pass(
    name: str, selector: str | None
) -> None:
    generate_and_check(name, selector, (7, 1, 19, 4))


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        ("dense", None),
        ("mod", "predictor"),
        ("mod_qkv_bias", "router"),
        ("early_exit", "predictor"),
    ],
)
def test_some_kinds_of_models(name: str, selector: str | None) -> None:
    generate_and_check(name, selector, (9, 1), num_layers=2)


def make_engine(model: Transformer, **options: Any) -> Engine:
    options = {"max_batch": 3, "page_size": 4, "chunk_tokens": 8, "invariant": False, **options}
    return Engine(model, **options)


def run(engine: Engine) -> dict[tuple[int, int], Sample]:
    """Step until no sequence is left; return the samples by request and number."""
    found = {}
    while engine.has_work:
        for event in engine.step():
            if event.result is not None:
                found[event.request, event.sample] = event.result
    return found


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "top_p": 0.7, "seed": 2, "logprobs": 0},
    {"temperature": 0.9, "top_k": 5, "seed": 3, "n": 2},
    {"temperature": 1.5, "min_p": 0.1, "seed": 4, "logprobs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.8, "seed": 5},
    {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 3},
    {"temperature": 0, "frequency_penalty": 0.4},
    {"temperature": 0.8, "presence_penalty": 0.9, "seed": 8},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    {"temperature": 0},
]


@pytest.mark.parametrize("name", ["mod", pytest.param("dense", marks=pytest.mark.gpu)])
def test_settings_give_what_the_other_runner_gives(name: str) -> None:
    """Whether kernels or torch draw: the same seed gives the same text."""
    model = make(name, num_layers=2)
    other = make(name, num_layers=2).cpu()
    common: dict[str, Any] = {"seed": 7, "max_tokens": 2}
    params = [SamplingParams(**(common | settings)) for settings in SETTINGS]
    prompts = [make_tokens(model.config, 1 + 2 * n, seed=n).tolist() for n in range(len(params))]
    found = make_engine(model, max_batch=9, chunk_tokens=32).generate(prompts, params)
    expected = make_engine(other, invariant=True, record=False).generate(prompts, params)
    for ours, theirs in zip(found, expected, strict=True):
        for one, two in zip(ours.samples, theirs.samples, strict=True):
            assert one.tokens == two.tokens
            assert one.finish == two.finish
            assert one.depth.blocks == two.depth.blocks
            assert (one.logprobs is None) == (two.logprobs is None)
            if one.logprobs is not None:
                assert one.logprobs == pytest.approx(two.logprobs, abs=1e-3)
            if two.top_logprobs is not None:
                assert one.top_logprobs is not None
                for tops, others in zip(one.top_logprobs, two.top_logprobs, strict=True):
                    assert [t.token for t in tops] == [t.token for t in others]
                    logprobs = [t.logprob for t in tops]
                    assert logprobs == pytest.approx([t.logprob for t in others], abs=1e-3)


# a single block, which is routed
SMALL: dict[str, Any] = {"num_layers": 1, "routing.every": 1}
MIXED = [
    SamplingParams(max_tokens=3, temperature=0, logprobs=0),
    SamplingParams(max_tokens=3, temperature=0.9, top_p=0.9, seed=3),
    SamplingParams(max_tokens=3, temperature=1, repetition_penalty=1.5, seed=4),
]
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]


def expect(model: Transformer) -> list[tuple[int, ...]]:
    """What these give in an engine without disturbances."""
    results = make_engine(model, invariant=True, record=False).generate(PROMPTS, MIXED)
    return [result.samples[0].tokens for result in results]


# a step that fails before doing anything, and one that fails after doing everything
@pytest.mark.parametrize("works", [False, True])
def test_a_step_that_fails_is_tried_again(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("mod", **SMALL)
    expected, engine = expect(model), make_engine(model)
    original, calls = fused.Blocks.run, [0]

    def fail_once(self: Any, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            if works:
                original(self, *args, **options)
            raise RuntimeError("out of luck")
        return original(self, *args, **options)

    monkeypatch.setattr(fused.Blocks, "run", fail_once)
    for prompt, params in zip(PROMPTS, MIXED, strict=True):
        engine.add(prompt, params)
    # no sequence is finished by then, so no result is lost with the step
    engine.step()
    with pytest.raises(RuntimeError, match="out of luck"):
        run(engine)
    found = run(engine)
    assert [found[number, 0].tokens for number in range(3)] == expected
    assert_free(engine)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host that is always late, so that steps have more and more rounds; how many each had."""
    monkeypatch.setattr(fused.FusedFlight, "is_ready", lambda self: True)
    original, found = fused.FusedRunner.launch, []

    def launch(self: Any, plan: Any, tracks: Any) -> Any:
        found.append(plan.rounds)
        return original(self, plan, tracks)

    monkeypatch.setattr(fused.FusedRunner, "launch", launch)
    return found


@pytest.mark.parametrize("sizes", [SMALL, pytest.param({"num_layers": 4}, marks=pytest.mark.gpu)])
def test_rounds_of_a_step_change_nothing(sizes: dict[str, Any], rounds: list[int]) -> None:
    """Settings, stop tokens and depth: as with one round, which the other runner always has."""
    model, other = make("mod", **sizes), make("mod", **sizes).cpu()
    wishes: list[dict[str, Any]] = [{"max_tokens": 12, "seed": 7} | SETTINGS[n] for n in (1, 4, 5)]
    # one that a stop token ends in the middle of a step
    options = {"invariant": True, "record": False}
    first = make_engine(other, **options).generate(PROMPTS[:1], SamplingParams(**wishes[0]))
    wishes[0]["stop_tokens"] = [first[0].samples[0].tokens[5]]
    params = [SamplingParams(**wish) for wish in wishes]
    expected = make_engine(other, **options).generate(PROMPTS, params)
    assert expected[0].samples[0].finish == "stop"
    rounds.clear()
    engine = make_engine(model)
    found = engine.generate(PROMPTS, params)
    assert max(rounds) > 2
    for ours, theirs in zip(found, expected, strict=True):
        for one, two in zip(ours.samples, theirs.samples, strict=True):
            assert one.tokens == two.tokens
            assert one.finish == two.finish
            assert one.depth == two.depth
            if two.logprobs is not None:
                assert one.logprobs == pytest.approx(two.logprobs, abs=1e-3)
            if two.top_logprobs is not None:
                tops = [[t.token for t in top] for top in two.top_logprobs]
                assert [[t.token for t in top] for top in one.top_logprobs or ()] == tops
    assert_free(engine)


@pytest.mark.parametrize("num_layers", [1, 4])
def test_rounds_in_a_small_cache(num_layers: int, rounds: list[int]) -> None:
    """Sequences give way, are cancelled and are added between steps of several rounds."""
    model = make("dense", num_layers=num_layers)
    engine = make_engine(model, cache_tokens=24, max_batch=2, page_size=2)
    prompts = [make_tokens(model.config, n, seed=n).tolist() for n in (7, 6, 3)]
    params = SamplingParams(max_tokens=14, temperature=0, logprobs=0)
    requests = [engine.add(prompt, params) for prompt in prompts[:2]]
    for _ in range(4):
        engine.step()
    cancelled = engine.add(prompts[2], params)
    engine.step()
    engine.cancel(cancelled)
    found = run(engine)
    assert max(rounds) > 2
    for request, prompt in zip(requests, prompts, strict=False):
        check(model, engine, prompt, found[request, 0])
    assert engine.stats().num_preempted > 0
    assert_free(engine)


def test_an_interrupt_between_rounds_loses_no_token(
    rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("mod", **SMALL)
    params = [SamplingParams(max_tokens=12, temperature=0.9, seed=n) for n in range(3)]
    expected = make_engine(model, invariant=True, record=False).generate(PROMPTS, params)
    rounds.clear()
    engine = make_engine(model)
    for prompt, wish in zip(PROMPTS, params, strict=True):
        engine.add(prompt, wish)
    original, calls = Track.take, [0]

    def interrupt(self: Track, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 16:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(Track, "take", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert max(rounds) > 1
    found = run(engine)
    assert [found[n, 0].tokens for n in range(3)] == [r.samples[0].tokens for r in expected]
    assert_free(engine)


def test_weights_that_moved_are_refused() -> None:
    model = make("mod", **SMALL)
    engine = make_engine(model)
    model.to(torch.float64).to(torch.float32)
    with pytest.raises(RuntimeError, match=r"weights were moved or replaced .* make a new Engine"):
        engine.add([1, 2], MIXED[0])
    assert_free(engine)
    # a new engine uses them in place
    engine = make_engine(model)
    result = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=2, temperature=0, logprobs=0))
    check(model, engine, PROMPTS[0], result[0].samples[0])


def test_two_engines_on_one_model_do_not_disturb_each_other() -> None:
    model = make("mod", **SMALL)
    expected = expect(model)
    engines = [make_engine(model), make_engine(model, page_size=2)]
    for number, engine in enumerate(engines):
        # the same requests in opposite order
        for at in (0, 1, 2) if number else (2, 1, 0):
            engine.add(PROMPTS[at], MIXED[at])
    found: list[dict[int, Sample]] = [{}, {}]
    while any(engine.has_work for engine in engines):
        for engine, samples in zip(engines, found, strict=True):
            events = engine.step()
            samples |= {e.request: e.result for e in events if e.result is not None}
    assert [found[1][n].tokens for n in range(3)] == expected
    assert [found[0][n].tokens for n in (2, 1, 0)] == expected


def test_whoever_gives_way_is_computed_again() -> None:
    model = make("mod", num_layers=2)
    # two prompts fill the cache, and neither can finish in what is left
    engine = make_engine(model, cache_tokens=16, max_batch=2, page_size=2)
    prompts = [make_tokens(model.config, n, seed=n).tolist() for n in (7, 6)]
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=0)
    for result, prompt in zip(engine.generate(prompts, params), prompts, strict=True):
        check(model, engine, prompt, result.samples[0])
    assert engine.stats().num_preempted > 0
    assert_free(engine)


def test_cancelled_while_steps_are_under_way() -> None:
    model = make("mod", **SMALL)
    expected, engine = expect(model), make_engine(model)
    for num_steps in (1, 2):
        requests = [engine.add(p, m) for p, m in zip(PROMPTS, MIXED, strict=True)]
        for _ in range(num_steps):
            engine.step()
        assert engine.pages.promised.any(), "a step is under way"
        for request in requests:
            (event,) = engine.cancel(request)
            assert event.result is not None
            assert event.result.finish == "cancelled"
        assert_free(engine)
    # new sequences in the same rows are not mistaken for those that left
    results = engine.generate(PROMPTS, MIXED)
    assert [result.samples[0].tokens for result in results] == expected
    assert_free(engine)


def test_computed_apart_numbers_depend_on_nobody_else() -> None:
    """With `invariant`, results are bitwise equal."""
    model = make("mod", **SMALL)
    params = SamplingParams(max_tokens=2, temperature=0.8, seed=1, logprobs=0)
    options = {"invariant": True, "record": True}
    together = make_engine(model, **options).generate(PROMPTS, params)
    for result, prompt in zip(together, PROMPTS, strict=True):
        (alone,) = make_engine(model, max_batch=1, **options).generate([prompt], params)
        assert result.samples == alone.samples
