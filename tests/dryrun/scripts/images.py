"""Images that a module without weights resizes on the CPU, as torchvision's transforms do."""

import torch
from torch import nn


class Resize(nn.Module):
    def forward(self, images):
        return nn.functional.interpolate(images, (64, 64))


class Classifier(nn.Sequential):
    """Patches and one layer."""


resize = Resize()
network = Classifier(nn.Conv2d(3, 32, 8, stride=8), nn.Flatten(), nn.Linear(2048, 10)).cuda()
loss_of, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(network.parameters(), lr=0.1)
for _ in range(100):
    images = torch.cat([resize(torch.rand(1, 3, 32, 32)) for _ in range(16)])
    loss = loss_of(network(images.cuda()), torch.randint(10, (16,)).cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
