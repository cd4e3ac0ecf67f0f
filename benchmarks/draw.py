"""Sampling on the device: the time of each kernel, and a check against the torch sampler.

    python benchmarks/draw.py                           # all shapes, logits and settings
    python benchmarks/draw.py --places 1 64 --vocabularies 32768

Needs a GPU. Every case is first compared with `infer.sampling.sample`, then timed by replaying a
CUDA graph of 20 steps. `total` is the time of a step in the graph, including gaps between kernels.
The kernels' own times are medians and, in brackets, the slowest of all steps: a row whose winner is
rejected by a filter takes longer. Shapes are compiled in parallel by separate processes; that is
most of the run.
"""

import argparse
import statistics
import subprocess
import sys
from itertools import product
from typing import Any, NamedTuple

import torch
from meters import require_gpu
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from depthmix.infer.sampling import SamplingParams, pack_settings, sample, unpack_settings
from depthmix.kernels.decode.draw import Drawer, DrawState

PLACES, VOCABULARIES = (1, 8, 64, 256), (32_768, 50_257)
LOGITS = ("normal 1", "normal 3", "peaked")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "both": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
}
STEPS, REPLAYS, CHECKS = 20, 10, 3
KERNELS = ("_rank_tokens", "_weigh", "_sift")


class Case(NamedTuple):
    """A step with one kind of rows, ready to be repeated."""

    logits: Tensor
    state: DrawState
    drawer: Drawer
    row: Tensor
    token: Tensor
    logprob: Tensor
    plain: bool
    filtered: bool
    num_kernels: int

    def draw(self) -> None:
        self.drawer(
            self.logits,
            self.row,
            self.token,
            self.logprob,
            plain=self.plain,
            filtered=self.filtered,
        )


def make_logits(kind: str, num_places: int, vocab: int) -> Tensor:
    logits = torch.randn(num_places, vocab, device="cuda")
    if kind == "normal 3":
        logits *= 3
    elif kind == "peaked":
        # like a trained model's: a few dozen tokens far above all others
        logits *= 2
        chosen = torch.randint(0, vocab, (num_places, 40), device="cuda")
        logits.scatter_(1, chosen, 10 + 2.5 * torch.randn(num_places, 40, device="cuda"))
    return logits


def make_case(drawer: Drawer, logits: Tensor, name: str) -> Case:
    state, num_places = drawer.state, logits.shape[0]
    params = [SamplingParams(**SETTINGS[name])] * num_places
    shares, counts = pack_settings(params, range(num_places), [0] * num_places)
    state.shares.copy_(shares)
    state.counts.copy_(counts)
    plain, filtered = name == "plain", "top_p" in SETTINGS[name] or "top_k" in SETTINGS[name]
    return Case(
        logits=logits,
        state=state,
        drawer=drawer,
        row=torch.randperm(num_places, device="cuda"),
        token=torch.zeros(num_places, device="cuda", dtype=torch.int64),
        logprob=torch.zeros(num_places, device="cuda"),
        plain=plain,
        filtered=filtered,
        num_kernels=1 if plain else 2 + filtered,
    )


def count_wrong(case: Case) -> int:
    """Count the tokens over some steps that differ from the sampler's."""
    wrong = 0
    for _ in range(CHECKS):
        settings = unpack_settings(case.state.shares[:, case.row], case.state.counts[:, case.row])
        truth = sample(case.logits, settings, None)
        case.draw()
        wrong += int((case.token != truth.token).sum())
        if not case.plain:
            wrong += int((case.logprob - truth.logprob).abs().gt(1e-4).sum())
    return wrong


def time_case(case: Case) -> tuple[float, list[list[float]]]:
    """Microseconds per step, and of each kernel in every step."""
    case.draw()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            case.draw()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    total = 1e3 * start.elapsed_time(end) / (REPLAYS * STEPS)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
    events = [e for e in found.events() if e.device_type == DeviceType.CUDA and e.name in KERNELS]
    own = [[e.time_range.elapsed_us() for e in events if e.name == name] for name in KERNELS]
    return total, own[: case.num_kernels]


def format_kernel(times: list[float]) -> str:
    if not times:
        return "?".rjust(14)
    return f"{statistics.median(times):6.1f} ({max(times):5.1f})"


def measure(num_places: int, vocab: int) -> int:
    """Print all cases of a shape; return the number of wrong tokens."""
    wrong = 0
    drawer = Drawer(DrawState(num_places, vocab, "cuda"), num_places)
    for kind in LOGITS:
        logits = make_logits(kind, num_places, vocab)
        for name in SETTINGS:
            case = make_case(drawer, logits, name)
            own_wrong = count_wrong(case)
            wrong += own_wrong
            total, kernels = time_case(case)
            words = " ".join(format_kernel(times) for times in kernels)
            mark = f"  {own_wrong} WRONG" if own_wrong else ""
            print(f"{num_places:4} {vocab:6} {kind:9}{name:12}{total:7.1f} {words}{mark}")
    return wrong


def compile_shape(num_places: int, vocab: int) -> None:
    drawer = Drawer(DrawState(num_places, vocab, "cuda"), num_places)
    logits = make_logits("normal 1", num_places, vocab)
    for name in ("plain", "both"):
        make_case(drawer, logits, name).draw()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, nargs="+", default=PLACES)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--compile", action="store_true", help="only compile; used by itself")
    given = parser.parse_args()
    require_gpu(parser)
    shapes = list(product(given.places, given.vocabularies))
    if given.compile:
        for shape in shapes:
            compile_shape(*shape)
        return
    command = [sys.executable, __file__, "--compile", "--places"]
    helpers = [
        subprocess.Popen([*command, str(num_places), "--vocabularies", str(vocab)])
        for num_places, vocab in shapes
    ]
    if any([helper.wait() for helper in helpers]):
        sys.exit("a shape does not compile")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, microseconds")
    names = " ".join(name.rjust(14) for name in KERNELS)
    print(f"{'B':>4} {'V':>6} {'logits':9}{'settings':12}{'total':>7} {names}")
    if sum(measure(*shape) for shape in shapes):
        sys.exit("some tokens are not the sampler's")


if __name__ == "__main__":
    main()
