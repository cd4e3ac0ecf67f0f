"""On a GPU: kernels equal their reference, compiled equals eager, a replayed step equals a step.

No hypothesis here: these run where nothing can be installed.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from depthmix.budget import make_schedule
from depthmix.config import Recipe, RunConfig
from depthmix.kernels import linear, linear_cross_entropy, multiply_groups, reference
from depthmix.nn import Transformer
from depthmix.nn.losses import IGNORE, RoutingLoss
from depthmix.nn.transformer import Output
from depthmix.train.evaluate import look_at_batch
from depthmix.train.meter import Meter
from depthmix.train.parallel import compile_layers
from depthmix.train.step import StepLoss, TrainStep, compute_loss
from depthmix.world import World
from variants import VARIANTS, enlarge_updates, make_config, make_model

pytestmark = pytest.mark.gpu


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return ((value.double() - truth.double()).norm() / truth.double().norm()).item()


@pytest.fixture
def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write is NaN and not by luck zero."""
    plain = torch.empty

    def poisoned(*args, **kwargs):
        made = plain(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() and made.is_cuda else made

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("rows", "tokens", "kept"),
    [(16, 2048, 256), (3, 33, 7), (1, 1, 1), (2, 16, 16), (2, 5000, 700)],
)
def test_select_topk(rows: int, tokens: int, kept: int, partial: bool, ties: bool) -> None:
    from depthmix.kernels import triton

    torch.manual_seed(0)
    scores = torch.randn(rows, tokens, device="cuda")
    if ties:
        scores = (scores * 2).round()
    counts = torch.randint(0, kept + 1, (rows,), device="cuda") if partial else None
    for ours, truth in zip(
        triton.select_topk(scores, kept, counts),
        reference.select_topk(scores, kept, counts),
        strict=True,
    ):
        assert torch.equal(ours, truth)


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "first", "width", "phase_rows"),
    [(2, 5, 6, 4, 8, 1), (3, 70, 16, 8, 128, 3), (4, 33, 3, 2, 24, 4)],
)
def test_rotate_split(rows, tokens, heads, first, width, phase_rows, dtype) -> None:
    from depthmix.kernels import triton

    torch.manual_seed(0)
    x = torch.randn(rows, tokens, heads, width, device="cuda", dtype=dtype, requires_grad=True)
    truth_x = x.detach().double().requires_grad_()
    phase = torch.randn(phase_rows, tokens, 2, width // 2, device="cuda")
    ours, truth = (
        triton.rotate_split(x, phase, first),
        reference.rotate_split(truth_x, phase, first),
    )
    # attention gives gradients in a layout of its own
    grads = [torch.randn_like(part.transpose(1, 2).contiguous()).transpose(1, 2) for part in ours]
    (grad,) = torch.autograd.grad(ours, x, grads)
    (truth_grad,) = torch.autograd.grad(truth, truth_x, [g.double() for g in grads])
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    for value, expected in [*zip(ours, truth, strict=True), (grad, truth_grad)]:
        assert relative_error(value, expected) < tolerance


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize(("rows", "width", "classes"), [(20000, 64, 1000), (300, 32, 50257)])
def test_linear_cross_entropy(rows: int, width: int, classes: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(classes, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, classes, (rows,), device="cuda")
    targets[::7] = IGNORE
    loss = linear_cross_entropy(hidden, weight, targets, IGNORE)
    loss.backward()
    truth_hidden, truth_weight = (t.detach().float().requires_grad_() for t in (hidden, weight))
    truth = F.cross_entropy(truth_hidden @ truth_weight.T, targets, ignore_index=IGNORE)
    truth.backward()
    assert relative_error(loss.detach(), truth.detach()) < 2e-3
    for ours, expected in ((hidden, truth_hidden), (weight, truth_weight)):
        assert ours.grad is not None
        assert expected.grad is not None
        assert relative_error(ours.grad, expected.grad) < 1e-2


def test_grouped_product() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([30, 30, 150, 200], device="cuda", dtype=torch.int32)
    ours = multiply_groups(x, weight, ends)
    grad = torch.randn_like(ours)
    grads = torch.autograd.grad(ours, (x, weight), grad)
    truth_inputs = [t.detach().double().requires_grad_() for t in (x, weight)]
    truth = torch.ops.depthmix.multiply_groups(*truth_inputs, ends)
    truth_grads = torch.autograd.grad(truth, truth_inputs, grad.double())
    for value, expected in zip((ours, *grads), (truth, *truth_grads), strict=True):
        assert relative_error(value, expected) < 1e-2


def test_linear_keeps_the_weights_gradient_in_float32() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 50, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32, 64, device="cuda", requires_grad=True)
    grad = torch.randn(3, 50, 32, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours = linear(x, weight)
    grads = torch.autograd.grad(ours, (x, weight), grad)
    inputs = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    truth = F.linear(inputs[0], inputs[1])
    truth_grads = torch.autograd.grad(truth, inputs, grad.double())
    assert ours.dtype == torch.bfloat16
    assert grads[1].dtype == torch.float32
    assert relative_error(ours, truth) < 1e-2
    assert relative_error(grads[0], truth_grads[0]) < 1e-2
    # its inputs are exact in bf16: a gradient rounded to bf16 would be off by 2e-3
    assert relative_error(grads[1], truth_grads[1]) < 1e-5


@pytest.mark.parametrize("name", ["dense", "mod", "token_choice"])
def test_compiled_attention_stays_inside_documents(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    # so long that the 150 tokens of a routed block are also enough to skip blocks
    model = enlarge_updates(Transformer(make_config(name, max_seq_len=600, width=64))).cuda()
    tokens = torch.randint(0, model.config.vocab_size, (3, 601), device="cuda")
    documents = (torch.rand(3, 600, device="cuda") < 0.02).cumsum(1)
    documents[1, 560:] = -1
    # padding is undefined, and is not predicted
    targets = tokens[:, 1:].where(documents >= 0, IGNORE)
    inputs = (model, tokens[:, :-1].contiguous(), targets, documents)
    losses, grads = [], []
    for function in (compute_loss, torch.compile(compute_loss, fullgraph=True)):
        model.zero_grad()
        result = function(*inputs)
        result.total.backward()
        losses.append(result.total.detach())
        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        grads.append(torch.cat(parts))
    assert relative_error(losses[1], losses[0]) < 1e-4
    assert relative_error(grads[1], grads[0]) < 1e-3


@pytest.mark.parametrize("name", ["dense", "mod"])
def test_blocks_compiled_for_training_can_be_validated(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = enlarge_updates(Transformer(make_config(name, max_seq_len=1024, width=64))).cuda()
    tokens = torch.randint(0, model.config.vocab_size, (4, 1025), device="cuda")
    documents = (torch.rand(4, 1024, device="cuda") < 0.01).cumsum(1)
    inputs = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), documents)
    with torch.no_grad():
        truth, _ = look_at_batch(model, *inputs, None, torch.bfloat16)
    compile_layers(model)
    compute_loss(model, *inputs).total.backward()
    with torch.no_grad():
        for _ in range(3):
            loss, _ = look_at_batch(model, *inputs, None, torch.bfloat16)
    assert relative_error(loss, truth) < 1e-2


def list_kept(output: Output) -> list[torch.Tensor]:
    """Which tokens each block kept, and which of them offered keys and values."""
    pairs = [(routing, routing.memory) for routing in output.routings]
    return [r.slot.cpu() >= 0 for pair in pairs for r in pair if r is not None]


@pytest.mark.parametrize("name", VARIANTS)
def test_gpu_equals_cpu(name: str) -> None:
    if name.startswith("stochastic"):
        pytest.skip("the two devices draw different noise")
    model = make_model(name, dtype=torch.float32)
    # each token once in a row: a row that begins with a token twice has an exact tie, since both
    # see the same, and rounding would decide between them
    torch.manual_seed(1)
    tokens = torch.rand(3, model.config.vocab_size).argsort(1)[:, :32]
    on_cpu, on_gpu = model(tokens), model.cuda()(tokens.cuda())
    for ours, truth in zip(list_kept(on_gpu), list_kept(on_cpu), strict=True):
        assert torch.equal(ours, truth)
    assert relative_error(on_gpu.logits.cpu(), on_cpu.logits) < 1e-3


COMPILED = [
    "dense",
    "mod",
    "mod_aux",
    "mod_kv",
    "token_choice",
    "early_exit",
    "stochastic",
    "moe_token_choice",
    "mode_staged",
]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_eager(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = enlarge_updates(Transformer(make_config(name))).cuda()
    tokens = torch.randint(0, model.config.vocab_size, (3, 33), device="cuda")
    compiled = torch.compile(compute_loss, fullgraph=True)
    losses, grads = [], []
    for function in (compute_loss, compiled):
        torch.manual_seed(1)
        result = function(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        model.zero_grad()
        result.total.backward()
        losses.append(result.total.detach())
        grads.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    if name != "stochastic":
        assert relative_error(losses[1], losses[0]) < 1e-4
        assert relative_error(grads[1], grads[0]) < 1e-2
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loose = compiled(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    assert relative_error(loose.total.detach(), losses[0]) < 3e-2


@pytest.mark.parametrize("name", ["dense", "mod"])
def test_replayed_steps_equal_steps(name: str) -> None:
    batches = torch.randint(0, 64, (4, 3, 33), device="cuda")
    losses = []
    for graph in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = enlarge_updates(Transformer(make_config(name))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
        step = TrainStep(model, optimizer, precision=torch.bfloat16, compile=True, cuda_graph=graph)
        losses.append(
            [step(b[:, :-1].contiguous(), b[:, 1:].contiguous()).total.item() for b in batches]
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("graph", [False, True])
def test_every_step_clips_its_own_gradient(graph: bool) -> None:
    torch.manual_seed(0)
    model = enlarge_updates(Transformer(make_config("mod"))).cuda()
    # without a memory, the optimiser's mean of the gradients is the last one, as it was clipped
    options: dict[str, Any] = {"betas": (0.0, 0.9), "fused": True, "capturable": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    step = TrainStep(model, optimizer, compile=True, cuda_graph=graph, max_grad_norm=0.1)
    norms = []
    for batch in torch.randint(0, 64, (4, 3, 33), device="cuda"):
        norm = step(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()).grad_norm
        assert norm is not None
        norms.append(norm.item())
        clipped = torch.cat([state["exp_avg"].flatten() for state in optimizer.state.values()])
        assert clipped.norm().item() == pytest.approx(0.1, rel=1e-3)
    # else a divisor from an earlier step would do
    assert max(norms) > 1.1 * min(norms) > 0.11


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_meter_waits_only_when_it_is_read() -> None:
    run = RunConfig(model=make_config("mod"), train=Recipe(batch_size=4, seq_len=16))
    meter = Meter(make_schedule(run), World(0, 1, torch.device("cuda")))
    total, zero = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    readings = []
    begin.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 7):
            # a replayed step writes its numbers into the same memory each time
            total.add_(1)
            meter.add(StepLoss(total, RoutingLoss(zero)))
            torch.cuda._sleep(1_000_000)
            with meter.pause():
                torch.cuda._sleep(50_000_000)
            if step % 3 == 0:
                readings.append(meter.cut(step))
        end.record()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(reading.sums.is_pinned() for reading in readings)
    records = [meter.read(reading) for reading in readings]
    assert [record["loss"] for record in records] == [2.0, 5.0]
    # the pauses, fifty times as long as the steps, are left out
    end.synchronize()
    seconds = begin.elapsed_time(end) / 1e3 / 6
    assert all(0 < record["seconds_per_step"] < seconds / 3 for record in records)
