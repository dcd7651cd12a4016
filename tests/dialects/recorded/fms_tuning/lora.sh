#!/bin/bash
MODEL_PATH=${MODEL_PATH:-bigcode/gpt_bigcode-santacoder}
python tuning/sft_trainer.py \
    --model_name_or_path $MODEL_PATH \
    --tokenizer_name_or_path $MODEL_PATH \
    --training_data_path train.json \
    --output_dir out \
    --num_train_epochs 40 \
    --per_device_train_batch_size 4 \
    --learning_rate 1e-4 \
    --response_template "\n## Label:" \
    --dataset_text_field "output" \
    --peft_method "lora" \
    --r 8 \
    --lora_dropout 0.05 \
    --lora_alpha 16 \
    --target_modules c_attn c_proj
