#!/bin/bash
set -e
CONFIG=llama32_3b_full.yaml

oumi distributed torchrun \
  --nproc-per-node=4 \
  -m oumi train \
  -c "$CONFIG" \
  --fsdp.enable_fsdp true \
  --fsdp.sharding_strategy FULL_SHARD \
  --training.per_device_train_batch_size=2
