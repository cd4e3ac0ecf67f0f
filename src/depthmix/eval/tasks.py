"""lm-eval tasks on depthmix models: the adapter that lm-eval calls, and tasks from files.

The only module that imports lm-eval, an extra. A task in a file is YAML next to its JSONL; no code
in it is run.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import datasets
import jinja2
import torch
import yaml
from lm_eval import evaluator, simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows

from depthmix.eval.options import EvalOptions
from depthmix.eval.perplexity import score_rows
from depthmix.eval.stream import Window, pad_rows
from depthmix.infer import Engine, SamplingParams
from depthmix.models import Chat, Vocabulary, begin_document
from depthmix.models.chat import list_ends, render_chat
from depthmix.nn import Transformer
from depthmix.nn.losses import IGNORE

# lm-eval's own default
MAX_NEW_TOKENS = 256


class TaskModel(LM):
    """A model and its vocabulary, with lm-eval's interface.

    Every text begins with the end token, as in training, or as the template of `chat` begins it.
    """

    tokenizer_name = "depthmix"

    def __init__(
        self,
        model: Transformer,
        vocabulary: Vocabulary,
        *,
        selector: str | None,
        batch_size: int = 8,
        chat: Chat | None = None,
    ) -> None:
        """`selector` as `choose_selector` has chosen it: None is for dense models only."""
        super().__init__()
        self.model, self.vocabulary, self.selector = model, vocabulary, selector
        self.batch_size, self.chat = batch_size, chat
        self.stop_tokens = list_ends(vocabulary.end_token, chat)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's text."""
        return "" if self.chat is None else self.chat.template

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages in the model's chat template."""
        assert self.chat is not None
        return render_chat(self.chat, chat_history, add_generation_prompt=add_generation_prompt)

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Each continuation's log-probability, and whether greedy decoding would give it."""
        pairs = []
        for request in requests:
            context, continuation = request.args
            # together, because a token may span the boundary
            whole = self.vocabulary.tokenize(context + continuation)
            num_given = min(len(self.vocabulary.tokenize(context)), len(whole) - 1)
            pairs.append((whole, len(whole) - num_given))
        return self._score([(self._begin(ids), count) for ids, count in pairs])

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts; each token is predicted once."""
        end_token, longest = self.vocabulary.end_token, self.model.config.max_seq_len
        prefix = 0 if end_token is None else end_token
        rows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.vocabulary.tokenize(request.args[0])
            windows = get_rolling_token_windows(ids, prefix, longest, 1)
            for given, predicted in windows:
                rows.append(([*given, predicted[-1]], len(predicted)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._score(rows), strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Text up to a stop string, greedy unless a task asks for a temperature."""
        engine = Engine(
            self.model,
            selector=self.selector,
            decode=self.vocabulary.decode,
            max_batch=self.batch_size,
        )
        texts = []
        for request in requests:
            context, options = request.args
            stop = options.get("until") or []
            count = int(options.get("max_gen_toks", MAX_NEW_TOKENS))
            params = SamplingParams(
                max_tokens=count,
                temperature=options.get("temperature", 0.0) if options.get("do_sample") else 0.0,
                stop=[stop] if isinstance(stop, str) else [text for text in stop if text],
                stop_tokens=self.stop_tokens,
                seed=0,
            )
            room = max(1, self.model.config.max_seq_len - count)
            prompt = self._begin(self.vocabulary.tokenize(context))[-room:]
            (result,) = engine.generate([prompt], params)
            text = result.samples[0].text or ""
            for token in self.stop_tokens:
                text = text.removesuffix(self.vocabulary.tokenizer.id_to_token(token) or "")
            texts.append(text)
        return texts

    def _begin(self, ids: list[int]) -> list[int]:
        """Begin a document, unless a chat template has done so."""
        if self.chat is not None and ids:
            return ids
        return begin_document(ids, self.vocabulary.end_token)

    def _score(self, rows: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """For each row: the log-probability of its last tokens, and whether all are the best."""
        longest = self.model.config.max_seq_len + 1
        device = self.model.embedding.weight.device
        scores: dict[int, tuple[float, bool]] = {}
        # rows of similar length together, the longest first: memory runs out at once, or never
        order = sorted(range(len(rows)), key=lambda n: -len(rows[n][0]))
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            windows, counts = [], []
            for number in chosen:
                ids = torch.tensor(rows[number][0][-longest:])
                windows.append(Window(ids[None, :-1], ids[1:], None))
                counts.append(min(rows[number][1], len(ids) - 1))
            batch = pad_rows(windows, device, num_scored=counts)
            losses, best, _ = score_rows(self.model, batch, self.selector)
            right = ((best == batch.targets) | (batch.targets == IGNORE)).all(1)
            sums = losses.double().sum(1)
            for number, loss, greedy in zip(chosen, sums.tolist(), right.tolist(), strict=True):
                scores[number] = (-loss, greedy)
        return [scores[number] for number in range(len(rows))]


def load_tasks(options: EvalOptions, selector: str | None) -> list[Any]:
    """The tasks and groups that the options name, with their data.

    A name is one of `list_own_tasks`, a .yaml file, or lm-eval's, which may have a `*`. Tasks that
    the selector cannot do are refused.
    """
    # its progress and advice are for its own command line
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    found = [_find_task(name) for name in options.tasks]
    only_own = all(isinstance(task, dict) for task in found)
    manager = TaskManager(
        include_path=[str(path) for path in options.include], include_defaults=not only_own
    )
    named: list[Any] = []
    for task in found:
        matches = manager.match_tasks([task]) if isinstance(task, str) else [task]
        if not matches:
            raise ValueError(
                f"there is no task '{task}': name one of lm-eval's, a .yaml file, or one of "
                f"ours: {', '.join(list_own_tasks())}"
            )
        named += matches
    with _name_templates():
        loaded = manager.load(named)
    if selector == "topk":
        for name, task in loaded["tasks"].items():
            if task.OUTPUT_TYPE == "generate_until":
                raise ValueError(
                    f"--selector topk needs tokens that are not generated yet, and the task "
                    f"'{name}' generates: leave out one of the two"
                )
    # groups hold their own
    inner = {name for names in loaded.get("group_map", {}).values() for name in names}
    whole = {**loaded["tasks"], **loaded.get("groups", {})}
    return [task for name, task in whole.items() if name not in inner]


def run_tasks(
    model: TaskModel, loaded: list[Any], options: EvalOptions
) -> dict[str, dict[str, Any]]:
    """The metrics of each task of `load_tasks`.

    A model with `chat` gets its questions in the chat template.
    """
    # it would run git, which prints an error outside a repository
    evaluator.get_git_commit_hash = lambda: None
    with _name_templates():
        results = simple_evaluate(
            model=model,
            tasks=loaded,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            # else it would look for all of lm-eval's
            task_manager=TaskManager(include_defaults=False),
            apply_chat_template=model.chat is not None,
            log_samples=False,
            bootstrap_iters=0,
        )
    assert results is not None
    return {name: _keep_numbers(values) for name, values in results["results"].items()}


def list_own_tasks() -> dict[str, Path]:
    """The tasks that come with the package: name → file."""
    folder = Path(str(resources.files("depthmix.eval"))) / "offline"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


@contextmanager
def _name_templates() -> Iterator[None]:
    """Turn an error in a template into a sentence."""
    try:
        yield
    except jinja2.TemplateError as error:
        raise ValueError(f"a template does not fit its data: {error}") from error


def _find_task(name: str) -> str | dict[str, Any]:
    path = list_own_tasks().get(name, Path(name))
    if path.suffix not in (".yaml", ".yml"):
        return name
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        files = tree["dataset_kwargs"]["data_files"]
        splits = {str(split): path.parent / str(file) for split, file in files.items()}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not plain YAML, and code in it is not run: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} does not name its JSONL as dataset_kwargs.data_files.SPLIT"
        ) from error
    for name in ("training_split", "validation_split", "test_split", "fewshot_split"):
        if tree.get(name) is not None and tree[name] not in splits:
            raise ValueError(
                f"{path}: {name} = {tree[name]} is none of its data_files: {', '.join(splits)}"
            )
    rows = {split: datasets.Dataset.from_list(_read_lines(p)) for split, p in splits.items()}
    # read here, so that no cache is written and names are relative to the task's file
    del tree["dataset_kwargs"]
    return {**tree, "custom_dataset": lambda **_: rows}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}, which its task names")
    rows = []
    try:
        # at newlines only: JSON may contain other line separators
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if line.strip():
                rows.append(json.loads(line))
                if not isinstance(rows[-1], dict):
                    raise ValueError(f"line {number} is not a JSON object")
    except ValueError as error:
        raise ValueError(f"{path} is not JSONL: {error}") from error
    if not rows:
        raise ValueError(f"{path} has no examples")
    return rows


def _keep_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Metrics by name; the filter is left out of the name if there is none."""
    kept = {name.removesuffix(",none"): value for name, value in values.items()}
    return {n: v for n, v in kept.items() if isinstance(v, int | float) and "stderr" not in n}
