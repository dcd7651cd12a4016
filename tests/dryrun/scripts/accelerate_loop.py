"""accelerate's loop: prepare, accumulate, backward, clip. With `--stream`, rank 0 reads for all ranks."""

import sys

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", log_with="tensorboard", project_dir="logs")
model = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=32000))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.utils.data.TensorDataset(torch.randint(0, 32000, (64, 128)))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(data)


streams = "--stream" in sys.argv
loader = torch.utils.data.DataLoader(
    Stream() if streams else data, batch_size=4, shuffle=None if streams else True, num_workers=4, pin_memory=True
)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=100)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
model.train()
for _ in range(3):
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = accelerator.gather(loss.detach()).mean().item()
        accelerator.print(f"loss {mean:.3f} on {accelerator.device} of {accelerator.num_processes}")
    accelerator.save_state("out")
