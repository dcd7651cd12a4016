#!/usr/bin/env python
# Parses arguments
model_name_or_path=google/gemma-2b-it
train_dataset_path=data/ultrafeedback-binarized-preferences-cleaned/train
output_dir=output_models/reward_modeling_lora
deepspeed_args="--master_port=11345 --include localhost:6"
conversation_template=gemma
trust_remote_code=0
while [[ $# -ge 1 ]]; do
  key="$1"
  case ${key} in
    -m|--model_name_or_path)
      model_name_or_path="$2"
      shift
      ;;
    *)
      echo "error: unknown option \"${key}\"" 1>&2
      exit 1
  esac
  shift
done
exp_id=reward_modeling
project_dir=$(cd "$(dirname $0)"/..; pwd)
log_dir=${project_dir}/log/${exp_id}
mkdir -p ${output_dir} ${log_dir}
deepspeed ${deepspeed_args} \
    examples/reward_modeling.py \
        --deepspeed configs/ds_config_zero2.json \
        --model_name_or_path ${model_name_or_path} \
        --arch_type "text_regression" \
        --do_train True \
        --dataset_path ${train_dataset_path} \
        --conversation_template ${conversation_template} \
        --output_dir ${output_dir} --overwrite_output_dir \
        --use_flash_attention True \
        --block_size 4096 \
        --learning_rate 1e-5 \
        --per_device_train_batch_size 1 \
        --num_train_epochs 2 \
        --gradient_accumulation_steps 32 \
        --gradient_checkpointing True \
        --bf16 True \
        --optim "paged_adamw_32bit" \
        --run_name ${exp_id} \
        --use_lora True \
        --lora_r 8 \
        | tee ${log_dir}/train.log \
        2> ${log_dir}/train.err
