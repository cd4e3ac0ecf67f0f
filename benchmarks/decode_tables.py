"""The tables of `benchmarks/decode.py`, in Markdown."""

COMPARISONS = {
    "dense": ("compile",),
    "mod": ("dense", "transformers"),
    "mod, by bytes": ("dense, by bytes",),
}
GOALS = {
    ("large", 1, "mod", "dense"): 1.6,
    ("large", 1, "dense", "compile"): 1.3,
    ("large", 1, "mod", "transformers"): 20,
    ("large", 64, "mod", "dense"): 1.6,
    ("small", 1, "mod", "dense"): 1.6,
    ("small", 1, "dense", "compile"): 1.6,
    ("small", 1, "mod", "transformers"): 20,
    ("cpu", 1, "mod", "dense"): 1.5,
}
"""Target speedups, by shape, rows, and the pair compared."""


def print_tables(rows: list[dict]) -> None:
    """Print every table that has rows; a ratio that reaches its target is bold."""
    parts = {"decode": print_decode, "prefill": print_prefill, "generate": print_generate}
    for part, print_part in parts.items():
        chosen = [row for row in rows if row["part"] == part]
        if chosen:
            print_part(chosen)
            print(flush=True)


def print_decode(rows: list[dict]) -> None:
    print("| shape | what | µs a token | mean | ratio | of means | goal | routed | mJ a token |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        key = {"shape": row["shape"], "batch": row["batch"]}
        # a step makes one token per row of the batch
        us, mean = row["us"] / row["batch"], row["us_mean"] / row["batch"]
        share, joules = row.get("share"), row.get("joules_per_token")
        what = row["what"]
        cells = [f"{row['shape']}, batch {row['batch']}", what, f"{us:.1f}", f"{mean:.1f}"]
        last = ["" if share is None else f"{share:.1%}"]
        last += ["" if joules is None else f"{1e3 * joules:.1f}"]
        others = [find_row(rows, **key, what=name) for name in COMPARISONS.get(row["what"], ())]
        others = [other for other in others if other is not None]
        for other in others or [None]:
            print_line([*cells, *compare(row, other), *last])
            cells, last = [*cells[:2], "", ""], ["", ""]


def compare(row: dict, other: dict | None) -> list[str]:
    """Speedup over `other`: by medians, by means, and the target."""
    if other is None:
        return ["", "", ""]
    goal = GOALS.get((row["shape"], row["batch"], row["what"], other["what"]))
    ratio = other["us"] / row["us"]
    text = f"{ratio:.2f}"
    if goal is not None and ratio >= goal:
        text = f"**{text}**"
    means = f"{other['us_mean'] / row['us_mean']:.2f}"
    return [f"{text} × {other['what']}", means, "" if goal is None else f"{goal:g}"]


def print_prefill(rows: list[dict]) -> None:
    print("| shape | prompt | model | ms | ratio | FLOPs allow |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = [row["shape"], f"{row['num_tokens']:,}", row["what"], f"{row['ms']:.2f}"]
        dense = find_row(rows, shape=row["shape"], what="dense") or row
        ratios = [dense["ms"] / row["ms"], dense["flops"] / row["flops"]]
        print_line([*cells, *(f"{ratio:.2f}" for ratio in ratios)])


def print_generate(rows: list[dict]) -> None:
    print("| shape | prompts | model | new tokens/s | ratio | routed | cache, MiB |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        key = {"shape": row["shape"], "num_prompts": row["num_prompts"]}
        dense = find_row(rows, **key, what="dense") or row
        speed, share = row["tokens_per_second"], row["share"]
        cells = [row["shape"], str(row["num_prompts"]), row["what"], f"{speed:,.0f}"]
        cells += [f"{speed / dense['tokens_per_second']:.2f}"]
        cells += ["" if share is None else f"{share:.1%}", f"{row['cache_bytes'] / 2**20:,.0f}"]
        print_line(cells)


def find_row(rows: list[dict], **fields: object) -> dict | None:
    """The first row with these fields."""
    return next((row for row in rows if fields.items() <= row.items()), None)


def print_line(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |")
