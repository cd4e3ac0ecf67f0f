"""Makes Triton's interpreter faster, without changing what a kernel computes in it.

Knows the interpreter's inside: where a release of Triton has another one, the tests fail at the
import, and this file may go.
"""

import dataclasses
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Leave out what takes half of the interpreter's time and has no effect."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    # sums and products are checked for an overflow, and without `debug` the answer is dropped
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch = interpreter._patch_lang

    def patch_once(fn: Any) -> interpreter._LangPatchScope:
        """A launch replaces the language's functions; a call in a kernel finds them replaced."""
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
