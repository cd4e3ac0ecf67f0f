"""A tiny run that was trained on text, for tests that sample."""

from pathlib import Path

from depthmix.cli import main
from depthmix.data.prepare import prepare

MODEL = (
    *("--preset", "tiny", "--device", "cpu", "width=16", "num_layers=4", "num_heads=2"),
    *("num_kv_heads=1", "max_seq_len=32", "vocab_size=300", "routing.predictor_width=8"),
)
RECIPE = ("train.batch_size=2", "train.val_tokens=64", "--steps", "4", "--checkpoint-every", "2")


def write_text_run(folder: Path, *fields: str, test_fraction: float = 0.0) -> Path:
    """`folder/run`, whose data is in `folder/data`; it has two checkpoints."""
    text = folder / "text.txt"
    lines = (f"line {i} says {i * i} and no more\n" for i in range(400))
    text.write_text("<|endoftext|>".join(lines))
    options = {"vocab_size": 300, "num_workers": 1, "test_fraction": test_fraction}
    prepare([str(text)], folder / "data", **options)  # pyrefly: ignore
    place = ("--data", str(folder / "data"), "--out", str(folder / "run"))
    assert main(["train", *MODEL, *RECIPE, *place, *fields]) == 0
    return folder / "run"
