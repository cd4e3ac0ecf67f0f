"""Traces: how a model routes each token of a text, and what it predicts.

`report.traces` defines the format.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.config import STRATEGIES, ModelConfig
from depthmix.config.fields import Count, check_value
from depthmix.eval.stream import Window, cut_windows
from depthmix.infer.scores import compute_hidden, iterate_logits
from depthmix.infer.text import TextStream
from depthmix.models import StoredModel, begin_document
from depthmix.nn import Transformer
from depthmix.report.traces import FORMAT, VERSION
from depthmix.runs.folder import collect_provenance
from depthmix.world import choose_device

Report = Callable[[int, int], object]
"""Takes the number of tokens read and their total, both counted once for each rule."""


def trace_model(
    model: StoredModel,
    words: str,
    *,
    text: str,
    max_tokens: int | None = None,
    device: str | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Trace a model on `words`, which the trace names `text`; on a GPU if there is one."""
    kind = choose_device(device)
    vocabulary = model.vocabulary
    # a text that cannot be traced is refused before weights are read
    check_value("max_tokens", max_tokens, Count)
    tokens = vocabulary.tokenize(words)[:max_tokens]
    check_tokens(tokens, model.config)
    recipe: dict[str, Any] = {} if model.run is None else model.run.read_config().get("train", {})
    known = collect_provenance(seed=recipe.get("seed", 0), data={}, device={})
    origin = {"run": str(model.home), "text": text}
    origin |= {name: known[name] for name in ("time", "command", "versions", "git")}
    if model.checkpoint is not None:
        origin["checkpoint"] = model.checkpoint.name
    trace = trace_tokens(
        model.network.to(kind),
        tokens,
        vocabulary.end_token,
        document_mask=recipe.get("document_mask", True),
        report=report,
    )
    texts = [""] * trace["num_added"] + cut_text(vocabulary.decode, tokens)
    return {**trace, "origin": {**origin, "device": kind}, "texts": texts}


def trace_tokens(
    model: Transformer,
    tokens: Sequence[int],
    end_token: int | None = None,
    *,
    document_mask: bool = True,
    report: Report | None = None,
) -> dict[str, Any]:
    """A trace without the text: the decisions under each rule, entropies and losses.

    The text is a document: the end token comes first, as in training. It is cut into windows of
    `max_seq_len` tokens, and each is a row of its own, as a long document is in training.
    """
    config = model.config
    check_tokens(tokens, config)
    stream = begin_document(tokens, end_token)
    device = model.embedding.weight.device
    windows = list(cut_windows(stream, config.max_seq_len, end_token if document_mask else None))
    # the rule of training is named after the strategy
    labels = {"topk": STRATEGIES[config.routing.strategy].label}
    wanted = config.list_rules()
    rules = {}
    for number, (name, selector) in enumerate(wanted.items()):

        def advance(done: int, before: int = number * len(stream)) -> None:
            if report is not None:
                report(before + done, len(wanted) * len(stream))

        label = labels.get(name, name)
        rules[name] = _follow(model, windows, selector, label, device, advance)
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": _describe(config),
        "end_token": end_token,
        "num_added": len(stream) - len(tokens),
        "window_starts": list(range(0, len(stream), config.max_seq_len)),
        "tokens": stream,
        "rules": rules,
    }


def check_tokens(tokens: Sequence[int], config: ModelConfig) -> None:
    """Refuse tokens or a model that cannot be traced."""
    if isinstance(tokens, str):
        raise ValueError("this takes token ids, not text: use trace_model for text")
    if not config.routed_layers:
        raise ValueError("this model has no routed blocks: trace a routed model")
    if not tokens:
        raise ValueError("there are no tokens to trace: give a text that is not empty")
    if max(tokens) >= config.vocab_size:
        raise ValueError(
            f"the tokenizer gives token {max(tokens)}, but the model has {config.vocab_size}: "
            f"give the run's own with --tokenizer"
        )


def cut_text(decode: Callable[[list[int]], str], tokens: Sequence[int]) -> list[str]:
    """The text of each token; joined, they give the whole text.

    A character made of several tokens is given to the last one, and the others are empty.
    """
    stream = TextStream(decode)
    texts = [stream.add(token) for token in tokens]
    if texts:
        texts[-1] += stream.finish()
    return texts


@torch.inference_mode()
def _follow(
    model: Transformer,
    windows: Sequence[Window],
    selector: str | None,
    label: str,
    device: torch.device,
    advance: Callable[[int], object],
) -> dict[str, Any]:
    """All windows under one rule; `advance` takes the number of tokens so far."""
    config = model.config
    places = zip(config.routed_layers, config.capacities, strict=True)
    blocks: list[dict[str, Any]] = [
        {"layer": layer, "capacity": share, "routed": [], "score": [], "predictor": []}
        for layer, share in places
    ]
    entropy: list[float] = []
    loss: list[float | None] = []
    for tokens, targets, documents in windows:
        ids = None if documents is None else documents.to(device)
        found = compute_hidden(model, tokens.to(device), selector, ids)
        spread, missed = measure_predictions(model, found.hidden[0], targets.to(device))
        if not spread.isfinite().all():
            raise ValueError(
                "this model's predictions are not finite: its training diverged; choose another "
                "--checkpoint, or another run"
            )
        entropy += _round(spread)
        loss += [*_round(missed), *[None] * (len(spread) - len(missed))]
        for block, routing in zip(blocks, found.routings, strict=True):
            block["routed"] += (routing.slot[0] >= 0).int().tolist()
            block["score"] += _round(routing.logits[0])
            if routing.predictor_logits is not None:
                block["predictor"] += _round(routing.predictor_logits[0])
        advance(len(entropy))
    for block in blocks:
        block["predictor"] = block["predictor"] or None
    return {
        "label": label,
        "selector": selector,
        "entropy": entropy,
        "loss": loss,
        "blocks": blocks,
    }


def measure_predictions(
    model: Transformer, hidden: Float[Tensor, "T D"], targets: Int[Tensor, " predicted"]
) -> tuple[Float[Tensor, " T"], Float[Tensor, " predicted"]]:
    """Entropy of the prediction at each token, and the loss of the next token, in nats."""
    spread, missed = [], []
    for logits_TV in iterate_logits(model, hidden):
        logs_TV = logits_TV.log_softmax(-1)
        spread.append(-(logs_TV.exp() * logs_TV).sum(-1))
        next_T, targets = targets[: len(logs_TV)], targets[len(logs_TV) :]
        missed.append(-logs_TV[: len(next_T)].gather(1, next_T[:, None])[:, 0])
    return torch.cat(spread), torch.cat(missed)


def _round(values: Tensor) -> list[float]:
    # four digits are enough for a page, and take a third of the space
    return [round(value, 4) for value in values.double().tolist()]


def _describe(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": config.num_layers,
        "routed_layers": list(config.routed_layers),
        "width": config.width,
        "max_seq_len": config.max_seq_len,
        "vocab_size": config.vocab_size,
        "strategy": config.routing.strategy,
        "gate": config.routing.gate,
        "config": config.to_dict(),
    }
