"""A Hugging Face script made of settings, one of each group: `trainer_settings.py NAME+NAME+... --output DIRECTORY`.

Each function below is a setting as scripts on the web have it. `GROUPS` says which exclude one another; the test
generates the scripts from it. `--dies EVENT:RANK:STEP` has a rank kill itself once in a hook.
"""

import copy
import os
import random
import signal
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch
from common import OUTPUT, JsonLog, finish, gpt, tokens
from torch import nn
from torch.utils.data import Dataset, RandomSampler
from transformers import EarlyStoppingCallback, TrainerCallback, default_data_collator, set_seed

from relight.integrations.transformers import Trainer, TrainingArguments

sys.path.append(str(Path(__file__).with_name("site-packages")))
torch.set_num_threads(1)
set_seed(1)
BEST = {"value": None, "history": []}  # of compute_metrics


class Dies(TrainerCallback):
    """Kills its rank in a hook, once. It keeps nothing: a file beside the output says that it is done."""

    def __init__(self, event, rank, step):
        self.rank, self.step, self.mark = int(rank), int(step), Path(OUTPUT + ".died")
        setattr(self, event, self.look)

    def look(self, args, state, control, **kwargs):
        if state.global_step >= self.step and args.process_index == self.rank and not self.mark.exists():
            self.mark.parent.mkdir(parents=True, exist_ok=True)
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Kit:
    """Parts that the settings fill in."""

    def __init__(self):
        self.args = {
            "output_dir": OUTPUT, "use_cpu": True, "seed": 1, "num_train_epochs": 2,
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
            "logging_steps": 2, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        }  # fmt: skip
        self.model, self.data, self.collate = gpt(), tokens(), default_data_collator
        self.callbacks, self.parents, self.more, self.own = [], [], {}, []

    def train(self, dies):
        kind = type("Mine", (*self.parents, Trainer), {})
        callbacks = [JsonLog(), *self.callbacks, *([Dies(*dies.split(":"))] if dies else [])]
        made = kind(
            model=self.model, args=TrainingArguments(**self.args), train_dataset=self.data,
            data_collator=self.collate, callbacks=callbacks, **self.more,
        )  # fmt: skip
        made.train()
        finish(made, *[own(made) for own in self.own])


# --- data ---------------------------------------------------------------------------------------------------------
def counted_data(kit):
    """A collator with a schedule of its own, that counts its calls."""

    class Collator:
        def __init__(self):
            self.calls = 0

        def __call__(self, features):
            self.calls += 1
            batch = default_data_collator(features)
            hidden = torch.rand(batch["input_ids"].shape) < min(0.5, self.calls / 50)
            batch["input_ids"] = batch["input_ids"].masked_fill(hidden, random.randrange(64))
            return batch

    kit.collate = Collator()


def workers(kit):
    """Two workers, a remainder of an epoch, the last batch dropped."""
    kit.data = tokens(90)
    kit.args |= {"dataloader_num_workers": 2, "dataloader_drop_last": True, "gradient_accumulation_steps": 3}


def own_sampler(kit):
    """A sampler with a random generator of Python's own, seeded once."""

    class Drawn(RandomSampler):
        def __init__(self, data):
            super().__init__(data)
            self.random = random.Random(4)

        def __iter__(self):
            order = list(range(len(self.data_source)))
            self.random.shuffle(order)
            return iter(order)

    class Mine(Trainer):
        def _get_train_sampler(self, dataset=None):
            return Drawn(self.train_dataset)

    kit.parents.append(Mine)


def split_batches(kit):
    """Batches that accelerate splits over ranks; no seedable sampler."""
    kit.args["accelerator_config"] = {"split_batches": True, "use_seedable_sampler": False}
    kit.args["per_device_train_batch_size"] = 8


def epoch_of_data(kit):
    """Items that depend on a stage that `on_step_end` moves on, which no epoch does."""

    class Staged(Dataset):
        def __init__(self):
            self.rows, self.stage = tokens(92), 0

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            row = self.rows[index]["input_ids"].clone()
            row[: self.stage % 5] = 0
            return {"input_ids": row, "labels": row}

    class Callback(TrainerCallback):
        def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
            train_dataloader.dataset.stage += 1

    kit.data = Staged()
    kit.callbacks.append(Callback())


# --- optimizer and schedule ---------------------------------------------------------------------------------------
def plateau(kit):
    kit.args |= {
        "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},
        "eval_strategy": "steps", "eval_steps": 2, "optim": "adafactor",
    }  # fmt: skip
    kit.more["eval_dataset"] = tokens(16, 1)


def own_optimizers(kit):
    """optimizers=(optimizer, scheduler), with a schedule that keeps a list."""
    optimizer = torch.optim.SGD(kit.model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    rates = []

    def factor(step):
        rates.append(step)
        return 1 / (1 + step)

    kit.more["optimizers"] = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def wsd(kit):
    kit.args |= {
        "lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 4}, "warmup_steps": 3,
        "optim": "rmsprop", "weight_decay": 0.05,
    }  # fmt: skip


def noisy_gradients(kit):
    """Noise and a clipping of a callback's own, with a norm that it remembers."""

    class Callback(TrainerCallback):
        def __init__(self):
            self.norm = None

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            norm = float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())
            self.norm = norm if self.norm is None else 0.9 * self.norm + 0.1 * norm
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(min(1.0, self.norm / norm)).add_(torch.randn_like(p.grad), alpha=1e-4)

    callback = Callback()
    kit.callbacks.append(callback)
    kit.own.append(lambda trainer: callback.norm)
    kit.args["max_grad_norm"] = 0.0


def own_write(kit):
    """A weight decay by hand in on_optimizer_step, and rates that a callback sets."""

    class Callback(TrainerCallback):
        def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.999)

        def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.01 * state.global_step

    kit.callbacks.append(Callback())


# --- the model ----------------------------------------------------------------------------------------------------
def bf16(kit):
    kit.args |= {"bf16": True, "bf16_full_eval": True}


def compiled(kit):
    kit.args |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}


def checkpointed(kit):
    kit.args |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


def neftune(kit):
    kit.args |= {"neftune_noise_alpha": 5.0}


def lora(kit):
    """Adapters by hand: frozen weights, small matrices that are trained, only these in the optimizer."""

    class Lora(nn.Module):
        def __init__(self, inner, rank=4):
            super().__init__()
            self.inner = inner
            self.a = nn.Parameter(torch.randn(inner.weight.shape[0], rank) * 0.02)
            self.b = nn.Parameter(torch.zeros(rank, inner.weight.shape[1]))
            self.scale = 1.0

        def forward(self, x):
            return self.inner(x) + self.scale * (x @ self.a @ self.b)

    class Callback(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            for module in model.modules():
                if isinstance(module, Lora):
                    module.scale *= 0.95

    kit.model.requires_grad_(False)
    for block in kit.model.transformer.h:
        block.attn.c_attn = Lora(block.attn.c_attn)
    kit.callbacks.append(Callback())
    kit.own.append(lambda trainer: [m.scale for m in trainer.model.modules() if isinstance(m, Lora)])


def peft(kit):
    from peft import LoraConfig, get_peft_model

    set_seed(1)
    kit.model = get_peft_model(kit.model, LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1))


# --- the loss -----------------------------------------------------------------------------------------------------
def smoothing(kit):
    kit.args |= {"label_smoothing_factor": 0.1, "include_num_input_tokens_seen": "non_padding"}


def loss_with_state(kit):
    """A loss that is weighed by a running mean on self, and a queue of tensors."""

    class Mine(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.mean, self.queue, self.seen = 1.0, deque(maxlen=3), {"steps": 0}

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            out = model(**inputs)
            loss = out.loss / self.mean
            if self.queue:
                loss = loss + 0.01 * (out.logits.mean(1) - self.queue[0]).pow(2).mean()
            if model.training:
                self.mean = 0.9 * self.mean + 0.1 * float(out.loss.detach())
                self.queue.append(out.logits.detach().mean((0, 1)))
                self.seen["steps"] += 1
            return (loss, out) if return_outputs else loss

    kit.parents.append(Mine)
    kit.own.append(lambda trainer: [trainer.mean, list(trainer.queue), trainer.seen])


def loss_function(kit):
    """compute_loss_func with a global that it counts in."""
    calls = {"count": 0}

    def loss(outputs, labels, num_items_in_batch=None):
        calls["count"] += 1
        value = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        weight = 1 + 0.1 * (calls["count"] % 3)
        return weight * value / (num_items_in_batch if num_items_in_batch is not None else labels.numel())

    kit.more["compute_loss_func"] = loss
    kit.own.append(lambda trainer: calls["count"])


def two_passes(kit):
    """A training_step with a second backward pass on disturbed embeddings (FGM), undone afterwards."""

    class Mine(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            table = self.model.transformer.wte.weight
            kept = table.detach().clone()
            if table.grad is not None:
                table.data.add_(0.1 * table.grad / (table.grad.norm() + 1e-6))
                out = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)  # its sum is reduced
                self.accelerator.backward(0.5 * out)
                table.data.copy_(kept)
            return loss

    kit.parents.append(Mine)


# --- callbacks ----------------------------------------------------------------------------------------------------
def copied_at_start(kit):
    """An average that is copied from the model in on_train_begin, and swapped in for evaluation."""

    class Callback(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.ema = copy.deepcopy(getattr(model, "module", model)).eval()

        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                for e, p in zip(self.ema.parameters(), getattr(model, "module", model).parameters(), strict=True):
                    e.lerp_(p, 0.1)

    class Mine(Trainer):
        def evaluate(self, *args, **kwargs):
            kept = copy.deepcopy(self.model.state_dict())
            self.model.load_state_dict(callback.ema.state_dict())
            found = super().evaluate(*args, **kwargs)
            self.model.load_state_dict(kept)
            return found

    callback = Callback()
    kit.callbacks.append(callback)
    kit.parents.append(Mine)
    kit.own.append(lambda trainer: callback.ema.state_dict())


def averaged(kit):
    """torch's AveragedModel, moved right after the write, and an average of a library, in an object of the script's."""
    from acme_average import Average

    class Holder:
        def __init__(self, model):
            self.average = Average(list(model.parameters()))

    class Callback(TrainerCallback):
        def __init__(self, model):
            decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            self.average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)
            self.holder = Holder(model)

        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.average.update_parameters(getattr(model, "module", model))

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.holder.average.step(getattr(model, "module", model).parameters())

    callback = Callback(kit.model)
    kit.callbacks.append(callback)
    kit.own.append(lambda trainer: [callback.average.state_dict(), callback.holder.average.state_dict()])


def teacher(kit):
    """A teacher on the Trainer that follows the student in training_step, and weighs in the loss."""

    class Mine(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.teacher = copy.deepcopy(self.model).requires_grad_(False).eval()

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            with torch.no_grad():
                for t, s in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                    t.mul_(0.9).add_(s, alpha=0.1)
            return loss

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, out = super().compute_loss(model, inputs, True, num_items_in_batch)
            with torch.no_grad():
                aim = self.teacher(input_ids=inputs["input_ids"]).logits
            loss = loss + (out.logits - aim).pow(2).mean()
            return (loss, out) if return_outputs else loss

    kit.parents.append(Mine)
    kit.own.append(lambda trainer: trainer.teacher.state_dict())


def lazy_copy(kit):
    """An average that is copied from the model in the first on_step_end: refused."""

    class Callback(TrainerCallback):
        def __init__(self):
            self.ema = None

        def on_step_end(self, args, state, control, model=None, **kwargs):
            inner = getattr(model, "module", model)
            if self.ema is None:
                self.ema = copy.deepcopy(inner).eval()
                return
            with torch.no_grad():
                for e, p in zip(self.ema.parameters(), inner.parameters(), strict=True):
                    e.lerp_(p, 0.1)

    callback = Callback()
    kit.callbacks.append(callback)
    kit.own.append(lambda trainer: callback.ema.state_dict())


def lazy_shadow(kit):
    """An average as a dict of tensors, made then."""

    class Callback(TrainerCallback):
        def __init__(self):
            self.shadow = {}

        def on_step_end(self, args, state, control, model=None, **kwargs):
            for name, p in model.named_parameters():
                old = self.shadow.setdefault(name, p.detach().clone())
                self.shadow[name] = 0.9 * old + 0.1 * p.detach()

    callback = Callback()
    kit.callbacks.append(callback)
    kit.own.append(lambda trainer: callback.shadow)


def counters(kit):
    """Counters of hooks on the class and in a closure; stops by itself, and asks for logs."""
    calls = {"substeps": 0}

    class Callback(TrainerCallback):
        steps = 0
        logs = 0

        def on_substep_end(self, args, state, control, **kwargs):
            calls["substeps"] += 1

        def on_step_end(self, args, state, control, **kwargs):
            Callback.steps += 1
            control.should_log = control.should_log or Callback.steps % 3 == 0
            control.should_training_stop = Callback.steps == 11

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.logs += 1

    kit.callbacks.append(Callback())
    kit.own.append(lambda trainer: [calls["substeps"], Callback.steps])


def evaluates_itself(kit):
    """A callback that evaluates on the training data at an epoch's end, and keeps the metrics."""

    class Callback(TrainerCallback):
        def __init__(self):
            self.trainer, self.found = None, []

        def on_epoch_end(self, args, state, control, **kwargs):
            kept = copy.deepcopy(control)
            metrics = self.trainer.evaluate(eval_dataset=tokens(12, 3), metric_key_prefix="train_set")
            self.found.append(metrics["train_set_loss"])
            return kept

    callback = Callback()
    kit.callbacks.append(callback)
    kit.parents.append(_naming(callback))
    kit.own.append(lambda trainer: callback.found)


def timed(kit):
    """A callback that measures, as many do: its times are other ones in each process."""

    class Callback(TrainerCallback):
        def __init__(self):
            self.began, self.step_began, self.seconds, self.steps = time.time(), None, [], 0

        def on_step_begin(self, args, state, control, **kwargs):
            self.step_began = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            self.seconds.append(time.perf_counter() - self.step_began)
            self.steps += 1

    callback = Callback()
    kit.callbacks.append(callback)
    kit.own.append(lambda trainer: [callback.steps, len(callback.seconds)])


def _naming(callback):
    class Mine(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            callback.trainer = self

    return Mine


# --- evaluation and saving ----------------------------------------------------------------------------------------
def best_model(kit):
    """Metrics with a history of their own; the best model at the end; patience."""

    def compute_metrics(p):
        value = float(np.asarray(p.predictions).argmax(-1).mean())
        BEST["history"].append(round(value, 6))
        BEST["value"] = max(value, BEST["value"] or 0.0)
        return {"mean": value, "best": BEST["value"]}

    kit.args |= {
        "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "mean", "greater_is_better": True,
    }  # fmt: skip
    kit.more |= {"eval_dataset": tokens(16, 1), "compute_metrics": compute_metrics}
    kit.callbacks.append(EarlyStoppingCallback(3))
    kit.own.append(lambda trainer: [BEST["value"], BEST["history"]])


def by_epoch(kit):
    kit.args |= {
        "eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch", "eval_on_start": True,
        "eval_accumulation_steps": 1, "save_only_model": True,
    }  # fmt: skip
    kit.more["eval_dataset"] = {"a": tokens(8, 1), "b": tokens(12, 2)}


def every_step(kit):
    kit.args |= {
        "eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1, "logging_first_step": True, "eval_delay": 3,
        "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "batch_eval_metrics": False,
        "max_steps": 9, "num_train_epochs": 1,
    }  # fmt: skip
    kit.more["eval_dataset"] = tokens(16, 1)


GROUPS = {
    "data": (None, counted_data, workers, own_sampler, split_batches, epoch_of_data),
    "optimizer": (own_optimizers, None, wsd, noisy_gradients, own_write, plateau),
    "model": (peft, bf16, lora, checkpointed, neftune, compiled),
    "loss": (smoothing, two_passes, loss_with_state, loss_function, teacher, loss_with_state),
    "callback": (lazy_shadow, counters, copied_at_start, evaluates_itself, averaged, timed),
    "saving": (best_model, every_step, by_epoch, None, by_epoch, best_model),
}

if __name__ == "__main__":
    kit = Kit()
    for word in sys.argv[1].split("+"):
        globals()[word](kit)
    kit.train(sys.argv[sys.argv.index("--dies") + 1] if "--dies" in sys.argv else "")
