"""The translation tutorial: encoder and decoder with an optimizer each, a Lang class that counts words, teacher forcing by
random.random(), a loop in Python over a sentence, losses for a plot."""

# ranks: 2
import random
import time

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

SOS_token, EOS_token, MAX_LENGTH = 0, 1, 8


class Lang:
    def __init__(self, name):
        self.name = name
        self.word2index, self.word2count = {}, {}
        self.index2word, self.n_words = {0: "SOS", 1: "EOS"}, 2

    def addSentence(self, sentence):
        for word in sentence.split(" "):
            self.addWord(word)

    def addWord(self, word):
        if word not in self.word2index:
            self.word2index[word] = self.n_words
            self.word2count[word] = 1
            self.index2word[self.n_words] = word
            self.n_words += 1
        else:
            self.word2count[word] += 1


class EncoderRNN(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.embedding, self.gru = nn.Embedding(input_size, hidden_size), nn.GRU(hidden_size, hidden_size)

    def forward(self, input):
        return self.gru(self.embedding(input).view(len(input), 1, -1))


class AttnDecoderRNN(nn.Module):
    def __init__(self, hidden_size, output_size, dropout_p=0.1):
        super().__init__()
        self.embedding, self.attn = nn.Embedding(output_size, hidden_size), nn.Linear(hidden_size * 2, MAX_LENGTH)
        self.attn_combine, self.dropout = nn.Linear(hidden_size * 2, hidden_size), nn.Dropout(dropout_p)
        self.gru, self.out = nn.GRU(hidden_size, hidden_size), nn.Linear(hidden_size, output_size)

    def step(self, input, hidden, encoder_outputs):
        embedded = self.dropout(self.embedding(input).view(1, 1, -1))
        weights = F.softmax(self.attn(torch.cat((embedded[0], hidden[0]), 1)), dim=1)
        applied = torch.bmm(weights.unsqueeze(0), encoder_outputs.unsqueeze(0))
        output = F.relu(self.attn_combine(torch.cat((embedded[0], applied[0]), 1)).unsqueeze(0))
        output, hidden = self.gru(output, hidden)
        return F.log_softmax(self.out(output[0]), dim=1), hidden

    def forward(self, hidden, encoder_outputs, target_tensor, criterion, use_teacher_forcing):
        loss, decoder_input = 0, torch.tensor([[SOS_token]])
        for target in target_tensor:
            output, hidden = self.step(decoder_input, hidden, encoder_outputs)
            loss += criterion(output, target.view(1))
            if use_teacher_forcing:
                decoder_input = target.view(1, 1)
            else:
                decoder_input = output.topk(1)[1].squeeze().detach()
                if decoder_input.item() == EOS_token:
                    break
        return loss


def tensorFromSentence(lang, sentence):
    return torch.tensor([*(lang.word2index[word] for word in sentence.split(" ")), EOS_token], dtype=torch.long)


def train(input_tensor, target_tensor, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion):
    encoder_optimizer.zero_grad()
    decoder_optimizer.zero_grad()
    encoder_outputs = torch.zeros(MAX_LENGTH, encoder.module.hidden_size)
    output, hidden = encoder(input_tensor)
    encoder_outputs[: len(output)] = output[:, 0]
    use_teacher_forcing = random.random() < teacher_forcing_ratio
    loss = decoder(hidden, encoder_outputs, target_tensor, criterion, use_teacher_forcing)
    loss.backward()
    encoder_optimizer.step()
    decoder_optimizer.step()
    return loss.item() / len(target_tensor)


job = relight.init()
random.seed(job.rank)
torch.manual_seed(0)
teacher_forcing_ratio = 0.5
words = "i am you are he is we they go home now late".split()
pairs = [
    (" ".join(words[i % 9 + k] for k in range(2 + i % 3)), " ".join(words[(i + 4) % 9 + k] for k in range(3)))
    for i in range(30)
]
input_lang, output_lang = Lang("eng"), Lang("fra")
for source, target in pairs:
    input_lang.addSentence(source)
    output_lang.addSentence(target)
encoder = DDP(EncoderRNN(input_lang.n_words, 16))
decoder = DDP(AttnDecoderRNN(16, output_lang.n_words))
encoder_optimizer = optim.SGD(encoder.parameters(), lr=0.01)
decoder_optimizer = optim.SGD(decoder.parameters(), lr=0.01)
optimizers = {"encoder": encoder_optimizer, "decoder": decoder_optimizer}
training = relight.Training(model={"encoder": encoder, "decoder": decoder}, optimizer=optimizers)
start, plot_losses, print_loss_total, plot_loss_total = time.time(), [], 0, 0
n_iters, print_every, plot_every = 24, 10, 4
criterion = nn.NLLLoss()
training_pairs = [random.choice(pairs) for _ in range(n_iters)]
for step in training.steps(until=n_iters):
    with step:
        iter = step.number + 1
        pair = training_pairs[iter - 1]
        loss = train(
            tensorFromSentence(input_lang, pair[0]), tensorFromSentence(output_lang, pair[1]),
            encoder, decoder, encoder_optimizer, decoder_optimizer, criterion,
        )  # fmt: skip
        print_loss_total += loss
        plot_loss_total += loss
        if iter % print_every == 0:
            print(
                f"{time.time() - start:.1f} s ({iter} {iter / n_iters * 100:.0f}%) {print_loss_total / print_every:.4f}"
            )
            print_loss_total = 0
        if iter % plot_every == 0:
            plot_losses.append(plot_loss_total / plot_every)
            plot_loss_total = 0
finish(job, encoder=encoder, decoder=decoder, plot=plot_losses, total=print_loss_total)
