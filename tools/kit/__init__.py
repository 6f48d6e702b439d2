"""The test kit: clusters in memory, runs and logs, for the tests and the tools; no product code.

Nothing of the product imports it.
"""
