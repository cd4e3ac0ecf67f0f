"""On a GPU: recorded decoding equals the model's own forward pass, for every variant.

No hypothesis here: these run where nothing can be installed.
"""

from typing import Any

import pytest
import torch

from depthmix.infer import Engine, SamplingParams
from depthmix.infer.decode import SingleStep
from depthmix.infer.runner import find_obstacle
from variants import causal_cases, make_config, make_model, make_tokens

pytestmark = pytest.mark.gpu

PROMPTS = (1, 7, 13, 30, 4)


def check(
    name: str, selector: str | None, *, max_batch: int, compile: bool = False, **overrides: Any
) -> Engine:
    """Greedy tokens, log-probabilities and depths of a batch that joins and leaves."""
    model = make_model(make_config(name, **overrides), dtype=torch.float32).cuda()
    engine = Engine(
        model, selector=selector, max_batch=max_batch, page_size=4, chunk_tokens=8, compile=compile
    )
    prompts = [make_tokens(model.config, n, seed=n).tolist() for n in PROMPTS]
    params = [SamplingParams(max_tokens=5 + n, temperature=0, logprobs=0) for n in range(5)]
    assert engine.runner.record
    for result, prompt in zip(engine.generate(prompts, params), prompts, strict=True):
        (sample,) = result.samples
        tokens = torch.tensor([[*prompt, *sample.tokens]], device="cuda")
        # the selector that the engine chose: None asks it to choose
        output = model(tokens, selector=engine.selector)
        logits = output.logits[0, len(prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(dim=1)
        chosen = torch.tensor(sample.tokens, device="cuda")
        found = torch.tensor(sample.logprobs, device="cuda")
        torch.testing.assert_close(
            found, logprobs.gather(1, chosen[:, None])[:, 0], rtol=0, atol=2e-3
        )
        # as good as the best, up to rounding
        assert (logprobs.amax(dim=1) - found < 2e-3).all()
        if output.routings:
            kept = torch.stack([r.slot[0] >= 0 for r in output.routings], dim=1)
            assert [list(path) for path in sample.depth.blocks] == kept.tolist()[:-1]
    assert engine.pages.num_used == 0
    return engine


@pytest.mark.parametrize(("name", "selector"), causal_cases())
def test_recorded_steps_equal_the_forward_pass(name: str, selector: str | None) -> None:
    runner = check(name, selector, max_batch=4).runner
    assert any(step is not None for step in runner.prompts.values()) == runner.pads


FUSED = [
    (name, selector)
    for name, selector in causal_cases()
    if find_obstacle(make_config(name, width=64)) is None and selector != "all"
]


@pytest.mark.parametrize(("name", "selector"), FUSED)
def test_one_sequence_in_one_kernel_equals_the_forward_pass(
    name: str, selector: str | None
) -> None:
    engine = check(name, selector, max_batch=1, width=64)
    assert engine.runner.can_fuse
    assert all(isinstance(step, SingleStep) for step in engine.runner.steps.values())


@pytest.mark.parametrize("name", ["dense", "mod", "mod_kv", "mode_staged"])
def test_compiled_steps_equal_the_forward_pass(name: str) -> None:
    torch._dynamo.reset()
    check(name, None, max_batch=4, compile=True)


def test_requests_that_are_computed_apart_do_not_disturb_each_other() -> None:
    """`invariant`: recorded steps one after the other, then everybody's sampling."""
    model = make_model(make_config("mod", width=64), dtype=torch.float32).cuda()
    params = SamplingParams(max_tokens=8, seed=1)
    prompts = [[1, 2, 3], [4, 5], [6]]
    together = Engine(model, max_batch=3, invariant=True).generate(prompts, params)
    alone = [Engine(model, max_batch=1, invariant=True).generate([p], params)[0] for p in prompts]
    assert [r.samples[0].tokens for r in together] == [r.samples[0].tokens for r in alone]


def test_sampling_is_the_same_on_both_devices() -> None:
    """The noise is a hash, so that the same seed gives the same text."""
    texts = []
    for device in ("cpu", "cuda"):
        model = make_model("mod", dtype=torch.float32).to(device)
        engine = Engine(model, max_batch=2, seed=3)
        params = SamplingParams(max_tokens=12, temperature=0.7, top_p=0.9, seed=5)
        results = engine.generate([[1, 2, 3], [4]], params)
        texts.append([result.samples[0].tokens for result in results])
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
