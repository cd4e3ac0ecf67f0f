"""The live page in a real browser."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tokenizers
from tokenizers import models

from browsers import watch
from depthmix.infer import SamplingParams
from depthmix.models import Vocabulary
from depthmix.serve.answers import ServedModel, format_path
from served_models import (
    CHAT,
    END,
    HeldEngine,
    Running,
    make_config,
    make_served,
    make_tokenizer,
    make_twin,
    run_server,
)

SECRET = "a-key"
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
HOSTILE = (
    '"><img src=x onerror="hit=1"></textarea></script><script>hit=1</script>{{data}}\\\n\u202e'
)


class Tab:
    """An open page, and everything that went wrong in it or was asked of others."""

    def __init__(self, browser: Any, running: Running, **options: Any) -> None:
        self.running = running
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(20_000)
        self.problems = watch(self.page)
        home = f"http://127.0.0.1:{running.port}/"
        self.page.on(
            "request",
            lambda request: (
                request.url.startswith((home, "data:")) or self.problems.append(request.url)
            ),
        )
        self.page.goto(home)

    def wait_idle(self) -> None:
        self.page.wait_for_selector("#send:enabled:not(.stop)")

    def send(self, prompt: str, **settings: object) -> None:
        self.wait_idle()
        self.page.locator("#settings").evaluate("node => node.parentElement.open = true")
        for name, value in settings.items():
            self.page.locator(f"#{name}").fill(str(value))
        self.page.locator("#prompt").fill(prompt)
        self.page.locator("#prompt").press("Enter")

    def lane(self, number: int = 0) -> Any:
        return self.page.locator(".lane").nth(number)

    def read(self, lane: int = 0) -> list[tuple[str, float]]:
        """Each token's text and shade."""
        script = "nodes => nodes.map(n => [n.textContent, Number(n.style.getPropertyValue('--d'))])"
        found = self.lane(lane).locator("[data-i]").evaluate_all(script)
        return [(text, shade) for text, shade in found]

    def wait_tokens(self, count: int) -> None:
        self.lane().locator(f"[data-i='{count - 1}']").wait_for(state="attached")
        assert len(self.read()) == count

    def read_meter(self) -> str:
        """The share of blocks that were run, by the server's own numbers."""
        meter = self.lane().locator(".meters dd").nth(1).filter(has_text="%")
        meter.wait_for()
        return meter.inner_text()


@contextmanager
def open_tab(browser: Any, running: Running, **options: Any) -> Iterator[Tab]:
    tab = Tab(browser, running, **options)
    yield tab
    tab.page.close()
    assert tab.problems == []


def generate(prompt: str, preset: str = "tiny", **options: Any) -> tuple[list[str], list[float]]:
    """The paths of the new tokens, and how deep they are."""
    vocabulary = Vocabulary(make_tokenizer(), END)
    tokens = vocabulary.encode(prompt)
    params = SamplingParams(stop_tokens=[END], **options)
    (sample,) = HeldEngine(preset).generate([tokens], params)[0].samples
    paths = [format_path(path) for path in sample.depth.blocks[len(tokens) :]]
    return paths, [path.count("1") / len(path) if path else 1.0 for path in paths]


def test_tokens_are_shaded_as_they_are_written(browser: Any) -> None:
    wish: dict[str, Any] = {"max_tokens": 12, "seed": 4, "temperature": 1, "top_p": 1}
    paths, shades = generate("once upon", **wish)
    assert len(set(shades)) > 1
    engine = HeldEngine()
    with (
        run_server(pairs=[(make_served(), engine)]) as running,
        open_tab(browser, running, **PHONE) as tab,
    ):
        engine.hold()
        tab.send("once upon", **wish)
        engine.gate.release(5)
        tab.wait_tokens(5)
        # the newest token's path is not known yet
        assert [shade for _, shade in tab.read()] == [*shades[:4], 0]
        assert tab.page.locator("#send").inner_text() == "Stop"
        assert "run" not in tab.page.locator("#card-text").inner_text()
        engine.let_go()
        tab.wait_idle()
        assert [shade for _, shade in tab.read()] == [*shades, 0]
        told = tab.lane().locator(".tally").inner_text()
        assert "12 tokens" in told
        assert "of FLOPs saved" in told

        # a tap shows a path, on a sheet that goes again
        card = tab.page.locator("#card")
        assert not card.is_visible()
        place = next(i for i, shade in enumerate(shades) if 0 < shade < 1)
        tab.lane().locator(f"[data-i='{place}']").tap()
        assert f"Token {place}" in card.inner_text()
        kinds = card.locator(".strip li").evaluate_all("nodes => nodes.map(n => n.className)")
        routed = make_config().routed_layers
        assert [kinds[layer] == "in" for layer in routed] == [c == "1" for c in paths[place]]
        assert [kinds[layer] for layer in range(4) if layer not in routed] == ["dense"] * 2
        prompt = Vocabulary(make_tokenizer(), END).encode("once upon")
        params = SamplingParams(stop_tokens=[END], logprobs=5, **wish)
        (sample,) = HeldEngine().generate([prompt], params)[0].samples
        scores = card.locator(".scores tr td:last-child").all_inner_texts()
        logprobs, tops = sample.logprobs or (), sample.top_logprobs or ()
        wanted = [logprobs[place], *(each.logprob for each in tops[place])]
        assert scores == [f"{100 * math.exp(logprob):.1f} %" for logprob in wanted]
        tab.lane().locator("[data-i='11']").dispatch_event("click")
        assert "It has no path" in card.inner_text()
        tab.page.locator("#close").tap()
        assert not card.is_visible()

        # the meters are the server's own numbers
        done = running.worker.metrics
        share = done.executed._value.get() / (
            done.executed._value.get() + done.skipped._value.get()
        )
        assert tab.read_meter() == f"{100 * share:.0f} %"


def test_two_models_race(browser: Any) -> None:
    wish: dict[str, Any] = {"max_tokens": 9, "seed": 4, "temperature": 1, "top_p": 1}
    pairs = [(make_served(), HeldEngine()), make_twin()]
    dark = {"color_scheme": "dark"}
    with run_server(pairs=pairs) as running, open_tab(browser, running, **dark) as tab:
        tab.send("once upon", **wish)
        tab.wait_idle()
        _, shades = generate("once upon", **wish)
        assert [shade for _, shade in tab.read(0)] == [*shades, 0]
        # a dense model has no choice
        assert [shade for _, shade in tab.read(1)] == [1.0] * 9
        assert "dense: all 4 blocks" in tab.lane(1).inner_text()
        tallies = " ".join(tab.page.locator(".tally").all_inner_texts())
        # which one is first, and by how much, depends on the machine
        assert tallies.count("9 tokens ·") == 2
        # the twin cannot chat, so both cannot; the first one alone can
        chat = tab.page.locator("#modes input[value=chat]")
        assert chat.is_disabled()
        tab.page.locator("#models input[value='0']").check(force=True)
        chat.check(force=True)
        tab.send("hi", **wish)
        tab.wait_idle()
        assert tab.lane(0).locator(".entry").count() == 2
        assert tab.lane(1).locator(".entry").count() == 1
        assert tab.lane(0).locator(".chat .prompt").inner_text() == "hi"
        tab.lane(0).locator(".chat [data-i]").last.click()
        assert tab.page.locator(".scores tr").count() == 7
        assert tab.page.locator("#prompt").input_value() == ""
        # the next message has the conversation before it
        before = running.worker.metrics.tokens_in._value.get()
        tab.send("again", **wish)
        tab.wait_idle()
        assert running.worker.metrics.tokens_in._value.get() - before > 20
        tab.page.locator("#clear").click()
        assert tab.page.locator(".entry").count() == 0


def test_it_works_without_a_mouse(browser: Any) -> None:
    engine = HeldEngine()
    with (
        run_server(pairs=[(make_served(None), engine)]) as running,
        open_tab(browser, running) as tab,
    ):
        tab.wait_idle()
        keys = tab.page.keyboard
        # the prompt has the focus from the start
        keys.type("one")
        keys.press("Shift+Enter")
        keys.type("two")
        engine.hold()
        keys.press("Enter")
        engine.gate.release(4)
        tab.wait_tokens(4)
        assert tab.lane().locator(".prompt").inner_text() == "one\ntwo"
        keys.press("Escape")
        engine.let_go()
        tab.wait_idle()
        assert "stopped" in tab.lane().locator(".tally").inner_text()
        running.wait_for(lambda: engine.pages.num_used == 0)
        # one stop for the text, however long; arrows go on from there
        for _ in range(12):
            keys.press("Shift+Tab")
            if tab.page.evaluate("document.activeElement.dataset.i") is not None:
                break
        card = tab.page.locator("#card-text")
        assert "Token 0" in card.inner_text()
        keys.press("ArrowRight")
        keys.press("ArrowRight")
        assert "Token 2" in card.inner_text()
        keys.press("ArrowUp")
        assert "Token 0" in card.inner_text()
        assert tab.page.locator(".text [tabindex='0']").count() == 1


def test_hostile_text_does_nothing(browser: Any) -> None:
    size = make_config().vocab_size
    names = {f"{HOSTILE}{number}": number for number in range(size)}
    # no token is only a part of another
    tokenizer = tokenizers.Tokenizer(models.WordLevel(names, unk_token=f"{HOSTILE}7"))
    vocabulary = Vocabulary(tokenizer, END)
    # a name that has the form of a metric's labels, too
    name = HOSTILE.replace("\u202e", "") + '",model="tiny"} 7'
    hostile = ServedModel(name, make_config(), vocabulary, CHAT, 1)
    pairs = [(hostile, HeldEngine(decode=vocabulary.decode)), make_twin()]
    with run_server(pairs=pairs) as running, open_tab(browser, running) as tab:
        for mode in ("completion", "chat"):
            if mode == "chat":
                tab.page.locator("#models input[value='0']").check(force=True)
                tab.page.locator("#modes input[value=chat]").check(force=True)
            tab.send(HOSTILE, max_tokens=5, seed=1)
            tab.wait_idle()
        assert tab.lane(0).locator(".entry").count() == 2
        texts = [text for text, _ in tab.read(0)]
        # a sample may end early, with a token that has no text
        assert sum(HOSTILE in text for text in texts) >= 5
        tab.lane(0).locator("[data-i='0']").hover()
        assert "onerror" in tab.page.locator("#card-text").inner_text()
        assert "onerror" in tab.lane(0).locator("h2").inner_text()
        assert "onerror" in tab.page.title()
        # its numbers are found by its name
        assert tab.read_meter() != "0 %"
        assert tab.page.evaluate("window.hit") is None
        assert tab.page.locator("img").count() == 0
        assert tab.page.locator("script").count() == 1


def test_a_message_that_fails_can_be_sent_again(browser: Any) -> None:
    engine = HeldEngine()

    def fail(step: int) -> None:
        if step == 1:
            raise RuntimeError("no")

    engine.fail = fail
    with run_server(pairs=[(make_served(), engine)]) as running:
        tab = Tab(browser, running)
        tab.page.locator("#modes input[value=chat]").check(force=True)
        tab.send("hello", max_tokens=3)
        tab.page.get_by_role("alert").wait_for()
        tab.wait_idle()
        assert tab.page.locator("#prompt").input_value() == "hello"
        tab.page.locator("#prompt").press("Enter")
        tab.lane().locator("[data-i]").first.wait_for(state="attached")
        tab.wait_idle()
        assert tab.page.locator("#prompt").input_value() == ""
        tab.page.close()
        # the browser logs every answer with an error status
        assert all("500" in problem for problem in tab.problems)


def test_meters_go_on_after_an_answer_that_breaks_off(browser: Any) -> None:
    with run_server() as running, open_tab(browser, running) as tab:
        tab.wait_idle()
        tab.page.evaluate(
            """() => {
                const { text } = Response.prototype;
                let left = 1;
                Response.prototype.text = function () {
                    const fails = new TypeError("network error");
                    return left-- > 0 ? Promise.reject(fails) : text.call(this);
                };
            }"""
        )
        state = tab.page.locator("#state")
        state.filter(has_text="the connection was lost").wait_for()
        state.filter(has_text="connected").wait_for()
        tab.send("a", max_tokens=3, seed=1)
        assert tab.read_meter() != "0 %"


def test_a_browser_keeps_to_the_pages_policy(browser: Any) -> None:
    with run_server() as running:
        tab = Tab(browser, running)
        tab.wait_idle()
        broken = tab.page.evaluate(
            """async () => {
                const broken = [], tell = (event) => broken.push(event.effectiveDirective);
                document.addEventListener("securitypolicyviolation", tell);
                const add = (name, text) => {
                    const node = document.createElement(name);
                    node.append(text);
                    document.body.append(node);
                };
                const tries = [
                    () => { document.body.innerHTML = "<b>"; },
                    () => add("script", "window.hit = 1"),
                    () => add("style", "body { color: red }"),
                    () => { setTimeout("window.hit = 1"); },
                    () => { new Image().src = "http://127.0.0.1:1/"; },
                    () => fetch("http://127.0.0.1:1/"),
                ];
                // an event says what was refused, whether or not it throws
                for (const each of tries) try { await each(); } catch {}
                await new Promise((resolve) => setTimeout(resolve, 100));
                return broken;
            }"""
        )
        kinds = {"require-trusted-types-for", "style-src-elem", "connect-src", "img-src"}
        assert set(broken) >= kinds
        assert tab.page.evaluate("window.hit") is None
        tab.page.close()


def test_two_models_fit_a_phone(browser: Any) -> None:
    pairs = [(make_served(), HeldEngine()), make_twin()]
    with run_server(pairs=pairs) as running, open_tab(browser, running, **PHONE) as tab:
        tab.wait_idle()
        tab.page.locator("#ignore_eos").evaluate("node => { node.checked = true; }")
        tab.send("once upon", max_tokens=200, seed=4)
        tab.page.locator("#settings").evaluate("node => node.parentElement.open = false")
        tab.wait_idle()
        width, height = PHONE["viewport"]["width"], PHONE["viewport"]["height"]
        assert tab.page.evaluate("document.documentElement.scrollWidth") == width
        boxes = [tab.lane(n).locator(".text").bounding_box() for n in (0, 1)]
        ask = tab.page.locator("#ask").bounding_box()
        # one above the other, and the prompt below both
        assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]
        assert boxes[1]["y"] + boxes[1]["height"] <= ask["y"]
        assert ask["y"] + ask["height"] <= height
        for number, box in enumerate(boxes):
            # some lines can be read, of which the last is the newest
            assert box["height"] > 100
            assert box["width"] > 0.9 * width
            last = tab.lane(number).locator(".tally").bounding_box()
            assert last["y"] + last["height"] <= box["y"] + box["height"] + 1
            for meter in tab.lane(number).locator(".meters > div").all():
                edges = meter.bounding_box()
                assert edges["x"] >= 0
                assert edges["x"] + edges["width"] <= width
        tab.lane(1).locator("[data-i='199']").tap()
        assert "Token 199" in tab.page.locator("#card").inner_text()


def test_a_key_is_asked_for_and_kept_in_memory_only(browser: Any) -> None:
    engine = HeldEngine()
    with run_server(pairs=[(make_served(), engine)], key=SECRET) as running:
        tab = Tab(browser, running)
        door = tab.page.locator("#door")
        for key, told in (("wrong", "kept in this page only"), (SECRET, "does not know this key")):
            door.get_by_text(told).wait_for()
            tab.page.locator("#key").fill(key)
            tab.page.locator("#key").press("Enter")
        tab.send("a", max_tokens=3, seed=1)
        tab.wait_idle()
        assert len(tab.read()) == 3
        places = "{...localStorage}, {...sessionStorage}, document.cookie, location.href"
        assert SECRET not in tab.page.evaluate(f"JSON.stringify([{places}])")
        assert SECRET not in tab.page.content()

        # an error is shown in place of the answer
        def fail(step: int) -> None:
            raise RuntimeError("no")

        engine.fail = fail
        tab.send("b", max_tokens=3)
        tab.wait_idle()
        assert "its log says why" in tab.page.get_by_role("alert").inner_text()
        tab.page.reload()
        door.get_by_text("kept in this page only").wait_for()
        tab.page.close()
        # the browser logs every answer with an error status
        assert all("401" in problem or "500" in problem for problem in tab.problems)
