uv run python -m torch.distributed.run --nproc_per_node=8 scripts/training/run_recipe.py \
  --recipe llama32_1b_pretrain_config \
  train.train_iters=10 train.global_batch_size=8 train.micro_batch_size=1 model.seq_length=4096
