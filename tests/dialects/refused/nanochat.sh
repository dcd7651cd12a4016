export OMP_NUM_THREADS=1
NPROC_PER_NODE=8
python -m scripts.tok_train --max-chars=2000000000 --vocab-size=65536
torchrun --standalone --nproc_per_node=$NPROC_PER_NODE -m scripts.base_train -- --depth=20 --target-param-data-ratio=20 --run=dummy
torchrun --standalone --nproc_per_node=$NPROC_PER_NODE -m scripts.base_loss
torchrun --standalone --nproc_per_node=$NPROC_PER_NODE -m scripts.chat_sft -- --run=dummy
