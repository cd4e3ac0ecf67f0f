"""Prompts in, samples on the terminal: while they come, when they are done, or as JSON.

Owns what is printed when. Knows nothing of where the model comes from.
"""

import json
import sys
from collections.abc import Callable, Sequence

from depthmix.infer import Sample, SamplingParams
from depthmix.sampler import Sampler
from depthmix.shades import (
    BOLD,
    RESET,
    DepthText,
    Screen,
    ShadedText,
    Shader,
    choose_palette,
    hide_controls,
    shade_tokens,
    summarize,
    to_dict,
)

NO_TIME = 0.1
"""Seconds that are not worth a word."""


class Show:
    """Runs requests of one kind and prints what comes of them."""

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
        """`stream` prints one sample while it comes, and several each when it is done.

        `color` shades by depth, `echo` prints prompts too; `file` is stdout unless given.
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
        self._num_printed = 0

    def warm_up(self, progress: Callable[[], object] | None = None) -> None:
        """Compile before anything is timed; prompts that do not fit are refused before that."""
        for prompt in self.prompts:
            self.sampler.engine.cancel(self.sampler.engine.add(prompt, self.params))
        self.sampler.warm_up(self.prompts, self.params, progress)

    def run(self, stopped: Callable[[], object] = lambda: False) -> None:
        """Generate and print, until all is done or `stopped` is true."""
        flowing = self.stream and self.num_samples == 1 and not self.as_json
        paths: Sequence[Sequence[bool]] = ()
        if flowing and self.shader is not None and self.echo:
            # the prompt is shown at once, and its depth is told with the end of a sample
            (look,) = self.sampler.engine.generate(self.prompts, SamplingParams(max_tokens=1))
            paths = look.samples[0].depth.blocks
        # prompts that do not fit are refused here, before anything is printed
        numbers = {self.sampler.add(p, self.params): i for i, p in enumerate(self.prompts)}
        if self.shader is not None:
            self._write(self.shader.explain() + "\n\n")
        if flowing:
            self._flow(stopped, paths)
            return
        for events in self.sampler.run(stopped):
            for event in events:
                if event.result is not None:
                    place = numbers[event.request], event.sample
                    self.done[place] = event.result
                    if self.stream:
                        self._print_sample(*place)
        if not self.stream:
            for place in sorted(self.done):
                self._print_sample(*place)

    def summarize(self, *, tell_seed: bool = False, tell_start: bool = False) -> list[str]:
        """How it went, in a line, and one more where the model's length was the limit.

        `tell_start` adds what came before the prompts: loading, and compiling if there was any.
        """
        samples = list(self.done.values())
        engine, params = self.sampler.engine, self.params
        told = summarize(samples, engine.stats(), self.sampler.tokens_per_second)
        if tell_start:
            speed, rest = told.split("; ", 1)
            told = f"{speed}; {self._describe_start()}; {rest}"
        lines = [f"{told}; seed {params.seed}" if tell_seed else told]
        cut = [s for s in samples if s.finish == "length" and len(s.tokens) < params.max_tokens]
        if cut:
            longest = engine.config.max_seq_len
            which = "it" if len(samples) == 1 else f"{len(cut)} of {len(samples)}"
            lines.append(f"the model's max_seq_len of {longest} tokens ended {which}")
        return lines

    def _describe_start(self) -> str:
        told = f"loaded in {self.sampler.load_seconds:.1f} s"
        seconds = self.sampler.compile_seconds
        return f"{told}, compiled in {seconds:.1f} s" if seconds > NO_TIME else told

    def _flow(self, stopped: Callable[[], object], paths: Sequence[Sequence[bool]]) -> None:
        """One sample while it comes; `paths` are its prompt's."""
        joined, waiting = DepthText(self.sampler.vocabulary.decode), None
        self._print_prompt(0, paths)
        for events in self.sampler.run(stopped):
            for event in events:
                if self.shader is None:
                    self._print_text(event.text)
                else:
                    joined.add_text(event.text)
                    # an end that came without a token has no path either
                    if waiting is not None and event.token is not None:
                        joined.add_token(waiting, event.path)
                    waiting = event.token
                    self._print_pieces(joined.take())
                if event.result is not None:
                    self.done[0, 0] = event.result
        self._print_pieces(joined.finish())
        self._write("\n")

    def _print_sample(self, prompt: int, number: int) -> None:
        """A finished sample, with a heading where there are several."""
        found, decode = self.done[prompt, number], self.sampler.vocabulary.decode
        text, tokens = self.texts[prompt], self.prompts[prompt]
        if self.as_json:
            self._write(json.dumps(to_dict(text, tokens, number, found, decode)) + "\n")
            return
        if self.num_samples > 1:
            parts = [("prompt", prompt, len(self.texts)), ("sample", number, self.params.n)]
            told = [f"{name} {i + 1} of {count}" for name, i, count in parts if count > 1]
            self._write(("\n" if self._num_printed else "") + f"--- {', '.join(told)} ---\n")
        self._num_printed += 1
        before, after = found.depth.blocks[: len(tokens)], found.depth.blocks[len(tokens) :]
        self._print_prompt(prompt, before)
        assert found.text is not None
        if self.shader is None:
            self._print_text(found.text)
        else:
            self._print_pieces(shade_tokens(decode, found.tokens, after, found.text))
        self._write("\n")

    def _print_prompt(self, prompt: int, paths: Sequence[Sequence[bool]]) -> None:
        text, tokens = self.texts[prompt], self.prompts[prompt]
        if not self.echo or not text:
            return
        if self.shader is None:
            self._print_text(text, bold=True)
            return
        # the end token that opens a document is no text, unless the prompt itself has it
        vocabulary = self.sampler.vocabulary
        num_added = len(tokens) - len(vocabulary.tokenize(text))
        pieces = shade_tokens(vocabulary.decode, tokens[num_added:], paths[num_added:], text)
        self._print_pieces(pieces)

    def _print_pieces(self, pieces: Sequence[ShadedText]) -> None:
        if self.shader is not None:
            self._write("".join(map(self.shader.paint, pieces)))

    def _print_text(self, text: str, *, bold: bool = False) -> None:
        # what is no terminal gets the text as it is
        if self.file.isatty():
            text = hide_controls(text)
        self._write(f"{BOLD}{text}{RESET}" if bold and self.palette else text)

    def _write(self, text: str) -> None:
        # what a terminal's encoding does not have is no reason to stop
        encoding = getattr(self.file, "encoding", None) or "utf-8"
        self.file.write(text.encode(encoding, "replace").decode(encoding))
        self.file.flush()
