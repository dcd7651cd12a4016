#!/bin/bash
set -e
# MODE=Options: "superoffload" or "zerooffload"
MODE=${1:-superoffload}
BATCH_SIZE=${2:-4}
SCRIPT_DIR=$(dirname "$0")
MODEL_NAME="meta-llama/Llama-3.1-8B"
OUTPUT_DIR="llama-8b_${MODE}_output"
DS_CONFIG_JSON="llama-8b_${MODE}_config.json"
mkdir -p $OUTPUT_DIR
ACTIVATION_CHECKPOINTING=true
MAX_LENGTH=4096
EPOCHS=1
ACTIVATION_CHECKPOINTING_FLAG=""
if [ "$ACTIVATION_CHECKPOINTING" = "true" ]; then
    ACTIVATION_CHECKPOINTING_FLAG="--activation_checkpointing"
fi

# Create DeepSpeed configuration file
if [ "$MODE" = "superoffload" ]; then
cat > "$DS_CONFIG_JSON" << EOF
{
    "train_batch_size": $BATCH_SIZE,
    "gradient_accumulation_steps": 1,
    "bf16": { "enabled": true },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": false,
        "reduce_bucket_size": 4e8,
        "sub_group_size": 4e8,
        "offload_optimizer": {
            "device": "cpu",
            "pin_memory": true,
            "ratio": 0.80,
            "super_offload": true,
            "cpuadam_cores_perc": 0.90
        }
    },
    "wall_clock_breakdown": true
}
EOF

elif [ "$MODE" = "zerooffload" ]; then
cat > "$DS_CONFIG_JSON" << EOF
{
    "train_batch_size": $BATCH_SIZE,
    "gradient_accumulation_steps": 1,
    "bf16": { "enabled": true },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": false,
        "reduce_bucket_size": 4e8,
        "sub_group_size": 4e8,
        "offload_optimizer": {
            "device": "cpu",
            "pin_memory": true
        }
    }
}
EOF
fi

GPUS_PER_NODE=1
CMD="deepspeed --num_gpus=$GPUS_PER_NODE finetune_zero3.py \
    --deepspeed_config=$DS_CONFIG_JSON \
    --model_name $MODEL_NAME \
    --num_train_epochs $EPOCHS \
    --lr 1e-5 \
    --batch_size $BATCH_SIZE \
    --weight_decay 0.01 \
    --output_dir $OUTPUT_DIR \
    --seed 42 \
    --max_length $MAX_LENGTH \
    --log_interval 1 \
    --dataset_name tatsu-lab/alpaca \
    --dataset_percentage 10.0 \
    --bench_steps 10 \
    --warmup_steps 20 \
    $ACTIVATION_CHECKPOINTING_FLAG"
eval $CMD
