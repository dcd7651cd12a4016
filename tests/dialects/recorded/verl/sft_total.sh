#!/bin/bash
if [ "$#" -lt 2 ]; then
    echo "Usage: sft_total.sh <nproc_per_node> <save_path> [other_configs...]"
fi
nproc_per_node=$1
shift 2
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node -m verl.trainer.fsdp_sft_trainer \
    data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet \
    data.prompt_key=prompt data.response_key=extra_info +data.prompt_dict_keys=['content'] \
    data.micro_batch_size=8 model.partial_pretrain=google/gemma-2b-it trainer.total_epochs=3 $@
