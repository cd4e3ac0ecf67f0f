"""A model on disk, measured on text, on data and on tasks."""

from collections.abc import Callable, Mapping
from typing import Any

from depthmix.eval.options import EvalOptions
from depthmix.eval.perplexity import describe_stream, keep_test_loss, measure_stream
from depthmix.eval.stream import read_stored
from depthmix.models import StoredModel, open_model
from depthmix.nn import Transformer
from depthmix.world import choose_device


def evaluate_model(
    source: StoredModel, options: EvalOptions, *, device: str | None = None
) -> dict[str, Any]:
    """Losses as `text` and `test`, scores as `tasks`, each where the options ask for it.

    Whatever can be refused is refused before the weights are read. Tasks need lm-eval, an extra.
    """
    if options.keep:
        if source.run is None or source.path != source.run.path:
            raise ValueError(
                f"--keep is for a run, and {source.path} is not a run's folder: leave it out"
            )
        # the last validation, which the test loss is compared with, was of the newest checkpoint
        source = open_model(source.path, checkpoint="newest", tokenizer=source.tokenizer)
    if options.chat and source.chat is None:
        raise ValueError(f"{source.path} has no chat template: leave out --chat")
    run_tasks = _prepare_tasks(source, options) if options.tasks else None
    sizes: dict[str, Any] = {"seq_len": options.seq_len, "batch_size": options.batch_size}
    streams = {}
    if options.reads:
        streams["text"] = read_stored(source, options.texts, options.data, options.max_tokens)
    if options.test:
        streams["test"] = read_stored(source, None, options.data, options.max_tokens, "test")
    network = source.network.to(choose_device(device))
    found: dict[str, Any] = {"model": str(source.path)}
    for name, stream in streams.items():
        found[name] = measure_stream(network, stream, **sizes)
    if options.keep and source.run is not None:
        keep_test_loss(source.run, found["test"])
    if run_tasks is not None:
        found |= run_tasks(network)
    return found


def _prepare_tasks(
    source: StoredModel, options: EvalOptions
) -> Callable[[Transformer], dict[str, Any]]:
    """Check what tasks need; returns the function that runs them."""
    from depthmix.eval.tasks import TaskModel, load_tasks, run_tasks

    selector = source.config.choose_selector(options.selector, looks_ahead=True)
    loaded = load_tasks(options, selector)
    chat, vocabulary = source.chat if options.chat else None, source.vocabulary

    def run(network: Transformer) -> dict[str, Any]:
        given: dict[str, Any] = {"selector": selector, "batch_size": options.batch_size}
        adapter = TaskModel(network, vocabulary, chat=chat, **given)
        return {"tasks": run_tasks(adapter, loaded, options), "selector": selector}

    return run


def describe_results(found: Mapping[str, Any]) -> list[str]:
    """What `evaluate_model` found, as lines."""
    names = {"text": found["model"], "test": f"{found['model']}, test split"}
    lines = [
        line
        for part, name in names.items()
        if part in found
        for line in describe_stream(name, found[part])
    ]
    for task, metrics in found.get("tasks", {}).items():
        note = "  ".join(f"{metric} {value:.4g}" for metric, value in metrics.items())
        lines.append(f"{task}: {note}")
    return lines
