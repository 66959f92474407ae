"""Sends a version of the weights to every receiver, bucket by bucket, on one host or several."""
