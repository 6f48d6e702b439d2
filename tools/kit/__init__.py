"""The test kit: clusters in memory, runs and logs, for the tests and the tools; no product code.

The product never imports it.
"""
