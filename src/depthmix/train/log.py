"""Logging while training: the display, metrics.jsonl, TensorBoard, and Weights & Biases."""

import math
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from torch import Tensor

from depthmix.files import replace_file
from depthmix.progress import READER_GONE, say
from depthmix.runs.folder import RunDir
from depthmix.runs.losses import perplexity
from depthmix.units import format_clock, format_number, format_power, format_tflops

REFRESH_SECONDS = 0.25
PLAIN_SECONDS = 10.0
NUM_BINS = 32
BAR_WIDTH, MIN_BAR_WIDTH, PADDING = 24, 4, 2

# a line in a file or a pipe is at most so long: these parts of it are left out first
PLAIN_WIDTH = 100
LESS_IMPORTANT = (
    *("flops", "perplexity", "flops_per_second", "description", "routed", "share_of_peak"),
)

# refreshes to measure the speed over: with fewer, one evaluation would change the estimate
NUM_MARKS = 200

Clock = Callable[[], float]


class Logger:
    """Shows and records the numbers of a training run; a context manager.

    There is no drawing thread: `show` draws the display, at most four times a second, and only then
    reads the numbers, so that it rarely waits for a GPU.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        console: Console,
        num_steps: int,
        start_step: int = 0,
        tensorboard: bool = True,
        wandb: bool = False,
        description: str = "",
        clock: Clock = time.monotonic,
    ) -> None:
        self.run, self.console, self.num_steps = run, console, num_steps
        self.start_step, self.description, self.clock = start_step, description, clock
        self._wants_board, self._wants_wandb = tensorboard, wandb
        self._board: Any = None
        self._wandb: Any = None
        self._live: Live | None = None
        self._marks: deque[tuple[float, int]] = deque(maxlen=NUM_MARKS)
        self._latest: tuple[int, Mapping[str, Any]] | None = None
        self._drawn_at = -math.inf

    def __enter__(self) -> "Logger":
        if self._wants_wandb:
            self._wandb = _start_wandb(self.run)
        if self._wants_board:
            self._board = self._open_board()
        self._started_at = self.clock()
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            # after a failure, the numbers may be on a device that no longer responds
            if error is None and self._latest is not None:
                self._draw(*self._latest)
        finally:
            if self._live is not None:
                with suppress(*READER_GONE):
                    self._live.stop()
            self._close(failed=error is not None)

    def log(self, record: Mapping[str, Any]) -> None:
        """Write a record with its `step` and `kind`; its numbers become curves of the same name."""
        self.run.append_metrics(record)
        step, kind = record["step"], record["kind"]
        rest = {name: value for name, value in record.items() if name not in ("step", "kind")}
        curves = dict(_list_numbers(kind, rest))
        if self._board is not None:
            with self._name_board():
                for tag, value in curves.items():
                    self._board.add_scalar(tag, value, step)
        if self._wandb is not None:
            self._wandb.log(curves, step=step)

    def histogram(
        self, name: str, values: Tensor | np.ndarray | Sequence[float], step: int
    ) -> None:
        """Write a histogram of values; those that are not finite are only counted."""
        if isinstance(values, Tensor):
            values = values.detach().to("cpu", torch.float64).numpy()
        every = np.asarray(values, dtype=np.float64).reshape(-1)
        finite = every[np.isfinite(every)]
        counts, edges = np.histogram(finite, NUM_BINS)
        summary = {"low": edges[0], "high": edges[-1], "counts": counts.tolist()}
        summary |= {"num_values": finite.size, "num_not_finite": every.size - finite.size}
        if finite.size:
            summary |= {"mean": finite.mean(), "std": finite.std()}
        self.run.append_metrics({"step": step, "kind": "router", "name": name, **summary})
        if self._board is not None and finite.size:
            with self._name_board():
                self._board.add_histogram_raw(
                    f"router/{name}",
                    min=float(finite.min()),
                    max=float(finite.max()),
                    num=finite.size,
                    sum=float(finite.sum()),
                    sum_squares=float(finite @ finite),
                    bucket_limits=edges[1:].tolist(),
                    bucket_counts=counts.tolist(),
                    global_step=step,
                )
        if self._wandb is not None and finite.size:
            chart = self._wandb.Histogram(np_histogram=(counts, edges))
            self._wandb.log({f"router/{name}": chart}, step=step)

    def show(self, step: int, fields: Mapping[str, Any]) -> None:
        """Show the progress, if it is time to; see `list_fields` for the names."""
        self._latest = (step, fields)
        pause = PLAIN_SECONDS if self._live is None else REFRESH_SECONDS
        if self.clock() - self._drawn_at >= pause:
            self._draw(step, fields)

    def say(self, sentence: str) -> None:
        """Print a line, above the bar if there is one."""
        say(self.console, sentence)

    def _draw(self, step: int, fields: Mapping[str, Any]) -> None:
        self._latest, self._drawn_at = None, self.clock()
        self._marks.append((self._drawn_at, step))
        parts, counted = list_fields(fields), f"{step}/{self.num_steps}"
        times = f"{format_clock(self._drawn_at - self._started_at)}{self._estimate_end(step)}"
        if self._live is None:
            step_and_fields = {"step": f"step {counted}", **parts}
            self.say(fit_line({"description": self.description, **step_and_fields, "times": times}))
            return
        # on a narrow terminal, shorten the bar first, then the name
        room = self.console.width - len(counted) - len(times) - 3 * PADDING
        name = Text(self.description)
        width = max(MIN_BAR_WIDTH, min(BAR_WIDTH, room - name.cell_len))
        name.truncate(max(1, room - width), overflow="ellipsis")
        grid = Table.grid(padding=(0, PADDING))
        for _ in range(4):
            grid.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(total=self.num_steps, completed=step, width=width)
        grid.add_row(name, bar, Text(counted), Text(times))
        with suppress(*READER_GONE):
            # cut to the terminal's width: another line would push the bar up at each refresh
            status = Text("  ".join(parts.values()), no_wrap=True, overflow="ellipsis")
            self._live.update(Group(grid, status), refresh=True)

    def _estimate_end(self, step: int) -> str:
        # counted from the first mark rather than the start, because the first step may compile
        (then, from_step), left = self._marks[0], self.num_steps - step
        if left <= 0 or step <= from_step:
            return ""
        seconds = left * (self._drawn_at - then) / (step - from_step)
        # a first estimate may be beyond the calendar
        if seconds > 1e9:
            return ""
        now = datetime.now()
        end = now + timedelta(seconds=seconds)
        day = "" if end.date() == now.date() else f"{end:%a %d %b} "
        return f"  {format_clock(seconds)} left, ends {day}{end:%H:%M}"

    def _open_board(self) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.say("TensorBoard is not installed, so its files are not written")
            return None
        # this hides what an interrupted run wrote after its checkpoint
        purge_step = self.start_step + 1 if self.start_step else None
        with self._name_board():
            return SummaryWriter(str(self.run.tensorboard), purge_step=purge_step, flush_secs=10)

    @contextmanager
    def _name_board(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = f"TensorBoard's files cannot be written: {error.strerror or error}"
            raise OSError(error.errno, why, str(self.run.tensorboard)) from error

    def _close(self, *, failed: bool) -> None:
        self.run.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(failed))
        if self._board is None:
            return
        # the first failure is the one to report
        with suppress(OSError) if failed else self._name_board():
            # close() alone does not report what its thread could not write
            self._board.flush()
            self._board.close()


class SilentLogger:
    """A `Logger` that does nothing, for every process but the first."""

    def __enter__(self) -> "SilentLogger":
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        pass

    def log(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def histogram(
        self, name: str, values: Tensor | np.ndarray | Sequence[float], step: int
    ) -> None:
        """Nothing."""

    def show(self, step: int, fields: Mapping[str, Any]) -> None:
        """Nothing."""

    def say(self, sentence: str) -> None:
        """Nothing."""


def list_fields(fields: Mapping[str, Any]) -> dict[str, str]:
    """A step's numbers as text, in a fixed order: known names with units, others as they are.

    Known are loss, tokens_per_second, flops_per_second, share_of_peak, routed, flops and
    flops_budget. Those that are None are left out.
    """
    words = {name: value for name, value in fields.items() if isinstance(value, str)}
    rest = {n: float(v) for n, v in fields.items() if v is not None and n not in words}
    parts = {}
    if (loss := rest.pop("loss", None)) is not None:
        parts |= {"loss": f"loss {loss:.3f}", "perplexity": f"ppl {perplexity(loss):.4g}"}
    budget = rest.pop("flops_budget", None)
    known: dict[str, Callable[[float], str]] = {
        "tokens_per_second": lambda speed: f"{format_number(speed)} tokens/s",
        "flops_per_second": format_tflops,
        "share_of_peak": lambda share: f"{share:.1%} of peak",
        "routed": lambda share: f"routed {share:.1%}",
        "flops": lambda spent: (
            f"{format_power(spent)}{f' of {format_power(budget)}' if budget else ''} FLOP"
        ),
    }
    parts |= {name: write(rest.pop(name)) for name, write in known.items() if name in rest}
    others = {name: f"{value:.4g}" for name, value in rest.items()} | words
    return parts | {name: f"{name} {value}" for name, value in others.items()}


def fit_line(parts: Mapping[str, str]) -> str:
    """Parts of a line for a file or a pipe, without the less important ones if it is too long."""
    shown = {name: part for name, part in parts.items() if part}
    for name in LESS_IMPORTANT:
        if len("  ".join(shown.values())) > PLAIN_WIDTH:
            shown.pop(name, None)
    return "  ".join(shown.values())


def _list_numbers(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number in a nested record, by its path."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _list_numbers(f"{tag}/{name}", inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _list_numbers(f"{tag}/{i}", inner)
    elif value is not None and not isinstance(value, str):
        yield tag, float(value)


def _start_wandb(run: RunDir) -> Any:
    try:
        import wandb  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise ValueError("W&B is not installed: pip install 'depthmix[wandb]'") from error
    # the same id after resuming, so that the curve continues
    where = run.path / "wandb_id.txt"
    if not where.exists():
        replace_file(where, uuid.uuid4().hex[:12])
    try:
        wandb.init(
            project=os.environ.get("WANDB_PROJECT", "depthmix"),
            name=run.path.resolve().name,
            id=where.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(run.path),
            config=run.read_config(),
        )
    except wandb.Error as error:
        raise ValueError(
            f"W&B did not start ({error}): log in with 'wandb login', or set WANDB_MODE=offline"
        ) from error
    return wandb
