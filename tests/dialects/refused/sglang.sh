#!/bin/bash
export CUDA_VISIBLE_DEVICES=0,1
python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 2 --mem-fraction-static 0.8
