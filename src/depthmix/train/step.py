"""One optimisation step of a model: forward, backward and optimiser, compiled or as a CUDA graph.

Independent of data, schedules and logging, and the model does not depend on it.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from depthmix.kernels.recording import record_graph
from depthmix.nn import Transformer
from depthmix.nn.losses import RoutingLoss, routing_loss, token_loss
from depthmix.nn.transformer import refuse_text
from depthmix.train.distill import Distillation
from depthmix.world import average_on_device


class StepLoss(NamedTuple):
    """The result of a step: the parts of the loss."""

    language_model: Float[Tensor, ""]
    routing: RoutingLoss
    grad_norm: Float[Tensor, ""] | None = None
    """Norm of the gradient before clipping; None without clipping."""
    distilled: Float[Tensor, ""] | None = None
    """The loss of the predictions against a teacher's; None without one."""
    hidden: Float[Tensor, ""] | None = None
    """The loss of the residual streams; None if they are not compared with a teacher's."""

    @property
    def total(self) -> Float[Tensor, ""]:
        """The loss that is minimised."""
        # added here, outside of the compiled function: without a routing loss, the compiler may
        # merge the total and the language model's part into one tensor, and return the one that
        # needs no gradient
        total = self.language_model + self.routing.loss
        for part in (self.distilled, self.hidden):
            total = total if part is None else total + part
        return total


def compute_loss(
    model: Transformer,
    tokens: Int[Tensor, "B T"],
    targets: Int[Tensor, "B T"],
    document_ids: Int[Tensor, "B T"] | None = None,
    distillation: Distillation | None = None,
) -> StepLoss:
    """Language-model loss, the routing losses of the model's configuration, and a teacher's."""
    keeps_streams = distillation is not None and distillation.keeps_streams
    hidden = model.compute_hidden(tokens, document_ids=document_ids, keeps_streams=keeps_streams)
    language_model = token_loss(hidden.hidden, model.head.weight, targets)
    routing = routing_loss(model.config, hidden.routings, hidden.expert_routings)
    if distillation is None:
        return StepLoss(language_model, routing)
    distilled, streams = distillation.compute_loss(
        hidden, model.head.weight, tokens, targets, document_ids
    )
    return StepLoss(language_model, routing, distilled=distilled, hidden=streams)


class Root(nn.Module):
    """Runs functions of a model as a module's `forward`, where sharding has its hooks."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.model, *args)


class TrainStep:
    """Calls are optimisation steps: `step(tokens, targets)` updates the model.

    >>> model = Transformer(load_preset("tiny"))
    >>> step = TrainStep(model, torch.optim.AdamW(model.parameters()))
    >>> tokens = torch.randint(model.config.vocab_size, (2, 33))
    >>> before = step(tokens[:, :-1], tokens[:, 1:]).total.item()
    >>> step(tokens[:, :-1], tokens[:, 1:]).total.item() < before
    True
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        precision: torch.dtype | None = None,
        compile: bool = False,
        cuda_graph: bool = False,
        max_grad_norm: float = 0.0,
        num_micro_batches: int = 1,
        root: Root | None = None,
        distillation: Distillation | None = None,
    ) -> None:
        """`precision` is the autocast type, None for the model's own.

        `cuda_graph` records a whole step once and replays it: the CPU then launches one graph
        instead of a thousand kernels. It needs an optimiser made with `capturable=True`, and
        batches of one shape. Gradients are clipped to `max_grad_norm`, unless it is 0; a batch is
        split into `num_micro_batches`. `root` wraps the model if it is sharded. `distillation` is a
        teacher to learn from.
        """
        self.model, self.precision = model, precision
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.max_grad_norm, self.num_micro_batches = max_grad_norm, num_micro_batches
        # without a teacher, the plain function: less to trace and guard
        taught = distillation is not None
        self.compute_loss: Callable[..., StepLoss] = (
            partial(compute_loss, distillation=distillation) if taught else compute_loss
        )
        # a fused optimiser divides the gradient as it reads it, which saves a pass over memory;
        # always the same tensor, because a recorded step refers to its address
        fused = all(g.get("fused") for o in self.optimizers for g in o.param_groups)
        device = model.embedding.weight.device
        self.divisor = torch.ones((), device=device) if max_grad_norm > 0 and fused else None
        self.root: Callable[..., StepLoss] = root or Root(model)
        if compile:
            self.root = torch.compile(self.root, fullgraph=True)
        self.cuda_graph = cuda_graph
        self.recording: Recording | None = None

    def __call__(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        document_ids: Int[Tensor, "B T"] | None = None,
    ) -> StepLoss:
        """One step. With `cuda_graph`, the returned tensors are overwritten by the next call."""
        refuse_text(tokens)
        refuse_text(targets)
        inputs = (tokens, targets, document_ids)
        if not self.cuda_graph:
            return self._step(*inputs)
        if self.recording is None:
            self.recording = self._record(inputs)
        return self.recording.replay(inputs)

    def forget(self) -> None:
        """Compile and record again at the next step, for new shapes."""
        self.recording = None
        if "torch._dynamo" in sys.modules:
            # also drop inferred dynamic sizes: a symbolic capacity cannot be traced
            torch._dynamo.reset()

    def _step(self, *inputs: Tensor | None) -> StepLoss:
        parts = [t.chunk(self.num_micro_batches) if t is not None else None for t in inputs]
        results = [
            self._accumulate(*(t[i] if t is not None else None for t in parts))
            for i in range(self.num_micro_batches)
        ]
        result = results[0] if len(results) == 1 else tree_map(_average, *results)
        norm = None
        if self.max_grad_norm > 0:
            norm = clip_gradients(self.model, self.max_grad_norm, self.divisor)
        for optimizer in self.optimizers:
            # where torch's fused optimisers look for it; removed again for other steps
            optimizer.grad_scale = self.divisor  # pyrefly: ignore[missing-attribute]
            optimizer.step()
            del optimizer.grad_scale  # pyrefly: ignore[missing-attribute]
            optimizer.zero_grad(set_to_none=True)
        if result.routing.shares is not None:
            self.model.move_biases(average_on_device(result.routing.shares))
        return result._replace(grad_norm=norm)

    def _accumulate(self, *inputs: Tensor | None) -> StepLoss:
        device = self.model.embedding.weight.device.type
        with torch.autocast(device, dtype=self.precision, enabled=self.precision is not None):
            result = self.root(self.compute_loss, *inputs)
        count = self.num_micro_batches
        (result.total if count == 1 else result.total / count).backward()
        return tree_map(_detach, result)

    def _record(self, inputs: tuple[Tensor | None, ...]) -> "Recording":
        static = tuple(None if t is None else t.clone() for t in inputs)
        # compiling and the optimiser's first step allocate: they must not happen inside a capture,
        # and must not count as training steps
        saved = _copy_state(self.model, self.optimizers)
        graph, result = record_graph(lambda: self._step(*static))
        _restore_state(self.optimizers, saved)
        return Recording(graph, static, result)


class Recording(NamedTuple):
    """A step recorded as a CUDA graph, with the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor | None, ...]
    result: StepLoss

    def replay(self, inputs: tuple[Tensor | None, ...]) -> StepLoss:
        """Run the recorded step on another batch of the same shape."""
        for static, new in zip(self.inputs, inputs, strict=True):
            shapes = [None if t is None else tuple(t.shape) for t in (static, new)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"this step was recorded for a batch of {shapes[0]}, but got {shapes[1]}: "
                    f"keep one shape, or make the TrainStep without cuda_graph"
                )
            if static is not None and new is not None:
                static.copy_(new)
        self.graph.replay()
        return self.result


def clip_gradients(
    model: nn.Module, largest: float, divisor: Float[Tensor, ""] | None = None
) -> Float[Tensor, ""]:
    """Scale the gradient down to a norm of at most `largest`; returns its norm before.

    With a `divisor`, the gradient is unchanged, and this tensor is set to the number to divide by.
    """
    params = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], foreach=True)
    if divisor is None:
        nn.utils.clip_grads_with_norm_(params, largest, norm, foreach=True)
    # in a sharded model, every rank has a part of the sum
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if divisor is not None:
        divisor.copy_(norm / largest).clamp_(min=1)
    return norm


def _detach(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach()


def _average(*values: Tensor | None) -> Tensor | None:
    tensors = [value for value in values if value is not None]
    return torch.stack(tensors).mean(0) if tensors else None


def _list_state(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    found = [t for o in optimizers for values in o.state.values() for t in values.values()]
    return [t for t in found if isinstance(t, Tensor)]


def _copy_state(model: Transformer, optimizers: Sequence[Optimizer]) -> list[tuple[Tensor, Tensor]]:
    """Every tensor that a step changes, with a copy."""
    tensors = [*model.parameters(), *model.buffers(), *_list_state(optimizers)]
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


@torch.no_grad()
def _restore_state(optimizers: Sequence[Optimizer], saved: list[tuple[Tensor, Tensor]]) -> None:
    """Undo the steps since `_copy_state`; optimiser state that they created is set to zero."""
    known = {id(tensor) for tensor, _ in saved}
    for tensor, copy in saved:
        tensor.copy_(copy)
    for tensor in _list_state(optimizers):
        if id(tensor) not in known:
            tensor.zero_()
