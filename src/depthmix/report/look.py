"""What pages that show depth have in common: colours, a token's card, and a policy.

Owns how a template of such a page becomes the page: `depth.css` and `depth.js` go into it, and the
policy names by their hashes the one style and the one script that there are, so that a browser runs
nothing else, whatever a text holds. Does not know what pages show.
"""

import hashlib
import re
from base64 import b64encode
from importlib import resources
from typing import NamedTuple

LOOK, CODE = "depth.css", "depth.js"


class Look(NamedTuple):
    """A template with its look and code, and what a browser may do with it."""

    html: str
    policy: str


def dress(template: str) -> Look:
    """Put the shared look and code where a template has `{{look}}` and `{{code}}`."""
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
