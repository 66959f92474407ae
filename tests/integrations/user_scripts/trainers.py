"""Scripts with Hugging Face's Trainer in shapes that people publish, chosen by name."""

import copy
import os
import random
import sys
from collections import Counter, deque

import numpy as np
import torch
from common import OUTPUT, JsonLog, bert, finish, gpt, pad, sentences, tokens
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback, default_data_collator, set_seed
from transformers.trainer_utils import get_last_checkpoint

from relight.integrations.transformers import Seq2SeqTrainer, Trainer, TrainingArguments

kind = sys.argv[1]
torch.set_num_threads(1)
set_seed(1)


def arguments(**more):
    given = {
        "output_dir": OUTPUT,
        "use_cpu": True,
        "seed": 1,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**given, **more})


def trainer(cls=Trainer, model=None, data=None, callbacks=(), collate=default_data_collator, args=None, **more):
    return cls(
        model=model if model is not None else gpt(),
        args=args or arguments(),
        train_dataset=data or tokens(),
        data_collator=collate,
        callbacks=[JsonLog(), *callbacks],
        **more,
    )


def train(made, own=lambda: ()):
    made.train()
    finish(made, own())


# --- arguments ----------------------------------------------------------------------------------------------------
def glue():
    """run_glue: metrics, rows of different lengths grouped by length, label smoothing, the best model."""

    def compute_metrics(p):
        return {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())}

    args = arguments(
        train_sampling_strategy="group_by_length",
        label_smoothing_factor=0.1,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        save_total_limit=1,
        num_train_epochs=3,
    )
    made = trainer(
        model=bert(),
        data=sentences(),
        collate=pad,
        args=args,
        eval_dataset=sentences(20, 1),
        compute_metrics=compute_metrics,
    )
    made.train()
    found = made.evaluate()
    predicted = made.predict(sentences(20, 1)).predictions
    finish(made, found["eval_accuracy"], torch.tensor(predicted))


def clm():
    """run_clm: starts from the last checkpoint in its directory, if there is one; cosine with restarts."""
    last = get_last_checkpoint(OUTPUT) if os.path.isdir(OUTPUT) else None
    args = arguments(
        save_strategy="steps",
        save_steps=3,
        save_total_limit=2,
        lr_scheduler_type="cosine_with_restarts",
        lr_scheduler_kwargs={"num_cycles": 2},
        warmup_steps=2,
        gradient_checkpointing=True,
        eval_strategy="steps",
        eval_steps=4,
    )
    made = trainer(args=args, eval_dataset=tokens(16, 1))
    made.train(resume_from_checkpoint=last)
    made.save_model()
    made.save_state()
    finish(made)


def plateau():
    args = arguments(
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "threshold": 0.5},
        eval_strategy="steps",
        eval_steps=2,
        optim="adafactor",
    )
    train(trainer(args=args, eval_dataset=tokens(16, 1)))


def greedy():
    args = arguments(
        lr_scheduler_type="greedy", lr_scheduler_kwargs={"patience": 0}, eval_strategy="steps", eval_steps=2
    )
    train(trainer(args=args, eval_dataset=tokens(16, 1)))


def neftune():
    train(trainer(args=arguments(neftune_noise_alpha=5.0, max_steps=9, num_train_epochs=1)))


def workers():
    """Workers of the loader, a dataset that augments with draws, uneven epochs, no column removed."""

    class Augmented(Dataset):
        def __init__(self):
            self.rows = tokens(90)

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            row = self.rows[index]["input_ids"].clone()
            row[random.randrange(16)] = int(torch.randint(0, 64, ()))
            row[np.random.randint(16)] = 3
            return {"input_ids": row, "labels": row}

    train(
        trainer(
            data=Augmented(),
            args=arguments(
                dataloader_num_workers=2,
                remove_unused_columns=False,
                dataloader_persistent_workers=True,
                dataloader_prefetch_factor=3,
            ),
        )
    )


def compiled():
    train(trainer(args=arguments(torch_compile=True, torch_compile_backend="aot_eager", max_steps=6)))


def iterable():
    class Endless(IterableDataset):
        def __iter__(self):
            yield from tokens(400)

    train(trainer(data=Endless(), args=arguments(max_steps=10)))


def keeps_iterator():
    """Data without labels, from a loader of its own that goes round and round."""

    class Mine(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.loader = DataLoader(tokens(40, 3), batch_size=4, shuffle=True, collate_fn=default_data_collator)
            self.other = iter(self.loader)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            try:
                other = next(self.other)
            except StopIteration:
                self.other = iter(self.loader)
                other = next(self.other)
            out = model(**inputs)
            loss = out.loss + model(**other).logits.pow(2).mean()
            return (loss, out) if return_outputs else loss

    train(trainer(Mine))


def finds_batch_size():
    train(trainer(args=arguments(auto_find_batch_size=True)))


def bf16():
    args = arguments(
        bf16=True,
        max_grad_norm=0.5,
        adam_beta2=0.95,
        optim="adamw_torch",
        weight_decay=0.1,
        include_num_input_tokens_seen="non_padding",
        logging_strategy="epoch",
        eval_strategy="epoch",
        eval_on_start=True,
        batch_eval_metrics=False,
        eval_accumulation_steps=1,
    )
    train(trainer(args=args, eval_dataset={"a": tokens(8, 1), "b": tokens(12, 2)}))


def dropout():
    """Masks and dropout of a masked language model: the collator draws."""

    def mask(features):
        batch = default_data_collator(features)
        chosen = torch.rand(batch["input_ids"].shape) < 0.3
        batch["labels"] = batch["labels"].masked_fill(~chosen, -100)
        batch["input_ids"] = batch["input_ids"].masked_fill(chosen, random.randrange(64))
        return batch

    train(trainer(model=gpt(0.1), collate=mask))


def lora():
    """LoRA by hand: frozen weights, and small matrices that are trained; only these are saved."""

    class Lora(nn.Module):
        def __init__(self, inner, rank=4):
            super().__init__()
            self.inner = inner
            self.a = nn.Parameter(torch.randn(inner.weight.shape[0], rank) * 0.02)
            self.b = nn.Parameter(torch.zeros(rank, inner.weight.shape[1]))

        def forward(self, x):
            return self.inner(x) + x @ self.a @ self.b

    model = gpt()
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Lora(block.attn.c_attn)
    train(
        trainer(
            model=model, args=arguments(learning_rate=1e-2, save_strategy="steps", save_steps=4, save_only_model=True)
        )
    )


def twice():
    """Train, then go on with another learning rate, in one process."""
    made = trainer(args=arguments(num_train_epochs=1))
    made.train()
    made.args.num_train_epochs = 2
    train(made)


# --- subclasses ---------------------------------------------------------------------------------------------------
def contrastive():
    """A loss of its own that logs each part, as many do, and sums of its own for the next log."""

    class Mine(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.parts = Counter()
            self.recent = deque(maxlen=3)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            out = model(**inputs)
            margin = out.logits.float().pow(2).mean()
            loss = out.loss + 0.01 * margin
            self.parts["margin"] += float(margin)
            self.recent.append(float(loss))
            if self.state.global_step % 3 == 0 and model.training:
                self.log({"margin": float(margin)})
            return (loss, out) if return_outputs else loss

        def log(self, logs, start_time=None):
            logs["parts"] = self.parts["margin"] / 10
            logs["recent"] = sum(self.recent) / max(1, len(self.recent))
            self.parts.clear()
            super().log(logs, start_time)

    made = trainer(Mine)
    train(made, lambda: [dict(made.parts), list(made.recent)])


def groups():
    """Optimizer and scheduler made by the subclass, a loader of its own with a DistributedSampler."""

    class Mine(Trainer):
        def create_optimizer(self, model=None):
            decay = [p for p in self.model.parameters() if p.ndim > 1]
            rest = [p for p in self.model.parameters() if p.ndim <= 1]
            self.optimizer = torch.optim.SGD(
                [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 1e-2}], lr=1e-1, momentum=0.9
            )
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
                self.optimizer, [0.1, 0.05], total_steps=num_training_steps + 1
            )
            return self.lr_scheduler

        def get_train_dataloader(self):
            sampler = DistributedSampler(self.train_dataset, seed=5)
            return DataLoader(
                self.train_dataset, batch_size=4, sampler=sampler, collate_fn=self.data_collator, drop_last=True
            )

    train(trainer(Mine))


def shuffled():
    """A loader of its own that shuffles, prepared by accelerate; and one that is not prepared."""

    class Mine(Trainer):
        def get_train_dataloader(self):
            made = DataLoader(self.train_dataset, batch_size=4, shuffle=True, collate_fn=self.data_collator)
            return self.accelerator.prepare(made)

    train(trainer(Mine))


def unprepared():
    class Mine(Trainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_size=4, shuffle=True, collate_fn=self.data_collator)

    train(trainer(Mine))


def weighted():
    """WeightedRandomSampler for unbalanced classes, with a generator of its own."""

    class Mine(Trainer):
        def _get_train_sampler(self, dataset=None):
            weights = torch.arange(1.0, len(self.train_dataset) + 1)
            return torch.utils.data.WeightedRandomSampler(
                weights, len(weights), generator=torch.Generator().manual_seed(3)
            )

    train(trainer(Mine))


def adversarial():
    """training_step of its own: two optimizers, two backward passes, as for GANs and adversarial training."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = gpt(), nn.Linear(64, 1)

        def forward(self, input_ids, labels=None, part="body"):
            if part == "head":
                return self.head(self.body(input_ids=input_ids).logits.detach()).pow(2).mean()
            out = self.body(input_ids=input_ids, labels=labels)
            return out.loss + 0.0 * self.head(out.logits).sum()

    class Mine(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.AdamW(self.model.body.parameters(), lr=1e-3)
            self.second = torch.optim.SGD(self.model.head.parameters(), lr=1e-2, momentum=0.9)
            return self.optimizer

        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = model(**inputs, part="head")
            loss.backward()
            self.second.step()
            self.second.zero_grad()
            loss = model(**inputs)
            self.accelerator.backward(loss)
            return loss.detach()

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = model(**inputs)
            return (loss, {"loss": loss}) if return_outputs else loss

    made = trainer(
        Mine,
        model=Both(),
        args=arguments(gradient_accumulation_steps=1, num_train_epochs=1, ddp_find_unused_parameters=True),
    )
    train(made, lambda: made.second.state_dict()["state"])


def distilled():
    """A teacher that is an average of the student, updated in training_step."""

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
            out = model(**inputs)
            with torch.no_grad():
                aim = self.teacher(**inputs).logits
            loss = out.loss + (out.logits - aim).pow(2).mean()
            return (loss, out) if return_outputs else loss

    made = trainer(Mine)
    train(made, made.teacher.state_dict)


def samples():
    """Overrides get_batch_samples: more batches a step, sorted."""

    class Mine(Trainer):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
            return batches[::-1], items

    train(trainer(Mine))


def saves():
    """Overrides _maybe_log_save_evaluate, as multimodal projects do, and evaluates with averaged weights."""

    class Mine(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.shadow = {name: p.detach().clone() for name, p in self.model.named_parameters()}

        def _maybe_log_save_evaluate(self, *args, **kwargs):
            for name, p in self.model.named_parameters():
                self.shadow[name].mul_(0.9).add_(p.detach(), alpha=0.1)
            super()._maybe_log_save_evaluate(*args, **kwargs)

        def evaluate(self, *args, **kwargs):
            kept = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    p.copy_(self.shadow[name])
            found = super().evaluate(*args, **kwargs)
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    p.copy_(kept[name])
            return found

    made = trainer(
        Mine,
        args=arguments(eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3),
        eval_dataset=tokens(16, 1),
    )
    train(made, lambda: made.shadow)


# --- callbacks ----------------------------------------------------------------------------------------------------
class Ema:
    """An average of weights, with a count, as in many repositories."""

    def __init__(self, model, decay=0.9):
        self.decay, self.count = decay, 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.backup = {}

    def update(self, model):
        self.count += 1
        for name, p in model.named_parameters():
            self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * p.detach()

    def apply(self, model):
        for name, p in model.named_parameters():
            self.backup[name] = p.data
            p.data = self.shadow[name]

    def restore(self, model):
        for name, p in model.named_parameters():
            p.data = self.backup[name]
        self.backup = {}


def ema_object():
    class Callback(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.ema = Ema(model)

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.ema.update(model)

        def on_train_end(self, args, state, control, model=None, **kwargs):
            self.ema.apply(model)

    callback = Callback()
    made = trainer(callbacks=[callback])
    made.train()
    finish(made, callback.ema.count, callback.ema.shadow)


def ema_module():
    class Callback(TrainerCallback):
        def __init__(self):
            self.ema = None

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if self.ema is None:
                self.ema = copy.deepcopy(getattr(model, "module", model))
                return
            with torch.no_grad():
                for e, p in zip(self.ema.parameters(), getattr(model, "module", model).parameters(), strict=True):
                    e.lerp_(p, 0.1)

    callback = Callback()
    made = trainer(callbacks=[callback])
    made.train()
    finish(made, callback.ema.state_dict())


def late_average():
    """An average that begins in a later step, and is made there."""

    class Callback(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 6:
                self.average = torch.optim.swa_utils.AveragedModel(model)
            if state.global_step >= 6:
                self.average.update_parameters(model)

    train(trainer(callbacks=[Callback()]))


def averages_late():
    """Stochastic weight averaging from step 6 on, in a callback, at the head of a step or in the middle of one."""

    class Callback(TrainerCallback):
        def __init__(self, model):
            self.average = torch.optim.swa_utils.AveragedModel(model)
            self.other = torch.optim.swa_utils.AveragedModel(model)

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step >= 6:
                self.average.update_parameters(model)

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step >= 6:
                self.other.update_parameters(model)

    model = gpt()
    callback = Callback(model)
    made = trainer(model=model, callbacks=[callback])
    train(made, lambda: [callback.average.state_dict(), callback.other.state_dict()])


def ema_optimizer_step():
    """An average updated right after the write, in on_optimizer_step, swapped in for evaluation by callbacks."""

    class Callback(TrainerCallback):
        def __init__(self, model):
            self.average = torch.optim.swa_utils.AveragedModel(
                model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            )

        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.average.update_parameters(getattr(model, "module", model))

    model = gpt()
    callback = Callback(model)
    train(trainer(model=model, callbacks=[callback]), callback.average.state_dict)


def unfreezes():
    """Freezes all but the head for an epoch, as for transfer learning."""

    class Callback(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            model.bert.encoder.requires_grad_(False)

        def on_epoch_begin(self, args, state, control, model=None, **kwargs):
            if state.epoch is not None and state.epoch >= 1:
                model.bert.encoder.requires_grad_(True)

    train(
        trainer(
            model=bert(),
            data=sentences(),
            collate=pad,
            callbacks=[Callback()],
            args=arguments(ddp_find_unused_parameters=True),
        )
    )


def curriculum(workers=0):
    """A dataset that a callback tells the epoch."""

    class Staged(Dataset):
        def __init__(self):
            self.rows, self.epoch = tokens(92), 0

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            row = self.rows[index]["input_ids"].clone()
            row[: 8 - 4 * self.epoch] = 0
            return {"input_ids": row, "labels": row}

    data = Staged()

    class Callback(TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            data.epoch = int(state.epoch or 0)

    train(trainer(data=data, callbacks=[Callback()], args=arguments(dataloader_num_workers=workers)))


def curriculum_of_workers():
    curriculum(workers=1)


def history():
    """A callback with state of many kinds, exported with checkpoints; stops by itself."""

    class Callback(TrainerCallback):
        def __init__(self):
            self.window, self.seen, self.sums = deque(maxlen=4), set(), np.zeros(3)
            self.pair = (0, 0.0)
            self.generator = np.random.default_rng(0)

        def on_step_end(self, args, state, control, model=None, **kwargs):
            value = float(next(model.parameters()).detach().sum()) + self.generator.random()
            self.window.append(value)
            self.seen.add(state.global_step)
            self.sums += [1, value, value * value]
            self.pair = (self.pair[0] + 1, value)
            if state.global_step == 10:
                control.should_training_stop = True
            if len(self.seen) == 5:
                control.should_evaluate = True

    callback = Callback()
    train(
        trainer(
            callbacks=[callback, EarlyStoppingCallback(3)],
            args=arguments(
                eval_strategy="steps",
                eval_steps=4,
                save_strategy="best",
                metric_for_best_model="loss",
                load_best_model_at_end=True,
            ),
            eval_dataset=tokens(16, 1),
        ),
        lambda: [list(callback.window), sorted(callback.seen), torch.tensor(callback.sums), callback.pair],
    )


def set_on_library():
    """A callback that keeps what it counts on the Trainer's own objects, and changes settings as it goes."""

    class Callback(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            state.marks = (*getattr(state, "marks", ()), state.global_step)
            args.max_grad_norm = max(0.1, args.max_grad_norm * 0.9)
            model.config.scale = getattr(model.config, "scale", 0) + np.float64(0.1)

    class Mine(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            out = model(**inputs)
            loss = out.loss * (1 + self.model.config.scale) + 0.01 * len(self.state.marks) * out.logits.pow(2).mean()
            return (loss, out) if return_outputs else loss

    made = trainer(Mine, callbacks=[Callback()])
    train(made, lambda: [made.state.marks, made.args.max_grad_norm, float(made.model.config.scale)])


def logs_decide():
    """on_log decides when to evaluate and to stop, by the losses that it keeps; metrics count in another module."""
    import scores

    class Callback(TrainerCallback):
        def __init__(self):
            self.losses = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                self.losses.append(logs["loss"])
                control.should_evaluate = len(self.losses) % 3 == 0
                control.should_training_stop = len(self.losses) == 8

    callback = Callback()
    train(
        trainer(
            callbacks=[callback],
            args=arguments(logging_steps=1),
            eval_dataset=tokens(16, 1),
            compute_metrics=scores.compute_metrics,
        ),
        lambda: [callback.losses, scores.BEST, scores.calls],
    )


def unnamed():
    """Callbacks that no variable names: an average as an object, a window, an export for checkpoints."""
    from transformers.trainer_callback import ExportableState

    class Averages(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.ema = Ema(model)

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.ema.update(model)

    class Patience(TrainerCallback, ExportableState):
        def __init__(self, patience=4):
            self.patience, self.window, self.worse = patience, deque(maxlen=3), 0

        def on_step_end(self, args, state, control, model=None, **kwargs):
            value = float(next(model.parameters()).detach().norm())
            self.worse += len(self.window) == 3 and value > sum(self.window) / 3
            self.window.append(value)
            control.should_training_stop = self.worse > self.patience

        def state(self):
            return {"args": {"patience": self.patience}, "attributes": {"worse": self.worse}}

    made = trainer(callbacks=[Averages(), Patience()], args=arguments(save_strategy="steps", save_steps=5))
    made.train()
    averages, patience = (
        each for each in made.callback_handler.callbacks if type(each).__name__ in ("Averages", "Patience")
    )
    finish(made, averages.ema.shadow, averages.ema.count, list(patience.window), patience.worse)


def unnamed_functions():
    """A collator, metrics and a loss with state of their own, that no variable names."""

    class Collator:
        def __init__(self):
            self.calls = 0

        def __call__(self, features):
            self.calls += 1
            batch = default_data_collator(features)
            batch["input_ids"][:, : self.calls % 4] = 0
            return batch

    class Metrics:
        def __init__(self):
            self.best, self.seen = 0.0, []

        def __call__(self, p):
            value = float(np.argmax(p.predictions, axis=-1).mean())
            self.best = max(self.best, value)
            self.seen.append(value)
            return {"best": self.best, "count": len(self.seen)}

    def loss():
        calls = 0

        def function(outputs, labels, num_items_in_batch=None):
            nonlocal calls
            calls += 1
            value = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
            return (1 + 0.1 * (calls % 3)) * value

        return function

    made = trainer(
        collate=Collator(),
        compute_metrics=Metrics(),
        compute_loss_func=loss(),
        eval_dataset=tokens(16, 1),
        args=arguments(eval_strategy="steps", eval_steps=3),
    )
    made.train()
    finish(made, made.data_collator.calls, made.compute_metrics.best, made.compute_metrics.seen)


def module_state():
    """A plain module that counts and keeps a memory queue, as MoCo does; not of transformers."""

    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.embed, self.out = nn.Embedding(64, 16), nn.Linear(16, 64)
            self.register_buffer("queue", torch.zeros(8, 16))
            self.place, self.norms = 0, []

        def forward(self, input_ids, labels=None):
            h = self.embed(input_ids).mean(1)
            loss = nn.functional.cross_entropy(self.out(h), input_ids[:, 0]) + (h @ self.queue.clone().T).pow(2).mean()
            if self.training:
                with torch.no_grad():
                    self.queue[self.place] = h.mean(0)
                self.place = (self.place + 1) % 8
                self.norms.append(float(h.norm()))
            return {"loss": loss, "logits": h}

    model = Memory()
    train(trainer(model=model), lambda: [model.place, model.norms])


def seq2seq():
    """Generation in the evaluation."""
    from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    torch.manual_seed(1)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    args = Seq2SeqTrainingArguments(
        output_dir=OUTPUT,
        use_cpu=True,
        seed=1,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=4,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        predict_with_generate=True,
        generation_max_length=8,
        gradient_accumulation_steps=2,
    )

    def compute_metrics(p):
        return {"tokens": int(np.asarray(p.predictions).sum())}

    train(
        trainer(
            Seq2SeqTrainer,
            model=model,
            args=args,
            eval_dataset=tokens(12, 1),
            compute_metrics=compute_metrics,
            processing_class=None,
        )
    )


if __name__ == "__main__":
    globals()[kind]()
