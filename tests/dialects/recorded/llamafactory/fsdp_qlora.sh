# in the shape of LLaMA-Factory's examples/extras/fsdp_qlora/train.sh
CUDA_VISIBLE_DEVICES=0,1 accelerate launch \
    --config_file ../accelerate/fsdp_offload.yaml \
    src/train.py llama3_qlora_fsdp.yaml
