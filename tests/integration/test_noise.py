"""Each token of a sample is drawn with noise of its own, made of the seed and the token's index.

Of a model that finds all tokens equally likely, the noise alone decides: what the engine writes is
then known from `draw_gumbel`, whatever the prompt, the neighbours and the way it is computed.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from depthmix.infer import Engine, SamplingParams
from depthmix.infer import engine as engine_module
from depthmix.infer.sampling import draw_gumbel
from depthmix.nn import Transformer
from variants import make_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_TOKENS = 12


def make_even_model(name: str, **overrides: Any) -> Transformer:
    """All weights are zero, and so are all logits."""
    with torch.device(DEVICE):
        model = Transformer(make_config(name, **overrides))
    for parameter in model.requires_grad_(False).parameters():
        parameter.zero_()
    return model.eval()


@pytest.fixture(scope="module", params=["dense", "mod"])
def model(request: pytest.FixtureRequest) -> Transformer:
    return make_even_model(request.param)


def foretell(seed: int, vocab_size: int, steps: Sequence[int]) -> tuple[int, ...]:
    """The tokens of a sample whose indices are these."""
    ids = torch.arange(vocab_size)[None].expand(len(steps), -1)
    noise = draw_gumbel(torch.full((len(steps),), seed), torch.tensor(steps), ids)
    return tuple(noise.argmax(dim=1).tolist())


def make_params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, **fields)


# none of them changes what is equally likely; each goes its own way through the sampler
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 64},
    {"min_p": 0.5},
    {"repetition_penalty": 1.5},
    {"logprobs": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way), "plain"))
@pytest.mark.parametrize("seed", [0, 7, -(2**63), 2**63 - 1])
def test_tokens_are_those_of_the_noise(model: Transformer, seed: int, way: dict[str, Any]) -> None:
    vocab_size = model.config.vocab_size
    (result,) = Engine(model).generate([[1, 2, 3]], make_params(seed=seed, **way))
    tokens = tuple(result.samples[0].tokens)
    assert tokens == foretell(seed, vocab_size, range(NUM_TOKENS))
    # the same noise each time would write one token over and over
    assert len(set(tokens)) > NUM_TOKENS // 2


@pytest.mark.slow
def test_tokens_that_a_device_draws_ahead_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the index of a token is counted on the device, from step to step."""
    fused = pytest.importorskip("depthmix.infer.paths.fused")

    def make(model: Transformer, pages: Any, selector: str | None, **options: Any) -> Any:
        return fused.FusedRunner(model, pages, selector, options["max_step_tokens"])

    monkeypatch.setattr(engine_module, "make_runner", make)
    # of the sizes that tests/infer/paths/test_fused.py checks against the forward pass
    model = make_even_model("mod", width=64, num_heads=2, num_kv_heads=1, tied_head=False)
    engine = Engine(model, max_batch=2, page_size=4, chunk_tokens=8, invariant=False)
    lengths = (5, 3, 4)
    ways: list[dict[str, Any]] = [WAYS[1], WAYS[2], WAYS[4]]
    params = [
        SamplingParams(max_tokens=n, seed=n, **way) for n, way in zip(lengths, ways, strict=True)
    ]
    results = engine.generate([[1, 2, 3], list(range(11)), [4]], params)
    for length, result in zip(lengths, results, strict=True):
        expected = foretell(length, model.config.vocab_size, range(length))
        assert tuple(result.samples[0].tokens) == expected


@pytest.mark.parametrize("options", [{}, {"max_batch": 2}, {"invariant": False}], ids=str)
def test_noise_does_not_depend_on_the_prompt_or_on_others(
    model: Transformer, options: dict[str, Any]
) -> None:
    """An index counts the sample's own new tokens, not its position, its row or the engine's steps.

    Prompts of other lengths, and samples that end before others, set all of these apart.
    """
    vocab_size = model.config.vocab_size
    prompts = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 9], list(range(16)), [0]]
    lengths = [12, 3, 7, 12, 5]
    params = [SamplingParams(max_tokens=n, seed=n + i) for i, n in enumerate(lengths)]
    results = Engine(model, **options).generate(prompts, params)
    for wish, result in zip(params, results, strict=True):
        assert wish.seed is not None
        expected = foretell(wish.seed, vocab_size, range(wish.max_tokens))
        assert tuple(result.samples[0].tokens) == expected


def test_samples_of_a_request_have_noise_of_their_own(model: Transformer) -> None:
    (result,) = Engine(model).generate([[1, 2]], make_params(seed=3, n=4))
    found = [tuple(sample.tokens) for sample in result.samples]
    assert found[0] == foretell(3, model.config.vocab_size, range(NUM_TOKENS))
    # nor is one the other, shifted: at most by chance are two tokens equal at the same index
    assert len(set(found)) == 4
    for number, tokens in enumerate(found):
        assert len(set(tokens)) > NUM_TOKENS // 2
        for other in found[:number]:
            assert sum(a == b for a, b in zip(tokens, other, strict=True)) < NUM_TOKENS // 2
