"""The engine's own decoding step, taken out of it so that it can be timed alone."""

from collections.abc import Callable

import torch
from torch import Tensor

from depthmix.infer import Engine, SamplingParams
from depthmix.nn import Transformer

LAP_TOKENS = 256


def prepare_decode(
    model: Transformer, batch: int, context: int, *, compile: bool = False
) -> Callable[[], Tensor | None]:
    """Give `batch` rows a prompt of `context` random tokens; returns a step of one token a row.

    The step's tokens are random, because random weights that decode greedily end in a loop, where
    decisions no longer come at the capacity's rate. It may be called without end: after a lap the
    rows are back at their prompts. It returns which routed blocks each row went through, (routed
    blocks, rows), or None where that is not known or there are none.
    """
    config = model.config
    lap = min(LAP_TOKENS, config.max_seq_len - context)
    engine = Engine(model, max_batch=batch, chunk_tokens=1 << 14, compile=compile)
    prompts = torch.randint(config.vocab_size, (batch, context)).tolist()

    def begin() -> None:
        for prompt in prompts:
            engine.add(prompt, SamplingParams(max_tokens=lap, seed=0))
        while engine.scheduler.num_waiting or any(
            track.num_new == 0 for track in engine._tracks.values()
        ):
            engine.step()

    # rows that have their prompt wait for the others by going on: not worth a recording
    record, engine.runner.record = engine.runner.record, False
    begin()
    if not record:
        # on a CPU: the whole engine, which samples at temperature 1

        def step_all() -> Tensor | None:
            if not engine.has_work:
                begin()
            paths = [event.path for event in engine.step()]
            return torch.tensor(paths).T if config.routed_layers else None

        return step_all

    engine.runner.record = True
    engine.step()
    (step,) = engine.runner.steps.values()
    cache = engine.runner.cache
    for row in range(batch):
        assert engine.pages.reserve(row, lap - batch)
    cache.follow(engine.pages.drain_changes())
    lengths, inputs = cache.lengths.clone(), step.inputs.clone()
    tokens = torch.randint(config.vocab_size, (lap, batch), device=inputs.device)
    num_routed, number = len(config.routed_layers), 0

    def step_device() -> Tensor | None:
        nonlocal number
        # the first row is `batch` tokens ahead of the last
        if number == lap - batch - 2:
            number = 0
            cache.lengths.copy_(lengths)
            step.inputs.copy_(inputs)
        step.tokens.copy_(tokens[number])
        number += 1
        outputs = step.run()
        return outputs.told[1 : 1 + num_routed] if num_routed else None

    return step_device
