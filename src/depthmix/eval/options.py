"""What a model is measured on, with bounds, and which options go together. Needs no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from depthmix.config.fields import Count, NotNegative, check_bounds


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """The options of `evaluate_model`: texts or data, tasks, or both.

    Errors name the flags of `depthmix eval`.
    """

    texts: Iterable[str] | None = None
    """Texts to measure, read after everything else was checked; None means to read data."""
    data: Path | None = None
    """A folder made by `prepare`; None means a run's own."""
    test: bool = False
    """Measure the data's test split too."""
    keep: bool = False
    """Add the test loss to the run's metrics, at its newest checkpoint."""
    tasks: Sequence[str] = ()
    """lm-eval's tasks, .yaml files, or `python_syntax`."""
    include: Sequence[Path] = ()
    """Folders of more lm-eval tasks."""
    num_fewshot: NotNegative[int] | None = None
    """Examples before each question; None leaves it to the task."""
    limit: Count | None = None
    """Most questions of each task."""
    chat: bool = False
    """Use the model's chat template in tasks."""
    selector: str | None = None
    """How tokens are routed in tasks; None means by the trained head."""
    max_tokens: Count | None = None
    """Most tokens of a text or split."""
    seq_len: Count | None = None
    """Tokens per window; None means the model's `max_seq_len`."""
    batch_size: Count = 8
    """Windows or questions per batch."""

    def __post_init__(self) -> None:
        check_bounds(self)
        has_text = self.texts is not None
        if has_text and self.data is not None:
            raise ValueError("give --text or --data, not both")
        if self.test and (has_text or (self.tasks and self.data is None)):
            raise ValueError(
                "--test is for data with a test split: leave it out, or --text and --tasks"
            )
        for_text = {"--max-tokens": self.max_tokens, "--seq-len": self.seq_len}
        is_cut = any(value is not None for value in for_text.values())
        if self.keep and (not self.test or self.data is not None or is_cut):
            raise ValueError(
                "--keep keeps the loss of the whole test split of a run's own data: give --test, "
                "and neither --data, --max-tokens nor --seq-len"
            )
        for_tasks = {"--include": self.include or None, "--fewshot": self.num_fewshot}
        for_tasks |= {"--limit": self.limit, "--selector": self.selector}
        for_tasks |= {"--chat": self.chat or None}
        for unused, options, note in (
            (not self.tasks, for_tasks, "for --tasks: name some, or leave it out"),
            (not self.reads, for_text, "for --text or --data: give one of them, or leave it out"),
        ):
            given = [name for name, value in options.items() if value is not None]
            if unused and given:
                raise ValueError(f"{', '.join(given)} is {note}")

    @property
    def reads(self) -> bool:
        """Whether losses are measured, on texts or data."""
        return self.texts is not None or self.data is not None or not self.tasks
