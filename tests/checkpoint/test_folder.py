"""What is on disk: checksums find every damage, and cleaning up loses nothing."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from depthmix.checkpoint import folder as disk


def make_checkpoint(folder: Path, step: int, score: float | None = None) -> Path:
    path = folder / disk.name_checkpoint(step)
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(bytes(range(200)))
    (path / "optimizer.safetensors").write_bytes(b"moments")
    disk.write_json(path / disk.STATE, {"format": 1, "step": step, "score": score})
    files = {file.name: disk.measure_file(file) for file in path.iterdir()}
    disk.write_json(path / disk.CHECKSUMS, {"files": files})
    return path


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


Damage = Callable[[Path], object]
DAMAGES: list[tuple[str, Damage, str]] = [
    ("model.safetensors", truncate, "model.safetensors has 199 bytes instead of 200"),
    ("model.safetensors", flip_byte, "the content of model.safetensors has changed"),
    ("model.safetensors", Path.unlink, "model.safetensors is missing"),
    ("optimizer.safetensors", flip_byte, "the content of optimizer.safetensors has changed"),
    ("state.json", empty, "state.json has 0 bytes"),
    ("state.json", Path.unlink, "state.json is missing"),
    ("checksums.json", empty, "its checksums.json cannot be read"),
    ("checksums.json", Path.unlink, "it has no checksums.json"),
    ("checksums.json", lambda p: p.write_text("[1]"), "checksums.json cannot be read"),
    ("checksums.json", lambda p: p.write_text('{"files": {}}'), "does not name state"),
    ("other.safetensors", lambda p: p.write_text("x"), "does not belong to it"),
]


@pytest.mark.parametrize(("name", "damage", "sentence"), DAMAGES)
def test_damage_is_found_and_named(
    tmp_path: Path, name: str, damage: Damage, sentence: str
) -> None:
    checkpoint = make_checkpoint(tmp_path, 5)
    assert disk.find_damage(checkpoint) is None
    damage(checkpoint / name)
    found = disk.find_damage(checkpoint)
    assert found is not None
    assert sentence in found
    assert str(checkpoint) in found


def test_damage_in_files_that_are_not_needed_is_passed_over(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, 5)
    flip_byte(checkpoint / "optimizer.safetensors")
    assert disk.find_damage(checkpoint, ("model", disk.STATE)) is None
    flip_byte(checkpoint / "model.safetensors")
    assert disk.find_damage(checkpoint, ("model", disk.STATE)) is not None


def test_sizes_are_looked_at_without_reading(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, 5)
    flip_byte(checkpoint / "model.safetensors")
    assert disk.find_damage(checkpoint, sizes_only=True) is None
    truncate(checkpoint / "model.safetensors")
    assert disk.find_damage(checkpoint, sizes_only=True) is not None


def test_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    assert disk.list_checkpoints(tmp_path / "nothing") == {}
    for name in ("step-100000000", "step-00000020", "step-00000003", "step-00000007.tmp-new"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-00000009").write_text("a file")
    assert list(disk.list_checkpoints(tmp_path)) == [3, 20, 100_000_000]


def test_opening_removes_incomplete_checkpoints(tmp_path: Path) -> None:
    kept = make_checkpoint(tmp_path, 1)
    half = tmp_path / ("step-00000002" + disk.UNFINISHED)
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    disk.open_folder(tmp_path)
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("suffix", [disk.UNFINISHED, disk.REMOVED])
def test_opening_renames_complete_checkpoints(tmp_path: Path, suffix: str) -> None:
    made = make_checkpoint(tmp_path, 2)
    made.rename(made.with_name(made.name + suffix))
    disk.open_folder(tmp_path)
    assert list(tmp_path.iterdir()) == [made]
    assert disk.find_damage(made) is None


def test_opening_prefers_a_checkpoint_with_its_final_name(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, 2, score=1.0)
    old = made.with_name(made.name + disk.REMOVED)
    made.rename(old)
    make_checkpoint(tmp_path, 2, score=2.0)
    disk.open_folder(tmp_path)
    assert list(tmp_path.iterdir()) == [made]
    assert disk.read_state(made)["score"] == 2.0


def test_publishing_replaces_the_same_step(tmp_path: Path) -> None:
    final = make_checkpoint(tmp_path, 2, score=1.0)
    unfinished = disk.start_checkpoint(final)
    shutil.copytree(final, unfinished, dirs_exist_ok=True)
    disk.write_json(unfinished / disk.STATE, {"format": 1, "score": 3.0})
    disk.publish_checkpoint(unfinished, final)
    assert list(tmp_path.iterdir()) == [final]
    assert disk.read_state(final)["score"] == 3.0


def test_starting_over_a_leftover_starts_empty(tmp_path: Path) -> None:
    final = tmp_path / "step-00000001"
    (disk.start_checkpoint(final) / "leftover").write_text("x")
    assert list(disk.start_checkpoint(final).iterdir()) == []


@pytest.mark.parametrize(
    ("scores", "keep_last", "kept"),
    [
        ([None] * 5, 1, [5]),
        ([None] * 5, 2, [4, 5]),
        ([None] * 5, 9, [1, 2, 3, 4, 5]),
        ([3.0, 1.0, 2.0, 4.0, 5.0], 2, [2, 4, 5]),
        ([1.0, 2.0, 3.0, 4.0, 0.5], 2, [4, 5]),
        # the newest of equals; not-a-number is no score
        ([1.0, 1.0, float("nan"), 4.0, None], 1, [2, 5]),
    ],
)
def test_pruning_keeps_the_last_and_the_best(
    tmp_path: Path, scores: list[float | None], keep_last: int, kept: list[int]
) -> None:
    for step, score in enumerate(scores, start=1):
        make_checkpoint(tmp_path, step, score)
    disk.prune_checkpoints(tmp_path, 5, keep_last, ())
    assert list(disk.list_checkpoints(tmp_path)) == kept
    assert [p.name for p in sorted(tmp_path.iterdir())] == [disk.name_checkpoint(s) for s in kept]


def test_pruning_does_not_count_damaged_ones(tmp_path: Path) -> None:
    for step in range(1, 7):
        make_checkpoint(tmp_path, step)
    # 4 and 6 are known as damaged, 3 shows it; a training resumed from 2 has just written 5
    truncate(tmp_path / disk.name_checkpoint(3) / "model.safetensors")
    disk.prune_checkpoints(tmp_path, 5, 2, {4, 6})
    assert list(disk.list_checkpoints(tmp_path)) == [2, 5, 6]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "not valid JSON"),
        ("[]", "not the state of a depthmix checkpoint"),
        ('{"step": 1}', "not the state of a depthmix checkpoint"),
        ('{"format": 99}', "newer depthmix"),
    ],
)
def test_a_state_that_cannot_be_used_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / disk.STATE).write_text(text)
    with pytest.raises(ValueError, match=sentence):
        disk.read_state(tmp_path)


def test_checksums_are_plain_sha256(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, 1)
    listed = json.loads((checkpoint / disk.CHECKSUMS).read_text())["files"]
    assert listed["optimizer.safetensors"] == {
        "num_bytes": 7,
        "sha256": hashlib.sha256(b"moments").hexdigest(),
    }
