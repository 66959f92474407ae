"""A temporal graph network: memory of nodes in buffers, a store of messages in a dict, the last neighbours in tensors, all
of which are detached after each step and reset when an epoch begins."""

# ranks: 2
import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

NODES, DIM, SIZE = 24, 8, 3


class LastNeighborLoader:
    def __init__(self, num_nodes, size):
        self.size = size
        self.neighbors = torch.empty((num_nodes, size), dtype=torch.long)
        self.e_id = torch.empty((num_nodes, size), dtype=torch.long)
        self._assoc = torch.empty(num_nodes, dtype=torch.long)
        self.reset_state()

    def __call__(self, n_id):
        neighbors, nodes = self.neighbors[n_id], n_id.view(-1, 1).repeat(1, self.size)
        mask = self.e_id[n_id] >= 0
        neighbors, nodes = neighbors[mask], nodes[mask]
        n_id = torch.cat([n_id, neighbors]).unique()
        self._assoc[n_id] = torch.arange(n_id.size(0))
        return n_id, torch.stack([self._assoc[neighbors], self._assoc[nodes]])

    def insert(self, src, dst):
        for s, d in zip(torch.cat([src, dst]).tolist(), torch.cat([dst, src]).tolist()):
            self.neighbors[s] = self.neighbors[s].roll(1)
            self.e_id[s] = self.e_id[s].roll(1)
            self.neighbors[s, 0], self.e_id[s, 0] = d, self.cur_e_id
            self.cur_e_id += 1

    def reset_state(self):
        self.cur_e_id = 0
        self.e_id.fill_(-1)


class TGNMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.empty(NODES, DIM))
        self.register_buffer("last_update", torch.empty(NODES, dtype=torch.long))
        self.register_buffer("_assoc", torch.zeros(NODES, dtype=torch.long))
        self.gru, self.time_enc = nn.GRUCell(2 * DIM + 4, DIM), nn.Linear(1, 4)
        self.msg_store = {}
        self.reset_state()

    def reset_state(self):
        self.memory.zero_()
        self.last_update.zero_()
        self.msg_store = {j: (torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)) for j in range(NODES)}

    def detach(self):
        self.memory.detach_()

    def forward(self, n_id):
        rows, inputs = [], []
        for i, node in enumerate(n_id.tolist()):
            dst, t = self.msg_store[node]
            if len(dst):
                rel = (t[-1] - self.last_update[node]).float().view(1)
                inputs.append(torch.cat([self.memory[node], self.memory[dst[-1]], self.time_enc(rel)]))
                rows.append(i)
        out = self.memory[n_id]
        if rows:
            updated = self.gru(torch.stack(inputs), out[rows])
            out = out.index_copy(0, torch.tensor(rows), updated)
        return out + 0 * sum(p.sum() for p in self.parameters())

    @torch.no_grad()
    def update_state(self, src, dst, t):
        n_id = torch.cat([src, dst]).unique()
        self.memory[n_id] = self(n_id)
        for s, d, when in zip(src.tolist(), dst.tolist(), t.tolist()):
            for a, b in ((s, d), (d, s)):
                self.msg_store[a] = (torch.tensor([b]), torch.tensor([when]))
                self.last_update[a] = when


class TGN(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory, self.gnn = TGNMemory(), nn.Linear(DIM, DIM)
        self.link_pred = nn.Sequential(nn.Linear(2 * DIM, DIM), nn.ReLU(), nn.Linear(DIM, 1))

    def forward(self, n_id, edge_index, pairs):
        z = self.memory(n_id)
        z = torch.relu(self.gnn(z.index_add(0, edge_index[1], z[edge_index[0]])))
        return [self.link_pred(torch.cat([z[a], z[b]], 1)) for a, b in pairs]


def events(rank):
    g = torch.Generator().manual_seed(rank)
    return torch.randint(0, 12, (60,), generator=g), torch.randint(12, NODES, (60,), generator=g), torch.arange(60)


job = relight.init()
torch.manual_seed(12345)
src_all, dst_all, t_all = events(job.rank)
net = TGN()
model = DDP(net, broadcast_buffers=False)
neighbor_loader = LastNeighborLoader(NODES, SIZE)
optimizer = torch.optim.Adam(net.parameters(), lr=0.005)
criterion = nn.BCEWithLogitsLoss()
assoc = torch.empty(NODES, dtype=torch.long)
training = relight.Training(model=model, optimizer=optimizer)
total_loss, batches = 0, 6
for step in training.steps(until=3 * batches):
    with step:
        epoch, i = divmod(step.number, batches)
        if i == 0:
            net.memory.reset_state()  # start with a fresh memory
            neighbor_loader.reset_state()
            total_loss = 0
        optimizer.zero_grad()
        chunk = slice(10 * i, 10 * i + 10)
        src, dst, t = src_all[chunk], dst_all[chunk], t_all[chunk]
        neg = torch.randint(12, NODES, (len(src),))
        n_id, edge_index = neighbor_loader(torch.cat([src, dst, neg]).unique())
        assoc[n_id] = torch.arange(n_id.size(0))
        pos_out, neg_out = model(n_id, edge_index, [(assoc[src], assoc[dst]), (assoc[src], assoc[neg])])
        loss = criterion(pos_out, torch.ones_like(pos_out)) + criterion(neg_out, torch.zeros_like(neg_out))
        net.memory.update_state(src, dst, t)  # ground truth of this batch
        neighbor_loader.insert(src, dst)
        loss.backward()
        optimizer.step()
        net.memory.detach()
        total_loss += float(loss) * len(src)
store = {k: [v[0], v[1]] for k, v in copy.copy(net.memory.msg_store).items()}
finish(job, model=net, optimizer=optimizer, store=store, neighbors=neighbor_loader.e_id, last=neighbor_loader.cur_e_id)
