"""Adapters of trainers, inference engines and clusters of others, imported only where their framework is installed.

A script names a framework by `relight.integrations.NAME`, a module or a folder. `trainers` and `engines` hold what
several adapters share.
"""
