"""The training loop: batches, optimiser, schedule, held-out acceptance, checkpoints."""

from __future__ import annotations

import csv
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..common.files import replacing
from ..errors import EagleError, ErrorKind
from ..runtime.machine import cores
from . import checkpoint
from .acceptance import Acceptance, measure
from .data import Corpus, batches, draft_vocabulary, split
from .export import head_d2t, read_head
from .loss import Teacher, training_time_test
from .model import Head, build
from .optimizer import Optimizers
from .settings import PACE_STEPS, TrainSettings
from .start import least_squares_start
from .weights import TargetWeights

COLUMNS = ("step", "tokens_seen", "seconds", "loss", "lr", "mean_accepted_length")
SAVE_EVERY = 60.0  # seconds


@dataclasses.dataclass
class Progress:
    """The progress of a run. seen: positions so far. rate: positions per second. accepted: mean length."""

    step: int
    steps: int
    seen: int
    rate: float
    loss: float
    accepted: float


class Trainer:
    """A training run. train() may be interrupted at any time; a new Trainer continues from the checkpoint."""

    def __init__(self, settings: TrainSettings, corpus: Corpus, out: Path) -> None:
        self.s, self.corpus, self.out = settings, corpus, out
        torch.set_num_threads(settings.threads or min(torch.get_num_threads(), cores()))
        self.train_items, self.heldout = split(corpus, settings.heldout, settings.seed)
        weights = TargetWeights(settings.targets[0])
        d2t, self.coverage = self._vocabulary(weights)
        head = build(weights, len(corpus.layers), d2t, settings.seed)
        if settings.init_from:
            read_head(Path(settings.init_from), head, corpus.layers)
        self.identity = checkpoint.identity(settings, corpus, d2t)
        self.head: Head = head.to(settings.device)
        self.teacher = Teacher.of(weights, self.head, settings.device)
        self.optimizer = Optimizers(self.head, settings.optimizer, settings.lr)
        self.dtype = torch.bfloat16 if settings.device.startswith("cuda") else torch.float32
        self.epoch_steps = len(batches(self.train_items, settings.batch_tokens, settings.seed, 0))
        best = {"best": -1.0, "since_best": 0, "rows": []}
        self.state: dict[str, Any] = {"step": 0, "seen": 0, "seconds": 0.0, **best, "by_time": None}
        self.loss, self.save_every = float("nan"), SAVE_EVERY
        self.stopping = False  # set from a signal: train() saves after the step, and raises KeyboardInterrupt

    def _vocabulary(self, weights: TargetWeights) -> tuple[np.ndarray, float]:
        answers = self.corpus.answers(self.train_items)
        if self.s.init_from:
            d2t = head_d2t(Path(self.s.init_from))
            return d2t, float(np.isin(answers, d2t).mean())
        return draft_vocabulary(answers, weights.shape.n_vocab, self.s.draft_vocab)

    @property
    def path(self) -> Path:
        return self.out / "checkpoint.pt"

    @property
    def best_path(self) -> Path:
        return self.out / "best.pt"

    def resume(self) -> bool:
        """Loads the checkpoint. Returns False if there is none. Raises EagleError as checkpoint.load()."""
        state = checkpoint.load(self.path, self.identity)
        if state is None:
            return False
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.state = state["state"]
        return True

    def save(self) -> None:
        parts = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        checkpoint.save(self.path, self.identity, {**parts, "state": self.state})

    def train(
        self,
        progress: Callable[[Progress], None],
        starting: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        """Trains until the epochs, the minutes or the patience are used up.

        starting(done, total) reports progress before the first step. Checkpoints are written only between
        steps. An interruption loses the work since the last checkpoint.
        """
        st, total = self.state, self.s.epochs * self.epoch_steps
        if st["step"] == 0 and not st["rows"]:
            if not self.s.init_from:
                least_squares_start(self.head, self.corpus, self.train_items, self.s.seed, starting)
            self.evaluate()
        saved, order, drawn = time.monotonic(), [], -1
        while st["step"] < total and not self._out_of_time() and not self._out_of_patience():
            epoch, at = divmod(st["step"], self.epoch_steps)
            if epoch != drawn:
                order, drawn = batches(self.train_items, self.s.batch_tokens, self.s.seed, epoch), epoch
            started = time.monotonic()
            n = self._step([self.train_items[k] for k in order[at % len(order)]], total)
            st["seconds"] += time.monotonic() - started
            st["step"], st["seen"] = st["step"] + 1, st["seen"] + n
            if st["step"] % self.s.eval_every == 0 or st["step"] == total:
                self.evaluate()
            if time.monotonic() - saved >= self.save_every:
                self.save()
                saved = time.monotonic()
            rate, accepted = st["seen"] / max(st["seconds"], 1e-9), st["rows"][-1]["mean_accepted_length"]
            progress(Progress(st["step"], total, st["seen"], rate, self.loss, accepted))
            if self.stopping:
                self.save()
                raise KeyboardInterrupt
        if st["rows"][-1]["step"] != st["step"]:
            self.evaluate()
        self.save()

    def seconds_left(self) -> float:
        """How long the steps that are left take, at the speed so far; measurements come on top."""
        st = self.state
        left = st["seconds"] / max(st["step"], 1) * (self.s.epochs * self.epoch_steps - st["step"])
        return min(left, 60 * self.s.minutes - st["seconds"]) if self.s.minutes else left

    def _step(self, items: list[Any], total: int) -> int:
        batch = self.corpus.batch(items, self.s.steps + 2, self.s.device)
        offset = int(np.random.default_rng([self.s.seed, 13, self.state["step"]]).integers(self.s.stride))
        s, models = self.s, (self.head, self.teacher)
        with torch.autocast(batch.final.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = training_time_test(
                *models, batch, s.steps, s.decay, s.hard, s.temperature, s.stride, offset, self.dtype
            )
        if loss.positions:
            loss.total.backward()
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), 0.5)
            self.optimizer.step(self.s.lr * self._schedule(total))
            self.loss = loss.losses[0]
        return int(batch.n_tokens.sum())

    def _schedule(self, total: int) -> float:
        """Factor of the learning rate: warm-up, then a cosine to a tenth.

        It follows the time instead of the steps if the minutes will end before the epochs. This is decided
        once, after a few steps. So a run whose epochs fit gives the same head however often it is stopped.
        """
        st = self.state
        if self.s.minutes and st["by_time"] is None and st["step"] >= PACE_STEPS:
            st["by_time"] = st["seconds"] / st["step"] * total > 60 * self.s.minutes
        done = (st["step"] + 1) / total
        if st["by_time"]:
            done = max(done, st["seconds"] / 60 / self.s.minutes)
        if done < self.s.warmup:
            return done / self.s.warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min((done - self.s.warmup) / (1 - self.s.warmup), 1)))

    def _out_of_time(self) -> bool:
        return bool(self.s.minutes) and self.state["seconds"] >= 60 * self.s.minutes

    def _out_of_patience(self) -> bool:
        return bool(self.s.patience) and self.state["since_best"] >= self.s.patience

    def evaluate(self) -> Acceptance:
        """Measures held-out acceptance, logs it, and saves the head if it is the best so far."""
        st = self.state
        self.head.eval()
        a = measure(self.head, self.corpus, self.heldout, min(self.s.steps, 5), self.s.device)
        self.head.train()
        st["rows"].append(
            {
                "step": st["step"],
                "tokens_seen": st["seen"],
                "seconds": round(st["seconds"], 1),
                "loss": self.loss,
                "lr": self.s.lr * self._schedule(self.s.epochs * self.epoch_steps),
                "mean_accepted_length": a.mean_accepted_length,
                "accept_per_position": a.accept_per_position,
            }
        )
        if a.mean_accepted_length > st["best"]:
            st["best"], st["since_best"] = a.mean_accepted_length, 0
            head = {k: v.clone() for k, v in self.head.state_dict().items()}
            checkpoint.save(self.best_path, self.identity, {"head": head})
        else:
            st["since_best"] += 1
        self.write_log()
        return a

    def write_log(self) -> None:
        """Writes log.csv, one line per measurement."""
        n = max((len(r["accept_per_position"]) for r in self.state["rows"]), default=0)
        with replacing(self.out / "log.csv") as part, open(part, "w", newline="", encoding="utf-8") as f:
            w = csv.writer(f)
            w.writerow([*COLUMNS, *(f"accept_{i + 1}" for i in range(n))])
            for r in self.state["rows"]:
                w.writerow([*(r[c] for c in COLUMNS), *r["accept_per_position"]])

    def best_head(self) -> Head:
        """The head with the best measurement. Raises EagleError as checkpoint.load(), and if it is gone."""
        state = checkpoint.load(self.best_path, self.identity)
        if state is None:
            raise EagleError(
                ErrorKind.BAD_FILE, f"{self.best_path} is gone: remove {self.path} too, and run again"
            )
        self.head.load_state_dict(state["head"])
        return self.head
