"""The proof that every family equals its original: cases, what is measured, and the table.

A case is a file in ``integration_tests/parity/families`` (`families.case`). It is plain data:
importing it does not import transformers. `families.parity` and `families.fields` compare with
transformers, `families.ranks` compares layouts and decoding with one rank, and ``python -m
families`` writes all measured errors into one table.
"""
