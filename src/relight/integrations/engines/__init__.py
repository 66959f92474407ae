"""Parts that the adapters of inference engines share: a cache of weights, and a stream of published ones."""
