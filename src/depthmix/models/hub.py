"""Models on the Hugging Face hub: a name → a local folder, without any code."""

import re
from pathlib import Path

from depthmix.data.tokenizer import say_why

# configuration, tokenizer, chat template and weights, and neither code nor pickles
PATTERNS = ["*.json", "*.safetensors", "*.jinja"]

_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_name(source: str | Path) -> bool:
    """Whether a path that does not exist may be meant as OWNER/NAME on the hub."""
    path = Path(source)
    # if OWNER is a local folder, a path was mistyped
    return bool(_NAME.fullmatch(str(source))) and not path.exists() and not path.parent.is_dir()


def fetch_model(name: str) -> Path:
    """The folder of a model from the hub, downloaded unless it is in the hub's cache."""
    by_hand = f"or download it with 'hf download {name} --local-dir DIR', and name DIR"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(
            f"there is no folder '{name}'; to get it from the Hugging Face hub: pip install "
            f"'depthmix[hf]', {by_hand}"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    # the network, the hub and the disk raise different errors
    except Exception as error:
        raise ValueError(
            f"no model '{name}' could be downloaded from the Hugging Face hub ({say_why(error)}): "
            f"check the name and the network, {by_hand}"
        ) from error
