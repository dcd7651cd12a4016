"""A network that is no `nn.Module`: parameters in a dictionary, two of them parts of one tensor, and a function of them,
compiled if asked."""

import argparse

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--compile", action="store_true")
arguments = parser.parse_args()

WORDS, WIDTH, BATCH, LENGTH, MICRO_BATCHES = 4096, 256, 8, 512, 2
params = {
    "table": torch.randn(WORDS, WIDTH, device="cuda", requires_grad=True),
    "up": torch.randn(4 * WIDTH, WIDTH, device="cuda", requires_grad=True),
    "down": torch.randn(4 * WIDTH, WIDTH, device="cuda", requires_grad=True),
}
stack = torch.zeros(2, 4 * WIDTH, WIDTH, device="cuda")
gradients = torch.zeros_like(stack)
for row, name in enumerate(("up", "down")):
    stack[row].copy_(params[name].detach())
    params[name].data, params[name].grad = stack[row], gradients[row]


def forward(tokens, targets):
    states = F.embedding(tokens, params["table"]).bfloat16()
    inner = F.relu(F.linear(states, params["up"].bfloat16())).square()
    states = states + F.linear(inner, params["down"].bfloat16().T)
    logits = F.linear(states, params["table"].bfloat16()).float()
    return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


loss_of = torch.compile(forward) if arguments.compile else forward
optimizer = torch.optim.AdamW(params.values(), fused=True)
for _ in range(100_000):
    for _ in range(MICRO_BATCHES):
        batch = torch.randint(WORDS, (BATCH, LENGTH + 1))
        tokens, targets = batch[:, :-1].cuda(), batch[:, 1:].cuda()
        (loss_of(tokens, targets) / MICRO_BATCHES).backward()
    optimizer.step()
    gradients.zero_()
    params["table"].grad = None
