"""Blocks of a network, written on a tape: one module per family. A block says what each operation allocates and keeps."""
