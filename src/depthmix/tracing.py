"""A run on disk and a text → a trace: checkpoint, tokenizer, device, and where it all comes from.

Owns what a trace says of its origin. Knows nothing of files of text, or of what becomes of a trace.
"""

from typing import Any

from depthmix.eval.trace import trace_checkpoint
from depthmix.rundir import RunDir, collect_provenance
from depthmix.sampler import choose_device, find_checkpoint, find_vocabulary


def trace_run(
    run: RunDir,
    words: str,
    *,
    text: str,
    checkpoint: str | None = None,
    tokenizer: str | None = None,
    max_tokens: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """What a run's model does with `words`, which the trace calls `text`; on a GPU if there is one.

    `checkpoint` and `tokenizer` are as for `open_sampler`.
    """
    kind = choose_device(device)
    recipe = run.read_config().get("train", {})
    known = collect_provenance(seed=recipe.get("seed", 0), data={}, device={})
    origin = {"run": str(run.path), "text": text}
    origin |= {name: known[name] for name in ("time", "command", "versions", "git")}
    return trace_checkpoint(
        find_checkpoint(run, checkpoint),
        *find_vocabulary(run, tokenizer),
        words,
        origin=origin,
        max_tokens=max_tokens,
        device=kind,
        document_mask=recipe.get("document_mask", True),
    )
