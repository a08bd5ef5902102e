"""Trains a small Llama on sequences that are distributed over ranks, and compares attention's bits with those of one rank.

torchrun --nproc-per-node 2 docs/examples/train_llama.py --record recorded    # two GPUs, or two CPU ranks
python docs/examples/train_llama.py --check recorded                          # on one rank
python docs/examples/train_llama.py                                           # trains on one rank

Each rank has its shard of the tokens and all weights. ringattn.attention() is the only layer that reads tokens of other
ranks. Its gradients of q, k and v are complete, so only the gradients of the weights are summed over the ranks.
The loss falls from 5.6 to 0.24 in 200 steps, which take less than a minute on two cores. CPUs compute in fp32, and GPUs
in bf16 with weights in fp32. --device cpu is for GPUs for which ringattn has no gradients.

--record writes q, k, v, out, lse, and the gradients of out, q, k and v, for each layer in a few steps. --check joins the
shards, computes out, lse, dq, dk and dv again on one rank, and compares them byte for byte. Only attention's bits are
compared. The loss and the gradients of the weights are sums over tokens, which one rank adds in a different order than
several ranks do. So from the second step on, the weights differ in their last bits between one rank and several.
"""

import argparse
import os
import pathlib
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: more threads do not speed up layers this small

import ringattn
import torch
import torch.distributed as distributed
from torch import nn
from torch.nn import functional

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 64, 2, 4, 2, 64, 192
VOCABULARY = 256  # bytes
WORDS = {
    "adjective": ["small", "old", "green", "quiet", "heavy"],
    "noun": ["cat", "river", "house", "engine", "teacher", "cloud"],
    "verb": ["sees", "follows", "carries", "paints"],
}
SENTENCE = ["adjective", "noun", "verb", "adjective", "noun"]


def make_text(tokens: int, seed: int) -> torch.Tensor:
    """Sentences of a small grammar: int64 [tokens], the same on every rank."""
    seeded, text = torch.Generator().manual_seed(seed), ""
    while len(text) < tokens:
        chosen = [WORDS[kind][torch.randint(len(WORDS[kind]), (), generator=seeded)] for kind in SENTENCE]
        text += "the {} {} {} the {} {}.\n".format(*chosen)
    return torch.tensor(list(text[:tokens].encode()))


def rope_angles(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [tokens, 1, HEAD_DIM / 2] of positions in the whole sequence."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=positions.device) / HEAD_DIM)
    angles = positions[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE. x: [tokens, heads, HEAD_DIM]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, rope, world, layout, recorder):
        normed = self.attention_norm(x)
        q, k, v = (linear(normed).unflatten(-1, (-1, HEAD_DIM)) for linear in (self.q, self.k, self.v))
        q, k = rotate(q, *rope), rotate(k, *rope)
        out, lse = ringattn.attention(q, k, v, world=world, layout=layout)
        if recorder is not None:
            recorder.add(q, k, v, out, lse)
        x = x + self.out(out.flatten(1))
        normed = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, rope, world, layout, recorder=None):
        """Logits [tokens, VOCABULARY] of this rank's tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rope, world, layout, recorder)
        return self.head(self.norm(x))


class Recorder:
    """Inputs, results and gradients of the calls of attention in one step, on this rank."""

    def __init__(self):
        self.calls = []

    def add(self, q, k, v, out, lse):
        for x in (q, k, v, out):
            x.retain_grad()
        self.calls.append({"q": q, "k": k, "v": v, "out": out, "lse": lse})

    def save(self, file: pathlib.Path, layout: ringattn.Layout):
        """Call it after backward()."""
        layers = []
        for call in self.calls:
            arrays = {name: x.detach().cpu() for name, x in call.items()}
            layers.append(arrays | {f"d{name}": call[name].grad.cpu() for name in ("q", "k", "v", "out")})
        device = self.calls[0]["q"].device.type
        torch.save({"device": device, "lengths": layout.lengths, "runs": layout.runs, "layers": layers}, file)


def train(arguments):
    ranks, local_ranks = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    device = torch.device(arguments.device or ("cuda" if torch.cuda.device_count() >= local_ranks else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    rank, world = 0, None  # a call without a world is one of this rank only
    if ranks > 1:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        world = ringattn.torch_world(device=device)
        rank = world.rank
    if arguments.layout == "striped":
        layout = ringattn.striped([arguments.tokens], ranks, stripe=64)
    else:
        layout = ringattn.zigzag([arguments.tokens], ranks)
    rope = rope_angles(torch.from_numpy(ringattn.positions(layout, rank)).to(device))

    torch.manual_seed(1)  # the same weights on every rank
    model = Llama().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    begin = time.perf_counter()
    for step in range(arguments.steps):
        text = make_text(arguments.tokens + 1, seed=step)
        tokens, targets = (ringattn.shard(part, layout, rank).to(device) for part in (text[:-1], text[1:]))
        recorder = Recorder() if arguments.record and step in arguments.record_steps else None
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens, rope, world, layout, recorder)
        # The mean over the tokens of all ranks is the sum of these.
        loss = functional.cross_entropy(logits.float(), targets, reduction="sum") / arguments.tokens
        optimizer.zero_grad()
        loss.backward()
        if ranks > 1:
            for weight in model.parameters():
                distributed.all_reduce(weight.grad)
        optimizer.step()

        if recorder is not None:
            recorder.save(arguments.record / f"step{step}-rank{rank}of{ranks}.pt", layout)
        if step % 20 == 0 or step == arguments.steps - 1:
            mean = loss.detach()
            if ranks > 1:
                distributed.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3}  loss {mean:.4f}", flush=True)
    if rank == 0:
        seconds = time.perf_counter() - begin
        print(f"{arguments.steps} steps took {seconds:.1f} s on {ranks} {device.type} rank{'s' if ranks > 1 else ''}")
    if ranks > 1:
        distributed.barrier()
        distributed.destroy_process_group()


def check(folder: pathlib.Path):
    firsts = sorted(folder.glob("step*-rank0of*.pt"))
    if not firsts:
        raise SystemExit(f"error: {folder} has no recorded steps (--record writes them). "
                         "Run `torchrun --nproc-per-node 2 docs/examples/train_llama.py --record DIR` first.")
    calls, different = 0, 0
    for first in firsts:
        ranks = int(first.stem.rpartition("of")[2])
        files = [torch.load(folder / first.name.replace("rank0", f"rank{rank}")) for rank in range(ranks)]
        layout, device = ringattn.Layout(files[0]["lengths"], files[0]["runs"]), files[0]["device"]
        for layer, shards in enumerate(zip(*(file["layers"] for file in files), strict=True)):
            whole = {name: ringattn.unshard([shard[name] for shard in shards], layout).to(device) for name in shards[0]}
            q, k, v = (whole[name].requires_grad_() for name in ("q", "k", "v"))
            out, lse = ringattn.attention(q, k, v)
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), whole["dout"])
            calls += 1
            for name, single in {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}.items():
                try:
                    ringattn.testing.assert_same_bits(whole[name], single.detach(), f"{name} of {ranks} ranks and of one")
                except ringattn.WrongResult as error:
                    different += 1
                    print(f"{first.name.partition('-')[0]}, layer {layer}: {error}")
    if different:
        raise SystemExit(f"error: {different} of {5 * calls} arrays differ from those of one rank.")
    print(f"out, lse, dq, dk and dv of {calls} calls have the bits of one rank")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=512, help="length of the sequence of a step")
    parser.add_argument("--layout", choices=["zigzag", "striped"], default="zigzag", help="which tokens each rank has")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cuda if there is a GPU for each rank, else cpu")
    parser.add_argument("--record", type=pathlib.Path, metavar="DIR", help="write attention's arrays to this directory")
    parser.add_argument("--record-steps", type=int, nargs="+", metavar="STEP",
                        help="steps to record: the first, the middle and the last one")  # fmt: skip
    parser.add_argument("--check", type=pathlib.Path, metavar="DIR", help="compare the arrays in this directory")
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments.check)
        return
    arguments.record_steps = arguments.record_steps or [0, arguments.steps // 2, arguments.steps - 1]
    if max(arguments.record_steps) >= arguments.steps:
        parser.error(f"--record-steps names step {max(arguments.record_steps)} (the last one is {arguments.steps - 1})")
    if arguments.record:
        arguments.record.mkdir(parents=True, exist_ok=True)
    train(arguments)


if __name__ == "__main__":
    main()
