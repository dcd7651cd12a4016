"""Importers of measurements that others published: source files in, `Measurement` rows of provenance "published" out.

Nothing is dropped: a row that the ledgers do not cover says so in `out_of_scope`, a doubtful one in `spoiled`.
"""
