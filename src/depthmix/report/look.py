"""What pages that show depth share: colours, a token's card, and a content security policy.

Fills a template with `depth.css` and `depth.js`. The policy allows the one style and the one script
by their hashes, so that a browser runs nothing else, whatever a text contains. Independent of what
the pages show.
"""

import hashlib
import re
from base64 import b64encode
from importlib import resources
from typing import NamedTuple

LOOK, CODE = "depth.css", "depth.js"


class Look(NamedTuple):
    """A template with its style and code, and the page's policy."""

    html: str
    policy: str


def dress(template: str) -> Look:
    """Fill `{{look}}` and `{{code}}` of a template with the shared style and code."""
    html = template.replace("{{look}}", read_part(LOOK)).replace("{{code}}", read_part(CODE))
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        f"img-src data:; base-uri 'none'; form-action 'none'"
    )
    return Look(html, policy)


def read_part(name: str) -> str:
    """A file of this package."""
    return resources.files("depthmix.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{b64encode(digest).decode()}'"
