"""Draws which tokens of a validation text each routed block of a run executes.

python docs/draw_depth.py RUN --start 150    # writes RUN/depth.png; docs/depth.png was drawn so
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from depthmix.data.manifest import read_manifest
from depthmix.models import open_model
from depthmix.report.figures import COLORS, INK, PALE
from depthmix.runs.folder import RunDir


def read_text(run: RunDir, num_tokens: int) -> list[int]:
    """The beginning of the first validation document that is long enough."""
    folder = Path(run.read_json("provenance.json")["starts"][-1]["data"]["folder"])
    manifest = read_manifest(folder)
    for shard in manifest.splits["val"].shards:
        ids = np.fromfile(folder / shard.file, manifest.dtype).astype(np.int64)
        ends = np.flatnonzero(ids == manifest.end_token)
        for start, stop in zip([-1, *ends[:-1]], ends, strict=True):
            if stop - start >= num_tokens:
                # a document is read from an end token on
                return [manifest.end_token, *ids[start + 1 : start + num_tokens].tolist()]
    raise ValueError(f"no validation document has {num_tokens} tokens")


def name_token(text: str) -> str:
    """A token as a label."""
    return text.replace("\n", "↵").replace(" ", "␣").replace("$", r"\$")[:12]


def main() -> None:
    """Draw one run's decisions, with top-k above and the causal head below."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, help="the image to write (default: RUN/depth.png)")
    parser.add_argument("--start", type=int, default=150, help="first token to show")
    parser.add_argument("--count", type=int, default=56, help="number of tokens to show")
    args = parser.parse_args()
    opened = open_model(args.run, checkpoint="newest")
    model, config, tokenizer = opened.network, opened.config, opened.vocabulary.tokenizer
    tokens = read_text(RunDir.open(args.run), config.max_seq_len)
    selector = config.causal_selector
    assert selector is not None
    kept = {}
    with torch.inference_mode():
        for name in ("topk", selector):
            routings = model(torch.tensor([tokens]), selector=name).routings
            kept[name] = torch.stack([routing.slot[0] >= 0 for routing in routings]).numpy()
    shown = slice(args.start, args.start + args.count)
    labels = [name_token(tokenizer.decode([token])) for token in tokens[shown]]
    figure = Figure(figsize=(11, 3.6), dpi=100, layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    titles = {"topk": "top-k, which sees the whole text", selector: f"{selector}, token by token"}
    for axes, (name, kept_RT), color in zip(panels, kept.items(), COLORS, strict=False):
        title = f"{kept_RT.mean():.1%} of {kept_RT.size:,} decisions keep the token"
        if name != "topk" and kept_RT.any():
            precision = kept["topk"][kept_RT].mean()
            title += f", {precision:.0%} of which agree with top-k"
        axes.set_title(f"{titles[name]}: {title}", loc="left", color=INK, fontsize=10)
        rows, columns = np.nonzero(kept_RT[:, shown])
        axes.scatter(columns, rows, marker="s", s=70, color=color)
        axes.set_yticks(range(len(kept_RT)), [f"block {i}" for i in config.routed_layers])
        axes.set_ylim(len(kept_RT) - 0.4, -0.6)
        axes.set_xlim(-0.7, len(labels) - 0.3)
        axes.set_xticks(range(len(labels)), labels, rotation=90, family="monospace", fontsize=8)
        axes.tick_params(length=0, labelcolor=INK)
        axes.set_axisbelow(True)
        axes.grid(color=PALE, linewidth=0.6)
        for spine in axes.spines.values():
            spine.set_visible(False)
    out = args.out or args.run / "depth.png"
    figure.savefig(out)
    print(out, {name: f"{kept_RT.mean():.4f}" for name, kept_RT in kept.items()})


if __name__ == "__main__":
    main()
