"""For all tests."""

from hypothesis import settings

# How long an example takes is the machine's business: benchmarks measure, tests do not.
settings.register_profile("relight", deadline=None)
settings.load_profile("relight")
