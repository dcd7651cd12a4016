"""transformers' Trainer on a small Qwen2, with a collator that pads."""

import sys

import torch
from transformers import (
    HfArgumentParser,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainingArguments,
)


class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 32000, (256,))
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


parser = HfArgumentParser(TrainingArguments)
(training_arguments,) = parser.parse_args_into_dataclasses(["--output_dir", "out", *sys.argv[1:]])
config = Qwen2Config(
    vocab_size=32000,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = Qwen2ForCausalLM(config)
trainer = Trainer(model=model, args=training_arguments, train_dataset=Sequences(), eval_dataset=Sequences())
trainer.train()
trainer.save_model("out/final")
