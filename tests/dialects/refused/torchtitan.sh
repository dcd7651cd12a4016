CONFIG_FILE="./torchtitan/models/llama3/train_configs/llama3_8b.toml" NGPU=8 ./run_train.sh --training.local_batch_size 2 --parallelism.tensor_parallel_degree 2
