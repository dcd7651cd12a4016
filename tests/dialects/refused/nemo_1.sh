torchrun --nproc_per_node=8 /opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py \
  --config-path=conf --config-name=megatron_gpt_config.yaml \
  trainer.devices=8 trainer.num_nodes=1 model.micro_batch_size=4 model.global_batch_size=32 model.tensor_model_parallel_size=2
