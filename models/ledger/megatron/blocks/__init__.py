"""The parts of a Megatron-LM layer and the ends of its model, written on a tape."""
