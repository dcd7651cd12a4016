#!/bin/bash
set -ex
export MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"

MODEL_ARGS=(
   --swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728
   --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
   --use-rotary-position-embeddings --disable-bias-linear --normalization "RMSNorm" --qk-layernorm
   --vocab-size 151936 --rotary-base 1000000
)
ROLLOUT_ARGS=(
   --prompt-data dapo-math-17k.jsonl --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
   --rollout-max-response-len 8192 --global-batch-size 256 --balance-data
)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   # --micro-batch-size 1
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)
GRPO_ARGS=(--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28)
WANDB_ARGS=(
   # --use-wandb
)
MISC_ARGS=(--attention-dropout 0.0 --hidden-dropout 0.0 --attention-backend flash --lr 1e-6)

ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint Qwen3-4B --ref-load ref \
   ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} ${GRPO_ARGS[@]} ${WANDB_ARGS[@]} ${PERF_ARGS[@]} ${MISC_ARGS[@]} \
   --sglang-mem-fraction-static 0.7
