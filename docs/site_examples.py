"""A griffe extension that shows the examples in docstrings as code, not as quotations."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Puts a fence around every `>>>` example, up to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every class, function and module."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^>>>.*?(?=\n\n|\Z)", _fence, text, flags=re.S | re.M)


def _fence(example: re.Match[str]) -> str:
    return f"\n```pycon\n{example[0]}\n```"
