python scripts/performance/setup_experiment.py --account me --partition batch --gpu h100 -m llama3 -s 8b -ng 8 -c bf16 -tp 2 -mb 1 -gb 128
