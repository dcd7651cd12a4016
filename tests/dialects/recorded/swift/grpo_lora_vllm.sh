MASTER_PORT=29501 \
CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 \
swift rlhf \
    --rlhf_type grpo \
    --model Qwen/Qwen2.5-7B \
    --reward_funcs accuracy format \
    --train_type lora \
    --use_vllm true \
    --vllm_gpu_memory_utilization 0.5 \
    --vllm_max_model_len 8192 \
    --lora_rank 8 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --torch_dtype bfloat16 \
    --dataset 'AI-MO/NuminaMath-TIR#1000' \
    --max_completion_length 1024 \
    --per_device_train_batch_size 16 \
    --gradient_accumulation_steps 1 \
    --max_length 2048 \
    --num_generations 16 \
    --temperature 0.9 \
    --deepspeed zero2 \
    --system 'examples/train/grpo/prompt.txt' \
    --log_completions true
