"""The engine's own decoding step, taken out of it so that it can be timed alone."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from depthmix.infer import Engine, SamplingParams
from depthmix.infer.runner import Work
from depthmix.infer.scheduler import Chunk
from depthmix.nn import Transformer

LAP_TOKENS = 256


def prepare_decode(
    model: Transformer,
    batch: int,
    context: int,
    *,
    compile: bool = False,
    documents: Sequence[Sequence[int]] | None = None,
) -> Callable[[], Tensor | None]:
    """Give `batch` rows a prompt of `context` tokens; returns a step of one token a row.

    Tokens are those of `documents`, or random, because random weights that decode greedily end in
    a loop, where decisions no longer come at the capacity's rate. It may be called without end:
    after a lap the rows are back at their prompts. It returns which routed blocks each row went
    through, (routed blocks, rows), or None where that is not known or there are none.
    """
    config = model.config
    lap = min(LAP_TOKENS, config.max_seq_len - context)
    if documents is not None:
        lap = min(lap, *(len(document) - context for document in documents))
        texts = torch.tensor([document[: context + lap] for document in documents])
    else:
        texts = torch.randint(config.vocab_size, (batch, context + lap))
    prompts = texts[:, :context].tolist()
    engine = Engine(model, max_batch=batch, compile=compile)
    if engine.runner.record:
        return _prepare_recorded(engine, prompts, texts[:, context + 1 :].T)

    def step() -> Tensor | None:
        # the whole engine, which samples at temperature 1
        if not engine.has_work:
            for prompt in prompts:
                engine.add(prompt, SamplingParams(max_tokens=lap, seed=0))
            while engine.scheduler.num_waiting or any(
                track.num_new == 0 for track in engine._tracks.values()
            ):
                engine.step()
        paths = [event.path for event in engine.step()]
        return torch.tensor(paths).T if config.routed_layers else None

    return step


def _prepare_recorded(
    engine: Engine, prompts: list[list[int]], tokens: Tensor
) -> Callable[[], Tensor | None]:
    """The recorded step of all rows; no scheduler, which would let the first rows go ahead."""
    lap = len(tokens) + 1
    runner, pages, config = engine.runner, engine.pages, engine.config
    context = len(prompts[0])
    for row, prompt in enumerate(prompts):
        assert pages.reserve(row, context)
        (done,) = runner.run([Work(Chunk(row, row, 0, context, False), prompt)])
        pages.settle(row, done.stored)
        assert pages.reserve(row, lap)
    runner.run([Work(Chunk(r, r, context, 1, True), [0]) for r in range(len(prompts))])
    (step,) = runner.steps.values()
    lengths, inputs = runner.cache.lengths.clone(), step.inputs.clone()
    tokens = tokens.to(inputs.device)
    num_routed, number = len(config.routed_layers), 0

    def run() -> Tensor | None:
        nonlocal number
        if number == lap - 1:
            number = 0
            runner.cache.lengths.copy_(lengths)
            step.inputs.copy_(inputs)
        step.tokens.copy_(tokens[number])
        number += 1
        outputs = step.run()
        return outputs.told[1 : 1 + num_routed] if num_routed else None

    return run
