"""In the shape of InternEvo's configurations: names that are set, without an import."""

SEQ_LEN = 2048
data = {"seq_len": SEQ_LEN, "micro_num": 4, "micro_bsz": 2}
model = {"num_layers": 32, "hidden_size": 4096, "dtype": "torch.bfloat16"}
hybrid_zero_optimizer = {"overlap_sync_grad": True}
parallel = {"zero1": {"size": 8}, "tensor": {"size": 1, "mode": "mtp"}}
