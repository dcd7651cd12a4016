#!/bin/bash
BATCH=(--per_device_train_batch_size 1 --gradient_accumulation_steps 4)
uv run torchrun --nproc_per_node=1 open_instruct/dpo.py \
    --model_name_or_path allenai/OLMo-2-0425-1B --tokenizer_name_or_path allenai/OLMo-2-0425-1B \
    --attn_backend flash_2 --max_seq_length 1024 "${BATCH[@]}" --learning_rate 5e-07 --num_epochs 1 \
    --mixer_list allenai/tulu-3-wildchat-reused-on-policy-8b 50 --chat_template_name olmo \
    --exp_name "dpo-local-debug-$(date +%s)" --push_to_hub false
