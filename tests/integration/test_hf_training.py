"""Fine-tuning with the tools that people have: Trainer, accelerate, peft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from depthmix.hf import DepthmixForCausalLM
from hf_models import make_hf_model

pytestmark = pytest.mark.slow

# the matrices of blocks, and not those of the predictors
BLOCKS = r".*\.(attention|mlp)\.w_\w+"


def make_corpus(num_rows: int, num_tokens: int = 16) -> list[dict[str, Tensor]]:
    """Rows that count upwards from anywhere: easy to learn."""
    starts = torch.randint(40, (num_rows,), generator=torch.Generator().manual_seed(0))
    rows = [torch.arange(num_tokens) + start for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


class Losses(TrainerCallback):
    """What a trainer logs."""

    def __init__(self) -> None:
        self.train: list[float] = []
        self.eval: list[float] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Keep both losses."""
        self.train += [logs["loss"]] if "loss" in logs else []
        self.eval += [logs["eval_loss"]] if "eval_loss" in logs else []


def make_trainer(model: Any, folder: Path, **options: Any) -> tuple[Trainer, Losses]:
    losses = Losses()
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 24,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "learning_rate": 3e-3,
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(**{**defaults, **options})
    corpus = make_corpus(64)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=corpus,  # pyrefly: ignore[bad-argument-type]
        eval_dataset=corpus[:8],  # pyrefly: ignore[bad-argument-type]
        callbacks=[losses],
    )
    return trainer, losses


@pytest.mark.parametrize("name", ["dense", "mod_tanh1", "token_choice", "mode_staged"])
def test_a_trainer_teaches_it(name: str, tmp_path: Path) -> None:
    model = make_hf_model(name, dtype=torch.float32)
    trainer, losses = make_trainer(model, tmp_path, eval_strategy="steps", eval_steps=12)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert losses.train[-1] < 0.7 * losses.train[0]
    assert losses.eval[-1] < 0.8 * before
    trainer.save_model(str(tmp_path / "saved"))
    tokens = make_corpus(2)[0]["input_ids"][None]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model.eval()(tokens).logits)


def test_accumulation_does_not_change_what_is_learned(tmp_path: Path) -> None:
    found = []
    for accumulate in (1, 4):
        model = make_hf_model("mod", dtype=torch.float32)
        size = {"per_device_train_batch_size": 4 // accumulate}
        size["gradient_accumulation_steps"] = accumulate
        trainer, losses = make_trainer(model, tmp_path, max_steps=3, logging_steps=1, **size)
        trainer.train()
        found.append(torch.tensor(losses.train))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=0)


def test_packed_rows_are_learned_as_documents(tmp_path: Path) -> None:
    model = make_hf_model("mod").train()
    rows = [
        {"input_ids": row["input_ids"][:n].tolist()}
        for row, n in zip(make_corpus(3), (16, 9, 5), strict=True)
    ]
    batch = DataCollatorWithFlattening(return_tensors="pt")(rows)
    packed = model.eval()(**batch).loss
    alone = [model(torch.tensor([row["input_ids"]])).logits[0] for row in rows]
    targets = [torch.tensor(row["input_ids"][1:]) for row in rows]
    logits = torch.cat([part[:-1] for part in alone])
    expected = torch.nn.functional.cross_entropy(logits, torch.cat(targets))
    torch.testing.assert_close(packed.double(), expected, rtol=1e-6, atol=0)


def test_accelerate_teaches_it() -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = make_hf_model("mod_tanh1", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    corpus: Any = make_corpus(64)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(corpus, batch_size=8)
    )
    losses = []
    for _ in range(3):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("name", ["mod", "mod_tanh1"])
def test_lora_on_the_blocks_teaches_it(name: str, tmp_path: Path) -> None:
    base = make_hf_model(name, dtype=torch.float32)
    first = {key: value.clone() for key, value in base.state_dict().items()}
    # routers and predictors learn in full, beside the adapters
    config = LoraConfig(
        r=8, target_modules=BLOCKS, modules_to_save=["decider"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("lora_A" in name for name in names)
    assert any("decider" in name and "router" in name for name in names)
    assert not any("predictor" in name and "lora" in name for name in names)
    trainer, losses = make_trainer(model, tmp_path, learning_rate=2e-2, max_steps=32)
    trainer.train()
    assert losses.train[-1] < 0.8 * losses.train[0]

    tokens = make_corpus(2)[1]["input_ids"][None, :8]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 7}
    model.eval()
    written = model.generate(input_ids=tokens, **options, use_cache=False)
    assert torch.equal(model.generate(input_ids=tokens, **options), written)
    with torch.no_grad():
        logits = model(tokens).logits
        # the adapter alone is saved, and comes back over the first weights
        model.save_pretrained(str(tmp_path / "adapter"))
        fresh = make_hf_model(name, dtype=torch.float32)
        fresh.load_state_dict(first)
        again = PeftModel.from_pretrained(fresh, str(tmp_path / "adapter")).eval()
        assert torch.equal(again(tokens).logits, logits)
        merged = again.merge_and_unload()
        assert isinstance(merged, DepthmixForCausalLM)
        merged.save_pretrained(tmp_path / "merged")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(loaded(tokens).logits, logits, rtol=1e-4, atol=1e-4)


def test_an_adapter_that_would_do_nothing_is_refused() -> None:
    for target, works in ((BLOCKS, False), (["w_value", "w_up"], True)):
        model = get_peft_model(make_hf_model("mod_kv"), LoraConfig(target_modules=target))
        tokens = make_corpus(1)[0]["input_ids"][None]
        if works:
            model(tokens)
        else:
            with pytest.raises(ValueError, match="w_qk cannot have an adapter"):
                model(tokens)
