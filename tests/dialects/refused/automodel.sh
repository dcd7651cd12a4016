automodel finetune llm -c examples/llm_finetune/llama3_2/llama3_2_1b_squad.yaml
