"""What each route answers: the engine's own results, in OpenAI's shapes, or a sentence."""

import asyncio
import base64
import hashlib
import json
import random
import re
import threading
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthmix.infer import Engine, Sample, SamplingParams
from depthmix.models import Vocabulary
from depthmix.models.chat import render_chat
from depthmix.serve import lane
from depthmix.serve.answers import CompletionDraft, Draft
from depthmix.serve.limits import Limits
from depthmix.serve.shapes import (
    ChatWish,
    CompletionWish,
    DetokenizeWish,
    TokenizeWish,
    WishShape,
)
from served_models import (
    CHAT,
    END,
    Caller,
    HeldEngine,
    Opened,
    make_config,
    make_network,
    make_tokenizer,
    make_twin,
    open_service,
    play,
    read_stream,
)

VOCABULARY = Vocabulary(make_tokenizer(), END)
TEXT = VOCABULARY.encode("once upon")


def generate(prompt: list[int] = TEXT, **options: Any) -> list[Sample]:
    """What the engine itself gives for the same wishes."""
    options = {"stop_tokens": [END], **options}
    return list(HeldEngine().generate([prompt], SamplingParams(**options))[0].samples)


async def read_error(server: Opened, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = await server.ask(path, **body)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error


def test_a_completion_is_what_the_engine_generates() -> None:
    async def scene() -> None:
        wish: dict[str, Any] = {
            "max_tokens": 12,
            "seed": 5,
            "temperature": 0.9,
            "top_p": 0.9,
            "top_k": 50,
        }
        wish |= {"min_p": 0.001, "repetition_penalty": 1.1, "n": 2}
        wish |= {"frequency_penalty": 0.4, "presence_penalty": -0.3}
        truth = generate(**wish)
        async with open_service() as server:
            found = await server.complete(prompt="once upon", model="tiny", **wish)
        assert found["object"] == "text_completion"
        assert found["model"] == "tiny"
        assert [choice["text"] for choice in found["choices"]] == [s.text for s in truth]
        assert [choice["finish_reason"] for choice in found["choices"]] == ["length"] * 2
        usage = found["usage"]
        assert usage["prompt_tokens"] == len(TEXT)
        assert usage["completion_tokens"] == 24
        assert usage["total_tokens"] == 24 + len(TEXT)
        depths = [sample.depth for sample in truth]
        assert usage["depth"] == {
            "blocks_executed": sum(depth.num_visits for depth in depths),
            "blocks": sum(depth.num_visits_dense for depth in depths),
            "flops": sum(depth.flops for depth in depths),
            "flops_saved": sum(depth.dense_flops - depth.flops for depth in depths),
        }
        assert 0 < usage["depth"]["blocks_executed"] < usage["depth"]["blocks"]

    play(scene())


def test_prompts_are_texts_ids_or_lists_of_them() -> None:
    async def scene() -> None:
        wish = {"max_tokens": 5, "temperature": 0}
        one, two = TEXT, VOCABULARY.encode("b")
        texts = [generate(prompt, **wish)[0].text for prompt in (one, two)]
        async with open_service() as server:
            for prompt, wanted in (
                ("once upon", texts[:1]),
                (one, texts[:1]),
                (["once upon", "b"], texts),
                ([one, two], texts),
            ):
                found = await server.complete(prompt=prompt, **wish)
                assert [choice["text"] for choice in found["choices"]] == wanted
            assert found["usage"]["prompt_tokens"] == len(one) + len(two)

    play(scene())


def test_samples_end_where_they_are_told_to() -> None:
    async def scene() -> None:
        (whole,) = generate(max_tokens=20, seed=7, stop_tokens=[])
        assert whole.text is not None
        async with open_service() as server:
            wish = {"prompt": "once upon", "max_tokens": 20, "seed": 7}
            stop = whole.text[4:6]
            (choice,) = (await server.complete(**wish, stop=stop))["choices"]
            assert choice["text"] == whole.text[: whole.text.index(stop)]
            assert choice["finish_reason"] == "stop"
            found = await server.complete(**wish, stop_token_ids=[whole.tokens[3]])
            assert found["choices"][0]["finish_reason"] == "stop"
            assert found["usage"]["completion_tokens"] == 1 + whole.tokens.index(whole.tokens[3])

    play(scene())


def test_a_stop_string_ends_a_stream_before_it() -> None:
    async def scene() -> None:
        (whole,) = generate(max_tokens=20, seed=7, stop_tokens=[])
        assert whole.text is not None
        async with open_service() as server:
            wish: dict[str, Any] = {"prompt": "once upon", "max_tokens": 20, "seed": 7}
            # it comes in two tokens, of which the first is held back
            wish |= {"stop": whole.text[4:6], "stream_options": {"include_usage": True}}
            answer = await server.ask("/v1/completions", stream=True, **wish)
            *events, usage = read_stream(answer.text)
            choices = [event["choices"][0] for event in events]
            assert (
                "".join(choice["text"] for choice in choices)
                == (whole.text[: whole.text.index(wish["stop"])])
            )
            reasons = [choice["finish_reason"] for choice in choices]
            assert reasons == [None] * (len(choices) - 1) + ["stop"]
            assert usage["usage"]["completion_tokens"] < 20
            # what was held back and is not the stop string comes after all
            wish["stop"] = whole.text[4] + "\0"
            answer = await server.ask("/v1/completions", stream=True, **wish)
            *events, _ = read_stream(answer.text)
            assert "".join(event["choices"][0]["text"] for event in events) == whole.text

    play(scene())


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_end_of_a_document_ends_a_sample(ignore_eos: bool) -> None:
    async def scene() -> None:
        wish = {"max_tokens": 12, "seed": 3}
        (truth,) = generate(stop_tokens=[], **wish)
        # as if a token that is drawn ended documents
        end_token = truth.tokens[4]
        async with open_service(end_token=end_token) as server:
            found = await server.complete(prompt=TEXT, ignore_eos=ignore_eos, **wish)
        (choice,) = found["choices"]
        assert choice["finish_reason"] == ("length" if ignore_eos else "stop")
        wanted = 12 if ignore_eos else truth.tokens.index(end_token) + 1
        assert found["usage"]["completion_tokens"] == wanted

    play(scene())


def test_logprobs_are_the_engines() -> None:
    async def scene() -> None:
        (truth,) = generate(max_tokens=6, seed=2, logprobs=3)
        assert truth.logprobs is not None
        assert truth.top_logprobs is not None
        async with open_service() as server:
            found = await server.complete(prompt="once upon", max_tokens=6, seed=2, logprobs=3)
            seen = found["choices"][0]["logprobs"]
            assert seen["token_logprobs"] == list(truth.logprobs)
            for place, others in zip(seen["top_logprobs"], truth.top_logprobs, strict=True):
                assert list(place.values()) == [other.logprob for other in others]
            assert len(seen["tokens"]) == len(seen["text_offset"]) == 6
            assert seen["text_offset"][0] == 0
            assert seen["text_offset"] == sorted(seen["text_offset"])
            # a part of a character is spelled by its number
            for name, token in zip(seen["tokens"], truth.tokens, strict=True):
                assert name in (VOCABULARY.decode([token]), f"token_id:{token}")
                assert "\ufffd" not in name
            bare = await server.complete(prompt="once upon", max_tokens=2, logprobs=0)
            assert bare["choices"][0]["logprobs"]["top_logprobs"] is None
            prompt = VOCABULARY.tokenize(
                render_chat(CHAT, [{"role": "user", "content": "hi"}], add_generation_prompt=True)
            )
            (truth,) = generate(prompt, max_tokens=6, seed=2, logprobs=2)
            found = await server.chat("hi", max_tokens=6, seed=2, logprobs=True, top_logprobs=2)
            content = found["choices"][0]["logprobs"]["content"]
            assert [each["logprob"] for each in content] == list(truth.logprobs or ())
            assert all(len(each["top_logprobs"]) == 2 for each in content)
            for each in content:
                if each["bytes"] is not None:
                    assert bytes(each["bytes"]).decode() == each["token"]

    play(scene())


def test_paths_are_told_where_they_are_asked_for() -> None:
    async def scene() -> None:
        (truth,) = generate(max_tokens=5, seed=2)
        paths = ["".join(str(int(taken)) for taken in path) for path in truth.depth.blocks]
        async with open_service() as server:
            wish = {"prompt": "once upon", "max_tokens": 5, "seed": 2}
            assert (await server.complete(**wish))["choices"][0]["depth"] is None
            seen = (await server.complete(**wish, depth=True))["choices"][0]["depth"]
            assert seen["routed_blocks"] == list(make_config().routed_layers)
            assert seen["prompt"] == paths[: len(TEXT)]
            # the last token is never computed
            assert seen["completion"] == [*paths[len(TEXT) :], None]
            assert len(seen["completion"]) == 5
            answer = await server.ask("/v1/completions", stream=True, depth=True, **wish)
            steps = [event["choices"][0]["depth"] for event in read_stream(answer.text)]
            assert [step["token"] for step in steps] == list(truth.tokens)
            assert [step["previous"] for step in steps] == paths[len(TEXT) - 1 :]

    play(scene())


def test_a_stream_is_the_same_answer_in_pieces() -> None:
    async def scene() -> None:
        wish = {"prompt": ["once", "upon"], "max_tokens": 12, "seed": 4, "n": 2}
        async with open_service() as server:
            whole = await server.complete(**wish)
            answer = await server.ask(
                "/v1/completions", stream=True, stream_options={"include_usage": True}, **wish
            )
            assert answer.headers["content-type"].startswith("text/event-stream")
            *events, last = read_stream(answer.text)
            assert last["choices"] == []
            assert last["usage"] == whole["usage"]
            texts, ends = [""] * 4, [None] * 4
            for event in events:
                assert event["usage"] is None
                (choice,) = event["choices"]
                assert ends[choice["index"]] is None
                texts[choice["index"]] += choice["text"]
                ends[choice["index"]] = choice["finish_reason"]
            assert texts == [choice["text"] for choice in whole["choices"]]
            assert ends == ["length"] * 4
            answer = await server.ask("/v1/completions", stream=True, **wish)
            assert all(event["choices"] for event in read_stream(answer.text))
            options = {"continuous_usage_stats": True}
            answer = await server.ask(
                "/v1/completions", stream=True, stream_options=options, echo=True, **wish
            )
            seen = [event["usage"] for event in read_stream(answer.text)]
            assert [usage["completion_tokens"] for usage in seen[:4]] == [0] * 4
            counts = [usage["completion_tokens"] for usage in seen]
            assert counts == sorted(counts)
            assert {**seen[-1], "depth": whole["usage"]["depth"]} == whole["usage"]

    play(scene())


def test_a_chat_goes_by_the_models_template() -> None:
    async def scene() -> None:
        messages = [
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
        ]
        text = "[system]be brief\n[user]ab\n[assistant]"
        (truth,) = generate(VOCABULARY.tokenize(text), max_tokens=8, seed=6)
        wish = {"messages": messages, "seed": 6}
        async with open_service() as server:
            for name in ("max_tokens", "max_completion_tokens"):
                answer = await server.ask("/v1/chat/completions", **wish, **{name: 8})
                (choice,) = answer.json()["choices"]
                assert choice["message"] == {"role": "assistant", "content": truth.text}
            answer = await server.ask("/v1/chat/completions", **wish, max_tokens=8, stream=True)
            deltas = [event["choices"][0]["delta"] for event in read_stream(answer.text)]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert "".join(delta.get("content", "") for delta in deltas) == truth.text
            # without a limit it goes on to its end, or to the model's
            (choice,) = (await server.chat("h" * 460, ignore_eos=True))["choices"]
            assert choice["finish_reason"] == "length"
            found = await server.ask("/tokenize", messages=messages)
            assert found.json()["tokens"] == VOCABULARY.tokenize(text)
            refused = await read_error(
                server, "/v1/chat/completions", messages=[{"role": "developer", "content": "x"}]
            )
            assert refused[0] == 400
            assert "no developers" in refused[1]["message"]
        async with open_service(chat=None) as server:
            status, error = await read_error(server, "/v1/chat/completions", messages=messages)
            assert (status, error["code"]) == (400, "no_chat_template")

    play(scene())


def test_an_echo_comes_before_the_text() -> None:
    async def scene() -> None:
        wish = {"max_tokens": 4, "seed": 1, "echo": True}
        (truth,) = generate(max_tokens=4, seed=1)
        async with open_service() as server:
            (choice,) = (await server.complete(prompt="once upon", **wish))["choices"]
            assert choice["text"] == f"once upon{truth.text}"
            (choice,) = (await server.complete(prompt=TEXT, **wish))["choices"]
            assert choice["text"] == f"<|endoftext|>once upon{truth.text}"
            answer = await server.ask("/v1/completions", prompt="once upon", stream=True, **wish)
            texts = [event["choices"][0]["text"] for event in read_stream(answer.text)]
            assert texts[0] == "once upon"
            assert "".join(texts) == f"once upon{truth.text}"

    play(scene())


def test_an_echo_scores_the_prompt() -> None:
    text = "once upon é"
    prompts = [VOCABULARY.encode(text), [*VOCABULARY.encode("b"), 0, 200, 5], [7]]
    network = make_network()

    def score(tokens: list[int]) -> torch.Tensor:
        return network(torch.tensor([tokens]), selector="predictor").logits[0].log_softmax(-1)

    async def scene() -> None:
        async with open_service() as server:
            wish = {"seed": 2, "echo": True, "logprobs": 2}
            for count in (0, 3):
                found = await server.complete(prompt=prompts, max_tokens=count, **wish)
                assert found["usage"]["completion_tokens"] == 3 * count
                for tokens, choice in zip(prompts, found["choices"], strict=True):
                    seen = choice["logprobs"]
                    assert len(seen["tokens"]) == len(tokens) + count
                    assert seen["token_logprobs"][0] is seen["top_logprobs"][0] is None
                    truth = score(tokens)
                    for place, token in enumerate(tokens[1:]):
                        logprob = seen["token_logprobs"][place + 1]
                        top = seen["top_logprobs"][place + 1]
                        assert logprob == pytest.approx(truth[place, token].item(), abs=1e-5)
                        assert len(top) == 2
                        assert max(top.values()) == pytest.approx(
                            truth[place].max().item(), abs=1e-5
                        )
                        # these are compared to see whether greedy sampling would draw it
                        assert logprob < max(top.values()) or seen["tokens"][place + 1] in top
                    assert choice["finish_reason"] == "length"
            (sample,) = generate(prompts[0], max_tokens=3, seed=2)
            same = await server.complete(prompt=text, max_tokens=3, **wish)
            (choice,) = same["choices"]
            assert choice["text"] == f"{text}{sample.text}"
            seen, wanted = choice["logprobs"], found["choices"][0]["logprobs"]
            assert seen["token_logprobs"] == wanted["token_logprobs"]
            # the end token begins the document and is not shown; two bytes are one character
            assert seen["text_offset"][:14] == [0, *range(11), 10, 11]
            shift = len("<|endoftext|>")
            assert wanted["text_offset"][:14] == [
                0,
                *range(shift, shift + 11),
                shift + 10,
                shift + 11,
            ]
            bare = await server.complete(
                prompt="ab", max_tokens=0, **{**wish, "logprobs": 0, "n": 2, "depth": True}
            )
            assert [choice["text"] for choice in bare["choices"]] == ["ab", "ab"]
            assert bare["choices"][1]["logprobs"]["top_logprobs"] is None
            assert len(bare["choices"][1]["depth"]["prompt"]) == 3
            assert bare["choices"][1]["depth"]["completion"] == []

    play(scene())


@pytest.mark.parametrize("echo", [False, True])
def test_a_streams_logprobs_are_the_whole_answers(echo: bool) -> None:
    async def scene() -> None:
        async with open_service() as server:
            # a stop string holds text back, and not its tokens' scores
            wish: dict[str, Any] = {"seed": 5, "n": 2, "stop": "no such text", "logprobs": 2}
            wish |= {"prompt": ["once", "b"], "echo": echo}
            for count in (0, 9) if echo else (9,):
                wish["max_tokens"] = count
                whole = await server.complete(**wish)
                streamed = await server.ask("/v1/completions", stream=True, **wish)
                pieces = [event["choices"][0] for event in read_stream(streamed.text)]
                for choice in whole["choices"]:
                    seen = [p for p in pieces if p["index"] == choice["index"]]
                    assert "".join(p["text"] for p in seen) == choice["text"]
                    logprobs = [p["logprobs"] for p in seen if p["logprobs"] is not None]
                    for name, wanted in choice["logprobs"].items():
                        assert [x for each in logprobs for x in each[name]] == wanted
            chat: dict[str, Any] = {"seed": 5, "max_tokens": 9, "logprobs": True}
            chat |= {"top_logprobs": 2, "messages": [{"role": "user", "content": "hi"}]}
            answer = await server.ask("/v1/chat/completions", **chat)
            streamed = await server.ask("/v1/chat/completions", stream=True, **chat)
            found = [event["choices"][0]["logprobs"] for event in read_stream(streamed.text)]
            content = [each for piece in found if piece for each in piece["content"]]
            assert content == answer.json()["choices"][0]["logprobs"]["content"]
            assert len(content) == 9

    play(scene())


def test_tokens_and_texts_are_translated() -> None:
    async def scene() -> None:
        async with open_service() as server:
            found = (await server.ask("/tokenize", prompt="once upon")).json()
            assert found == {"count": len(TEXT), "max_model_len": 512, "tokens": TEXT}
            bare = await server.ask("/tokenize", prompt="once upon", add_special_tokens=False)
            assert bare.json()["tokens"] == TEXT[1:]
            text = await server.ask("/detokenize", tokens=TEXT[1:])
            assert text.json() == {"prompt": "once upon"}
            for wrong in (-1, 257, 10**30):
                status, error = await read_error(server, "/detokenize", tokens=[wrong])
                assert status == 400
                assert "is not a token" in error["message"]
            long = "é" * 20_000
            found = (await server.ask("/tokenize", prompt=long)).json()
            assert found["tokens"] == VOCABULARY.encode(long)

    play(scene())


def test_long_work_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        loop_thread = threading.current_thread()
        places: dict[str, set[bool]] = {}

        def watch(owner: Any, name: str) -> None:
            work = getattr(owner, name)

            def watched(*args: Any, **options: Any) -> Any:
                places.setdefault(name, set()).add(threading.current_thread() is loop_thread)
                return work(*args, **options)

            monkeypatch.setattr(owner, name, watched)

        for owner, name in (
            (Vocabulary, "tokenize"),
            (Vocabulary, "decode"),
            (lane, "render_chat"),
            (Draft, "finish"),
            (CompletionDraft, "start_stream"),
        ):
            watch(owner, name)
        async with open_service() as server:

            async def check(names: list[str], answer: httpx.Response, *, status: int = 200) -> None:
                assert answer.status_code == status
                # where each was done
                assert [places.get(name) for name in names] == [{False}] * len(names)
                places.clear()

            long = "a" * 5000
            messages = [{"role": "user", "content": long}]
            await check(["tokenize"], await server.ask("/tokenize", prompt=long))
            # refused as too long, but only after it was encoded
            both = ["render_chat", "tokenize"]
            await check(both, await server.ask("/tokenize", messages=messages), status=400)
            messages = [{"role": "user", "content": ""}] * 99
            await check(both, await server.ask("/tokenize", messages=messages), status=400)
            await check(["decode"], await server.ask("/detokenize", tokens=[66] * 5000))
            # none of them alone is long
            many = ["a" * 99] * 50
            await check(
                ["tokenize"], await server.ask("/v1/completions", prompt=many, max_tokens=1)
            )
            wish: dict[str, Any] = {"max_tokens": 20, "n": 16, "ignore_eos": True, "seed": 1}
            chat = {**wish, "messages": [{"role": "user", "content": "a"}]}
            chat |= {"logprobs": True, "top_logprobs": 20}
            await check(["finish"], await server.ask("/v1/chat/completions", **chat))
            wish |= {"prompt": "a" * 20, "logprobs": 20, "echo": True}
            await check(["finish"], await server.ask("/v1/completions", **wish))
            answer = await server.ask("/v1/completions", **wish, stream=True)
            await check(["start_stream"], answer)
            # what is short is done at once
            await server.complete(prompt="a", max_tokens=2)
            assert (places["tokenize"], places["finish"]) == ({True}, {True})

    play(scene())


def test_the_length_is_looked_at_before_the_tokens() -> None:
    async def scene() -> None:
        async with open_service() as server:
            _, error = await read_error(server, "/v1/completions", prompt=[1] * 512 + [999])
            assert "513 tokens, and 512 are allowed" in error["message"]
            _, error = await read_error(server, "/v1/completions", prompt=[1] * 511 + [999])
            assert "999 is not a token" in error["message"]

    play(scene())


def test_a_choice_that_looks_like_the_answers_frame_stays_a_text() -> None:
    async def scene() -> None:
        async with open_service() as server:
            text = '"choices":[]'
            found = await server.complete(prompt=[text, "b"], echo=True, max_tokens=0)
            assert [choice["text"] for choice in found["choices"]] == [text, "b"]

    play(scene())


def test_models_health_and_metrics() -> None:
    async def scene() -> None:
        async with open_service() as server:
            models = (await server.client.get("/v1/models")).json()
            assert [model["id"] for model in models["data"]] == ["tiny"]
            assert (await server.client.get("/v1/models/tiny")).json() == models["data"][0]
            assert (await server.client.get("/v1/models/else")).status_code == 404
            found = await server.complete(prompt="once upon", max_tokens=3, seed=1)
            await read_error(server, "/v1/completions", prompt="x", model="else")
            await read_error(server, "/v1/completions", prompt=7)
            health = await server.client.get("/health")
            assert health.status_code == 200
            assert health.json()["status"] == "ok"
            lines = (await server.client.get("/metrics")).text.splitlines()
            values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
            # all of them name their model
            values = {name.replace('{model="tiny"}', ""): each for name, each in values.items()}
            depth = found["usage"]["depth"]
            place = 'endpoint="/v1/completions",model="tiny"'
            for name, wanted in (
                (f'requests_total{{{place},outcome="completed"}}', 1),
                (f'requests_total{{{place},outcome="refused"}}', 2),
                ("prompt_tokens_total", len(TEXT)),
                ("generated_tokens_total", 3),
                ("time_to_first_token_seconds_count", 1),
                ("time_per_output_token_seconds_count", 1),
                ("blocks_executed_total", depth["blocks_executed"]),
                ("blocks_skipped_total", depth["blocks"] - depth["blocks_executed"]),
                ("flops_saved_total", depth["flops_saved"]),
                ("samples_running", 0),
                ("samples_waiting", 0),
                ("preemptions_total", 0),
                ("cache_pages_used", 0),
                ("cache_pages", server.engine.pages.num_pages),
            ):
                assert float(values[f"depthmix_{name}"]) == wanted, name

    play(scene())


def test_two_models_have_their_own_lines() -> None:
    async def scene() -> None:
        twin = make_twin()
        async with open_service(others=[twin]) as server:
            cards = (await server.client.get("/v1/models")).json()["data"]
            seen = [(c["id"], c["num_blocks"], len(c["routed_blocks"])) for c in cards]
            assert seen == [("tiny", 4, 2), ("twin", 4, 0)]
            assert [card["has_chat_template"] for card in cards] == [True, False]
            assert (await server.client.get("/v1/models/twin")).json() == cards[1]
            # without a name it is the first
            for wish, name in (
                ({}, "tiny"),
                ({"model": "tiny"}, "tiny"),
                ({"model": "twin"}, "twin"),
            ):
                found = await server.complete(prompt="a", max_tokens=3, ignore_eos=True, **wish)
                assert found["model"] == name
                depth = found["usage"]["depth"]
                assert (depth["blocks_executed"] == depth["blocks"]) == (name == "twin")
            assert await server.chat("hi", max_tokens=2)
            status, error = await read_error(
                server,
                "/v1/chat/completions",
                model="twin",
                messages=[{"role": "user", "content": ""}],
            )
            assert (status, error["code"]) == (400, "no_chat_template")
            status, error = await read_error(server, "/tokenize", model="else", prompt="a")
            assert (status, error["code"]) == (404, "model_not_found")
            assert "'tiny' and 'twin' are served" in error["message"]
            lines = (await server.client.get("/metrics")).text.splitlines()
            assert len(lines) == len(set(lines)), "each family appears once"
            place = 'requests_total{endpoint="/v1/completions",model="%s",outcome="completed"}'
            assert f"depthmix_{place % 'tiny'} 2.0" in lines
            assert f"depthmix_{place % 'twin'} 1.0" in lines
            assert 'depthmix_generated_tokens_total{model="twin"} 3.0' in lines
            # one of them is busy, both are well
            twin[1].hold()
            caller = Caller(server.app, "/v1/completions", model="twin", prompt="a", max_tokens=9)
            await server.wait_for(lambda: twin[1].stats().num_waiting == 1)
            await server.complete(prompt="a", max_tokens=2)
            twin[1].let_go()
            await caller.task
            health = (await server.client.get("/health")).json()
            assert (health["status"], health["running"], health["waiting"]) == ("ok", 0, 0)

            def break_down(step: int) -> None:
                raise RuntimeError("no")

            twin[1].fail = break_down
            assert (await read_error(server, "/v1/completions", model="twin", prompt="a"))[0] == 500
            health = (await server.client.get("/health")).json()
            assert (health["status"], health["failed_steps"]) == ("failing", 1)
            assert await server.complete(prompt="a", max_tokens=2)

    play(scene())


def test_preemptions_are_counted() -> None:
    async def scene() -> None:
        # room for one long sequence, and two that want to grow
        engine = HeldEngine(max_batch=2, cache_tokens=64)
        async with open_service(engine=engine) as server:
            wish = {"max_tokens": 50, "ignore_eos": True, "seed": 1}
            await server.complete(prompt=["a", "b"], **wish)
            lines = (await server.client.get("/metrics")).text.splitlines()
            (value,) = [
                float(x.split()[1]) for x in lines if x.startswith("depthmix_preemptions_t")
            ]
            assert value == engine.stats().num_preempted > 0

    play(scene())


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"foo": 1}, "foo", "'foo' is not supported"),
        ({"best_of": 2}, "best_of", "'best_of' is not supported"),
        ({"logit_bias": {"1": 2}}, "logit_bias", "'logit_bias' is not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "is for streams"),
        ({"stream": True, "stream_options": {"x": 1}}, "x", "'x' is not supported"),
        ({"prompt": 7}, "prompt", "must be a text"),
        ({"prompt": []}, "prompt", "must be a text"),
        ({"prompt": [[]]}, "prompt", "must be a text"),
        ({"prompt": [1, "a"]}, "prompt", "must be a text"),
        ({"prompt": [[1], ["a"]]}, "prompt", "token ids"),
        ({"prompt": [True]}, "prompt", "must be a text"),
        ({"prompt": [1.5]}, "prompt", "must be a text"),
        ({"prompt": None}, "prompt", "is missing"),
        ({"prompt": [-1]}, None, "is not a token"),
        ({"prompt": [257]}, None, "is not a token"),
        ({"prompt": [10**40]}, None, "is not a token"),
        ({"prompt": "x" * 600}, None, "512 are allowed"),
        ({"max_tokens": 0}, "max_tokens", "needs echo: set echo to true"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"min_p": 2}, "min_p", "less than or equal to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
        ({"presence_penalty": -3}, "presence_penalty", "greater than or equal to -2"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"seed": 1 << 70}, "seed", "less than"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"stop": [1]}, "stop", "list of texts"),
        ({"stop": ["a"] * 17}, "stop", "16 texts"),
        ({"stop": ["a" * 1025]}, "stop", "1024 characters"),
        ({"stop": [""]}, None, "empty string"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "greater than or equal to 0"),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids", "at most 256"),
        ({"model": "else"}, None, "there is no model 'else' here: 'tiny' is served"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_by_name(
    body: dict[str, Any], param: str | None, words: str
) -> None:
    async def scene() -> None:
        async with open_service() as server:
            status, error = await read_error(server, "/v1/completions", **{"prompt": "a", **body})
            assert status == (404 if "model" in body else 400)
            assert words in error["message"]
            assert error["param"] == param
            assert error["type"] == "invalid_request_error"
            assert server.engine.num_steps == 0

    play(scene())


def test_two_names_of_one_limit_must_agree() -> None:
    async def scene() -> None:
        async with open_service() as server:
            found = await server.chat("a", max_tokens=3, max_completion_tokens=3, ignore_eos=True)
            assert found["usage"]["completion_tokens"] == 3
            messages = [{"role": "user", "content": "a"}]
            status, error = await read_error(
                server,
                "/v1/chat/completions",
                messages=messages,
                max_tokens=3,
                max_completion_tokens=4,
            )
            assert (status, error["param"]) == (400, "max_completion_tokens")
            assert "differ" in error["message"]

    play(scene())


def test_a_conversation_has_a_longest_length() -> None:
    async def scene() -> None:
        async with open_service(Limits(max_body_bytes=8 << 20)) as server:
            parts = [{"type": "text", "text": ""}] * 4097
            for path in ("/v1/chat/completions", "/tokenize"):
                many = [{"role": "user", "content": ""}] * 4097
                status, error = await read_error(server, path, messages=many)
                assert (status, error["param"]) == (400, "messages")
                assert "at most 4096" in error["message"]
                one = [{"role": "user", "content": parts}]
                status, error = await read_error(server, path, messages=one)
                assert (status, error["param"]) == (400, "messages")
                assert "at most 4096" in error["message"]

    play(scene())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (7, "'messages.0.content' does not fit: must be a text or a list of text parts"),
        ([{"type": "image_url", "image_url": "x"}], "the parameter 'image_url' is not supported"),
        ([{"type": "image_url"}], "'messages.0.content.parts.0.type' does not fit: Input should"),
        ([{"type": "text"}], "'messages.0.content.parts.0.text' is missing"),
        (["a"], "'messages.0.content.parts.0' does not fit: must be a JSON object"),
    ],
)
def test_what_is_wrong_with_a_message_is_named(content: Any, sentence: str) -> None:
    async def scene() -> None:
        async with open_service() as server:
            messages = [{"role": "user", "content": content}]
            for path in ("/v1/chat/completions", "/tokenize"):
                status, error = await read_error(server, path, messages=messages)
                assert status == 400
                assert error["message"].startswith(sentence)

    play(scene())


def test_what_changes_nothing_is_taken() -> None:
    async def scene() -> None:
        async with open_service() as server:
            wish = {"prompt": "a", "max_tokens": 3, "seed": 1}
            plain = (await server.complete(**wish))["choices"]
            more = {"frequency_penalty": 0, "presence_penalty": 0.0, "top_k": -1, "best_of": None}
            assert (await server.complete(**wish, **more))["choices"] == plain

    play(scene())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt": [' + b"1," * 100_000 + b'"x"]}',
        b'{"\\ud800": 1}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "stop": "\\ud800", "x": 1}',
        b'{"prompt": "a", "__class__": 1}',
        b'{"messages": [' + b"1," * 5000 + b"1]}",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_hostile_bodies_are_refused(body: bytes) -> None:
    async def scene() -> None:
        async with open_service() as server:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                answer = await server.client.post(
                    path, content=body, headers={"Content-Type": "application/json"}
                )
                assert answer.status_code == 400, (path, answer.text)
                message = answer.json()["error"]["message"]
                assert "Traceback" not in message
                assert len(message) < 500
            # and it goes on
            await server.complete(prompt="a", max_tokens=1)

    play(scene())


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([2**31, -(2**63), 2**63, 10**40])
    | st.floats()
    | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "system", "tool"]) | VALUES, "content": VALUES}
)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/completions", CompletionWish),
        ("/v1/chat/completions", ChatWish),
        ("/tokenize", TokenizeWish),
        ("/detokenize", DetokenizeWish),
    ],
)
def test_no_body_makes_the_server_fail(path: str, shape: type[WishShape]) -> None:
    # some tokens are enough, and a wish for all of them would take its time
    names = [name for name in shape.model_fields if name not in ("max_tokens", "messages")]
    bodies = st.dictionaries(st.sampled_from(names) | st.text(max_size=4), VALUES, max_size=3)
    messages = st.lists(MESSAGE, max_size=2)

    @settings(max_examples=12)
    @given(st.lists(st.tuples(bodies, messages, VALUES), min_size=8, max_size=8))
    def check(wishes: list[tuple[dict[str, Any], Any, Any]]) -> None:
        async def scene() -> None:
            async with open_service(engine=engine) as server:
                for body, seen, prompt in wishes:
                    if "max_tokens" in shape.model_fields:
                        body = {"max_tokens": 2, **body}
                    if "messages" in shape.model_fields and seen:
                        body = {"messages": seen, **body}
                    if "prompt" in shape.model_fields:
                        body = {"prompt": prompt, **body}
                    answer = await server.client.post(
                        path,
                        content=json.dumps(body),
                        headers={"Content-Type": "application/json"},
                    )
                    assert answer.status_code in (200, 400, 404), (body, answer.text)
                    if answer.status_code != 200:
                        assert answer.json()["error"]["message"]

        play(scene())

    engine = HeldEngine()
    check()


def test_unknown_paths_and_methods_have_the_same_shape() -> None:
    async def scene() -> None:
        async with open_service() as server:
            for method, path, status in (
                ("GET", "/nope", 404),
                ("GET", "/v1/completions", 405),
                ("POST", "/health", 405),
            ):
                answer = await server.client.request(method, path)
                assert answer.status_code == status
                assert path in answer.json()["error"]["message"]
                allowed = {"/v1/completions": "POST", "/health": "GET"}.get(path)
                assert answer.headers.get("allow") == allowed
            answer = await server.client.post("/v1/completions", content=b'{"prompt": "a"}')
            assert answer.status_code == 400
            assert "application/json" in answer.json()["error"]["message"]

    play(scene())


def test_the_schema_tells_every_kind_of_answer() -> None:
    async def scene() -> None:
        async with open_service() as server:
            schema = (await server.client.get("/openapi.json")).json()
            assert "/" not in schema["paths"], "the page is not for programs"
            for path, methods in schema["paths"].items():
                (route,) = methods.values()
                for status in ("4XX", "5XX"):
                    seen = route["responses"][status]["content"]
                    assert set(seen) == {"application/json"}
                    assert seen["application/json"]["schema"]["$ref"].endswith("/ProblemAnswer")
                # how FastAPI itself refuses is not how we do
                assert "422" not in route["responses"]
                kinds = set(route["responses"]["200"]["content"])
                is_streamed = "text/event-stream" in kinds
                assert is_streamed == (path in ("/v1/completions", "/v1/chat/completions"))

    play(scene())


def read_hashes(policy: str, kind: str) -> list[str]:
    (names,) = re.findall(rf"{kind}-src ([^;]*)", policy)
    return names.split()


def test_the_page_is_open_and_allows_nothing_but_itself() -> None:
    async def scene() -> None:
        async with open_service(key="a-key") as server:
            answer = await server.client.get("/")
            assert (await server.client.post("/")).status_code == 405
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        for kind in ("style", "script"):
            (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert read_hashes(policy, kind) == [f"'sha256-{digest}'"]
        # nothing of the models is in it, and nothing of others
        assert "tiny" not in answer.text
        assert not re.findall(r"""(?:src|href|action)=(?!"data:)""", answer.text)
        assert "{{" not in answer.text

    play(scene())


def test_nothing_of_the_inside_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with open_service() as server:

            def fail(*_: object) -> None:
                raise KeyError("/secret/path")

            monkeypatch.setattr(server.worker, "submit", fail)
            status, error = await read_error(server, "/v1/completions", prompt="a")
            assert status == 500
            assert error["message"] == "the server failed: its log says why"
            # nor where answering the failure fails, too
            monkeypatch.setattr(server.worker.metrics.requests, "labels", fail)
            assert (await read_error(server, "/v1/completions", prompt="a"))[0] == 500

    play(scene())


def test_a_stream_that_fails_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with open_service() as server:

            def fail(*_: object) -> None:
                raise KeyError("/secret/path")

            monkeypatch.setattr(CompletionDraft, "continue_stream", fail)
            answer = await server.ask("/v1/completions", prompt="a", stream=True)
            *_, last, rest = answer.text.split("\n\n")
            assert rest == ""
            error = json.loads(last.removeprefix("data: "))["error"]
            assert error["message"] == "the server failed: its log says why"
            counts = (await server.client.get("/metrics")).text
            (line,) = (x for x in counts.splitlines() if x.startswith("depthmix_requests_total"))
            assert 'outcome="failed"' in line
            assert line.endswith(" 1.0")

    play(scene())


def test_an_address_need_not_be_text() -> None:
    async def scene() -> None:
        async with open_service() as server:

            async def call(scope: Any, receive: Any, send: Any) -> None:
                # not every server refuses what is not ASCII
                await server.app({**scope, "query_string": b"\xff"}, receive, send)

            for path, wanted in (("/v1/completions", 200), ("/nope", 404)):
                caller = Caller(call, path, prompt="a", max_tokens=1)
                await caller.task
                assert caller.sent[0]["status"] == wanted
                assert json.loads(caller.text)

    play(scene())


@pytest.mark.parametrize(
    ("limits", "body", "words"),
    [
        (Limits(max_n=2), {"n": 3}, "n = 3 is more than 2"),
        (Limits(max_samples=4), {"n": 2, "prompt": ["a"] * 3}, "more than 4 samples"),
        (Limits(max_prompt_tokens=3), {"prompt": "abcd"}, "5 tokens, and 3 are allowed"),
        (Limits(max_queue=0), {"n": 5}, "more than this server can hold (4)"),
    ],
)
def test_wishes_over_a_limit_are_refused(limits: Limits, body: dict[str, Any], words: str) -> None:
    async def scene() -> None:
        async with open_service(limits) as server:
            status, error = await read_error(server, "/v1/completions", **{"prompt": "a", **body})
            assert status == 400
            assert words in error["message"]
            await server.complete(prompt="a", max_tokens=1)

    play(scene())


def test_a_full_queue_answers_429() -> None:
    async def scene() -> None:
        engine = HeldEngine(max_batch=1)
        engine.hold()
        async with open_service(Limits(max_queue=1), engine=engine) as server:
            held = [
                asyncio.ensure_future(server.complete(prompt="a", max_tokens=2)) for _ in range(2)
            ]
            await server.wait_for(lambda: server.worker.num_open == 2)
            answer = await server.ask("/v1/completions", prompt="a")
            assert answer.status_code == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
            engine.let_go()
            await asyncio.gather(*held)
            await server.complete(prompt="a", max_tokens=1)

    play(scene())


def test_loading_and_draining_answer_503() -> None:
    async def scene() -> None:
        engine, is_loaded = HeldEngine(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def load() -> Engine:
            asyncio.run_coroutine_threadsafe(is_loaded.wait(), loop).result(30)
            return engine

        async with open_service(load=load, engine=engine) as server:

            async def check(status: str) -> None:
                for path, body in (
                    ("/v1/completions", {"prompt": "a"}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                    ("/tokenize", {"prompt": "a"}),
                ):
                    answer = await server.ask(path, **body)
                    assert answer.status_code == 503
                    assert answer.json()["error"]["type"] == "service_unavailable"
                    assert int(answer.headers["Retry-After"]) >= 1
                assert (await server.client.get("/v1/models")).status_code == 503
                health = await server.client.get("/health")
                assert (health.status_code, health.json()["status"]) == (503, status)

            await check("loading")
            is_loaded.set()
            await server.worker.wait_loaded()
            engine.hold()
            held = asyncio.ensure_future(server.complete(prompt="a", max_tokens=2))
            await server.wait_for(lambda: server.worker.num_open == 1)
            server.worker.drain()
            await check("draining")
            engine.let_go()
            assert (await held)["usage"]["completion_tokens"] == 2

    play(scene())


def test_a_failed_step_is_answered_and_shows() -> None:
    async def scene() -> None:
        async with open_service() as server:

            def fail(step: int) -> None:
                if step in (1, 4):
                    raise RuntimeError("boom at /secret")

            server.engine.fail = fail
            answer = await server.ask("/v1/completions", prompt="a")
            assert answer.status_code == 500
            assert "secret" not in answer.text
            health = await server.client.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "failing")
            assert health.json()["failed_steps"] == 1
            # in a stream the status has been sent
            answer = await server.ask("/v1/completions", prompt="a", stream=True, ignore_eos=True)
            assert answer.status_code == 200
            *_, last, rest = answer.text.split("\n\n")
            assert rest == ""
            assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
            await server.complete(prompt="a", max_tokens=2)
            assert (await server.client.get("/health")).json()["status"] == "ok"
            assert server.engine.pages.num_used == 0

    play(scene())


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_pages(stream: bool) -> None:
    async def scene() -> None:
        engine = HeldEngine()
        engine.hold()
        async with open_service(engine=engine) as server:
            wish = {"prompt": "a" * 100, "max_tokens": 400, "ignore_eos": True, "stream": stream}
            caller = Caller(server.app, "/v1/completions", **wish)
            engine.gate.release(3)
            await server.wait_for(lambda: engine.num_steps == 3)
            assert engine.pages.num_used > 0
            await caller.leave()
            # the step that was under way
            engine.gate.release()
            await server.wait_for(lambda: server.worker.num_open == 0)
            assert engine.pages.num_used == 0
            assert engine.num_steps <= 4
            engine.let_go()
            text = (await server.client.get("/metrics")).text
            assert 'outcome="cancelled"} 1.0' in text

    play(scene())


def test_many_clients_of_whom_half_leave_leak_nothing() -> None:
    async def scene() -> None:
        dice = random.Random(5)
        engine = HeldEngine(max_batch=8, cache_tokens=1024)
        async with open_service(engine=engine) as server:
            callers: list[tuple[Caller, bool]] = []

            async def call(number: int) -> None:
                leaves = number % 2 == 0
                size = 40 if leaves else 3
                wish = {"prompt": "a" * dice.randrange(1, 60), "max_tokens": size, "n": 2}
                wish |= {"stream": dice.random() < 0.5, "ignore_eos": True, "seed": number}
                caller = Caller(server.app, "/v1/completions", **wish)
                callers.append((caller, leaves))
                if leaves:
                    num_steps = engine.num_steps + dice.randrange(0, 30)
                    await server.wait_for(
                        lambda: engine.num_steps >= num_steps or caller.task.done()
                    )
                    await caller.leave()
                await caller.task

            await asyncio.gather(*map(call, range(64)))
            await server.worker.wait_idle()
            assert engine.pages.num_used == 0
            assert not engine.has_work
            assert server.worker._prompts == {}
            stayed = [caller for caller, leaves in callers if not leaves]
            assert len(stayed) == 32
            for caller in stayed:
                assert caller.sent[0]["status"] == 200
                assert caller.text.endswith("[DONE]\n\n") or json.loads(caller.text)["usage"]

    play(scene())


def test_a_client_that_waits_in_line_may_leave() -> None:
    async def scene() -> None:
        engine = HeldEngine(max_batch=1)
        engine.hold()
        async with open_service(engine=engine) as server:
            first = Caller(server.app, "/v1/completions", prompt="a", max_tokens=3)
            await server.wait_for(lambda: server.worker.num_open == 1)
            second = Caller(server.app, "/v1/completions", prompt="b", max_tokens=3)
            await server.wait_for(lambda: server.worker.num_open == 2)
            await second.leave()
            engine.let_go()
            await first.task
            assert json.loads(first.text)["usage"]["completion_tokens"] == 3
            await server.worker.wait_idle()
            assert second.sent == [] or second.sent[0]["status"] == 499

    play(scene())


def test_the_schema_is_there_and_the_pages_are_not() -> None:
    async def scene() -> None:
        async with open_service() as server:
            schema = (await server.client.get("/openapi.json")).json()
            assert {"/v1/completions", "/v1/chat/completions", "/health"} <= set(schema["paths"])
            assert (await server.client.get("/docs")).status_code == 404

    play(scene())
