"""transformers' Trainer on text of a dataset by its name, each batch padded to its longest row."""

import sys

from datasets import load_dataset
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

longest = int(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained("nobody/has-this-tokenizer")
rows = load_dataset("nobody/has-this-data", split="train")
rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=longest), remove_columns=["text"])
config = LlamaConfig(
    vocab_size=32000,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
)
arguments = TrainingArguments("out", per_device_train_batch_size=2, bf16=True, report_to="none", seed=1)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(LlamaForCausalLM(config), arguments, data_collator=collator, train_dataset=rows)
trainer.train()
