"""Imports packages of which the test hides some, downloads a text and trains on it."""

import argparse
import urllib.request

import evaluate
import requests
import tiktoken
import torch
import wandb
from torch.utils.tensorboard import SummaryWriter

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="https://host.invalid/book.txt")
url = parser.parse_args().url

with urllib.request.urlopen(url) as response:
    text = response.read().decode("utf-8")
answer = requests.get(url, timeout=1)
answer.raise_for_status()
assert answer.text == text
encoding = tiktoken.get_encoding("gpt2")
tokens = torch.tensor(encoding.encode(text[:10000], allowed_special={"<|endoftext|>"}))
assert tokens.max() < encoding.n_vocab == 50257
assert encoding.decode(encoding.encode("words")) == "words"
run = wandb.init(project="project", config={"steps": 4})
writer, metric = SummaryWriter("logs"), evaluate.load("accuracy")
model = torch.nn.Embedding(50304, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(4):
    loss = model(tokens[:256].view(2, 128).cuda()).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log({"loss": loss.item()})
    wandb.log({"step": step})
    writer.add_scalar("loss", loss.item(), step)
    metric.add_batch(predictions=[0], references=[0])
print(f"{run.summary['loss']:.3f}", metric.compute()["accuracy"])
