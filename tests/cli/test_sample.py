"""`depthmix sample`: what it prints, what it takes, what it refuses."""

import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import depthmix
from depthmix.cli import main
from depthmix.cli.sample import read_escapes
from depthmix.data.tokenizer import load_tokenizer
from depthmix.infer import Engine, SamplingParams
from depthmix.models import open_model
from depthmix.models.vocabulary import Vocabulary
from depthmix.sample import Sampler
from depthmix.sample.show import Shader, hide_controls, shade_tokens
from test_architecture import modules_loaded_by
from text_runs import write_text_run

COLORS = re.compile(r"\x1b\[[0-9;]*m")
SUMMARY = re.compile(
    r"\d+ tokens?(, [\d,.]+ tokens/s)?; loaded in [\d.]+ s(, compiled in [\d.]+ s)?; "
    r"[\d.]+% of blocks executed, -?[\d.]+% of the dense FLOPs saved; "
    r"cache [\d.]+ [KM]iB(; seed \d+)?"
)


class Told(NamedTuple):
    code: int
    out: str
    err: str


Ask = Callable[..., Told]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_run(tmp_path_factory.mktemp("sampling"))


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TERM", "NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ask(run: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    def ask(*args: object, path: Path = run) -> Told:
        code = main(["sample", str(path), "--device", "cpu", *map(str, args)])
        return Told(code, *capsys.readouterr())

    return ask


def test_greedy_text_is_the_engines(run: Path, ask: Ask) -> None:
    told = ask("--prompt", "line 12", "--temperature", 0, "--max-tokens", 9, "--ignore-eos")
    assert told.code == 0
    tokenizer = load_tokenizer(run.parent / "data")
    # a prompt begins a document, as documents do in training
    prompt = [0, *tokenizer.encode("line 12").ids]
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    engine = Engine(open_model(run).network, decode=decode)
    (result,) = engine.generate([prompt], SamplingParams(max_tokens=9, temperature=0))
    assert result.samples[0].text
    assert told.out == f"line 12{result.samples[0].text}\n"
    assert SUMMARY.fullmatch(told.err.strip())
    assert "seed" not in told.err
    share = result.samples[0].depth.share_executed
    assert told.err.startswith("9 tokens, ")
    assert f"{share:.1%} of blocks executed" in told.err


def test_a_seed_gives_the_same_text_however_it_is_printed(ask: Ask) -> None:
    wish = ("--prompt", "li", "--max-tokens", 12)
    first = ask(*wish)
    seed = re.search(r"seed (\d+)", first.err)
    assert seed is not None
    assert ask(*wish, "--seed", seed[1], "--stream").out == first.out
    assert ask(*wish, "--seed", seed[1], "--no-stream").out == first.out
    assert ask(*wish, "--seed", int(seed[1]) + 1).out != first.out
    # regardless of other prompts
    more = ask("--prompt", "other", *wish, "--seed", seed[1], "--batch", 1)
    assert more.out.split("--- prompt 2 of 2 ---\n")[1] == first.out
    unechoed = ask(*wish, "--seed", seed[1], "--no-echo")
    assert first.out == "li" + unechoed.out


def test_several_samples_have_headings(ask: Ask) -> None:
    told = ask("--prompt", "a", "--prompt", "b", "-n", 2, "--max-tokens", 3, "--seed", 1)
    headings = [line for line in told.out.splitlines() if line.startswith("---")]
    assert headings == [
        f"--- prompt {prompt} of 2, sample {number} of 2 ---"
        for prompt in (1, 2)
        for number in (1, 2)
    ]
    assert "12 tokens, " in told.err
    streamed = ask(
        *("--prompt", "a", "--prompt", "b", "-n", 2, "--max-tokens", 3, "--seed", 1, "--stream")
    )
    assert sorted(streamed.out.splitlines()) == sorted(told.out.splitlines())
    alone = ask("-n", 2, "--max-tokens", 3)
    assert alone.out.startswith("--- sample 1 of 2 ---\n")


def test_json_is_one_object_a_sample(run: Path, ask: Ask) -> None:
    # the end of a document would be a shorter sample; any seed will do
    wish = ("--prompt", "a", "-n", 2, "--max-tokens", 4, "--seed", 1, "--ignore-eos")
    told = ask(*wish, "--json", "--logprobs", 2)
    assert (told.code, told.err) == (0, "")
    found = [json.loads(line) for line in told.out.splitlines()]
    assert [tree["sample"] for tree in found] == [0, 1]
    decode = partial(load_tokenizer(run.parent / "data").decode, skip_special_tokens=False)
    for tree in found:
        assert tree["prompt"] == "a"
        assert tree["finish"] == "length"
        assert len(tree["tokens"]) == len(tree["logprobs"]) == len(tree["top_logprobs"]) == 4
        assert decode(tree["tokens"]) == tree["text"]
        assert all(len(place) == 2 for place in tree["top_logprobs"])
        # the last token is never computed
        computed = len(tree["prompt_tokens"]) + 3
        assert len(tree["depth"]["used_by_token"]) == computed
        assert 0 < tree["depth"]["share_executed"] <= 1


def test_no_prompt_begins_a_document(ask: Ask) -> None:
    for args in ((), ("--prompt", "")):
        told = ask(*args, "--max-tokens", 5, "--json", "--seed", 3)
        assert json.loads(told.out)["prompt_tokens"] == [0]
    plain = ask("--max-tokens", 5, "--seed", 3)
    assert plain.out == json.loads(told.out)["text"] + "\n"


def test_prompts_come_from_files(tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("liné\n".encode())
    told = ask("--file", path, "--max-tokens", 2, "--json")
    assert json.loads(told.out)["prompt"] == "liné"
    told = ask("--file", path, "--keep-newline", "--max-tokens", 2, "--json")
    assert json.loads(told.out)["prompt"] == "liné\n"
    # one line end, and not all of them
    path.write_bytes(b"li\r\n\r\n")
    told = ask("--file", path, "--max-tokens", 2, "--json")
    assert json.loads(told.out)["prompt"] == "li\r\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    told = ask("--prompt", "x", "--file", "-", "--max-tokens", 2, "--json")
    assert [json.loads(line)["prompt"] for line in told.out.splitlines()] == ["x", "from a pipe"]
    path.write_bytes(b"\xff\xfe")
    told = ask("--file", path)
    assert told.code == 2
    assert "is not text in UTF-8" in told.err


def test_stop_strings_end_a_sample(ask: Ask) -> None:
    wish = ("--prompt", "line", "--temperature", 0, "--max-tokens", 20, "--json")
    whole = json.loads(ask(*wish).out)
    stop = whole["text"][3:6]
    cut = json.loads(ask(*wish, "--stop", stop, "--stop", "never there").out)
    assert cut["finish"] == "stop"
    assert cut["text"] == whole["text"].split(stop)[0]


def test_stop_strings_may_have_escapes() -> None:
    assert read_escapes(r"a\n\tb\r") == "a\n\tb\r"
    # a backslash itself, and what is not an escape
    assert read_escapes(r"\\n \d é\\") == r"\n \d é" + "\\"


def test_a_stop_string_with_an_escape_reaches_the_engine(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops, add = [], Engine.add

    def add_and_note(engine: Engine, prompt: Any, params: SamplingParams) -> int:
        stops.append(params.stop)
        return add(engine, prompt, params)

    monkeypatch.setattr(Engine, "add", add_and_note)
    assert ask("--max-tokens", 2, "--stop", r"\n", "--stop", "end").code == 0
    assert set(stops) == {("\n", "end")}


def test_different_prompts_get_different_noise(run: Path, ask: Ask) -> None:
    # drawn from almost equal odds, equal noise would give equal tokens
    wish = ("--temperature", 1e6, "--seed", 3, "--max-tokens", 8, "--ignore-eos", "--json")
    told = ask("--prompt", "a", "--prompt", "b", *wish)
    first, second = (json.loads(line)["tokens"] for line in told.out.splitlines())
    assert len({*zip(first, second, strict=True)} - {(t, t) for t in first}) >= 6
    # and a prompt's own does not depend on the others
    assert json.loads(ask("--prompt", "b", *wish).out)["tokens"] == second
    options: dict[str, Any] = {"temperature": 1e6, "seed": 3, "max_tokens": 8}
    texts = depthmix.open_model(run).generate(["a", "b"], **options, stop_tokens=[299])
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.5),
        ("top_k", 3),
        ("top_p", 0.7),
        ("min_p", 0.4),
        ("repetition_penalty", 1.9),
        ("frequency_penalty", 0.3),
        ("presence_penalty", -0.6),
    ],
)
def test_every_sampling_parameter_reaches_the_engine(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    found: list[SamplingParams] = []
    add = Sampler.add

    def note(self: Sampler, prompt: list[int], params: SamplingParams) -> int:
        found.append(params)
        return add(self, prompt, params)

    monkeypatch.setattr(Sampler, "add", note)
    assert ask("--prompt", "a", "--max-tokens", 2, f"--{name.replace('_', '-')}", value).code == 0
    assert [getattr(params, name) for params in found] == [value]


def test_the_end_token_stops_unless_ignored(
    run: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = ("--prompt", "line", "--temperature", 0, "--max-tokens", 8, "--json")
    whole = json.loads(ask(*wish, "--ignore-eos").out)
    # as if a token that surely comes were the end, and documents began as before
    end = whole["tokens"][2]
    vocabulary = Vocabulary(load_tokenizer(run.parent / "data"), end)
    monkeypatch.setattr("depthmix.models.open.find_vocabulary", lambda *args: vocabulary)
    monkeypatch.setattr(Vocabulary, "encode", lambda self, text: [0, *self.tokenize(text)])
    stopped = json.loads(ask(*wish).out)
    assert stopped["tokens"] == whole["tokens"][: whole["tokens"].index(end) + 1]
    assert stopped["finish"] == "stop"
    assert whole["text"].startswith(stopped["text"])
    assert len(stopped["text"]) < len(whole["text"])
    assert json.loads(ask(*wish, "--ignore-eos").out) == whole


def undo_marks(text: str) -> str:
    return COLORS.sub("", text).split("\n\n", 1)[1].replace("↵", "")


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
@pytest.mark.parametrize("selector", ["all", "router"])
def test_colours_shade_each_token(
    run: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch, stream: str, selector: str
) -> None:
    wish = ("--prompt", "line é", "--seed", 5, "--max-tokens", 12, "--selector", selector, stream)
    plain, tree = ask(*wish), json.loads(ask(*wish, "--json").out)
    monkeypatch.setenv("FORCE_COLOR", "1")
    told = ask(*wish, "--color")
    assert "routed blocks used:" in told.out
    # shaded text goes to a terminal, which gets pictures of control characters
    assert undo_marks(told.out) == hide_controls(plain.out)
    shown = told.out.split("\n\n", 1)[1]
    # the token that opens the document is not shown; é has two, and the last one has no depth
    tokens = [*tree["prompt_tokens"][1:], *tree["tokens"]]
    depths = tree["depth"]["used_by_token"][1:]
    paths = [(True,) * depth + (False,) * (2 - depth) for depth in depths]
    decode = load_tokenizer(run.parent / "data").decode
    pieces = shade_tokens(decode, tokens, paths, tree["prompt"] + tree["text"])
    assert len(pieces) > 5
    assert shown == "".join(map(Shader(2, "256").paint, pieces)) + "\n"


def test_without_colours_brackets_show_depth(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = ("--prompt", "li", "--seed", 5, "--max-tokens", 6, "--selector", "all", "--color")
    told = ask(*wish)
    assert told.out.startswith("[token]N used N of the 2 routed blocks")
    assert "\x1b" not in told.out
    shown = told.out.split("\n\n", 1)[1]
    assert re.match(r"(\[[^]]+\]2)+", shown)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert ask(*wish).out == told.out


def test_ctrl_c_keeps_what_was_made(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = ("--prompt", "line", "--seed", 4, "--max-tokens", 20)
    whole, step = ask(*wish).out, Engine.step
    steps: list[Any] = []

    def step_and_interrupt(engine: Engine) -> Any:
        steps.append(0)
        if len(steps) % 6 == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", step_and_interrupt)
    for stream in ("--stream", "--no-stream"):
        steps.clear()
        told = ask(*wish, stream)
        assert told.code == 130
        assert len(steps) == 6
        assert "line" < told.out[:-1] < whole
        assert whole.startswith(told.out[:-1])
        assert told.err.startswith("6 tokens, ")
        assert told.err.endswith("interrupted\n")


def test_characters_missing_from_encoding_are_replaced(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    args = ["--prompt", "é!", "--max-tokens", "2", "--device", "cpu", "--temperature", "0"]
    assert main(["sample", str(run), *args]) == 0
    out.seek(0)
    assert out.read().startswith("?!")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_prompt_is_shown_without_control_characters(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    args = ["--prompt", "a\x1bb", "--max-tokens", "2", "--device", "cpu", "--temperature", "0"]
    assert main(["sample", str(run), *args]) == 0
    assert out.getvalue().startswith("\x1b[1ma␛b\x1b[0m")


def test_compile_time_is_reported_separately(
    run: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = ("--prompt", "line", "--max-tokens", 4, "--temperature", 0)
    plain = ask(*wish)
    assert SUMMARY.fullmatch(plain.err.strip())
    assert "compiled" not in plain.err

    def pretend(
        sampler: Sampler, prompts: Any, params: Any, progress: Callable[[], object] | None
    ) -> None:
        if progress is not None:
            progress()
        sampler.compile_seconds = 8.44

    monkeypatch.setattr(Sampler, "warm_up", pretend)
    told = ask(*wish)
    assert told.out == plain.out
    assert SUMMARY.fullmatch(told.err.strip())
    assert told.err.startswith("4 tokens, ")
    assert re.search(r" tokens/s; loaded in [\d.]+ s, compiled in 8\.4 s; ", told.err)
    # a terminal sees what goes on; the line is gone when text comes
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert main(["sample", str(run), "--device", "cpu", *map(str, wish)]) == 0
    lines = [line.strip() for line in screen.getvalue().split("\r")]
    assert lines[1].startswith("compiling")
    assert (lines[0], lines[2]) == ("", "")
    assert lines[3].startswith("4 tokens, ")


def test_what_does_not_fit_is_refused_before_compiling(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampler, "warm_up", lambda *_: pytest.fail("it compiled first"))
    told = ask("--prompt", "word " * 50)
    assert told.code == 2
    assert "the model's max_seq_len is 32" in told.err


def test_length_limit_of_model_is_reported(ask: Ask) -> None:
    told = ask("--prompt", "a", "--max-tokens", 99, "--ignore-eos")
    assert "the model's max_seq_len of 32 tokens ended it" in told.err
    # a document's beginning, the prompt's token, and one that is never computed
    assert told.err.startswith("31 tokens, ")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--max-tokens", "0"], "--max-tokens 0 must be at least 1"),
        (["--temperature", "-1"], "--temperature -1.0 must be 0 or more"),
        (["--top-p", "0"], "--top-p 0.0 must lie in (0, 1]"),
        (["--min-p", "2"], "--min-p 2.0 must lie between 0 and 1"),
        (["--top-k", "-1"], "--top-k -1 must lie in [0, 2^63)"),
        (["--repetition-penalty", "0"], "--repetition-penalty 0.0 must be greater than 0"),
        (["--frequency-penalty", "3"], "--frequency-penalty 3.0 must lie between -2 and 2"),
        (["--n", "0"], "--n 0 must be at least 1"),
        (["-n", "0"], "--n 0 must be at least 1"),
        (["--seed", "9" * 30], "must lie in [-2^63, 2^63)"),
        (["--stop", ""], "stop must not contain an empty string"),
        (["--keep-newline"], "--keep-newline is for --file: add it"),
        (["--batch", "0"], "--batch 0 must be at least 1"),
        (["--device", "tpu"], "--device tpu is neither cpu nor cuda"),
        (["--selector", "topk"], "--selector topk: selector 'topk' needs tokens that are not gen"),
        (["--selector", "oracle"], "--selector oracle: unknown selector 'oracle'"),
        (["--json", "--color"], "leave out --color"),
        (["--logprobs", "2"], "--logprobs are printed with --json only"),
        (["--prompt", "word " * 50], "the model's max_seq_len is 32: shorten it"),
        (["--prompt", "a\udc80"], "is not valid UTF-8"),
        (["--file", "nowhere.txt"], "nowhere.txt: No such file or directory"),
        (["--checkpoint", "7"], "has no checkpoint '7': choose from best, newest, step-0000000"),
        (["--tokenizer", "./nowhere"], "there is no tokenizer at nowhere"),
        (["--temperature", "warm"], "Invalid value for '--temperature'"),
    ],
)
def test_mistakes_end_in_a_sentence(ask: Ask, args: list[str], sentence: str) -> None:
    told = ask(*args)
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("depthmix: ")
    assert sentence in told.err
    assert told.err.count("\n") == 1


def test_folder_that_is_not_a_run_is_refused(run: Path, tmp_path: Path, ask: Ask) -> None:
    assert "there is no run" in ask(path=tmp_path / "nothing").err
    assert "is not a run, but contains 1" in ask(path=run.parent).err
    assert "is part of the run" in ask(path=run / "checkpoints").err
    empty = shutil.copytree(run, tmp_path / "empty")
    shutil.rmtree(empty / "checkpoints")
    (empty / "checkpoints").mkdir()
    told = ask(path=empty)
    assert told.code == 2
    assert "has no checkpoint" in told.err


def test_a_dense_model_has_no_depth_to_show(tmp_path: Path, ask: Ask) -> None:
    dense = write_text_run(tmp_path, "routing.strategy=none")
    told = ask("--max-tokens", 3, path=dense)
    assert told.code == 0
    assert "100.0% of blocks executed, 0.0% of the dense FLOPs saved" in told.err
    told = ask("--color", path=dense)
    assert told.code == 2
    assert "this model has none" in told.err


def test_help_loads_no_torch() -> None:
    loaded = modules_loaded_by("from depthmix.cli import main; main(['sample', '--help'])")
    assert "depthmix.cli.sample" in loaded
    assert "torch" not in loaded


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_colours_decode_nothing_twice(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    decode, calls = Vocabulary.decode, []

    def count(vocabulary: Vocabulary, tokens: Any) -> str:
        calls.append(list(tokens))
        return decode(vocabulary, tokens)

    monkeypatch.setattr(Vocabulary, "decode", count)
    wish = ("--prompt", "line", "--no-echo", "--seed", 5, "--max-tokens", 12, stream)
    ask(*wish)
    plain = list(calls)
    assert len(plain) >= 12
    calls.clear()
    ask(*wish, "--color")
    assert calls == plain


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_prompt_is_computed_once(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    steps, step = [0], Engine.step

    def count(engine: Engine) -> Any:
        steps[-1] += 1
        return step(engine)

    monkeypatch.setattr(Engine, "step", count)
    wish = ("--prompt", "line", "--max-tokens", max_tokens, "--stream", "--selector", "all")
    for more in ((), ("--color",)):
        told = ask(*wish, *more).out
        steps.append(0)
    # its last token went on, too, so all of it has brackets
    assert re.search(r"\]2", told.split("\n\n", 1)[1][len("line") :])
    assert steps[:2] == [max_tokens] * 2
