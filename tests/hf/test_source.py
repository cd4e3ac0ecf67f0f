"""Whatever folder is named, what lies there is told apart, and what is damaged is refused."""

from pathlib import Path

import pytest

from depthmix.hf.source import open_source
from hf_models import make_hf_model


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    make_hf_model("mod").save_pretrained(tmp_path, max_shard_size="20KB")
    assert open_source(tmp_path).load()
    shard = max(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(ValueError, match=f"{shard.name} is not a sound safetensors file"):
        open_source(tmp_path).load()
