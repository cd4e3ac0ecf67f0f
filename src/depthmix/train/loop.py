"""The training loop: batch, step, metrics, validation, checkpoint; each has its own module."""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

from depthmix.budget import Schedule
from depthmix.checkpoint import (
    Checkpoints,
    collect_rng,
    find_largest,
    restore_rank_rng,
    seed_rng,
)
from depthmix.data.loader import Batch, Loader, prefetch
from depthmix.data.shards import Corpus
from depthmix.interrupt import Interrupt
from depthmix.models import StoredModel
from depthmix.nn import Transformer
from depthmix.runs.folder import RunDir, State
from depthmix.runs.losses import JUDGED, bits_per_byte, name_metric, perplexity, read_metric
from depthmix.train import parallel
from depthmix.train.distill import open_distillation
from depthmix.train.evaluate import (
    TokenBatch,
    make_val_loader,
    read_val_batches,
    validate,
)
from depthmix.train.log import Logger, SilentLogger
from depthmix.train.lora import add_adapters, collect_parts, restore_parts
from depthmix.train.meter import Meter, MetricSums, check_finite
from depthmix.train.optim import check_state, make_optimizers, set_rates
from depthmix.train.start import freeze, load_start
from depthmix.train.step import Root, TrainStep
from depthmix.world import World


class Ending(NamedTuple):
    """How a training ended."""

    state: str
    """finished, or interrupted."""
    step: int
    num_steps: int
    val: dict[str, Any]
    """The last validation."""
    signal: int | None
    """The signal that interrupted it."""

    def describe_val(self) -> str:
        """The last validation as part of a sentence; empty if there was none."""
        labels = {"dense": "", "topk": " (top-k)", "causal": " (causal)"}
        found = {label: self.val.get(name_metric(rule)) for rule, label in labels.items()}
        losses = [f"{loss:.3f}{label}" for label, loss in found.items() if loss is not None]
        return f", validation loss {', '.join(losses)}" if losses else ""


class Trainer:
    """A model, its optimisers and its data; needs a folder to start."""

    def __init__(
        self,
        schedule: Schedule,
        corpus: Corpus,
        world: World,
        *,
        start: StoredModel | None = None,
        teacher: StoredModel | None = None,
    ) -> None:
        """`start` has the initial weights; `teacher` is the model of `train.teacher`."""
        run, device = schedule.run, world.device
        recipe = run.train
        recipe.check_sharing(world.size)
        if recipe.cuda_graph and device.type != "cuda":
            raise ValueError("train.cuda_graph = true needs a GPU: leave it out")
        self.schedule, self.run, self.corpus, self.world = schedule, run, corpus, world
        self.stage = schedule.stages[-1]
        """The stage of the previous step; a new model has its own capacities."""
        shape: dict[str, Any] = {"seq_len": run.seq_len, "batch_size": recipe.batch_size}
        shape |= {"seed": recipe.seed, "rank": world.rank, "world_size": world.size}
        self.loader = Loader(corpus.split("train"), **shape)
        self.val_loader = make_val_loader(corpus, shape)

        with torch.device("meta"):
            self.model = Transformer(run.model)
        freeze(self.model, recipe.trainable)
        self.root = Root(self.model)
        self.precision = parallel.resolve_precision(recipe, device)
        compiled = device.type == "cuda" if recipe.compile is None else recipe.compile
        alone = world.size == 1
        whole = compiled and alone and not recipe.compile_blocks
        by_block = compiled and not whole
        parallel.wrap_model(self.root, recipe, world, self.precision, by_block=by_block)
        parallel.allocate(self.root, device, recipe.seed)
        self.started = "" if start is None else load_start(self.model, start, recipe.seed)
        add_adapters(self.model, recipe)
        # the same weights on every process; after this, each has its own random numbers
        seed_rng(recipe.seed, world.rank, 0)
        can_record = alone and compiled and device.type == "cuda"
        graph = can_record if recipe.cuda_graph is None else recipe.cuda_graph
        self.optimizers = make_optimizers(self.model, recipe, capturable=graph)
        self.step = TrainStep(
            self.model,
            self.optimizers,
            precision=self.precision,
            compile=whole,
            cuda_graph=graph,
            max_grad_norm=recipe.max_grad_norm,
            num_micro_batches=recipe.num_micro_batches,
            root=self.root,
            distillation=None if teacher is None else open_distillation(teacher, run, device),
        )
        self.meter = Meter(schedule, world)
        # a GPU computes while the host writes; on a CPU it would only delay the numbers
        self.log_later = device.type == "cuda"
        self.pending: tuple[MetricSums, dict[str, Any]] | None = None
        """A line of metrics that is not written yet, with the fields that the meter lacks."""
        self.shown: dict[str, Any] = {}
        self.num_done = 0
        """Steps done so far, including those before resuming."""
        self.loss: float | None = None
        self.val: dict[str, Any] = {}

    def open(self, folder: RunDir) -> None:
        """Write to this run's folder from now on; cleans up after a killed process."""
        self.folder = folder
        keep = self.run.train.num_kept_checkpoints
        self.checkpoints = Checkpoints(folder.checkpoints, keep_last=keep)

    def resume(self) -> list[str]:
        """Resume from the newest intact checkpoint; returns messages for the user."""
        found = self.checkpoints.find_newest()
        if found is None:
            return ["there is no checkpoint yet: starting from the beginning"]
        tensors = collect_parts(self.model, self.optimizers)
        state = self.checkpoints.load(found, tensors)
        restore_parts(self.model, self.optimizers, tensors)
        check_state(self.optimizers)
        self.num_done, self.val, self.loss = found.step, state["val"], state.get("loss")
        self._set_stage(max(0, found.step - 1))
        self.meter.load_state_dict(state.get("meter", {}))
        self.loader.load_state_dict(state["loader"])
        note = restore_rank_rng(
            state["rng"],
            rank=self.world.rank,
            num_ranks=self.world.size,
            seed=self.run.train.seed,
            step=found.step,
        )
        return [*found.damaged, f"resuming at step {found.step}", *([note] if note else [])]

    def train(self, console: Console) -> Ending:
        """Train to the end of the budget, or until interrupted."""
        recipe, num_steps, world = self.run.train, self.schedule.num_steps, self.world
        val_every = self.run.space_validations(num_steps)
        meter, step = self.meter, self.num_done
        logger = SilentLogger()
        if world.is_first:
            logger = Logger(
                self.folder,
                console=console,
                num_steps=num_steps,
                start_step=step,
                tensorboard=recipe.tensorboard,
                wandb=recipe.wandb,
                description=self.folder.path.name,
            )
            self.write_status("running")
        saved_at = time.monotonic()
        with logger, Interrupt() as interrupt, prefetch(self.loader) as batches, ExitStack() as end:
            # log what was measured, however it ends
            end.callback(self._log_pending, logger)
            while step < num_steps:
                self._enter_stage(step)
                rate = set_rates(self.optimizers, recipe, step, num_steps)
                meter.add(self.step(*self._move(batches.next())))
                # while the device is busy
                self._log_pending(logger)
                step += 1
                self.num_done = step
                if step % recipe.log_every == 0 or step == num_steps:
                    # not the loader's own position, which is ahead of training
                    epoch = step * recipe.batch_size // self.loader.num_rows_per_epoch
                    extra = {"learning_rate": rate, "epoch": epoch, **self._describe_capacity()}
                    self.pending = meter.cut(step), extra
                    if step == num_steps or not self.log_later:
                        self._log_pending(logger)
                if self.shown:
                    logger.show(step, self.shown)
                if step % val_every == 0 or step == num_steps:
                    with self._pause(logger):
                        self.val = self._validate(logger, step)
                every, minutes = recipe.checkpoint_every, (time.monotonic() - saved_at) / 60
                wish = step % every == 0 if every else minutes > recipe.checkpoint_minutes
                save, stop = world.agree(wish, interrupt.signal is not None)
                if save or stop or step == num_steps:
                    with self._pause(logger):
                        if step % recipe.log_every and step != num_steps:
                            # never save weights that are not finite
                            check_finite(meter.peek(), step)
                        self._save(step, batches.state_dict())
                    saved_at = time.monotonic()
                self.checkpoints.poll()
                if stop and step < num_steps:
                    break
            self.checkpoints.wait()
        state: State = "finished" if step == num_steps else "interrupted"
        self.write_status(state)
        return Ending(state, step, num_steps, self.val, interrupt.signal)

    def _enter_stage(self, step: int) -> None:
        """Set the capacities of a step; recompile if they change."""
        if self._set_stage(step):
            self.step.forget()
            self.meter.expect_slow_step()
            # the last validation was at another capacity
            self.val = {}

    def _set_stage(self, step: int) -> bool:
        """Set the capacities of a step; returns whether they changed."""
        before, self.stage = self.stage, self.schedule.find_stage(step)
        self.model.set_capacities(self.stage.model.capacities)
        return before.model.capacities != self.stage.model.capacities

    def _describe_capacity(self) -> dict[str, float]:
        """For a line of metrics: the current mean capacity, if the recipe changes it."""
        shares = self.stage.model.capacities
        return {"capacity": sum(shares) / len(shares)} if len(self.schedule.stages) > 1 else {}

    def write_status(self, state: State, reason: str = "") -> None:
        """Write the status to the run's folder."""
        if self.world.is_first:
            numbers = {
                "step": self.num_done,
                "num_steps": self.schedule.num_steps,
                "loss": self.loss,
            }
            self.folder.write_status(state, **numbers, reason=reason)

    @contextmanager
    def _pause(self, logger: Logger | SilentLogger) -> Iterator[None]:
        """Write pending metrics and pause timing for the block, which does something else."""
        self._log_pending(logger)
        with self.meter.pause():
            yield

    def _log_pending(self, logger: Logger | SilentLogger) -> None:
        if self.pending is None:
            return
        (reading, extra), self.pending = self.pending, None
        record = self.meter.read(reading)
        check_finite(record, reading.step)
        self.loss = loss = record["loss"]
        record["perplexity"] = perplexity(loss)
        record["bits_per_byte"] = bits_per_byte(loss, self.corpus.bytes_per_token)
        logger.log({"step": reading.step, "kind": "train", **record, **extra})
        self.shown = _choose_shown(record, self.schedule.flops)

    def _move(self, batch: Batch) -> TokenBatch:
        """A batch as tensors on this process's device."""
        mask = self.run.train.document_mask
        return move_batch(batch, self.world.device, document_mask=mask)

    def _validate(self, logger: Logger | SilentLogger, step: int) -> dict[str, Any]:
        if self.val_loader is None:
            return {}
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        # random routing draws here too: validation must not change what follows
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.run.train.seed)
            batches = read_val_batches(self.val_loader, self.run.num_val_batches)
            moved = (self._move(batch) for batch in batches)
            means, gates = validate(self.root, self.run.model, moved, self.precision)
        values = self.world.average(torch.stack(list(means.values())))
        record = dict(zip(means, values.tolist(), strict=True))
        per_token = self.val_loader.split.bytes_per_token
        for rule in JUDGED:
            if (loss := record.get(name_metric(rule))) is not None:
                record[name_metric(rule, "bits_per_byte")] = bits_per_byte(loss, per_token)
        logger.log({"step": step, "kind": "val", **record})
        for layer, weights in zip(self.run.model.routed_layers, gates, strict=True):
            logger.histogram(f"weights_layer_{layer}", weights, step)
        return record

    def _save(self, step: int, loader: dict[str, Any]) -> None:
        self.corpus.check_unchanged()
        state = {
            "loader": loader,
            "meter": self.meter.state_dict(),
            "loss": self.loss,
            "val": self.val,
            # with this step's capacities, as the checkpoint may be used before training ends
            "config": {**self.run.to_dict(), "model": self.stage.model.to_dict()},
            "data": self.corpus.manifest_hash,
            "rng": collect_rng(),
        }
        score = read_metric(self.val, JUDGED)
        tensors = collect_parts(self.model, self.optimizers)
        # the loss is from before the update, which may have diverged
        (broken,) = self.world.agree(not math.isfinite(find_largest(tensors)))
        check_finite({"weights": math.nan if broken else 0.0}, step)
        # a higher capacity gives a lower loss: compare only at the final one
        is_final = self.stage is self.schedule.stages[-1]
        self.checkpoints.save(step, tensors, state, score=score if is_final else None)


def move_batch(batch: Batch, device: torch.device, *, document_mask: bool) -> TokenBatch:
    """A batch as tensors on a device; without the mask, each row counts as one document."""
    arrays = (batch.tokens, batch.targets, batch.documents if document_mask else None)
    tensors = [None if a is None else torch.from_numpy(a.astype(np.int64)) for a in arrays]
    if device.type == "cuda":
        tensors = [
            None if t is None else t.pin_memory().to(device, non_blocking=True) for t in tensors
        ]
    tokens, targets, documents = tensors
    assert tokens is not None
    assert targets is not None
    return tokens, targets, documents


def _choose_shown(record: dict[str, Any], budget: int | float) -> dict[str, Any]:
    names = ("loss", "tokens_per_second", "flops_per_second", "share_of_peak", "flops")
    routed = record.get("predictor_routed_fraction", record.get("router_routed_fraction"))
    return {**{name: record[name] for name in names}, "flops_budget": budget, "routed": routed}
