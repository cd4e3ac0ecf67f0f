"""The scoring heads: float32 whatever surrounds them, and a predictor that only listens."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from depthmix.nn.router import EPS, Predictor, Router

WIDTH = 64


def make_router(**options: Any) -> Router:
    router = Router(WIDTH, **options)
    torch.nn.init.normal_(router.weight, std=WIDTH**-0.5)
    return router


def test_scores_are_products_with_the_weight() -> None:
    router, x = make_router(num_scores=3).double(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    assert router(x).shape == (2, 5, 3)
    for score in range(3):
        expected = (x * router.weight[score]).sum(-1)
        torch.testing.assert_close(router(x)[..., score], expected, rtol=0, atol=1e-13)


def test_normalized_scores_do_not_depend_on_scale() -> None:
    router, x = make_router(normalize=True).double(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    expected = F.rms_norm(x, (WIDTH,), eps=EPS) @ router.weight.T
    torch.testing.assert_close(router(x), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(router(1000 * x), router(x), rtol=0, atol=1e-5)
    plain = make_router().double()
    assert not torch.allclose(plain(1000 * x), plain(x))


@pytest.mark.parametrize("how", ["model", "autocast"])
@pytest.mark.parametrize("normalize", [False, True])
def test_scores_are_float32_under_bf16(how: str, normalize: bool) -> None:
    router, x = make_router(normalize=normalize), torch.randn(1, 4096, WIDTH).bfloat16()
    if how == "model":
        router = router.bfloat16()
        scores = router(x)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            scores = router(x)
    assert scores.dtype == torch.float32
    truth = make_router(normalize=normalize).double()
    truth.weight.data.copy_(router.weight)
    expected = truth(x.double())
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-5)
    # bf16 has fewer values than there are tokens: its scores tie
    assert scores.unique().numel() > 4000
    assert scores.bfloat16().unique().numel() < 2500


def test_router_passes_gradients_to_input_and_weight() -> None:
    router = make_router()
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    router(x).sum().backward()
    assert x.grad is not None
    assert router.weight.grad is not None
    torch.testing.assert_close(x.grad, router.weight.detach().expand(2, 5, -1))
    torch.testing.assert_close(router.weight.grad[0], x.detach().sum(dim=(0, 1)))


def test_predictor_by_hand_and_without_gradient_to_its_input() -> None:
    predictor = Predictor(WIDTH, 16, 2).double()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    scores = predictor(x)
    hidden = F.gelu(F.rms_norm(x, (WIDTH,), eps=EPS) @ predictor.w_in.weight.T)
    expected = hidden @ predictor.w_out.weight.T + predictor.w_out.bias
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-13)
    scores.sum().backward()
    assert x.grad is None
    for name, parameter in predictor.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_predictor_scores_are_float32_in_a_bf16_model() -> None:
    predictor = Predictor(WIDTH, 16).bfloat16()
    assert predictor(torch.randn(1, 3, WIDTH).bfloat16()).dtype == torch.float32


@pytest.mark.compile
@pytest.mark.parametrize("normalize", [False, True])
def test_compiled_router_equals_the_product(normalize: bool) -> None:
    """Compiled, one score is a product and a sum: the same numbers, also under autocast."""
    router = make_router(normalize=normalize)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, WIDTH).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        scores = compiled(x)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, router(x), rtol=0, atol=1e-5)
