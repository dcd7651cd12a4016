"""Steps that torch.compile compiles: graphs as Inductor fuses and orders them."""
