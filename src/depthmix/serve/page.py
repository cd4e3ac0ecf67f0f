"""The live page: one answer, the same for every client.

Owns its headers, of which the policy lets a browser run the page's own script, call this server,
and nothing else. The page itself is `page.html` with the look of all pages that show depth; it
learns from the interface what is served.
"""

from functools import cache
from importlib import resources

from starlette.responses import HTMLResponse

from depthmix.report.look import dress

TEMPLATE = "page.html"


async def answer_page() -> HTMLResponse:
    """The page."""
    text, headers = _prepare()
    return HTMLResponse(text, headers=headers)


@cache
def _prepare() -> tuple[str, dict[str, str]]:
    template = resources.files("depthmix.serve").joinpath(TEMPLATE).read_text(encoding="utf-8")
    look = dress(template)
    policy = (
        f"{look.policy}; connect-src 'self'; frame-ancestors 'none'; "
        f"require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return look.html, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        # the page changes with the release
        "Cache-Control": "no-cache",
    }
