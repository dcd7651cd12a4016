#!/bin/bash
MODEL=huggyllama/llama-30b
LORA="--lora_r 64 --lora_alpha 16 --lora_modules all --lora_dropout 0.05"
python qlora.py --model_name_or_path $MODEL --output_dir ./output/33b --dataset oasst1 \
    --bits 4 --double_quant --quant_type nf4 --bf16 $LORA --gradient_checkpointing --group_by_length \
    --source_max_len 16 --target_max_len 512 --per_device_train_batch_size 4 --gradient_accumulation_steps 4 \
    --do_train --do_eval --do_mmlu_eval --eval_dataset_size 1024 --max_eval_samples 1000 --max_new_tokens 32 \
    --learning_rate 0.0001 --adam_beta2 0.999 --max_grad_norm 0.3 --weight_decay 0.0 --max_steps 1875 --seed 0
