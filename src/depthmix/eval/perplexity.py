"""Loss, perplexity and bits per byte of a model on a text, under each routing rule.

Results do not depend on the batch size or on the lengths of the rows in a batch.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthmix import flops
from depthmix.config import ModelConfig
from depthmix.config.fields import Count, check_value
from depthmix.eval.stream import Padded, Stream, Window, cut_windows, pad_rows
from depthmix.infer.scores import compute_hidden, iterate_logits
from depthmix.nn import Transformer
from depthmix.nn.losses import IGNORE
from depthmix.nn.transformer import Hidden
from depthmix.runs import RunDir
from depthmix.runs.losses import bits_per_byte, name_metric, perplexity


def measure_stream(
    model: Transformer,
    stream: Stream,
    *,
    seq_len: int | None = None,
    batch_size: int = 8,
    document_mask: bool = True,
) -> dict[str, Any]:
    """Every rule's loss in nats, perplexity, bits per byte and share of tokens routed.

    The stream is cut into windows of `seq_len` tokens (default: the model's `max_seq_len`), each a
    row of its own, as in training. A dense model has the rule `dense`; a routed one has `topk`,
    the rule of training, and `causal`, if it has a head for it.
    """
    config = model.config
    check_value("seq_len", seq_len, Count)
    check_value("batch_size", batch_size, Count)
    length = min(seq_len or config.max_seq_len, config.max_seq_len)
    if len(stream.tokens) < 2:
        raise ValueError("the text has nothing to predict: give one of at least two tokens")
    if max(stream.tokens) >= config.vocab_size:
        raise ValueError(
            f"the text has token {max(stream.tokens)}, but the model has {config.vocab_size}: "
            f"use the model's own tokenizer"
        )
    end_token = stream.end_token if document_mask else None
    num_predicted = len(stream.tokens) - 1
    per_token = None if stream.num_bytes is None else stream.num_bytes / num_predicted
    rules = {}
    for name, selector in config.list_rules().items():
        windows = cut_windows(stream.tokens, length, end_token)
        loss, share = _measure(model, windows, selector, batch_size)
        rules[name] = {
            "selector": selector,
            "loss": loss,
            "perplexity": perplexity(loss),
            "bits_per_byte": bits_per_byte(loss, per_token),
            "share_routed": share,
        }
    return {
        "num_tokens": num_predicted,
        "num_bytes": stream.num_bytes,
        "seq_len": length,
        "flops_of_dense": _compare_flops(config, length),
        "rules": rules,
    }


def describe_stream(name: object, found: Mapping[str, Any]) -> list[str]:
    """The results of `measure_stream` for a named model, as lines."""
    note = "" if found["num_bytes"] is None else f" ({found['num_bytes']:,.0f} bytes)"
    lines = [
        f"{name}: {found['num_tokens']:,} tokens{note} in windows of {found['seq_len']:,}; "
        f"forward FLOPs {found['flops_of_dense']:.1%} of dense"
    ]
    for label, rule in found["rules"].items():
        line = f"  {label:6}  loss {rule['loss']:.4f}  perplexity {rule['perplexity']:,.3f}"
        if rule["bits_per_byte"] is not None:
            line += f"  bits per byte {rule['bits_per_byte']:.4f}"
        if rule["share_routed"] is not None:
            line += f"  routed {rule['share_routed']:.1%}"
        lines.append(line)
    return lines


def keep_test_loss(run: RunDir, found: Mapping[str, Any]) -> None:
    """Add what `measure_stream` found on the test split to a run's metrics."""
    losses = {name_metric(rule): each["loss"] for rule, each in found["rules"].items()}
    with run.lock():
        step = run.read_json("status.json").get("step", 0)
        run.append_metrics({"step": step, "kind": "test", **losses})
        run.close()


@torch.inference_mode()
def score_rows(
    model: Transformer, batch: Padded, selector: str | None
) -> tuple[Float[Tensor, "B T"], Int[Tensor, "B T"], Hidden]:
    """Loss of each target in nats, 0 without one; the most probable tokens; the hidden states."""
    found = compute_hidden(model, batch.tokens, selector, batch.documents)
    losses, best = [], []
    flat_targets = batch.targets.flatten()
    for logits_TV in iterate_logits(model, found.hidden.flatten(0, 1)):
        start = sum(map(len, best))
        targets_T = flat_targets[start : start + len(logits_TV)]
        losses.append(
            torch.nn.functional.cross_entropy(
                logits_TV, targets_T, ignore_index=IGNORE, reduction="none"
            )
        )
        best.append(logits_TV.argmax(-1))
    shape = batch.targets.shape
    return torch.cat(losses).view(shape), torch.cat(best).view(shape), found


def _measure(
    model: Transformer, windows: Iterator[Window], selector: str | None, batch_size: int
) -> tuple[float, float | None]:
    """Mean loss over all targets, and the share of (token, routed block) pairs that were routed."""
    device = model.embedding.weight.device
    total = count = routed = places = 0.0
    while rows := list(islice(windows, batch_size)):
        batch = pad_rows(rows, device)
        losses, _, found = score_rows(model, batch, selector)
        total += float(losses.double().sum())
        count += int((batch.targets != IGNORE).sum())
        for routing in found.routings:
            routed += int((routing.slot >= 0).sum())
            places += sum(row.tokens.shape[1] for row in rows)
    return total / count, routed / places if places else None


def _compare_flops(config: ModelConfig, length: int) -> float:
    """Forward FLOPs under the rule of training, as a fraction of the dense twin's."""
    dense = flops.forward_flops(config.dense_twin(), seq_len=length)
    return flops.forward_flops(config, seq_len=length) / dense
