"""What `warm_up` compiles is all that any step needs, and it is not much."""

import json
from typing import Any

import pytest

compiled_kernels = pytest.importorskip("compiled_kernels")

# it takes about half a second to compile one
MOST_KERNELS = 45

SHAPES: dict[str, dict[str, Any]] = {
    "mod": {"width": 512, "num_heads": 8, "num_kv_heads": None, "num_layers": 2},
    "dense_gelu_grouped": {
        "width": 576,
        "num_heads": 9,
        "num_kv_heads": 3,
        "num_layers": 2,
        "mlp": "gelu",
        "vocab_size": 50257,
        "routing.strategy": "none",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_no_step_compiles_what_is_not_warm(name: str) -> None:
    told = compiled_kernels.ask(json.dumps(SHAPES[name]))
    assert told["late"] == []
    assert 20 < told["num_warm"] <= MOST_KERNELS
