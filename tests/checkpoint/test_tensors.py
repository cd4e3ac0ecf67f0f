"""Names do not depend on how a model is wrapped, and every tensor comes back bitwise."""

from pathlib import Path
from typing import Any

import pytest
import torch

from depthmix.checkpoint import collect_tensors, restore_tensors
from depthmix.checkpoint.tensors import copy_to_cpu, name_files, read_part, read_tensors
from depthmix.checkpoint.tensors import write_tensors as write_shards
from depthmix.world import join_world


def write_tensors(folder: Path, tensors: dict[str, dict[str, torch.Tensor]]) -> list[str]:
    write_shards(folder, tensors, join_world())
    return [path.name for path in name_files(folder, list(tensors), join_world())]


def test_a_tied_tensor_is_there_once(make_training: Any) -> None:
    tied, untied = make_training(), make_training(tied_head=False)
    for training in (tied, untied):
        training.run(1)
    assert "head.weight" not in tied.collect()["model"]
    assert "head.weight.exp_avg" not in tied.collect()["optimizer"]
    assert "head.weight" in untied.collect()["model"]
    assert "head.weight.exp_avg" in untied.collect()["optimizer"]


def test_names_do_not_depend_on_wrappers(make_training: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    training = make_training()
    names = set(training.collect()["model"])
    wrapped = torch.compile(training.model)
    assert isinstance(wrapped, torch.nn.Module)
    assert set(collect_tensors(wrapped, training.optimizers)["model"]) == names
    training.model.layers[0] = checkpoint_wrapper(training.model.layers[0])
    assert set(training.collect()["model"]) == names


def test_collected_tensors_are_the_live_ones(make_training: Any) -> None:
    training = make_training()
    assert training.collect()["optimizer"] == {}
    training.run(1)
    tensors = training.collect()
    training.run(1)
    assert torch.equal(tensors["model"]["norm.weight"], training.model.norm.weight)
    assert tensors["optimizer"]["norm.weight.step"] == 2


def test_several_optimizers_share_one_name_space(make_training: Any) -> None:
    training = make_training("muon")
    training.run(1)
    names = set(training.collect()["optimizer"])
    assert {"embedding.weight.exp_avg", "layers.0.mlp.w_out.weight.momentum_buffer"} <= names
    assert "layers.0.mlp.w_out.weight.exp_avg" not in names


def test_optimizers_that_do_not_fit_are_refused(make_training: Any) -> None:
    training, other = make_training(), make_training()
    with pytest.raises(ValueError, match="is another optimiser's"):
        collect_tensors(training.model, [*training.optimizers, *training.optimizers])
    with pytest.raises(ValueError, match="not the model's"):
        collect_tensors(training.model, other.optimizers)
    training.optimizers[0].state[training.model.norm.weight]["step"] = 3
    with pytest.raises(ValueError, match="AdamW keeps 'step' as int"):
        training.collect()


@pytest.mark.parametrize("kind", ["adamw", "fused", "muon"])
def test_restoring_makes_the_state_that_is_missing(make_training: Any, kind: str) -> None:
    trained, fresh = make_training(kind), make_training(kind)
    trained.run(2)
    restore_tensors(fresh.model, fresh.optimizers, trained.copy())
    trained.run(1)
    fresh.step = 2
    fresh.run(1)
    for part, named in trained.collect().items():
        for name, value in named.items():
            assert torch.equal(fresh.collect()[part][name], value), name


def test_restoring_keeps_memory_and_drops_new_state(make_training: Any) -> None:
    training = make_training()
    training.run(1)
    saved = training.copy()
    training.run(1)
    weight, moment = training.model.norm.weight, training.collect()["optimizer"]
    assert moment["norm.weight.step"] == 2
    restore_tensors(training.model, training.optimizers, saved)
    assert training.model.norm.weight is weight
    assert torch.equal(weight, saved["model"]["norm.weight"])
    assert training.collect()["optimizer"]["norm.weight.exp_avg"] is moment["norm.weight.exp_avg"]
    for name, value in saved["optimizer"].items():
        assert torch.equal(moment[name], value), name

    restore_tensors(training.model, training.optimizers, {**saved, "optimizer": {}})
    assert training.collect()["optimizer"] == {}


def test_restoring_refuses_tensors_that_do_not_fit(make_training: Any) -> None:
    training = make_training()
    tensors = training.copy()
    stray = {**tensors, "optimizer": {"nowhere.weight.exp_avg": torch.ones(1)}}
    with pytest.raises(ValueError, match=r"'nowhere.weight', which this run does not train"):
        restore_tensors(training.model, training.optimizers, stray)
    del tensors["model"]["norm.weight"]
    with pytest.raises(ValueError, match=r"has no 'norm.weight' \(1 such"):
        restore_tensors(training.model, training.optimizers, tensors)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)


def test_every_type_and_shape_is_restored_bitwise(tmp_path: Path) -> None:
    shapes = ((), (1,), (0,), (3, 5), (2, 1, 4))
    named = {
        f"{dtype}{shape}".removeprefix("torch."): torch.randn(shape).mul(100).to(dtype)
        for dtype in DTYPES
        for shape in shapes
    }
    named["large"] = torch.tensor(2**62 + 1)
    named["strange"] = torch.tensor([float("nan"), float("inf"), -0.0])
    named["transposed"] = torch.randn(3, 4).T
    named["slice"] = torch.randn(10)[2:5]
    assert write_tensors(tmp_path, {"model": named}) == ["model.safetensors"]

    filled = {"model": {name: torch.zeros_like(t) for name, t in named.items()}}
    targets = dict(filled["model"])
    read_tensors(tmp_path, filled, join_world())
    for loaded in (filled["model"], targets, read_part(tmp_path, "model")):
        assert loaded.keys() == named.keys()
        for name, value in named.items():
            assert loaded[name].dtype == value.dtype
            as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (value, loaded[name])]
            assert torch.equal(*as_bytes), name


def test_files_open_without_depthmix(tmp_path: Path, make_training: Any) -> None:
    from safetensors.torch import load_file

    training = make_training()
    training.run(1)
    assert write_tensors(tmp_path, training.collect()) == [
        "model.safetensors",
        "optimizer.safetensors",
    ]
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == training.collect()["model"].keys()
    assert torch.equal(weights["norm.weight"], training.model.norm.weight)


def test_equal_tensors_make_equal_files(tmp_path: Path) -> None:
    tensors = {"ä": torch.arange(3.0), "b.weight": torch.ones(2, 5, dtype=torch.bfloat16)}
    written = set()
    # the order of three metadata is another in most of these
    for number in range(8):
        folder = tmp_path / str(number)
        folder.mkdir()
        # a resumed training may have them in another order
        ordered = dict(list(tensors.items())[:: -1 if number % 2 else 1])
        write_tensors(folder, {"model": ordered, "optimizer": {"b.weight.step": torch.ones(())}})
        written.add(tuple(path.read_bytes() for path in sorted(folder.glob("*.safetensors"))))
        found = read_part(folder, "model")
        assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert len(written) == 1


def test_a_part_more_is_kept_apart(tmp_path: Path) -> None:
    tensors = {
        "model": {"a": torch.ones(2)},
        "optimizer": {},
        "average": {"a": torch.full((2,), 3.0)},
    }
    write_tensors(tmp_path, tensors)
    assert read_part(tmp_path, "average")["a"].tolist() == [3, 3]
    assert read_part(tmp_path, "model")["a"].tolist() == [1, 1]
    assert read_part(tmp_path, "optimizer") == {}


def test_reading_takes_on_the_optimizer_state_of_the_checkpoint(tmp_path: Path) -> None:
    write_tensors(
        tmp_path,
        {
            "model": {"w": torch.ones(2)},
            "optimizer": {"w.exp_avg": torch.arange(2.0), "w.step": torch.tensor(4.0)},
        },
    )
    tensors = {"model": {"w": torch.zeros(2)}, "optimizer": {"w.other": torch.ones(3)}}
    read_tensors(tmp_path, tensors, join_world())
    assert tensors["model"]["w"].tolist() == [1, 1]
    assert tensors["optimizer"].keys() == {"w.exp_avg", "w.step"}
    assert tensors["optimizer"]["w.exp_avg"].tolist() == [0, 1]
    assert tensors["optimizer"]["w.step"].shape == ()
    assert tensors["optimizer"]["w.step"] == 4


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({}, r"has an unknown 'w'"),
        ({"w": torch.ones(2), "v": torch.ones(2)}, r"has no 'v'"),
        ({"w": torch.ones(3)}, r"float32 \(2,\) and this run has torch.float32 \(3,\)"),
        ({"w": torch.ones(2).bfloat16()}, r"float32 \(2,\) and this run has torch.bfloat16"),
    ],
)
def test_reading_refuses_another_model(
    tmp_path: Path, model: dict[str, torch.Tensor], sentence: str
) -> None:
    write_tensors(tmp_path, {"model": {"w": torch.ones(2)}})
    with pytest.raises(ValueError, match=sentence):
        read_tensors(tmp_path, {"model": model}, join_world())


def test_copies_are_separate_and_reuse_memory() -> None:
    tensors = {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}}
    first = copy_to_cpu(tensors, {})
    tensors["model"]["a"].fill_(1)
    assert first["model"]["a"].tolist() == [0, 0]
    tensors["model"]["b"] = torch.ones(3)
    second = copy_to_cpu(tensors, first)
    assert second["model"]["a"] is first["model"]["a"]
    assert second["model"]["a"].tolist() == [1, 1]
    assert second["model"]["b"].tolist() == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adamw", "fused", "capturable"])
def test_the_gpu_continues_bitwise(tmp_path: Path, make_training: Any, kind: str) -> None:
    training, fresh = make_training(kind, "cuda"), make_training(kind, "cuda")
    training.run(3)
    write_tensors(tmp_path, copy_to_cpu(training.collect(), {}))
    tensors = fresh.collect()
    read_tensors(tmp_path, tensors, join_world())
    restore_tensors(fresh.model, fresh.optimizers, tensors)
    expected = training.collect()["optimizer"]["norm.weight.step"].device
    assert fresh.collect()["optimizer"]["norm.weight.step"].device == expected
    fresh.step = 3
    for each in (training, fresh):
        each.run(2)
    for part, named in training.collect().items():
        for name, value in named.items():
            assert torch.equal(fresh.collect()[part][name], value), name
