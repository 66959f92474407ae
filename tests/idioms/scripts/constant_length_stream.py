"""Language modelling on a stream: an IterableDataset that packs token sequences to a constant length, endless, shuffled in
a buffer, split over ranks and two workers; tokens are counted."""

# ranks: 2
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import relight
from tests.idioms.digest import finish


class Tokenizer:
    bos_token_id, eos_token_id, vocab_size = 1, 2, 32

    def __call__(self, texts):
        return {"input_ids": [[3 + ord(c) % 29 for c in text] for text in texts]}


class TextStream(IterableDataset):
    def __init__(self, rank, world_size, n=40):
        self.texts = [chr(97 + i % 26) * (3 + i % 11) + str(i) for i in range(n)]
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        yield from self.texts[self.rank * workers + worker :: self.world_size * workers]


class ConstantLengthDataset(IterableDataset):
    def __init__(self, tokenizer, dataset, infinite=True, seq_length=16, num_of_sequences=4, chars_per_token=1):
        self.tokenizer, self.dataset, self.infinite, self.seq_length = tokenizer, dataset, infinite, seq_length
        self.concat_token_id, self.epoch = tokenizer.eos_token_id, 0
        self.input_characters = seq_length * chars_per_token * num_of_sequences

    def __iter__(self):
        iterator = iter(self.dataset)
        more_examples = True
        while more_examples:
            buffer, buffer_len = [], 0
            while True:
                if buffer_len >= self.input_characters:
                    break
                try:
                    buffer.append(next(iterator))
                    buffer_len += len(buffer[-1])
                except StopIteration:
                    if self.infinite:
                        iterator = iter(self.dataset)
                        self.epoch += 1
                    else:
                        more_examples = False
                        break
            tokenized_inputs = self.tokenizer(buffer)["input_ids"]
            all_token_ids = []
            for tokenized_input in tokenized_inputs:
                all_token_ids.extend(tokenized_input + [self.concat_token_id])
            examples = []
            for i in range(0, len(all_token_ids), self.seq_length):
                input_ids = all_token_ids[i : i + self.seq_length]
                if len(input_ids) == self.seq_length:
                    examples.append(input_ids)
            random.shuffle(examples)
            for example in examples:
                yield torch.tensor(example)


class ShufflerIterDataPipe(IterableDataset):
    def __init__(self, source, buffer_size=6):
        self.source, self.buffer_size = source, buffer_size

    def __iter__(self):
        buffer = []
        for x in self.source:
            if len(buffer) == self.buffer_size:
                idx = random.randint(0, len(buffer) - 1)
                yield buffer[idx]
                buffer[idx] = x
            else:
                buffer.append(x)


def main(steps=18):
    job = relight.init()
    torch.manual_seed(1)
    tokenizer = Tokenizer()
    stream = TextStream(job.rank, job.world_size)
    dataset = ShufflerIterDataPipe(ConstantLengthDataset(tokenizer, stream))
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    net = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, s / 5) * max(0.0, 1 - s / 30))
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader, accumulate=2)
    t_tokens, completed_steps, loss_tracking = 0, 0, 0
    for step in training.steps(until=steps):
        with step as batches:
            optimizer.zero_grad()
            for i, batch in enumerate(batches):
                model.require_backward_grad_sync = i == len(batches) - 1
                loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                loss_tracking += loss.item() / len(batches)
                t_tokens += batch.numel()
                (loss / len(batches)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            completed_steps += 1
    finish(job, model=net, optimizer=optimizer, tokens=t_tokens, loss=loss_tracking, completed=completed_steps)


if __name__ == "__main__":
    main()
