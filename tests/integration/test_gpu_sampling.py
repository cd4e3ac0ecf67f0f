"""On a GPU: what an engine generates equals the model's own forward pass, as users call it.

Long prompts first, several at once, the same call twice. No hypothesis here: these run where
nothing can be installed.
"""

import gc
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from depthmix.config import load_preset
from depthmix.infer import Engine, SamplingParams
from depthmix.infer.paths.plain import find_shape_obstacle
from depthmix.infer.results import Result, Sample
from depthmix.nn import Transformer
from variants import causal_cases, make_config, make_model, make_tokens

pytestmark = pytest.mark.gpu

PROMPTS = (30, 13, 7, 1, 4)
# the log-probability of a token, for numbers that were rounded otherwise
TOLERANCE = 2e-3


def make(name: str, **overrides: Any) -> Transformer:
    model = make_model(make_config(name, **overrides), dtype=torch.float32)
    return model.cuda().requires_grad_(False)


def draw_prompts(model: Transformer, lengths: Sequence[int]) -> list[list[int]]:
    return [
        make_tokens(model.config, length, seed=seed).tolist() for seed, length in enumerate(lengths)
    ]


def check_sample(
    model: Transformer,
    engine: Engine,
    prompt: Sequence[int],
    sample: Sample,
    tolerance: float = TOLERANCE,
) -> None:
    """A greedy sample is as good as the best, up to rounding, and went where the full pass goes."""
    tokens = torch.tensor([[*prompt, *sample.tokens]], device="cuda")
    # the selector that the engine chose: None asks it to choose
    output = model(tokens, selector=engine.selector)
    logprobs = output.logits[0, len(prompt) - 1 : -1].float().log_softmax(dim=1)
    expected = logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0]
    assert (logprobs.amax(dim=1) - expected < tolerance).all()
    if sample.logprobs is not None:
        found = torch.tensor(sample.logprobs, device="cuda")
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    if output.routings:
        kept = torch.stack([r.slot[0] >= 0 for r in output.routings], dim=1)
        assert [list(path) for path in sample.depth.blocks] == kept.tolist()[:-1]


def list_tokens(results: Sequence[Result]) -> list[tuple[int, ...]]:
    return [sample.tokens for result in results for sample in result.samples]


def generate_twice(
    model: Transformer,
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    tolerance: float = TOLERANCE,
) -> None:
    """The same call twice on one engine: the first one records, the second one replays."""
    for _ in range(2):
        results = engine.generate(prompts, params)
        for result, prompt in zip(results, prompts, strict=True):
            check_sample(model, engine, prompt, result.samples[0], tolerance)
        assert engine.pages.num_used == 0


def check(name: str, selector: str | None, *, max_batch: int, **overrides: Any) -> Engine:
    """Greedy tokens, log-probabilities and depths of a batch that joins and leaves."""
    model = make(name, **overrides)
    engine = Engine(model, selector=selector, max_batch=max_batch, page_size=4, chunk_tokens=8)
    params = [SamplingParams(max_tokens=5 + n, temperature=0, logprobs=0) for n in range(5)]
    generate_twice(model, engine, draw_prompts(model, PROMPTS), params)
    return engine


@pytest.mark.parametrize(("name", "selector"), causal_cases())
def test_steps_equal_the_forward_pass(name: str, selector: str | None) -> None:
    from depthmix.infer.paths.fused import FusedRunner

    engine = check(name, selector, max_batch=4)
    knows_it = find_shape_obstacle(engine.config, torch.float32) is None
    assert isinstance(engine.runner, FusedRunner) == knows_it


FUSED = [
    (name, selector)
    for name, selector in causal_cases()
    if find_shape_obstacle(make_config(name), torch.float32) is None
]


@pytest.mark.parametrize(("name", "selector"), FUSED)
def test_one_sequence_at_a_time_equals_the_forward_pass(name: str, selector: str | None) -> None:
    # heads wide enough for one kernel that does a whole step
    check(name, selector, max_batch=1, width=64)


WIDE = {
    "width": 1024,
    "num_heads": 16,
    "num_kv_heads": 4,
    "mlp_width": 2816,
    "routing.predictor_width": 256,
    "max_seq_len": 256,
}


def test_four_prompts_of_a_hundred_tokens_twice() -> None:
    model = make("mod", **WIDE)
    engine = Engine(model, max_batch=4)
    params = SamplingParams(max_tokens=16, temperature=0, logprobs=0)
    # logits of this width are larger, and so is what rounding does to them
    generate_twice(model, engine, draw_prompts(model, (103, 100, 97, 110)), params, 2e-2)


def test_four_prompts_of_a_hundred_tokens_twice_in_bf16() -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Transformer(load_preset("60m")).to(torch.bfloat16).requires_grad_(False)
    engine = Engine(model, max_batch=4)
    params = SamplingParams(max_tokens=16, temperature=0, logprobs=0)
    prompts = draw_prompts(model, (103, 100, 97, 110))
    first, second = (engine.generate(prompts, params) for _ in range(2))
    assert list_tokens(first) == list_tokens(second)
    assert engine.pages.num_used == 0
    for result, prompt in zip(first, prompts, strict=True):
        (sample,) = result.samples
        tokens = torch.tensor([[*prompt, *sample.tokens]], device="cuda")
        logits = model(tokens, selector=engine.selector).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(dim=1)
        expected = logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected.cpu(), rtol=0, atol=0.2)
        assert (logprobs.amax(dim=1) - expected < 0.2).all()


@pytest.mark.parametrize("name", ["dense", "mod"])
def test_a_batch_then_one_alone_then_a_batch(name: str) -> None:
    model = make(name, width=256, num_heads=4, num_kv_heads=2, mlp_width=512, max_seq_len=256)
    engine = Engine(model, max_batch=4)
    prompts = draw_prompts(model, (120, 64, 90, 17))
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=0)
    for group in (prompts, prompts[1:2], prompts, prompts[::-1]):
        for result, prompt in zip(engine.generate(group, params), group, strict=True):
            check_sample(model, engine, prompt, result.samples[0], 5e-3)
    assert engine.pages.num_used == 0


@pytest.mark.parametrize("name", ["dense", "mod"])
@pytest.mark.parametrize("number", [64, 256])
def test_many_mixed_prompts(name: str, number: int) -> None:
    model = make(name, width=128, num_heads=4, num_kv_heads=2, mlp_width=256, max_seq_len=256)
    engine = Engine(model)
    pick = random.Random(number)
    # long ones first, and many of one length
    lengths = sorted(pick.choice((1, 2, 31, 100, pick.randint(1, 200))) for _ in range(number))
    prompts = draw_prompts(model, lengths[::-1])
    params = [
        SamplingParams(max_tokens=pick.randint(1, 24), temperature=0, logprobs=0) for _ in prompts
    ]
    generate_twice(model, engine, prompts, params)


def test_sixteen_samples_through_a_sampler() -> None:
    """As `depthmix sample RUN -n 16` does it, where a run cannot be written."""
    tokenizers = pytest.importorskip("tokenizers")
    from depthmix.models import Vocabulary
    from depthmix.sample import Sampler

    words = {"<|endoftext|>": 0} | {f"word{n}": n for n in range(1, 64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word1"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model = make("mod", tied_head=False).to(torch.bfloat16)
    sampler = Sampler(model, Vocabulary(tokenizer, 0), max_batch=16)
    params = SamplingParams(max_tokens=24, n=16, seed=5, stop_tokens=[0])
    sampler.warm_up([sampler.vocabulary.encode("word3 word9 word27")], params)
    assert sampler.compile_seconds > 0
    heard: list[tuple[int, ...]] = []
    assert sampler.engine.warm_up(lambda *done: heard.append(done)) > 0
    assert heard[-1][0] == heard[-1][1] == len(heard)
    found = []
    for _ in range(2):
        request = sampler.add(sampler.vocabulary.encode("word3 word9 word27"), params)
        events = [event for step in sampler.run() for event in step]
        samples = {event.sample: event.result for event in events if event.result is not None}
        assert sorted(samples) == list(range(16))
        assert {event.request for event in events} == {request}
        found.append([samples[number].tokens for number in range(16)])
    assert found[0] == found[1]
    assert len(set(found[0])) > 1
    assert sampler.engine.pages.num_used == 0


def test_sixteen_samples_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`depthmix sample RUN -n 16`."""
    for name in ("tomli_w", "typer", "rich", "safetensors", "tokenizers", "tensorboard"):
        pytest.importorskip(name)
    from depthmix.cli import main
    from text_runs import write_text_run

    run = write_text_run(tmp_path)
    capsys.readouterr()
    options = ("--max-tokens", "20", "--seed", "1", "--json")
    told = []
    for _ in range(2):
        assert main(["sample", str(run), "--prompt", "line 7 says", "-n", "16", *options]) == 0
        told.append([line for line in capsys.readouterr().out.splitlines() if line[:1] == "{"])
    assert len(told[0]) == 16
    assert len(told[1]) == 16


def test_engines_in_threads_of_their_own_do_not_disturb_each_other() -> None:
    """Each records steps while the other one decodes, one row or several."""
    models = [make(name).bfloat16() for name in ("mod", "dense")]
    sizes = [(9,), (30, 13, 7), (4, 5), (1,), (6, 2, 8, 3, 5, 7)]

    def generate(engine: Engine) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for lengths in sizes:
            prompts = draw_prompts(engine.model, lengths)
            found += list_tokens(engine.generate(prompts, SamplingParams(max_tokens=24, seed=1)))
        return found

    expected = [generate(Engine(model)) for model in models]
    for _ in range(3):
        engines = [Engine(model) for model in models]
        with ThreadPoolExecutor(len(engines)) as threads:
            assert list(threads.map(generate, engines)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_is_scored_while_requests_run(dtype: torch.dtype) -> None:
    model = make("mod")
    tokens = make_tokens(model.config, 40).tolist()
    logits = model(torch.tensor([tokens], device="cuda"), selector="predictor").logits[0, :-1]
    wanted = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None].cuda())
    engine = Engine(model.to(dtype), max_batch=4)
    (alone,) = list_tokens(engine.generate([tokens], SamplingParams(max_tokens=16, seed=1)))
    engine.add(tokens, SamplingParams(max_tokens=16, seed=1))
    engine.step()
    found = torch.tensor([score.logprob for score in engine.score(tokens, top=3)])
    ends = []
    while engine.has_work:
        ends += [event.result for event in engine.step() if event.result is not None]
    assert [sample.tokens for sample in ends] == [alone]
    # the pass multiplies in bf16, and a token's choice of blocks may hang on its rounding
    wanted = wanted[:, 0].cpu()
    assert ((found - wanted) / wanted).abs().median() < 5e-3


def test_requests_that_are_computed_apart_do_not_disturb_each_other() -> None:
    """`invariant`: to the last bit, regardless of other requests."""
    model = make("mod", width=64)
    params = SamplingParams(max_tokens=8, seed=1, logprobs=0)
    prompts = draw_prompts(model, (30, 3, 1))
    together = Engine(model, max_batch=3, invariant=True).generate(prompts, params)
    for result, prompt in zip(together, prompts, strict=True):
        (alone,) = Engine(model, max_batch=1, invariant=True).generate([prompt], params)
        assert result.samples == alone.samples


def test_sampling_is_the_same_on_both_devices() -> None:
    """The noise is a hash, so that the same seed gives the same text."""
    texts = []
    for device in ("cpu", "cuda"):
        model = make_model("mod", dtype=torch.float32).to(device)
        engine = Engine(model, max_batch=2, seed=3)
        params = SamplingParams(max_tokens=12, temperature=0.7, top_p=0.9, seed=5)
        texts.append(list_tokens(engine.generate([[1, 2, 3], [4]], params)))
    assert texts[0] == texts[1]


def test_bf16_decoding_is_close_to_float32() -> None:
    model = make_model("mod", dtype=torch.float32).cuda()
    narrow = make_model("mod", dtype=torch.float32).cuda().to(torch.bfloat16)
    found = []
    for each in (model, narrow):
        engine = Engine(each, selector="all", max_batch=2)
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=0)
        found.append([r.samples[0].logprobs for r in engine.generate([[1, 2, 3], [9]], params)])
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), rtol=0.1, atol=0.2)


def draw_params(pick: random.Random, vocab_size: int) -> SamplingParams:
    """What one user of many asks for."""
    options: dict[str, Any] = {"max_tokens": pick.randint(1, 24), "seed": pick.getrandbits(40)}
    kind = pick.random()
    if kind < 0.4:
        options |= {"temperature": 0, "logprobs": pick.choice((0, 0, 0, 3))}
    elif kind < 0.5:
        options |= {"temperature": 0}
    elif kind < 0.6:
        stops = tuple(pick.sample(range(vocab_size), 4))
        options |= {"temperature": 0, "logprobs": 0, "stop_tokens": stops}
    elif kind < 0.7:
        penalty = {"repetition_penalty": 1.3, "frequency_penalty": pick.choice((0, 0.5))}
        options |= {"temperature": pick.choice((0, 0.8)), **penalty}
    elif kind < 0.8:
        options |= {"n": 2, "temperature": 1.0}
    else:
        filters = ({"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_p": 0.9, "top_k": 20}, {})
        options |= {"temperature": 0.9, **pick.choice(filters)}
    return SamplingParams(**options)


class Soak:
    """Users who come, go and change their minds."""

    def __init__(self, model: Transformer, engine: Engine) -> None:
        self.model, self.engine, self.pick = model, engine, random.Random(0)
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self.samples: dict[int, list[Sample]] = {}
        self.open: set[int] = set()

    def add(self) -> None:
        config = self.model.config
        prompt = [self.pick.randrange(config.vocab_size) for _ in range(self.pick.randint(1, 200))]
        params = draw_params(self.pick, config.vocab_size)
        request = self.engine.add(prompt, params)
        self.asked[request], self.samples[request] = (prompt, params), []
        self.open.add(request)

    def note(self, events: Sequence[Any]) -> None:
        for event in events:
            if event.result is not None:
                samples = self.samples[event.request]
                samples.append(event.result)
                if len(samples) == self.asked[event.request][1].n:
                    self.open.discard(event.request)

    def run(self, number: int) -> None:
        """So many requests to their ends, of which some are cancelled."""
        num_left = number
        while num_left or self.engine.has_work:
            while num_left and len(self.open) < 150:
                self.add()
                num_left -= 1
            self.note(self.engine.step())
            if self.open and self.pick.random() < 0.05:
                self.note(self.engine.cancel(self.pick.choice(sorted(self.open))))

    def check(self) -> int:
        """Every greedy sample with the forward pass; how many there were."""
        count = 0
        for request, (prompt, params) in self.asked.items():
            assert len(self.samples[request]) == params.n
            if params.temperature or params.penalizes:
                continue
            for sample in self.samples[request]:
                if not sample.tokens:
                    assert sample.finish == "cancelled"
                    continue
                check_sample(self.model, self.engine, prompt, sample)
                stopped = sample.tokens[-1] in params.stop_tokens
                assert not set(sample.tokens[:-1]) & set(params.stop_tokens)
                if sample.finish != "cancelled":
                    assert stopped == (sample.finish == "stop")
                    assert stopped or len(sample.tokens) == params.max_tokens
                count += 1
        return count


def measure_memory() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize(("name", "width"), [("dense", 64), ("mod", 128)])
def test_a_thousand_requests(name: str, width: int) -> None:
    """Two thousand with both models: everything in them, in a cache that is too small for all."""
    sizes = {"width": width, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 2 * width}
    model = make(name, num_layers=4, max_seq_len=256, vocab_size=256, **sizes)
    engine = Engine(
        model, max_batch=32, chunk_tokens=128, cache_tokens=2048 if name == "dense" else 1024
    )
    soak, used = Soak(model, engine), []
    for _ in range(2):
        soak.run(500)
        used.append(measure_memory())
        assert engine.pages.num_used == 0
        assert not engine.has_work
        assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)
    assert engine.stats().num_preempted > 0
    # a shape of step may come for the first time in the second half, and no more
    assert used[1] - used[0] < 16 * 2**20
    assert soak.check() > 400
