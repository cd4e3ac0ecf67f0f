"""The page: whole in one file, safe whatever the text holds, and alive in a real browser."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from browsers import watch
from depthmix.report.look import dress, read_part
from depthmix.report.view import TEMPLATE, embed_json, write_page
from hand_traces import CAUSAL, TEXTS, TOPK, make_trace


class Page(HTMLParser):
    """What is in a page: elements with their attributes, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.append((self.open[-1], data))


def test_the_page_holds_the_trace_and_needs_nothing_else() -> None:
    trace = make_trace()
    page = Page(write_page(trace))
    assert page.open == []
    scripts = [attributes for tag, attributes in page.elements if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "trace"}, {}]
    data = json.loads(next(text for tag, text in page.texts if tag == "script"))
    assert {key: data[key] for key in trace if key != "rules"} == {
        key: value for key, value in trace.items() if key != "rules"
    }
    # a page has what it shows: two digits, and the predictor where it decides
    for name, rule in trace["rules"].items():
        for before, after in zip(rule["blocks"], data["rules"][name]["blocks"], strict=True):
            assert after["routed"] == before["routed"]
            assert after["score"] == [round(value, 2) for value in before["score"]]
            assert (after["predictor"] is None) == (name == "topk" or not before["predictor"])
        assert data["rules"][name]["loss"][-1] is None
        assert data["rules"][name]["entropy"] == [round(value, 2) for value in rule["entropy"]]
    assert set(data["measures"]) == {"topk", "causal"}
    assert len(data["agreement"]) == 2
    assert len(data["classes"]) == len(TEXTS)
    # nothing is fetched: no element refers to another file
    assert not [a for _, a in page.elements if {"src", "href", "srcset", "data"} & a.keys()]
    template = dress(read_part(TEMPLATE)).html
    assert "url(" not in template
    assert "@import" not in template
    assert "fetch(" not in template
    # neither the name of a namespace nor that of a header is an address
    names = template.count("http://www.w3.org/2000/svg") + template.count("http-equiv")
    assert template.count("http") == names == 2
    assert len(template) < 100_000
    known = {attributes.get("id") for _, attributes in page.elements}
    assert {"text", "card", "modes", "scores", "positions", "classes", "dead", "entropy"} <= known
    titles = [text for tag, text in page.texts if tag in ("title", "h1")]
    assert titles == ["Depth of runs/<b>{{data}}"] * 2


def test_text_cannot_leave_its_script() -> None:
    told = embed_json({"a": "</script><!-- & \u2028"})
    assert not set("<>&") & set(told)
    assert json.loads(told) == {"a": "</script><!-- & \u2028"}


def test_a_broken_trace_makes_no_page() -> None:
    with pytest.raises(ValueError, match="this is not a trace"):
        write_page({})


class Tab:
    """An open page and everything that went wrong in it."""

    def __init__(self, browser: Any, trace: dict[str, Any], path: Path, **options: Any) -> None:
        path.write_text(write_page(trace), encoding="utf-8")
        self.page = browser.new_page(**options)
        self.problems = watch(self.page)
        self.page.on("request", lambda request: self.problems.append(request.url))
        self.page.goto(path.as_uri())
        assert self.problems.pop(0) == path.as_uri()

    def token(self, i: int) -> Any:
        return self.page.locator(f"[data-i='{i}']")

    def choose(self, mode: str) -> None:
        self.page.locator(f"#modes input[value={mode}]").check(force=True)

    def read_shades(self) -> list[float]:
        script = "nodes => nodes.map(n => Number(n.style.getPropertyValue('--d')))"
        return self.page.eval_on_selector_all("[data-i]", script)


def share_used(routed: tuple[list[int], ...]) -> list[float]:
    return [sum(path) / len(path) for path in zip(*routed, strict=True)]


def test_a_browser_shows_depth(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, make_trace(), tmp_path / "page.html")
    shown = tab.page.eval_on_selector_all("[data-i]", "nodes => nodes.map(n => n.textContent)")
    assert shown == TEXTS
    assert tab.read_shades() == share_used(TOPK)
    colors = {i: tab.token(i).evaluate("n => getComputedStyle(n).backgroundColor") for i in (1, 2)}
    assert colors[1] != colors[2]
    tab.choose("causal")
    assert tab.read_shades() == share_used(CAUSAL)
    assert tab.page.locator(".kt, .kc").count() == 0
    tab.choose("differ")
    marks = tab.page.eval_on_selector_all(
        "[data-i]", "nodes => nodes.map(n => [n.matches('.kt'), n.matches('.kc')])"
    )
    assert [i for i, (topk, _) in enumerate(marks) if topk] == [0, 6]
    assert [i for i, (_, causal) in enumerate(marks) if causal] == [10]
    assert "13.6 % of decisions differ" in tab.page.locator("#keys").inner_text()
    # one block alone
    tab.page.locator("#block").select_option(label="only 3")
    assert tab.read_shades() == CAUSAL[1]
    assert tab.problems == []


def test_pointing_and_keys_show_a_token(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, make_trace(), tmp_path / "page.html")
    card = tab.page.locator("#card")
    tab.token(6).hover()
    told = card.inner_text()
    assert "Token 6" in told
    assert "number" in told
    assert "1 of 2" in told
    assert "0 of 2" in told
    dots = card.locator(".path .dot")
    # block 3 by top-k and causal, then block 1: the last block is on top
    assert [dots.nth(i).get_attribute("aria-label") for i in range(4)] == [
        *("passed by", "passed by", "routed", "passed by")
    ]
    assert card.locator(".differs").count() == 1
    assert card.locator("tr.dense").count() == 2
    tab.token(6).focus()
    tab.page.keyboard.press("ArrowRight")
    assert "Token 7" in card.inner_text()
    for _ in range(2):
        tab.page.keyboard.press("ArrowUp")
    assert "start of the document" in card.inner_text()
    # one stop for the tab key, however long the text
    assert tab.page.locator("#text [tabindex='0']").count() == 1
    assert tab.problems == []


def test_on_a_phone_a_tap_opens_a_card_that_can_be_closed(browser: Any, tmp_path: Path) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    tab = Tab(browser, make_trace(), tmp_path / "page.html", **phone)
    card = tab.page.locator("#card")
    assert not card.is_visible()
    told = tab.page.locator("body").inner_text()
    assert "Tap a token" in told
    assert "arrow keys" not in told
    assert "Point at" not in told
    tab.token(2).tap()
    assert "Token 2" in card.inner_text()
    assert [card.locator(".strip li").nth(i).get_attribute("class") for i in range(4)] == [
        *("dense", "in", "dense", "in")
    ]
    assert card.bounding_box()["height"] < 0.35 * 844
    card.locator("#close").tap()
    assert not card.is_visible()
    assert tab.problems == []


def test_nothing_runs_but_the_pages_own_script(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, make_trace(), tmp_path / "page.html")
    script = """() => {
        for (const [tag, text] of [["script", "window.hit = 1"], ["style", "body{color:red}"]])
            document.body.append(Object.assign(document.createElement(tag), {textContent: text}));
        return [window.hit, getComputedStyle(document.body).color];
    }"""
    hit, color = tab.page.evaluate(script)
    assert hit is None
    assert color != "rgb(255, 0, 0)"
    refused = [problem for problem in tab.problems if "Content Security Policy" in problem]
    assert refused == tab.problems != []


def test_charts_follow_the_rule(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, make_trace(), tmp_path / "page.html", color_scheme="dark")
    page = tab.page
    assert page.locator("#scores svg").count() == 2
    assert page.locator("#positions rect").count() == 4
    assert page.locator("#classes .rows b").count() == 6
    assert page.locator("#entropy circle").count() == len(TEXTS)
    assert "r = -1.000" in page.locator("#entropy").inner_text()
    assert "7 of 11 tokens (63.6 %)" in page.locator("#dead").inner_text()
    assert page.locator("#agreement tr").count() == 3
    tab.choose("causal")
    # top-k kept the number in block 1, the causal rule the last letter in block 3
    assert "27.3 % routed" in page.locator("#scores svg").nth(1).text_content()
    assert "18.2 % routed" in page.locator("#scores svg").nth(0).text_content()
    assert "depthmix trace" in page.locator("#origin").inner_text()
    assert tab.problems == []


def test_one_rule_alone_has_no_switch(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, make_trace(causal=False), tmp_path / "page.html")
    assert tab.page.locator("#modes input").count() == 1
    assert not tab.page.locator("#agreement").is_visible()
    tab.token(2).hover()
    assert "2 of 2" in tab.page.locator("#card").inner_text()
    assert tab.problems == []


def test_a_long_text_has_pages(browser: Any, tmp_path: Path) -> None:
    trace, times = make_trace(), 900
    for rule in trace["rules"].values():
        for column in (rule, *rule["blocks"]):
            for key in ("entropy", "loss", "routed", "score", "predictor"):
                if key in column:
                    column[key] = column[key] * times
    trace["tokens"], trace["texts"] = trace["tokens"] * times, trace["texts"] * times
    trace["window_starts"] = list(range(0, len(trace["tokens"]), 4))
    tab = Tab(browser, trace, tmp_path / "page.html")
    seen = [tab.page.locator("[data-i]").count()]
    while tab.page.locator("#next").is_enabled():
        tab.page.locator("#next").click()
        seen.append(tab.page.locator("[data-i]").count())
    assert seen == [4096, 4096, 11 * times - 8192]
    tab.token(9000).hover()
    assert "Token 9,000" in tab.page.locator("#card").inner_text()
    assert tab.problems == []
