"""A run is opened by its configuration first; its weights come when they are asked for."""

from pathlib import Path

import pytest
import torch

from depthmix.checkpoint.source import open_run
from depthmix.checkpoint.weights import load_model
from text_runs import write_text_run


def test_a_run_and_its_checkpoint(tmp_path: Path) -> None:
    run = write_text_run(tmp_path)
    tokens = torch.randint(300, (1, 12))
    for path in (run, run / "checkpoints" / "step-00000004"):
        source = open_run(path)
        assert (source.path, source.kind) == (path, "depthmix")
        wanted = load_model(run, which="best")(tokens).logits
        if path != run:
            wanted = load_model(path)(tokens).logits
        assert torch.equal(source.build()(tokens).logits, wanted)
    assert open_run(run, max_seq_len=16).build().phase_table.shape[0] == 16
    with pytest.raises(ValueError, match="there is nothing at"):
        open_run(tmp_path / "nowhere")
