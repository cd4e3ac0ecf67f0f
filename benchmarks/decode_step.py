"""The engine's own decoding step, isolated so that it can be timed alone."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from depthmix.infer import Engine, SamplingParams
from depthmix.infer.scheduler import Chunk, Plan
from depthmix.kernels import HAS_TRITON
from depthmix.nn import Transformer

if HAS_TRITON:
    from depthmix.infer.paths.fused import FusedRunner, choose_shape

LAP_TOKENS = 256


def prepare_decode(
    model: Transformer,
    batch: int,
    context: int,
    *,
    documents: Sequence[Sequence[int]] | None = None,
) -> Callable[[], Tensor | None]:
    """Give `batch` rows a prompt of `context` tokens; return a step of one token per row.

    Tokens come from `documents`, or are random, because greedy decoding with random weights ends
    in a loop, where decisions no longer match the capacity's rate. The step may be called without
    limit: after a lap, the rows are back at their prompts. It returns which routed blocks each row
    went through, (routed blocks, rows), or None if there are none.
    """
    config = model.config
    lap = min(LAP_TOKENS, config.max_seq_len - context)
    if documents is not None:
        lap = min(lap, *(len(document) - context for document in documents))
        texts = torch.tensor([document[: context + lap] for document in documents])
    else:
        texts = torch.randint(config.vocab_size, (batch, context + lap))
    # limited to the batch, or the engine would reserve pages for more rows
    engine = Engine(model, max_batch=batch)
    if HAS_TRITON and isinstance(engine.runner, FusedRunner):
        return prepare_fused(engine, engine.runner, texts, context)
    return _prepare_engine(engine, texts[:, :context].tolist(), lap)


def _prepare_engine(
    engine: Engine, prompts: Sequence[list[int]], lap: int
) -> Callable[[], Tensor | None]:
    """The whole engine, which samples at temperature 1."""

    def step() -> Tensor | None:
        if not engine.has_work:
            for prompt in prompts:
                engine.add(prompt, SamplingParams(max_tokens=lap, seed=0))
            while engine.scheduler.num_waiting or any(
                track.num_new == 0 for track in engine._tracks.values()
            ):
                engine.step()
        paths = [event.path for event in engine.step()]
        return torch.tensor(paths).T if engine.config.routed_layers else None

    return step


def prepare_fused(
    engine: Engine, runner: "FusedRunner", texts: Tensor, context: int
) -> Callable[[], Tensor | None]:
    """The recorded step of all rows; it draws the best tokens, which are discarded.

    Without the scheduler, which would let the first rows run ahead, and without host work other
    than the launch.
    """
    pages, num_routed = engine.pages, len(engine.config.routed_layers)
    batch, lap = texts.shape[0], texts.shape[1] - context
    for text in texts.tolist():
        engine.add(text, SamplingParams(temperature=0, max_tokens=1))
    tracks = list(engine._tracks.values())
    most = engine.scheduler.chunk_tokens
    for row, track in enumerate(tracks):
        for start in range(0, context, most):
            count = min(most, context - start)
            assert pages.reserve(row, count), "a lap does not fit into the cache"
            plan = Plan.gather([Chunk(row, row, start, count, False)])
            (report,) = runner.launch(plan, [track]).wait()
            pages.settle([row], report.stored)
        assert pages.reserve(row, lap), "a lap does not fit into the cache"
    lengths = runner.cache.lengths.clone()
    plan = Plan.gather([Chunk(row, row, context, 1, True) for row in range(batch)])
    runner.launch(plan, tracks).wait()
    runner.cache.lengths.copy_(lengths)
    step = runner.steps[choose_shape(plan, batch)]
    given, position = step.tokens.given[:batch], step.tokens.position[:batch]
    later = texts[:, context:].T.int().to(given.device)
    number = 0

    def run() -> Tensor | None:
        nonlocal number
        if number == lap:
            number = 0
            runner.cache.lengths.copy_(lengths)
        given.copy_(later[number])
        position.fill_(context + number)
        number += 1
        runner._run(step, plain=True, filtered=False)
        return step.taken[:, :batch] if num_routed else None

    return run
