"""Configurations of transformers' and TRL's trainers, PEFT, accelerate and DeepSpeed."""
