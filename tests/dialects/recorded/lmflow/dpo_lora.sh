#!/bin/bash
model_name_or_path=meta-llama/Llama-2-7b-hf
dataset_path=data/stack-exchange-paired-dummy
output_dir=output_models/dpo
deepspeed_args="--master_port=11000"
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
exp_id=dpo
log_dir=log/${exp_id}
deepspeed ${deepspeed_args} \
  examples/dpo_train.py \
    --model_name_or_path ${model_name_or_path} \
    --dataset_path ${dataset_path} \
    --output_dir ${output_dir} \
    --run_name dpo \
    --max_steps 200 \
    --learning_rate 1e-6 \
    --use_lora 1 \
    --lora_r 8 \
    --sanity_check True \
    --save_aggregated_lora 0\
    --logging_steps 20 \
    | tee ${log_dir}/train.log
