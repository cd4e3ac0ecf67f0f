"""lm-eval on our models: scores by hand, the same in every batch, and tasks that lie in files."""

import ast
import json
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pytest
import torch
import yaml

from depthmix.data.tokenizer import train_tokenizer
from depthmix.eval.options import EvalOptions
from depthmix.models import Chat, Vocabulary
from depthmix.nn import Transformer
from variants import enlarge_updates, make_config

tasks = pytest.importorskip("depthmix.eval.tasks", exc_type=ImportError)

pytestmark = pytest.mark.slow

LINES = [f"line {i} says {i * i} and no more\n" for i in range(60)]
TOKENIZER = train_tokenizer(LINES, 300, parallel=False)


class Request(NamedTuple):
    args: tuple[Any, ...]


def make_model(name: str = "mod", batch_size: int = 4, **options: Any) -> Any:
    torch.manual_seed(0)
    model = enlarge_updates(Transformer(make_config(name, vocab_size=300, max_seq_len=32))).eval()
    with torch.no_grad():
        model.norm.weight.mul_(20)
    options = {"selector": model.config.choose_selector(None), **options}
    return tasks.TaskModel(model, Vocabulary(TOKENIZER, 0), batch_size=batch_size, **options)


def run_tasks(model: Any, names: list[str], **options: Any) -> dict[str, dict[str, Any]]:
    given = EvalOptions(tasks=names, **options)
    return tasks.run_tasks(model, tasks.load_tasks(given, model.selector), given)


PAIRS = [
    ("line 3", " says 9"),
    ("", "line"),
    ("line 4 says", " 16 and no more"),
    ("a long way to say very little " * 4, " and no more"),
    ("line 3", " says 10 and much"),
]


@torch.no_grad()
def score_by_hand(model: Any, context: str, continuation: str) -> tuple[float, bool]:
    whole = [0, *TOKENIZER.encode(context + continuation).ids]
    count = len(whole) - 1 - len(TOKENIZER.encode(context).ids)
    whole = whole[-33:]
    logs = model.model(torch.tensor([whole[:-1]]), selector=model.selector).logits[0]
    logs = logs.log_softmax(-1)[-count:]
    wanted = torch.tensor(whole[-count:])
    total = logs.gather(1, wanted[:, None]).sum()
    return float(total), bool((logs.argmax(-1) == wanted).all())


@pytest.mark.parametrize("name", ["dense", "mod"])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_scores_by_hand_in_any_batch(name: str, batch_size: int) -> None:
    model = make_model(name, batch_size)
    found = model.loglikelihood([Request(pair) for pair in PAIRS])
    for pair, (score, greedy) in zip(PAIRS, found, strict=True):
        wanted = score_by_hand(model, *pair)
        assert score == pytest.approx(wanted[0], abs=1e-3)
        assert greedy == wanted[1]


def test_greedy_text_scores_as_greedy() -> None:
    model = make_model()
    (text,) = model.generate_until([Request(("line 3", {"until": [], "max_gen_toks": 4}))])
    ids = TOKENIZER.encode("line 3" + text).ids
    if ids[:-4] == TOKENIZER.encode("line 3").ids:
        ((_, greedy),) = model.loglikelihood([Request(("line 3", text))])
        assert greedy
    options = {"until": text[1:3], "max_gen_toks": 4}
    (shorter,) = model.generate_until([Request(("line 3", options))])
    assert shorter == text[: text.index(text[1:3])]


@torch.no_grad()
def test_long_texts_are_scored_token_by_token_once() -> None:
    model = make_model("dense", batch_size=3)
    texts = ["".join(LINES[:10]), "line"]
    found = model.loglikelihood_rolling([Request((text,)) for text in texts])
    assert len(TOKENIZER.encode(texts[0]).ids) > 64
    ids = [0, *TOKENIZER.encode(texts[1]).ids]
    logs = model.model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    wanted = logs.gather(1, torch.tensor(ids[1:])[:, None]).sum()
    assert found[1] == pytest.approx(float(wanted), abs=1e-3)
    # a window of its own for each 32 that are predicted, the last one as long as the others
    ids = [0, *TOKENIZER.encode(texts[0]).ids]
    total, done = 0.0, 0
    while done < len(ids) - 1:
        count = min(32, len(ids) - 1 - done)
        first = max(0, done + count - 32)
        logs = model.model(torch.tensor([ids[first : done + count]])).logits[0].log_softmax(-1)
        wanted = torch.tensor(ids[done + 1 : done + count + 1])
        total += float(logs[-count:].gather(1, wanted[:, None]).sum())
        done += count
    assert found[0] == pytest.approx(total, abs=1e-2)


def test_our_task_has_one_right_answer_each() -> None:
    path = tasks.list_own_tasks()["python_syntax"]
    rows = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert len(rows) == 40
    for row in rows:
        for number, choice in enumerate(row["choices"]):
            if number == row["answer"]:
                ast.parse(row["prompt"] + choice)
            else:
                with pytest.raises(SyntaxError):
                    ast.parse(row["prompt"] + choice)
    # no place is right more often than chance would have it
    answers = [row["answer"] for row in rows]
    assert max(map(answers.count, range(4))) <= 16


def test_our_task_runs_and_batches_do_not_change_it() -> None:
    found = [run_tasks(make_model(batch_size=size), ["python_syntax"]) for size in (1, 7)]
    assert found[0] == found[1]
    assert 0 <= found[0]["python_syntax"]["acc"] <= 1
    few = run_tasks(make_model(), ["python_syntax"], limit=3)
    assert few["python_syntax"]["acc"] * 3 == pytest.approx(
        round(few["python_syntax"]["acc"] * 3), abs=1e-9
    )


def test_tasks_in_files(tmp_path: Path) -> None:
    own = tasks.list_own_tasks()["python_syntax"]
    path = tmp_path / "mine.yaml"
    path.write_text(own.read_text().replace("python_syntax", "mine"))
    with pytest.raises(ValueError, match=r"there is no file .*mine.jsonl"):
        run_tasks(make_model(), [str(path)])
    row = {"prompt": "line 1 says", "choices": [" 1", " 2"], "answer": 0}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    assert run_tasks(make_model(), [str(path)])["mine"]["acc"] in (0, 1)
    (tmp_path / "mine.jsonl").write_text("no JSON\n")
    with pytest.raises(ValueError, match="is not JSONL"):
        run_tasks(make_model(), [str(path)])
    for content, told in (("[1]\n", "line 1 is not a JSON object"), ("\n", "has no examples")):
        (tmp_path / "mine.jsonl").write_text(content)
        with pytest.raises(ValueError, match=told):
            run_tasks(make_model(), [str(path)])
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    plain = path.read_text()
    path.write_text(plain.replace("test_split: test", "test_split: other"))
    with pytest.raises(ValueError, match="test_split = other is none of its data_files: test"):
        run_tasks(make_model(), [str(path)])
    path.write_text(plain.replace("{{prompt}}", "{{nothing}}"))
    with pytest.raises(ValueError, match="template does not fit its data: 'nothing' is undefined"):
        run_tasks(make_model(), [str(path)])
    path.write_text("task: mine\n")
    with pytest.raises(ValueError, match="does not name its JSONL"):
        run_tasks(make_model(), [str(path)])
    path.write_text("process_docs: !function code.run\n")
    with pytest.raises(ValueError, match="code in it is not run"):
        run_tasks(make_model(), [str(path)])


def write_task(folder: Path, name: str, **changes: Any) -> str:
    """A task in a file, beside its data; returns the file's path."""
    own = tasks.list_own_tasks()["python_syntax"]
    tree = {**yaml.safe_load(own.read_text()), "task": name, **changes}
    row = {"prompt": "line 1 says", "choices": [" 1", " 2"], "answer": 0}
    (folder / "python_syntax.jsonl").write_text(json.dumps(row) + "\n")
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


GENERATES = {
    "output_type": "generate_until",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
    "metric_list": [{"metric": "exact_match"}],
}


def test_topk_cannot_generate(tmp_path: Path) -> None:
    names = [write_task(tmp_path, "mine"), write_task(tmp_path, "writes", **GENERATES)]
    assert run_tasks(make_model(), names).keys() == {"mine", "writes"}
    assert run_tasks(make_model(selector="topk"), names[:1])["mine"]["acc"] in (0, 1)
    with pytest.raises(ValueError, match=r"--selector topk needs .* the task 'writes' generates"):
        tasks.load_tasks(EvalOptions(tasks=names), "topk")


def test_groups_are_loaded_whole(tmp_path: Path) -> None:
    files = {"test": str(tmp_path / "python_syntax.jsonl")}
    given = {"data_files": files, "cache_dir": str(tmp_path / "cache")}
    for name in ("one", "two"):
        write_task(tmp_path, name, dataset_path="json", dataset_kwargs=given)
    mean = [{"metric": "acc", "weight_by_size": True}]
    inner = {"group": "inner", "task": ["one", "two"], "aggregate_metric_list": mean}
    outer = {"group": "outer", "task": ["inner"], "aggregate_metric_list": mean}
    for tree in (inner, outer):
        (tmp_path / f"{tree['group']}.yaml").write_text(yaml.safe_dump(tree))
    found = run_tasks(make_model(), ["outer"], include=[tmp_path])
    assert found.keys() == {"outer", "inner", "one", "two"}
    assert found["outer"]["acc"] == found["one"]["acc"] == found["two"]["acc"]


def test_a_star_names_several_tasks(tmp_path: Path) -> None:
    files = {"test": str(tmp_path / "python_syntax.jsonl")}
    given = {"data_files": files, "cache_dir": str(tmp_path / "cache")}
    for name in ("mine_one", "mine_two", "other"):
        write_task(tmp_path, name, dataset_path="json", dataset_kwargs=given)
    found = run_tasks(make_model(), ["mine_*"], include=[tmp_path])
    assert found.keys() == {"mine_one", "mine_two"}
    with pytest.raises(ValueError, match=r"there is no task 'nothing_\*'"):
        run_tasks(make_model(), ["nothing_*"], include=[tmp_path])


def test_only_our_own_words_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # no repository: git would complain
    monkeypatch.chdir(tmp_path)
    run_tasks(make_model(), ["python_syntax"], limit=1)
    assert "fatal" not in capfd.readouterr().err


def test_examples_come_before_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = make_model(), []
    monkeypatch.setattr(Vocabulary, "tokenize", lambda _, text: sizes.append(len(text)) or [1, 2])
    for number in (0, 2):
        run_tasks(model, ["python_syntax"], limit=1, num_fewshot=number)
    half = len(sizes) // 2
    assert min(sizes[half:]) > max(sizes[:half])
    with pytest.raises(ValueError, match="num_fewshot = -1 must be 0 or more"):
        run_tasks(model, ["python_syntax"], num_fewshot=-1)


CHAT = Chat(
    "{{ bos_token }}{%- for m in messages -%}\n  [{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    (7,),
    "<s>",
)


def test_templates_are_rendered_as_transformers_does() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZER, bos_token="<s>", chat_template=CHAT.template
    )
    messages = [{"role": r, "content": f"{r} → 1"} for r in ("user", "assistant", "user")]
    for prompt in (True, False):
        options = {"add_generation_prompt": prompt}
        wanted = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert tasks.render_chat(CHAT, messages, **options) == wanted
    assert "[user] user → 1" in wanted
    told = Chat("{{ raise_exception('no such role') }}", ())
    with pytest.raises(jinja2.TemplateError, match="no such role"):
        tasks.render_chat(told, messages, add_generation_prompt=True)
    # what reaches for the interpreter is stopped
    wicked = Chat("{{ ().__class__.__base__.__subclasses__() }}", ())
    with pytest.raises(jinja2.TemplateError, match="unsafe"):
        tasks.render_chat(wicked, messages, add_generation_prompt=True)


def test_a_model_is_asked_by_its_template(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = tasks.TaskModel.loglikelihood

    def spy(self: Any, requests: Any, **options: Any) -> Any:
        asked.extend(request.args[0] for request in requests)
        return original(self, requests, **options)

    monkeypatch.setattr(tasks.TaskModel, "loglikelihood", spy)
    found = run_tasks(make_model(chat=CHAT), ["python_syntax"], limit=2, num_fewshot=1)
    assert found["python_syntax"].keys() >= {"acc", "acc_norm"}
    # a question and its answer before, each a turn of its own
    assert all(text.startswith("<s>[user] ") for text in asked)
    assert all(text.count("[user]") == 2 and text.count("[assistant]") == 2 for text in asked)
    asked.clear()
    run_tasks(make_model(), ["python_syntax"], limit=2)
    assert not any("[user]" in text for text in asked)


def test_answers_end_where_the_model_ends_them() -> None:
    text = "<s>[user] hello"
    request = Request((text, {"until": ["nothing"], "max_gen_toks": 8}))
    free = make_model(chat=CHAT._replace(stop_tokens=()))
    free.stop_tokens = ()
    # begins as the template has it, and not with an end token
    ids = torch.tensor([TOKENIZER.encode(text).ids])
    with torch.no_grad():
        first = int(free.model(ids, selector="predictor").logits[0, -1].argmax())
    (answer,) = free.generate_until([request])
    assert answer.startswith(TOKENIZER.decode([first]))
    model = make_model(chat=CHAT._replace(stop_tokens=(first,)))
    assert model.generate_until([request]) == [""]


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(ValueError, match=r"no task 'nothing_such': .* python_syntax"):
        run_tasks(make_model(), ["nothing_such"])
