"""A simulated worker process, by the parts of relight.training that it models; ../worker.py has all of them."""
