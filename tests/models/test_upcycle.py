"""A dense checkpoint becomes a run that routes, samples and traces, and says what it is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from depthmix import flops
from depthmix.models import foreign, open_model
from depthmix.models.upcycle import upcycle
from depthmix.models.vocabulary import find_end
from depthmix.runs.folder import RunDir
from foreign_models import make_foreign, write_foreign
from text_runs import write_text_run

ROUTING: dict[str, Any] = {
    "routing.capacity": 0.25,
    "routing.first_dense": 0,
    "routing.predictor_width": 8,
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_foreign(tmp_path_factory.mktemp("dense") / "llama")


def test_the_run_is_the_dense_model_where_nothing_is_skipped(dense: Path, tmp_path: Path) -> None:
    made = upcycle(open_model(dense), tmp_path / "run", ROUTING)
    model = open_model(tmp_path / "run").network
    assert model.config == made.config == open_model(tmp_path / "run").config
    assert made.config.routed_layers == (1, 3)
    assert made.config.capacities == (0.25, 0.25)
    tokens = torch.randint(300, (2, 40))
    with torch.no_grad():
        wanted = make_foreign("llama").float()(tokens).logits
        for selector in ("all", "predictor"):
            found = model(tokens, selector=selector).logits
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        # untrained top-k is not
        assert not torch.allclose(model(tokens).logits, wanted, rtol=0, atol=1e-2)


def test_summary_of_upcycling(dense: Path, tmp_path: Path) -> None:
    made = upcycle(open_model(dense), tmp_path / "run", ROUTING)
    first, second, third, last = made.describe()
    num_new = flops.num_parameters(made.config).total
    num_new -= flops.num_parameters(made.config.dense_twin()).total
    assert f"(llama), {num_new:,} of them new" in first
    assert second == "2 of 4 blocks route: capacity 0.25, gate tanh1"
    whole, routed = (
        flops.forward_flops(config, seq_len=64)
        for config in (made.config.dense_twin(), made.config)
    )
    assert f"64 tokens: {whole:.3g} dense, {routed:.3g} routed ({routed / whole:.1%})" in third
    assert last.endswith("it still equals the dense model")
    raw = upcycle(open_model(dense), tmp_path / "raw", {**ROUTING, "routing.gate": "raw"})
    assert len(raw.describe()) == 3


def test_the_folder_knows_its_tokenizer_and_its_origin(dense: Path, tmp_path: Path) -> None:
    upcycle(open_model(dense), tmp_path / "run", ROUTING)
    run = RunDir.open(tmp_path / "run")
    (start,) = run.read_json("provenance.json")["starts"]
    assert start["data"]["upcycled"] == "llama"
    assert start["data"]["end_token"] == 0
    assert (run.path / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()
    assert run.read_json("status.json")["state"] == "finished"
    assert "depthmix train --from" in run.read_json("status.json")["reason"]


def test_fields_may_be_changed_where_they_are_routing(dense: Path, tmp_path: Path) -> None:
    changes = {"routing.every": 1, "routing.capacity": "linear", "max_seq_len": "32"}
    shorter = open_model(dense, max_seq_len=32)
    made = upcycle(shorter, tmp_path / "run", {**ROUTING, **changes})
    assert made.config.max_seq_len == 32
    assert len(made.config.routed_layers) == 4
    assert "capacity 0.85 to 0.15" in made.describe()[1]
    with pytest.raises(ValueError, match="only fields of routing may be changed"):
        upcycle(open_model(dense), tmp_path / "other", {**ROUTING, "width": 64, "head_width": 8})
    # whose tensors would all fit, and which would be another function
    rope = (("rope_theta", 9.0), ("rope_factors", (2.0,)))
    for name, value in (*rope, ("norm_eps", 0.1), ("max_seq_len", 128)):
        with pytest.raises(ValueError, match=f"{name} = .* only fields of routing may be changed"):
            upcycle(open_model(dense), tmp_path / "other", {**ROUTING, name: value})
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_width": 16}
    with pytest.raises(ValueError, match=r"num_heads = 2 .* only fields of routing"):
        upcycle(open_model(dense), tmp_path / "other", {**ROUTING, **heads})
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_upcycled_is_refused(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leaves the model dense"):
        upcycle(open_model(dense), tmp_path / "run", {"routing.strategy": "none"})
    with pytest.raises(ValueError, match="leave no routed block among 4"):
        upcycle(open_model(dense), tmp_path / "run", {"routing.first_dense": 4})
    with pytest.raises(ValueError, match="there is no run or model at"):
        upcycle(open_model(tmp_path / "nowhere"), tmp_path / "run", ROUTING)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is not a model"):
        upcycle(open_model(tmp_path / "empty"), tmp_path / "run", ROUTING)
    assert not (tmp_path / "run").exists()
    upcycle(open_model(dense), tmp_path / "run", ROUTING)
    with pytest.raises(ValueError, match="already contains a run"):
        upcycle(open_model(dense), tmp_path / "run", ROUTING)
    with pytest.raises(ValueError, match="already has routed blocks"):
        upcycle(open_model(tmp_path / "run"), tmp_path / "again", ROUTING)


def test_a_dense_run_of_ours_can_be_upcycled(tmp_path: Path) -> None:
    dense = write_text_run(tmp_path, "routing.strategy=none")
    made = upcycle(open_model(dense), tmp_path / "routed", ROUTING)
    assert made.source.kind == "depthmix"
    model, original = open_model(tmp_path / "routed").network, open_model(dense).network
    tokens = torch.randint(300, (1, 20))
    found = model(tokens, selector="all").logits
    torch.testing.assert_close(found, original(tokens).logits)


def test_end_tokens_come_from_the_tokenizer_or_the_configuration(
    dense: Path, tmp_path: Path
) -> None:
    assert find_end(dense) == 0
    assert find_end(tmp_path) is None
    for eos, wanted in (("[7, 8]", 7), ("5", 5), ("null", None)):
        (tmp_path / "config.json").write_text(f'{{"eos_token_id": {eos}}}')
        assert find_end(tmp_path) == wanted


def test_chosen_blocks_route_and_weights_are_read_once(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = foreign.read_weights, []
    monkeypatch.setattr(foreign, "read_weights", lambda *a: reads.append(a) or read(*a))
    opened = open_model(dense)
    changes = {**ROUTING, "routing.capacity": (0.5, 0.25), "routing.first_dense": 4}

    def choose() -> tuple[int, ...]:
        # all else was checked, and nothing read
        assert not reads
        assert opened.network.config is opened.config
        return 0, 3

    with pytest.raises(ValueError, match=r"norm_eps = 0\.1"):
        upcycle(opened, tmp_path / "run", {**changes, "norm_eps": 0.1}, choose_layers=choose)
    made = upcycle(opened, tmp_path / "run", changes, choose_layers=choose)
    assert (made.config.routed_layers, made.config.capacities) == ((0, 3), (0.5, 0.25))
    assert len(reads) == 1
    wrong = {"routing.layers": (0, 3), "routing.capacity": (0.5, 0.3, 0.1)}
    with pytest.raises(ValueError, match="lists 3 numbers, but 2 blocks route"):
        upcycle(opened, tmp_path / "other", wrong)
    assert not (tmp_path / "other").exists()
