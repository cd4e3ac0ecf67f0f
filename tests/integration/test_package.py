"""What `import depthmix` offers."""

import pytest

import depthmix
from depthmix import nn
from depthmix.config import ModelConfig


def test_every_exported_name_is_there() -> None:
    for name in depthmix.__all__:
        assert getattr(depthmix, name) is not None
    assert depthmix.Transformer is nn.Transformer
    assert depthmix.Cache is nn.Cache
    assert depthmix.ModelConfig is ModelConfig


def test_unknown_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Transfomer'"):
        _ = depthmix.Transfomer
