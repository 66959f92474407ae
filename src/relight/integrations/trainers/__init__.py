"""Parts that the adapters of trainers share: batches of one optimizer step, and the names of a framework's own."""
