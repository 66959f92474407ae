"""One step as every rank takes it: writes are noticed, the barrier is passed, a broken step is recovered."""
