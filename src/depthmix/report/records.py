"""Records of finished runs: a line of JSON per run, for when run folders are too large to keep.

Defines the format (docs/report.md). Unknown values are null.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from depthmix.config import RunConfig
from depthmix.files import parse_json, replace_file
from depthmix.report.load import Head, Row, Runs, SkippedRun, collect_runs, load_runs, make_row
from depthmix.runs import find_runs

RECORDS = "*.jsonl"
MILLI = 1e-3


def read_report_runs(source: str | Path) -> Runs:
    """The runs in a folder and below; or records in a .jsonl file or a folder without runs."""
    path = Path(source)
    files = [path] if path.suffix == ".jsonl" and path.is_file() else sorted(path.glob(RECORDS))
    # runs come before records: they may be newer, and their metrics have this suffix too
    if not files or next(find_runs(path), None) is not None:
        return load_runs(source)
    return load_records(files, str(source))


def load_records(paths: Iterable[str | Path], source: str = "records") -> Runs:
    """The runs in these files, like `load_runs` for folders."""
    return collect_runs(source, (_read_record(each) for path in paths for each in read_lines(path)))


def append_records(rows: Iterable[Row], path: str | Path) -> int:
    """Add runs to a file, and return how many are new; refuses another run of the same name."""
    path = Path(path)
    records = list(read_lines(path)) if path.exists() else []
    present = {record["run"]: record for record in records}
    added = [record for record in map(make_record, rows) if record["run"] not in present]
    for record in map(make_record, rows):
        if present.get(record["run"], record) != record:
            raise ValueError(
                f"'{path}' has another run with the name '{record['run']}': choose another file, "
                f"or remove that line"
            )
    if added:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, "".join(json.dumps(record) + "\n" for record in [*records, *added]))
    return len(added)


def make_record(row: Row) -> dict[str, Any]:
    """A run as the data of its line."""
    origin = row.provenance
    data, device, git = (origin.get(name) or {} for name in ("data", "device", "git"))
    record = {
        "run": row.name,
        "source": "run",
        "seed": row.seed,
        "steps": row.num_steps,
        "tokens": row.num_steps * row.config.tokens_per_step,
        "flops": {"full": row.flops, "executed": row.executed_flops},
        "parameters": row.parameters.total,
        "forward_flops_per_token": row.flops_per_token,
        "loss": row.loss,
        "loss_causal": row.loss_causal,
        "test_loss": row.test_loss,
        "test_loss_causal": row.test_loss_causal,
        "seconds": row.seconds,
        "step_ms": None,
        "tokens_per_second": row.tokens_per_second,
        "heads": {
            head.name: {"precision": head.precision[-1][1], "recall": head.recall[-1][1]}
            for head in row.heads
        },
        "data": data.get("hash"),
        "device": device.get("name") or device.get("kind"),
        "versions": origin.get("versions"),
        "commit": git.get("commit"),
        "time": origin.get("time"),
        "curve": [[round(share, 4), round(loss, 4)] for share, loss in row.curve],
        "config": row.config.to_dict(),
    }
    if row.joules is not None:
        # left out if unknown, so that older files have the same lines
        record["joules"] = row.joules
    # as read back from a file
    return json.loads(json.dumps(record, default=str))


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Every record of a file, as plain data; refuses a line that is not one."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"cannot read '{path}': {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = dict(parse_json(line))
            record["run"], record["config"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"'{path}' is not a file of records: line {number} is not a run; remove that line, "
                f"or choose another file"
            ) from error
        yield record


def _read_record(record: Mapping[str, Any]) -> Row | SkippedRun:
    name = str(record["run"])
    if record["config"] is None:
        return SkippedRun(name, "record", "its configuration was not kept")
    try:
        return _make_row(name, record)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return SkippedRun(name, "broken", f"its record is damaged: {error}")


def _make_row(name: str, record: Mapping[str, Any]) -> Row:
    seed, tree = record["seed"], record["config"]
    # a configuration needs a seed, even if the record lacks it
    config = RunConfig.from_dict({**tree, "train": {**tree["train"], "seed": seed or 0}})
    seconds, step_ms = record["seconds"], record["step_ms"]
    if seconds is None and step_ms is not None:
        seconds = MILLI * step_ms * record["steps"]
    if record["loss"] is None and record["loss_causal"] is None:
        raise ValueError("it has no loss")
    return make_row(
        name,
        config,
        num_steps=record["steps"],
        flops=float(record["flops"]["full"]),
        executed_flops=float(record["flops"]["executed"]),
        loss=record["loss"],
        loss_causal=record["loss_causal"],
        test_loss=record.get("test_loss"),
        test_loss_causal=record.get("test_loss_causal"),
        seed=seed,
        seconds=seconds,
        joules=record.get("joules"),
        tokens_per_second=record.get("tokens_per_second"),
        heads=tuple(
            Head(head, ((1.0, parts["precision"]),), ((1.0, parts["recall"]),))
            for head, parts in (record["heads"] or {}).items()
            if None not in parts.values()
        ),
        curve=tuple((share, loss) for share, loss in record["curve"] or ()),
        provenance={
            "time": record["time"],
            "versions": record["versions"],
            "device": {"name": record["device"]},
            "data": {"hash": record["data"]},
            "git": {"commit": record["commit"]},
        },
    )
