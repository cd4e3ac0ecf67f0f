"""lm-eval over HTTP against lm-eval in this process: the same texts must get the same scores.

    python benchmarks/lm_eval_http.py runs/first
    python benchmarks/lm_eval_http.py runs/first --requests 2000 --text README.md --json out.json

Exports the run, serves the export, and lets lm-eval's own `local-completions` score continuations
of a text through the server: `echo`, `logprobs=1`, prompts as token ids. `depthmix eval --tasks`
scores the same ones here. Contexts and continuations have random lengths, from nothing to as many
tokens as the model takes. Fails where two scores differ by more than 1e-3 nats per token, or where
the two disagree about whether greedy decoding gives the continuation. Needs the extras eval, serve
and hf, and lm-eval's own extra `api`.
"""

import argparse
import json
import logging
import platform
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from meters import name_device
from served import serve

from depthmix.eval.tasks import TaskModel
from depthmix.hf.export import export_model
from depthmix.models import open_model
from depthmix.sample.sampler import place_network
from depthmix.world import choose_device

LIMIT = 1e-3
CHARS_PER_TOKEN = 2


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrent", type=int, default=8, help="requests at a time")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def cut_pairs(text: str, count: int, longest: int) -> list[tuple[str, str]]:
    """Contexts of many lengths, and what follows them; every tenth has no context.

    A context ends at a word's end, as in tasks: lm-eval encodes it once alone and once with what
    follows, and takes the two for the same tokens.
    """
    rng = random.Random(1)
    pairs = []
    for number in range(count):
        size = rng.randint(2, longest)
        start = rng.randrange(len(text) - size)
        part = text[start : start + size]
        cuts = [match.start() + 1 for match in re.finditer(r"\S\s", part)]
        cut = rng.choice(cuts) if cuts and number % 10 else 0
        pairs.append((part[:cut], part[cut:]))
    return pairs


def score(model: Any, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=number)
        for number, pair in enumerate(pairs)
    ]
    return model.loglikelihood(requests, disable_tqdm=True)


def main() -> int:
    args = read_arguments()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    device = choose_device("cpu" if args.cpu else None)
    stored = open_model(args.run)
    longest = stored.config.max_seq_len
    vocabulary = stored.vocabulary
    text = args.text.read_text(encoding="utf-8")
    pairs = cut_pairs(text, args.requests, min(CHARS_PER_TOKEN * longest, len(text) - 1))
    # what is longer than the model is cut in two ways: leave it out
    fits = [pair for pair in pairs if len(vocabulary.encode("".join(pair))) < longest]
    network = place_network(stored, device)
    inside = TaskModel(network, vocabulary, selector=stored.config.choose_selector(None))
    truth = score(inside, fits)
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "exported"
        export_model(
            network, exported, tokenizer=vocabulary.tokenizer, end_token=vocabulary.end_token
        )
        with serve([exported], "--device", device) as (address, _):
            outside = LocalCompletionsAPI(
                base_url=f"{address}/v1/completions",
                model="exported",
                tokenizer=str(exported),
                tokenizer_backend="huggingface",
                # every document begins with the end token, in training too
                add_bos_token=True,
                max_length=longest,
                num_concurrent=args.concurrent,
            )
            start = time.perf_counter()
            found = score(outside, fits)
            seconds = time.perf_counter() - start
    counts = [
        max(1, len(vocabulary.encode("".join(pair))) - len(vocabulary.encode(pair[0])))
        for pair in fits
    ]
    gaps = [abs(a - b) / n for (a, _), (b, _), n in zip(truth, found, counts, strict=True)]
    result = {
        "model": str(args.run),
        "machine": name_device(device),
        "python": platform.python_version(),
        "lm_eval": lm_eval.__version__,
        "requests": len(fits),
        "tokens": sum(counts),
        "largest_gap_nats_per_token": max(gaps),
        "greedy_differs": sum(a != b for (_, a), (_, b) in zip(truth, found, strict=True)),
        "greedy": sum(greedy for _, greedy in truth),
        "seconds": round(seconds, 1),
    }
    print(json.dumps(result, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(max(gaps) > LIMIT or result["greedy_differs"] > 0)


if __name__ == "__main__":
    sys.exit(main())
