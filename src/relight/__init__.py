"""Keeps synchronous data-parallel PyTorch training alive through failures, bit-identically.

Every process imports this file, so it loads nothing that needs torch.
"""
