"""Training of sparse_video: the dense model, stage 1 of the router, and stage 2 of one arm."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .command import Signals
from .graphed import GraphedStep
from .sparse_arms import ArmAttention, attention_of
from .sparse_plan import ARMS, Run, SparseConfig
from .sprites import as_tokens, videos
from .video_model import VideoModel

#: Seeds of what is not trained on; training has those from 0 on.
HELD_OUT, CALIBRATION = 900_001, 900_002

#: From one checkpoint of the dense model's training to the next.
KEEP_SECONDS = 180


class Progress:
    """One line on standard error for the whole command."""

    def __init__(self, minutes: float | None) -> None:
        self.started, self.minutes, self.last = time.monotonic(), minutes, 0.0

    def __call__(self, title: str, done: int, total: int, text: str = "") -> None:
        now, last = time.monotonic(), done >= total
        if not last and now - self.last < (0.2 if sys.stderr.isatty() else 20):
            return
        self.last = now
        spent = f"{(now - self.started) / 60:.1f}"
        limit = f" of {self.minutes:g}" if self.minutes else ""
        bar = "#" * round(20 * done / max(1, total))
        line = f"{title} [{bar:<20}] {done}/{total} {text} ({spent}{limit} minutes)"
        if sys.stderr.isatty():
            print(f"\r{line:<100}", end="\n" if last else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


class Workplace:
    """The configuration, the device, and what all runs share."""

    def __init__(self, config: SparseConfig, device: torch.device, progress: Progress) -> None:
        self.config, self.device, self.progress = config, device, progress

    def batch(self, seed: int, step: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """(videos as tokens, noise, times), of seed and step alone."""
        c = self.config
        clean = as_tokens(videos(seed, step, count, c.frames, c.size, self.device), c.patch)
        generator = torch.Generator(self.device).manual_seed(seed * 1_000_003 + step + 7)
        noise = torch.randn(clean.shape, generator=generator, device=self.device)
        time = torch.randn(count, generator=generator, device=self.device).sigmoid()
        return clean, noise, time

    def model(self) -> VideoModel:
        torch.manual_seed(0)
        return VideoModel(self.config).to(self.device)

    def validation(self, model: VideoModel) -> float:
        """The mean loss on fixed videos, noise and times."""
        model.eval()
        count, found = self.config.validation, []
        for first in range(0, count, self.config.batch):
            size = min(self.config.batch, count - first)
            clean, noise, _ = self.batch(HELD_OUT, first, size)
            at = (torch.arange(first, first + size, device=self.device) + 0.5) / count
            with torch.no_grad():
                found.append(model.loss(clean, noise, at))
        model.train()
        return float(torch.cat(found).double().mean())

    def optimizer(self, groups, rate: float, decay: float) -> torch.optim.AdamW:
        """On a GPU one whose steps and rates a CUDA graph reads."""
        if self.device.type != "cuda":
            return torch.optim.AdamW(groups, rate, weight_decay=decay, betas=(0.9, 0.99))
        optimizer = torch.optim.AdamW(groups, rate, weight_decay=decay, betas=(0.9, 0.99),
                                      fused=True, capturable=True)  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], device=self.device)
        return optimizer

    @staticmethod
    def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
        """All groups get this rate."""
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def stepper(self, model: VideoModel, optimizer, graphed: bool = True) -> Callable[..., Tensor]:
        """The function (seed, step) that trains on that batch and gives its loss, as a CUDA graph
        where there is a GPU."""

        def train(clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = model.loss(clean, noise, time).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        call = GraphedStep(train) if graphed and self.device.type == "cuda" else train
        return lambda seed, step: call(*self.batch(seed, step, self.config.batch))

    def wait(self) -> float:
        """The time, once the device has done what it was asked to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic()

    # ---- the dense model -------------------------------------------------------------------------

    def pretrain(self, seconds: float | None, unfinished=None) -> tuple[VideoModel, dict]:
        """The dense model, trained for the configured steps or for as long as `seconds` allow.

        `unfinished`, if given, has what an earlier call left, and is written to every few minutes
        and on an interrupt, which waits for the end of a step. Without a limit of time a model
        that was interrupted is bit for bit another that was not.
        """
        model, steps = self.model(), self.config.pretrain_steps
        optimizer = self.optimizer(model.parameters(), self.config.pretrain_lr, 0.01)
        state: dict = {"step": 0, "curve": [], "spent": 0.0, "loss": math.nan}
        if unfinished is not None and (found := unfinished.read()):
            state = found
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        step, curve, loss = state["step"], state["curve"], state["loss"]
        train = self.stepper(model, optimizer)
        started, cut, written = self.wait(), None, time.monotonic()
        every, spent = max(1, steps // 12), state["spent"]

        def keep() -> None:
            unfinished.write({"step": step, "curve": curve, "spent": spent, "loss": float(loss),
                              "model": model.state_dict(),
                              "optimizer": optimizer.state_dict()})  # fmt: skip

        while step < steps:
            if seconds and step >= 10 and step % 10 == 0:
                spent = state["spent"] + (1 - state["spent"]) * (self.wait() - started) / seconds
            done = max(step / steps, spent)  # the schedule ends with the time
            if done >= 1:
                cut = f"{step} steps of pre-training instead of {steps}"
                break
            warm = min(1.0, (step + 1) / 100)
            self.set_rate(optimizer, self.config.pretrain_lr * warm * (
                0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))))  # fmt: skip
            with Signals() as signals:
                loss = train(0, step)
                step += 1
                if step % every == 0 or step == steps:
                    curve.append([step, self.validation(model), float(loss)])
                    self.progress("dense", step, steps, f"validation {curve[-1][1]:.4f}")
                due = signals.here or time.monotonic() - written > KEEP_SECONDS
                if unfinished is not None and due:
                    keep()
                    written = time.monotonic()
            signals.check()
        if not curve or curve[-1][0] != step:
            curve.append([step, self.validation(model), float(loss)])
        return model, {"steps": step, "curve": curve, "cut": cut,
                       "parameters": sum(p.numel() for p in model.parameters())}  # fmt: skip

    # ---- stage 1 ---------------------------------------------------------------------------------

    def captured(self, model: VideoModel, seed: int, step: int, count: int) -> list[tuple]:
        """q, k and v of every layer of the dense model, on noised videos."""
        found: list[tuple] = []
        hooks = [layer.attend.register_forward_pre_hook(lambda _, given: found.append(given))
                 for layer in model.layers()]  # fmt: skip
        with torch.no_grad():
            model.loss(*self.batch(seed, step, count))
        for hook in hooks:
            hook.remove()
        return found

    def stage_one(self, model: VideoModel, density: float, steps: int) -> list[dict]:
        """The routers of (e), by layer, as states of modules."""
        modules = [self.attention("e", density, layer) for layer in range(self.config.layers)]
        for module, given in zip(modules, self.captured(model, CALIBRATION, 0, 1)):
            module.calibrate_alpha(*given)
        maps = [p for module in modules for p in module.router.parameters()]
        alphas = [module.alpha_logit for module in modules]
        optimizer = torch.optim.AdamW([{"params": maps}, {"params": alphas}],
                                      self.config.stage_one_lr, weight_decay=0.0)  # fmt: skip
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = self.config.stage_one_lr * (1 - 0.9 * step / steps)
            for module, given in zip(modules, self.captured(model, 0, 500_000 + step, 1)):
                module.stage_one_loss(*given).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.progress(f"stage 1 at {density:g}", step + 1, steps)
        return [module.router.state_dict() for module in modules]

    def attention(self, arm: str, density: float, layer: int) -> nn.Module:
        how = self.config.how if self.config.how == "bf16" else ARMS[arm].how
        return attention_of(arm, density, layer, self.config, how).to(self.device)

    def arm_modules(self, run: Run, model: VideoModel, routers: list[dict] | None) -> list:
        """An arm's modules, with the trained router and alpha calibrated for it."""
        modules = [self.attention(run.arm, run.density, i) for i in range(self.config.layers)]
        if ARMS[run.arm].router == "learned":
            for module, state in zip(modules, routers):
                module.router.load_state_dict(state)
        if ARMS[run.arm].branches == "both":
            given = self.captured(model, CALIBRATION, 0, self.config.calibration)
            for module, tensors in zip(modules, given):
                module.calibrate_alpha(*(t.contiguous() for t in tensors))
                if ARMS[run.arm].routing == "hard":
                    module.freeze_router()
        return modules

    def held_out_report(self, modules: list, model: VideoModel) -> list[dict]:
        """By layer the figures of `report`, and the error of soft lists."""
        found = []
        for module, given in zip(modules, self.captured(model, HELD_OUT, 0, 1)):
            given = [t.contiguous() for t in given]
            figures = module.report(*given)
            with torch.no_grad():
                full = (torch.nn.functional.scaled_dot_product_attention(*given)).float()
                soft = module.stage_one_loss(*given)
            figures["error_soft"] = float((soft / full.square().mean()).sqrt())
            found.append({name: round(value, 6) for name, value in figures.items()})
        return found

    # ---- stage 2 ---------------------------------------------------------------------------------

    def run(self, run: Run, model: VideoModel, modules: list, steps: int) -> dict:
        """Trains one arm from the dense model's weights: its curve of validations."""
        trained = self.model()
        trained.load_state_dict(model.state_dict())
        for layer, module in zip(trained.layers(), modules):
            layer.attend = module
        logits = [
            p
            for name, p in trained.named_parameters()
            if p.requires_grad and name.rpartition(".")[2] in ("alpha_logit", "beta")
        ]
        others = [p for p in trained.parameters()
                  if p.requires_grad and not any(p is x for x in logits)]  # fmt: skip
        groups = [{"params": others}, {"params": logits, "lr": 10 * self.config.lr}]
        optimizer = self.optimizer(groups, self.config.lr, 0.0)
        train = self.stepper(trained, optimizer, ARMS[run.arm].routing == "hard")
        every, curve = max(1, steps // self.config.evals), []

        def validate(step: int) -> None:
            self._set_how(trained, ARMS[run.arm].how_at_validation)
            curve.append([step, self.validation(trained)])
            self._set_how(trained, ARMS[run.arm].how)

        validate(0)
        times, since = [], self.wait()
        for step in range(steps):
            train(1 + run.seed, step)
            last = step + 1 == steps
            if last or (step + 1) % every == 0:
                now = self.wait()
                times.append((now - since) * 1e3 / every)
                validate(step + 1)
                since = self.wait()
            self.progress(f"run {run.label()}", step + 1, steps, f"validation {curve[-1][1]:.5f}")
        return {"arm": run.arm, "density": run.density, "seed": run.seed, "steps": steps,
                "curve": curve, "final": curve[-1][1],
                "ms_per_step": round(statistics.median(times), 2)}  # fmt: skip

    def _set_how(self, model: VideoModel, how: str) -> None:
        for layer in model.layers():
            if isinstance(layer.attend, ArmAttention):
                layer.attend.how = "bf16" if self.config.how == "bf16" else how
