"""`relight prove`: a short run of a script with failures, compared step by step with one without. No torch."""
