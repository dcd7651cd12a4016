"""Rows of measured, published or traced runs: their schema, and the tables and shards that hold them."""
