"""Gated delta net: linear attention whose state is corrected by the delta rule, and decays."""
