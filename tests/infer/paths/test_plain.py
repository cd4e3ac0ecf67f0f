from functools import cache

import pytest
import torch
from torch import Tensor

from depthmix.config import ModelConfig, fields
from depthmix.infer.depth import Usage
from depthmix.infer.pages import Pages
from depthmix.infer.paths.plain import KNOWN_FIELDS, Done, Runner, Work, find_shape_obstacle
from depthmix.infer.scheduler import Chunk
from depthmix.nn import Output, Transformer
from variants import causal_cases, make_config, make_model, make_tokens

CASES = causal_cases()


@cache
def get_model(name: str) -> Transformer:
    """Shared between tests, which must not modify it."""
    return make_model(name).requires_grad_(False)


class Rows:
    """Sequences in the rows of a runner: key and row are the same number."""

    def __init__(
        self, name: str, selector: str | None, lengths: list[int], *, record: bool = False
    ) -> None:
        self.model, self.selector = get_model(name), selector
        config = self.model.config
        sizes = (200 * config.num_layers, 3, config.num_layers, len(lengths))
        self.pages = Pages(*sizes, longest=config.max_seq_len)
        self.runner = Runner(self.model, self.pages, selector, record=record)
        self.tokens = [make_tokens(config, n, seed=row) for row, n in enumerate(lengths)]
        self.done = [0] * len(lengths)

    def run(self, counts: dict[int, int]) -> list[Done]:
        """Compute the next tokens of some rows in one pass; logits for each row's last token."""
        works = []
        for row, count in counts.items():
            start = self.done[row]
            assert self.pages.reserve(row, count)
            self.done[row] += count
            tokens = self.tokens[row][start : start + count].tolist()
            asks = self.done[row] == len(self.tokens[row])
            works.append(Work(Chunk(row, row, start, count, asks), tokens))
        found = self.runner.run(works)
        self.pages.settle(list(counts), [done.stored for done in found])
        return found

    def compute(self, row: int) -> Output:
        return self.model(self.tokens[row][None], selector=self.selector)


def count_by_hand(
    model: Transformer, output: Output, first: int, last: int
) -> tuple[Usage, list[int]]:
    """Usage of tokens first .. last - 1, counting every pair; and what each layer stored."""
    config, num_tokens = model.config, output.logits.shape[1]
    routings = dict(zip(config.routed_layers, output.routings, strict=True))
    experts, here = iter(output.expert_routings), slice(first, last)
    total: dict[str, int] = dict.fromkeys(Usage._fields, 0)
    stored = []
    for layer in range(config.num_layers):
        asks_T = offers_T = torch.ones(num_tokens, dtype=torch.bool)
        if layer in routings:
            routing = routings[layer]
            asks_T = routing.slot[0] >= 0
            offers_T = (routing.memory or routing).slot[0] >= 0
        pairs_TT = (asks_T[:, None] & offers_T).tril()
        num_asking, num_offering = int(asks_T[here].sum()), int(offers_T[here].sum())
        stored.append(num_offering)
        total["num_visits"] += num_asking
        total["num_stored"] += num_offering
        total["num_pairs"] += int(pairs_TT[here].sum())
        if layer in routings:
            total["num_routed_visits"] += num_asking
            total["num_routed_stored"] += num_offering
        if layer in config.expert_layers:
            kept_TE = torch.zeros(num_tokens, config.experts.num_experts)
            # inside a routed block the experts see the kept tokens
            kept_TE[asks_T] = next(experts).kept[0, : int(asks_T.sum())].float()
            total["num_expert_visits"] += num_asking
            total["num_expert_pairs"] += int(kept_TE[here].sum())
    return Usage(**total), stored


def list_paths(output: Output) -> list[tuple[bool, ...]]:
    columns = [(routing.slot[0] >= 0).tolist() for routing in output.routings]
    return [tuple(path) for path in zip(*columns, strict=True)]


# each case once with run-time shape checks, and once without
@pytest.mark.parametrize("record", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("name", "selector"), CASES)
def test_chunks_of_several_rows_equal_the_full_pass(
    name: str, selector: str | None, record: bool
) -> None:
    """Rows of any length in one pass, in any order; some join late, some finish early."""
    rows = Rows(name, selector, [11, 1, 8], record=record)
    steps = [{0: 6}, {2: 5, 0: 3, 1: 1}, {0: 1, 2: 2}, {2: 1, 0: 1}]
    starts = [0, 0, 0]
    outputs = [rows.compute(row) for row in range(3)]
    logits: dict[int, Tensor] = {}
    for counts in steps:
        for (row, count), done in zip(counts.items(), rows.run(counts), strict=True):
            start, output = starts[row], outputs[row]
            starts[row] += count
            paths = list_paths(output) or [()] * output.logits.shape[1]
            assert done.paths == paths[start : start + count]
            used, stored = count_by_hand(rows.model, output, start, start + count)
            assert done.used == used
            assert done.stored == stored
            if done.logits is not None:
                logits[row] = done.logits
    assert set(logits) == {0, 1, 2}, "asked for at each row's last token and nowhere else"
    for row, found in logits.items():
        torch.testing.assert_close(found, outputs[row].logits[0, -1], rtol=0, atol=1e-10)


def test_nothing_is_asked() -> None:
    rows = Rows("mod", "predictor", [9, 9])
    for done in rows.run({0: 4, 1: 2}):
        assert done.logits is None
        assert done.best is None
        assert len(done.stored) == rows.model.config.num_layers


def test_no_gradients_are_kept() -> None:
    model = make_model("mod")
    rows = Rows("mod", "predictor", [3])
    rows.runner.model = model
    [done] = rows.run({0: 3})
    assert done.logits is not None
    assert not done.logits.requires_grad
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_cache_has_the_models_type() -> None:
    for dtype in (torch.float32, torch.float64):
        model = make_model("dense", dtype=dtype)
        runner = Runner(model, Pages(8, 4, model.config.num_layers, 1), None, record=False)
        assert runner.cache.key.dtype == runner.cache.value.dtype == dtype


def test_kernels_are_used_only_for_what_they_know() -> None:
    assert find_shape_obstacle(make_config("mod"), torch.float32) is None
    told = find_shape_obstacle(make_config("mod_kv"), torch.float32)
    assert told == "kernels do not support its routing.kv_capacity = 0.5"
    for name in ("dense_memory", "mod_memory", "mod_lookup"):
        told = find_shape_obstacle(make_config(name), torch.float32)
        assert told == "it has a memory of n-grams"
    # a new field needs a decision here: kernels support it, or models with it do not use them
    sections = ("experts.", "memory.")
    names = {n for n in fields.flatten(ModelConfig().to_dict()) if not n.startswith(sections)}
    assert names - KNOWN_FIELDS == {
        "routing.bypass",
        *("routing.kv_capacity", "routing.noise_gate", "routing.bias_rate"),
        *("routing.place_factor", "residual_mix", "value_embedding"),
    }
    assert names >= KNOWN_FIELDS
