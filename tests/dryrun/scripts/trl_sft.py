"""TRL's SFTTrainer with LoRA, its model and data by their names on the hub."""

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("trl-lib/Capybara", split="train")
arguments = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=2,
    max_length=512,
    bf16=True,
    gradient_checkpointing=True,
    report_to="wandb",
    eval_strategy="no",
)
trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    args=arguments,
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
trainer.train()
