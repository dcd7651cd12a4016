#!/bin/bash
export MODEL_PATH=mistralai/Mistral-7B-v0.1
accelerate launch --num_processes=1 -m tuning.sft_trainer \
    --model_name_or_path $MODEL_PATH \
    --training_data_path train.json \
    --output_dir out \
    --per_device_train_batch_size 4 \
    --gradient_checkpointing True \
    --dataset_text_field "output" \
    --peft_method lora --r 16 --lora_alpha 16 --lora_dropout 0.0 --target_modules q_proj k_proj v_proj o_proj \
    --torch_dtype float16 --fp16 \
    --auto_gptq triton_v2 --fused_lora auto_gptq True --fast_kernels True True True \
    --padding_free huggingface
