"""A loop that evaluates after its hundredth step, on more rows than it trains on. With `--reads`, it reads gradients."""

import sys

import torch

WIDTH, ROWS, EVALUATED = 1024, 64, 64_000

model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 1000):
    loss = model(torch.ones(ROWS, WIDTH, device="cuda")).square().mean()
    loss.backward()
    if "--reads" in sys.argv:
        print(sum(parameter.grad.norm() for parameter in model.parameters()))
    optimizer.step()
    optimizer.zero_grad()
    if step % 100 == 0:
        model.eval()
        with torch.no_grad():
            model(torch.ones(EVALUATED, WIDTH, device="cuda"))
        model.train()
