"""A simulated worker process, by the parts of relight.training that it models; sim/worker.py has all of them."""
