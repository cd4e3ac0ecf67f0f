"""The report's page: figures, tables and provenance, in one self-contained file.

Writes the tables and the sentences. Every text that comes from a run is escaped, and the page loads
nothing.
"""

import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from depthmix.files import replace_file
from depthmix.report.charts import list_charts
from depthmix.report.figures import Chart, NoMatplotlib, draw_chart, save_images
from depthmix.report.fit import (
    NOISE,
    Comparison,
    Fit,
    average_test,
    compare_minima,
    compare_sizes,
    find_dense,
    fit_runs,
)
from depthmix.report.frontier import COSTS, Lead, Trend, find_leads, fit_trends
from depthmix.report.load import Row, Runs
from depthmix.report.records import read_report_runs
from depthmix.report.traces import read_trace
from depthmix.units import (
    format_count,
    format_difference,
    format_flops,
    format_number,
    format_power,
    format_seconds,
)

PAGE = "report.html"
TRACE = "trace.json"
"""Written by `depthmix trace RUN --out RUN/trace.json`."""
NAMES = {"full": "full FLOPs", "executed": "executed FLOPs", "wall clock": "wall clock"}
"""The costs of `frontier`, as written in a sentence."""
TEMPLATE = Path(__file__).with_name("template.html")


class WrittenReport(NamedTuple):
    """The files of a report, and their content."""

    page: Path
    images: list[Path]
    problem: str
    """Why there are no pictures; empty if there are."""
    runs: Runs
    fits: list[Fit]
    comparisons: list[Comparison]
    summary: list[str]
    """The page's first sentences."""


def write_report(
    folder: str | Path, out: str | Path | None = None, command: str = ""
) -> WrittenReport:
    """Read the runs in a folder, and write the page and its images, by default to FOLDER/report.

    `folder` may also be a file of records; the default is then beside it.
    """
    runs = read_report_runs(folder)
    beside = Path(folder).parent if Path(folder).is_file() else Path(folder)
    place = beside / "report" if out is None else Path(out)
    fits = fit_runs(runs.rows)
    charts = list_charts(runs.rows, fits, read_traces(folder, runs.rows))
    if place.exists() and not place.is_dir():
        raise ValueError(f"'{place}' is a file: choose another --out for the report's folder")
    place.mkdir(parents=True, exist_ok=True)
    problem, images, figures = "", [], []
    try:
        figures = [_draw_figure(chart) for chart in charts]
        images = save_images(charts, place)
    except NoMatplotlib as error:
        problem = str(error)
    page = place / PAGE
    replace_file(page, make_page(runs, fits, figures, command, problem=problem))
    comparisons = compare_minima(fits)
    summary = summarize(runs, comparisons, fits)
    return WrittenReport(page, images, problem, runs, fits, comparisons, summary)


def read_traces(folder: str | Path, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Run → the trace in its folder, if there is one."""
    places = {row.name: Path(folder, row.name) for row in rows}
    if (Path(folder) / "config.toml").exists():
        places = {row.name: Path(folder) for row in rows}
    return {n: read_trace(p / TRACE) for n, p in places.items() if (p / TRACE).is_file()}


def make_page(
    runs: Runs, fits: Sequence[Fit], figures: Sequence[str], command: str, *, problem: str = ""
) -> str:
    """The page's HTML; `figures` are HTML too, and `problem` says why there are none."""
    comparisons = compare_minima(fits)
    parts = {
        "title": escape(f"Report on {runs.folder}"),
        "summary": "".join(
            # a number and its per cent sign stay on one line
            f"<p>{escape(line).replace(' %', '&nbsp;%')}</p>"
            for line in summarize(runs, comparisons, fits)
        ),
        "warnings": "".join(
            f'<p class="warning">{escape(each)}</p>'
            for each in filter(None, (*find_warnings(runs.rows), problem))
        ),
        "minima": _section("Minima", _list_minima(fits, comparisons), MINIMA_NOTE),
        "test": _section("Test split", _list_test(fits), TEST_NOTE),
        "leads": _section("Leads at equal cost", _list_leads(fits), LEADS_NOTE),
        "figures": "\n".join(figures),
        "sizes": _section("Sizes", _list_sizes(fits), SIZES_NOTE),
        "runs": _section("Runs", _list_runs(runs.rows), ""),
        "left_out": _section("Left out", _list_left_out(runs), "In no fit and in no figure."),
        "origin": _table(_list_origin(runs, command)),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    # in one pass: the name of a run may look like a placeholder
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], text)


MINIMA_NOTE = (
    "The lowest loss of each variant at each budget: of a parabola in log(parameters) where it is "
    "bracketed, else of the best size tried, which says less. Differences are to the dense minimum "
    "of the same budget, or to that of plain experts where no dense model was trained; negative is "
    "better. Parity is where it first is as good as that minimum. Spread is the standard "
    "deviation over seeds at the best size; what follows ± is a standard error, by the fit's "
    "residuals where a minimum is bracketed, else over seeds."
)
LEADS_NOTE = (
    "The best size of each variant, by its mean over seeds, against what dense training reaches at "
    "the same cost; between budgets the dense loss is taken to follow a power law. Full FLOPs "
    "count attention as a whole square and no optimiser, executed FLOPs half the square and the "
    "optimiser's own products. Wall clock says something only about runs that had a device of one "
    "kind to themselves. The multiplier is how many times the cost dense needs for the same loss; "
    "* marks one from beyond the dense models that were trained. What follows ± is a standard "
    "error over seeds."
)
TEST_NOTE = (
    "Losses on documents that nothing was tuned on, of the best size of each variant by its "
    "validation loss, where 'depthmix eval RUN --test --keep' measured them. What follows ± is a "
    "standard error over seeds."
)
SIZES_NOTE = (
    "Means over seeds. Where a size was run by several recipes, that with the lowest mean counts."
)


def summarize(runs: Runs, comparisons: Sequence[Comparison], fits: Sequence[Fit] = ()) -> list[str]:
    """The page's first sentences: how many runs there are, how the minima and the leads compare.

    For two runs that can be compared, one plain sentence.
    """
    if len(runs.rows) == 2 and len(comparisons) == 1 and not runs.left_out:
        return [describe_pair(comparisons[0])]
    lines = [f"{format_count(len(runs.rows), 'finished run')}."]
    if runs.left_out:
        lines[0] += f" {len(runs.left_out)} left out."
    if not runs.rows:
        lines[0] = (
            f"No run is finished: there is nothing to compare yet. {len(runs.left_out)} left out."
        )
    leads = find_leads(fits)
    for found in comparisons:
        lines.append(describe_comparison(found))
        described = describe_leads(leads.get((found.fit.budget, found.fit.variant), {}))
        lines[-1] += f" {described}" if described else ""
    lines += [describe_trend(*each) for each in fit_trends(leads).items()]
    return lines


def describe_pair(found: Comparison) -> str:
    """The comparison of two runs of one size each, in plain words."""
    fit, dense = found.fit, found.dense
    outcome = format_difference(found.percent)
    return (
        f"Trained with the same compute ({format_power(fit.budget)} FLOPs), {fit.variant} ends with"
        f" a validation loss {outcome} that of {dense.variant} ({fit.loss:.3f} against"
        f" {dense.loss:.3f}), and takes {100 * found.relative_flops:.0f} % of its FLOPs to process"
        f" a token. This is one run of each, not the best model of each kind."
    )


def describe_comparison(found: Comparison) -> str:
    """One sentence, with a reservation if a minimum is not bracketed."""
    fit, side = found.fit, "below" if found.percent < 0 else "above"
    percent = format_error(abs(found.percent), found.error)
    sentence = (
        f"At {format_power(fit.budget)} training FLOPs ({fit.convention}) {fit.variant} is "
        f"{percent} % {side} {found.dense.variant} ({fit.loss:.4f} against {found.dense.loss:.4f}),"
        f" at {100 * found.relative_flops:.0f} % of its forward FLOPs."
    )
    if found.is_sound:
        if found.parity_flops is None:
            return sentence
        return f"{sentence[:-1]}, and as good at {100 * found.parity_flops:.0f} %."
    open_ends = [
        f"{each.variant}: {each.note}" for each in (fit, found.dense) if not each.bracketed
    ]
    return f"{sentence} Minima not yet bracketed: {'; '.join(open_ends)}."


def describe_leads(leads: Mapping[str, Lead]) -> str:
    """A sentence about the lead of a variant's best size at equal cost; empty if unknown."""
    parts = []
    for cost, lead in leads.items():
        side = "below" if lead.percent < 0 else "above"
        part = f"{format_error(abs(lead.percent), lead.error)} % {side} at equal {NAMES[cost]}"
        if lead.multiplier is not None:
            times = format_error(lead.multiplier, lead.multiplier_error)
            part += f" (dense needs {times} times as much{', extrapolated' * lead.extrapolated})"
        parts.append(part)
    return f"By means over seeds its best size is {', '.join(parts)}." if parts else ""


def describe_trend(key: tuple[str, str], trend: Trend) -> str:
    """A sentence about how a variant's lead changes with the budget, and whether it is noise."""
    variant, cost = key
    sure = abs(trend.slope) > NOISE * trend.error
    return (
        f"With ten times the {NAMES[cost]} the loss of {variant} against dense changes by "
        f"{format_error(trend.slope, trend.error, sign=True)} percentage points"
        f"{'' if sure else ', which is within noise'}."
    )


def format_error(value: float, error: float | None, *, sign: bool = False) -> str:
    """A number, with its standard error if known."""
    text = f"{value:+.2f}" if sign else f"{value:.2f}"
    return text if error is None else f"{text} ± {error:.2f}"


def find_warnings(rows: Sequence[Row]) -> list[str]:
    """What makes the runs of a folder hard to compare."""
    warnings = []
    hashes = {(row.provenance.get("data") or {}).get("hash") for row in rows}
    if len(hashes) > 1:
        warnings.append(
            f"These runs were trained on {len(hashes)} different data folders: their losses cannot "
            f"be compared."
        )
    devices = {_name_device(row) for row in rows}
    conventions = {row.config.train.flops_convention for row in rows if row.config.train.flops}
    if len(conventions) > 1:
        warnings.append(
            "Some budgets count full FLOPs and some executed ones: runs of one budget did not cost "
            "the same."
        )
    if len(devices) > 1:
        warnings.append(f"Times are from different devices: {', '.join(sorted(devices))}.")
    return warnings


def _list_minima(fits: Sequence[Fit], comparisons: Sequence[Comparison]) -> list[list[str]]:
    if not fits:
        return []
    compared = {(each.fit.budget, each.fit.variant): each for each in comparisons}
    table = [
        [
            *("budget", "variant", "loss", "spread", "seeds", "difference", "parameters"),
            *("forward FLOPs", "relative", "at parity", "minimum"),
        ]
    ]
    for fit in fits:
        found = compared.get((fit.budget, fit.variant))
        parity = None if found is None else found.parity_flops
        table.append(
            [
                format_power(fit.budget),
                fit.variant,
                f"{fit.loss:.4f}",
                "-" if fit.best.spread is None else f"{fit.best.spread:.4f}",
                f"{fit.best.num_seeds}",
                "-"
                if found is None
                else f"{format_error(found.percent, found.error, sign=True)} %",
                format_number(fit.parameters),
                format_flops(fit.flops_per_token),
                "-" if found is None else f"{found.relative_flops:.2f}",
                "-" if parity is None else f"{parity:.2f}",
                "bracketed" if fit.bracketed else f"not yet bracketed: {fit.note}",
            ]
        )
    return table


def _list_leads(fits: Sequence[Fit]) -> list[list[str]]:
    leads = find_leads(fits)
    if not leads:
        return []
    table = [["budget", "variant"]]
    for cost in COSTS:
        table[0] += [f"at equal {NAMES[cost]}", "multiplier"]
    for (budget, variant), found in leads.items():
        table.append([format_power(budget), variant])
        for cost in COSTS:
            lead = found.get(cost)
            table[-1].append(
                "-" if lead is None else f"{format_error(lead.percent, lead.error, sign=True)} %"
            )
            table[-1].append("-" if lead is None else _tell_multiplier(lead))
    return table


def _list_test(fits: Sequence[Fit]) -> list[list[str]]:
    table = [["budget", "variant", "test loss", "validation loss", "seeds", "difference"]]
    for fit in fits:
        size, dense = average_test(fit), find_dense(fits, fit.budget)
        if size is None:
            continue
        other = None if dense is None or dense is fit else average_test(dense)
        difference = None if other is None else compare_sizes(size, other)
        table.append(
            [
                *(format_power(fit.budget), fit.variant, f"{size.loss:.4f}"),
                *(f"{fit.best.loss:.4f}", f"{size.num_seeds}"),
                "-" if difference is None else f"{format_error(*difference, sign=True)} %",
            ]
        )
    return table if len(table) > 1 else []


def _tell_multiplier(lead: Lead) -> str:
    if lead.multiplier is None:
        return "-"
    return format_error(lead.multiplier, lead.multiplier_error) + "*" * lead.extrapolated


def _list_sizes(fits: Sequence[Fit]) -> list[list[str]]:
    if not fits:
        return []
    table = [["budget", "variant", "parameters", "active", "non-embedding", "seeds", "recipes"]]
    table[0] += ["loss", "spread", "top-k", "forward FLOPs"]
    for fit in fits:
        for size in fit.sizes:
            count = size.rows[0].parameters
            table.append(
                [
                    format_power(fit.budget),
                    fit.variant,
                    *map(format_number, (count.total, count.active, count.total_non_embedding)),
                    ", ".join(str(row.seed) for row in size.rows),
                    f"{size.num_recipes}",
                    f"{size.loss:.4f}",
                    "-" if size.spread is None else f"{size.spread:.4f}",
                    _average_topk(size.rows),
                    format_flops(size.flops_per_token),
                ]
            )
    return table


def _average_topk(rows: Sequence[Row]) -> str:
    losses = [row.loss for row in rows if row.loss is not None]
    return f"{statistics.fmean(losses):.4f}" if losses else "-"


def _list_runs(rows: Sequence[Row]) -> list[list[str]]:
    table = [
        ["run", "variant", "budget", "full", "executed", "parameters", "FLOPs a token", "top-k"]
    ]
    table[0] += ["causal", "seed", "time", "tokens/s"]
    for row in rows:
        table.append(
            [
                row.name,
                row.variant,
                format_power(row.budget),
                format_power(row.flops),
                format_power(row.executed_flops),
                format_number(row.parameters.total),
                format_flops(row.flops_per_token),
                "-" if row.loss is None else f"{row.loss:.4f}",
                "-" if row.loss_causal is None else f"{row.loss_causal:.4f}",
                "-" if row.seed is None else f"{row.seed}",
                "-" if row.seconds is None else format_seconds(row.seconds),
                "-" if row.tokens_per_second is None else format_number(row.tokens_per_second),
            ]
        )
    return table if rows else []


def _list_left_out(runs: Runs) -> list[list[str]]:
    if not runs.left_out:
        return []
    return [["run", "state", "reason"], *(list(run) for run in runs.left_out)]


def _list_origin(runs: Runs, command: str) -> list[list[str]]:
    """The provenance of the page and its runs."""
    rows = runs.rows
    versions = {f"python {platform.python_version()}"}
    for name in ("depthmix", "numpy", "matplotlib"):
        with suppress(metadata.PackageNotFoundError):
            versions.add(f"{name} {metadata.version(name)}")
    trained = {
        f"{name} {version}"
        for row in rows
        for name, version in (row.provenance.get("versions") or {}).items()
    }
    commits = {str((row.provenance.get("git") or {}).get("commit", "")) for row in rows}
    rows = {
        "command": command,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "by": ", ".join(sorted(versions)),
        "runs trained by": ", ".join(sorted(trained)),
        "on": ", ".join(sorted({_name_device(row) for row in rows})),
        "at commit": ", ".join(sorted(commits - {""})),
        "run folders": f"{runs.folder}: "
        + ", ".join([row.name for row in rows] + [run.name for run in runs.left_out]),
    }
    return [["", ""], *([name, value] for name, value in rows.items() if value)]


def _section(title: str, table: list[list[str]], note: str) -> str:
    if not table:
        return ""
    paragraph = f"<p>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{paragraph}{_table(table)}</section>"


def _table(table: list[list[str]]) -> str:
    """HTML of a table whose first line is the head; columns of numbers are right-aligned."""
    columns = list(zip(*table[1:], strict=True))
    marks = [' class="number"' if all(map(_is_number, column)) else "" for column in columns]
    lines = []
    for line, tag in ((line, "td" if i else "th") for i, line in enumerate(table)):
        cells = (f"<{tag}{m}>{escape(c)}</{tag}>" for c, m in zip(line, marks, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = f"<thead>{lines[0]}</thead>" if any(table[0]) else ""
    return f'<div class="wide"><table>{head}<tbody>{"".join(lines[1:])}</tbody></table></div>'


def _is_number(cell: str) -> bool:
    return cell == "-" or re.fullmatch(r"[-+]?\d[\d.,e+-]*( [A-Za-z%]+)?", cell) is not None


def _draw_figure(chart: Chart) -> str:
    return (
        f'<figure id="{chart.key}"><h2>{escape(chart.title)}</h2>{draw_chart(chart)}'
        f"<figcaption>{escape(chart.caption)}</figcaption></figure>"
    )


def _name_device(row: Row) -> str:
    device = row.provenance.get("device") or {}
    return str(device.get("name") or device.get("kind") or "an unknown device")
