#!/bin/bash
model_name_or_path=meta-llama/Llama-2-13b-hf
python examples/finetune.py \
    --model_name_or_path ${model_name_or_path} \
    --dataset_path data/alpaca/train_conversation \
    --conversation_template llama2 \
    --output_dir output_models/finetune --overwrite_output_dir \
    --num_train_epochs 0.01 \
    --learning_rate 1e-4 \
    --block_size 512 \
    --per_device_train_batch_size 1 \
    --use_qlora 1 \
    --save_aggregated_lora 0 \
    --fp16 \
    --do_train
