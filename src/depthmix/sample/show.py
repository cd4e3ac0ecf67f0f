"""Samples on a terminal: shaded by depth, streamed or printed when done, or as JSON."""

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from depthmix.infer import Event, SamplingParams
from depthmix.infer.depth import Depth, join_depths
from depthmix.infer.results import Sample, Stats
from depthmix.infer.text import TextStream
from depthmix.sample.sampler import Sampler, seed_prompt
from depthmix.units import format_bytes, format_count

# from light to dark, in the 256 colours of most terminals and in true colour
SHADES_256 = (255, 189, 153, 111, 68, 25, 18)
SHADES_RGB = ((234, 242, 251), (107, 174, 214), (8, 48, 107))
# from this fraction on, the background is dark and its text white
DARK = 0.6
RESET, BOLD = "\x1b[0m", "\x1b[1m"

# A model can generate terminal control sequences; the pictures of these characters are harmless.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS |= {0x7F: 0x2421, **{code: 0xFFFD for code in range(0x80, 0xA0)}}

NO_TIME = 0.1
"""Times below this, in seconds, are not mentioned."""


@runtime_checkable
class Screen(Protocol):
    """A terminal, a file, or memory to print text to."""

    def write(self, text: str, /) -> int:
        """Take text."""
        ...

    def flush(self) -> None:
        """Flush what was written."""
        ...

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        ...


class ShadedText(NamedTuple):
    """Text of one token, or of several that together form a character."""

    text: str
    depth: int | None
    """Number of routed blocks used, the maximum over several tokens; None while unknown."""


class DepthText:
    """Joins a sample's final text with the depth of its tokens, which is known one token later.

    The text determines what is shown, as tokens include those cut off by a stop string.
    """

    def __init__(self, stream: TextStream | None = None) -> None:
        """`stream` is for a sample with stop strings, which delay its text.

        Without it, an event's text is that of its token, and nothing is decoded here.
        """
        self._stream = stream
        self._waiting: str | None = None
        self._deepest = 0
        self._pieces: deque[ShadedText] = deque()
        self._certain = ""

    def add_event(self, event: Event) -> None:
        """An event of the sample: a token, and the path of the one before it."""
        self.add_text(event.text)
        if event.token is None:
            # an end without a token has no path either
            return
        if self._waiting is not None:
            self.add_token(self._waiting, event.path)
        self._waiting = event.text if self._stream is None else self._stream.add(event.token)

    def add_text(self, text: str) -> None:
        """Add text that is final."""
        self._certain += text

    def add_token(self, text: str, path: Sequence[bool]) -> None:
        """The next token's text, now that it has been computed; empty inside a character."""
        self._deepest = max(self._deepest, sum(path))
        if text:
            self._pieces.append(ShadedText(text, self._deepest))
            self._deepest = 0

    def take(self) -> list[ShadedText]:
        """The pieces that can be shown now."""
        shown = []
        while self._pieces and len(self._pieces[0].text) <= len(self._certain):
            shown.append(self._pieces.popleft())
            self._certain = self._certain[len(shown[-1].text) :]
        return shown

    def finish(self) -> list[ShadedText]:
        """The rest of the text, including the last tokens, whose depth is unknown."""
        shown = self.take()
        if self._pieces and self._certain:
            # a stop string was cut out of the middle of a token
            shown.append(ShadedText(self._certain, self._pieces[0].depth))
        elif self._certain:
            shown.append(ShadedText(self._certain, None))
        self._certain = ""
        self._pieces.clear()
        return shown


def shade_tokens(
    decode: Callable[[list[int]], str],
    tokens: Sequence[int],
    paths: Sequence[Sequence[bool]],
    text: str,
) -> list[ShadedText]:
    """A whole text in pieces; the last tokens may have no path."""
    joined, stream = DepthText(), TextStream(decode)
    joined.add_text(text)
    for token, path in zip(tokens, paths, strict=False):
        joined.add_token(stream.add(token), path)
    return joined.finish()


class Shader:
    """Shows depth with background colours, or with brackets if there are no colours."""

    def __init__(self, num_blocks: int, palette: Literal["rgb", "256"] | None) -> None:
        self.num_blocks, self.palette = num_blocks, palette

    def paint(self, piece: ShadedText) -> str:
        """The piece's text as it goes to the terminal."""
        text, depth = hide_controls(piece.text), piece.depth
        if depth is None or (self.palette is None and depth == 0):
            return text
        # to make the depth of a newline visible
        lines = text.replace("\n", "↵\n").split("\n")
        if self.palette is None:
            return f"[{chr(10).join(lines)}]{depth}"
        start = _choose_colors(depth / self.num_blocks, self.palette)
        # a background that is open at the end of a line fills the rest of it
        return "\n".join(f"{start}{line}{RESET}" if line else "" for line in lines)

    def explain(self) -> str:
        """A legend."""
        if self.palette is None:
            return (
                f"[token]N used N of the {self.num_blocks} routed blocks, other tokens "
                f"used none of them"
            )
        # at most nine steps, the first and the last among them
        count = min(self.num_blocks, 8)
        steps = sorted({round(i * self.num_blocks / count) for i in range(count + 1)})
        shown = "".join(self.paint(ShadedText(f" {depth} ", depth)) for depth in steps)
        return f"routed blocks used: {shown} of {self.num_blocks}"


def choose_palette(file: Screen) -> Literal["rgb", "256"] | None:
    """The colours to use for a file: a terminal's, unless the environment says otherwise."""
    environment = os.environ
    forced = bool(environment.get("FORCE_COLOR"))
    plain = bool(environment.get("NO_COLOR")) or environment.get("TERM") == "dumb"
    if plain or not (forced or file.isatty()):
        return None
    return "rgb" if environment.get("COLORTERM") in ("truecolor", "24bit") else "256"


def hide_controls(text: str) -> str:
    """The text without control characters other than newlines and tabs."""
    return text.translate(_CONTROLS)


def summarize(samples: Sequence[Sample], stats: Stats, tokens_per_second: float | None) -> str:
    """One line: the number of tokens, the speed, and the savings of depth routing."""
    count = format_count(sum(len(sample.tokens) for sample in samples), "token")
    depth = join_depths([sample.depth for sample in samples])
    speed = "" if tokens_per_second is None else f", {tokens_per_second:,.1f} tokens/s"
    return (
        f"{count}{speed}; {depth.share_executed:.1%} of blocks "
        f"executed, {depth.share_saved:.1%} of the dense FLOPs saved; cache "
        f"{format_bytes(stats.cache_bytes_peak)}"
    )


def to_dict(
    prompt: str,
    prompt_tokens: Sequence[int],
    number: int,
    sample: Sample,
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """A sample as plain data."""
    tops = None
    if sample.top_logprobs is not None:
        tops = [
            [{"token": t, "text": decode([t]), "logprob": logprob} for t, logprob in place]
            for place in sample.top_logprobs
        ]
    return {
        "prompt": prompt,
        "prompt_tokens": list(prompt_tokens),
        "sample": number,
        "text": sample.text,
        "tokens": list(sample.tokens),
        "finish": sample.finish,
        "logprobs": None if sample.logprobs is None else list(sample.logprobs),
        "top_logprobs": tops,
        "depth": _describe_depth(sample.depth),
    }


def _describe_depth(depth: Depth) -> dict[str, Any]:
    return {
        "routed_blocks": len(depth.blocks[0]) if depth.blocks else 0,
        "used_by_token": [sum(path) for path in depth.blocks],
        "share_executed": depth.share_executed,
        "share_saved": depth.share_saved,
        "flops": depth.flops,
        "dense_flops": depth.dense_flops,
    }


def _choose_colors(share: float, palette: Literal["rgb", "256"]) -> str:
    """The escape sequence of a background and of a text that can be read on it."""
    if palette == "256":
        background = SHADES_256[round(share * (len(SHADES_256) - 1))]
        return f"\x1b[48;5;{background};38;5;{231 if share >= DARK else 16}m"
    lower = min(int(share * 2), 1)
    mixed = zip(SHADES_RGB[lower], SHADES_RGB[lower + 1], strict=True)
    red, green, blue = (round(a + (b - a) * (share * 2 - lower)) for a, b in mixed)
    ink = 255 if share >= DARK else 0
    return f"\x1b[48;2;{red};{green};{blue};38;2;{ink};{ink};{ink}m"


class Show:
    """Runs requests with the same parameters and prints their samples."""

    def __init__(
        self,
        sampler: Sampler,
        texts: Sequence[str],
        params: SamplingParams,
        *,
        stream: bool = False,
        color: bool = False,
        echo: bool = True,
        as_json: bool = False,
        file: Screen | None = None,
    ) -> None:
        """`stream` prints a single sample as it is generated, and several as each one finishes.

        `color` shades by depth, `echo` prints prompts too; `file` is stdout by default.
        """
        self.sampler, self.texts, self.params = sampler, list(texts), params
        self.stream, self.echo, self.as_json = stream, echo, as_json
        self.file: Screen = sys.stdout if file is None else file
        self.palette = choose_palette(self.file)
        self.shader: Shader | None = None
        if color:
            num_blocks = len(sampler.engine.config.routed_layers)
            if num_blocks == 0:
                raise ValueError("--color shows routed blocks, and this model has none")
            self.shader = Shader(num_blocks, self.palette)
        self.prompts = [sampler.vocabulary.encode(text) for text in texts]
        self.num_samples = params.n * len(texts)
        self.done: dict[tuple[int, int], Sample] = {}
        self._shaded: dict[tuple[int, int], DepthText] = {}
        self._num_printed = 0

    def warm_up(self, progress: Callable[[], object] | None = None) -> None:
        """Compile before anything is timed; refuses prompts that do not fit first."""
        for prompt in self.prompts:
            self.sampler.engine.cancel(self.sampler.engine.add(prompt, self.params))
        self.sampler.warm_up(self.prompts, self.params, progress)

    def run(self, stopped: Callable[[], object] = lambda: False) -> None:
        """Generate and print, until all is done or `stopped` is true."""
        flowing = self.stream and self.num_samples == 1 and not self.as_json
        # prompts that do not fit are refused here, before anything is printed
        numbers = {
            self.sampler.add(prompt, seed_prompt(self.params, text)): i
            for i, (prompt, text) in enumerate(zip(self.prompts, self.texts, strict=True))
        }
        if self.shader is not None:
            self._write(self.shader.explain() + "\n\n")
        if flowing:
            self._flow(stopped)
            return
        for events in self.sampler.run(stopped):
            for event in events:
                place = numbers[event.request], event.sample
                if self.shader is not None:
                    self._shade(place, event)
                if event.result is not None:
                    self.done[place] = event.result
                    if self.stream:
                        self._print_sample(*place)
        if not self.stream:
            for place in sorted(self.done):
                self._print_sample(*place)

    def summarize(self, *, with_seed: bool = False, with_start: bool = False) -> list[str]:
        """A line of statistics, and another if samples reached the model's maximum length.

        `with_start` adds the time for loading and compiling.
        """
        samples = list(self.done.values())
        engine, params = self.sampler.engine, self.params
        line = summarize(samples, engine.stats(), self.sampler.tokens_per_second)
        if with_start:
            speed, rest = line.split("; ", 1)
            line = f"{speed}; {self._describe_start()}; {rest}"
        lines = [f"{line}; seed {params.seed}" if with_seed else line]
        cut = [s for s in samples if s.finish == "length" and len(s.tokens) < params.max_tokens]
        if cut:
            longest = engine.config.max_seq_len
            which = "it" if len(samples) == 1 else f"{len(cut)} of {len(samples)}"
            lines.append(f"the model's max_seq_len of {longest} tokens ended {which}")
        return lines

    def _describe_start(self) -> str:
        text = f"loaded in {self.sampler.load_seconds:.1f} s"
        seconds = self.sampler.compile_seconds
        return f"{text}, compiled in {seconds:.1f} s" if seconds > NO_TIME else text

    def _flow(self, stopped: Callable[[], object]) -> None:
        """Stream one sample."""
        if self.shader is None:
            self._print_prompt(0, ())
        for events in self.sampler.run(stopped):
            for event in events:
                if self.shader is None:
                    self._print_text(event.text)
                else:
                    if not self._shaded:
                        # the depth of the prompt is known with the first token
                        self._print_prompt(0, self._find_paths(event)[: len(self.prompts[0])])
                    self._print_pieces(self._shade((0, 0), event).take())
                if event.result is not None:
                    self.done[0, 0] = event.result
                    if self.shader is not None:
                        self._print_pieces(self._shaded.pop((0, 0)).finish())
        self._write("\n")

    def _find_paths(self, event: Event) -> Sequence[Sequence[bool]]:
        if event.result is not None:
            return event.result.depth.blocks
        return self.sampler.engine.list_paths(event.request, event.sample)

    def _shade(self, place: tuple[int, int], event: Event) -> DepthText:
        """A sample's text so far with the depth of its tokens."""
        if place not in self._shaded:
            decode = self.sampler.vocabulary.decode
            self._shaded[place] = DepthText(TextStream(decode) if self.params.stop else None)
        self._shaded[place].add_event(event)
        return self._shaded[place]

    def _print_sample(self, prompt: int, number: int) -> None:
        """A finished sample, with a heading if there are several."""
        found, text, tokens = self.done[prompt, number], self.texts[prompt], self.prompts[prompt]
        if self.as_json:
            decode = self.sampler.vocabulary.decode
            self._write(json.dumps(to_dict(text, tokens, number, found, decode)) + "\n")
            return
        if self.num_samples > 1:
            parts = [("prompt", prompt, len(self.texts)), ("sample", number, self.params.n)]
            labels = [f"{name} {i + 1} of {count}" for name, i, count in parts if count > 1]
            self._write(("\n" if self._num_printed else "") + f"--- {', '.join(labels)} ---\n")
        self._num_printed += 1
        self._print_prompt(prompt, found.depth.blocks[: len(tokens)])
        assert found.text is not None
        if self.shader is None:
            self._print_text(found.text)
        else:
            self._print_pieces(self._shaded.pop((prompt, number)).finish())
        self._write("\n")

    def _print_prompt(self, prompt: int, paths: Sequence[Sequence[bool]]) -> None:
        text, tokens = self.texts[prompt], self.prompts[prompt]
        if not self.echo or not text:
            return
        if self.shader is None:
            self._print_text(text, bold=True)
            return
        # the end token that opens a document is not shown, unless it is in the prompt itself
        vocabulary = self.sampler.vocabulary
        num_added = len(tokens) - len(vocabulary.tokenize(text))
        pieces = shade_tokens(vocabulary.decode, tokens[num_added:], paths[num_added:], text)
        self._print_pieces(pieces)

    def _print_pieces(self, pieces: Sequence[ShadedText]) -> None:
        if self.shader is not None:
            self._write("".join(map(self.shader.paint, pieces)))

    def _print_text(self, text: str, *, bold: bool = False) -> None:
        # files and pipes get the text as it is
        if self.file.isatty():
            text = hide_controls(text)
        self._write(f"{BOLD}{text}{RESET}" if bold and self.palette else text)

    def _write(self, text: str) -> None:
        # replace what a terminal's encoding does not have
        encoding = getattr(self.file, "encoding", None) or "utf-8"
        self.file.write(text.encode(encoding, "replace").decode(encoding))
        self.file.flush()
