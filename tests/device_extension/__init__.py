"""A device that is late, for tests: torch knows it by the name `late`.

Importing `tests.device_extension.late` registers it with torch, if it was built (`make test-device`). It computes what
a CPU computes, by a thread of its own:

- **Memory** that the host cannot read: an attempt ends the process by SIGSEGV. What is used again is overwritten.
- **Streams** that run late, and in an order drawn from `LATE_SEED` that is legal by events and nothing else. With a
  negative `LATE_MICROSECONDS` nothing runs but what the host waits for.
- **Copies** between pinned memory and the device, non_blocking, read or write the host's memory when their turn comes.
- **Races**, whatever the order was: operations on the same bytes, one of them writing, that streams, events and waits
  of the host do not order, and the host's use of pinned memory that the device may still use. They are reported by
  `late.native.races()`, and in the file that LATE_RACES names.
- **Collectives** as NCCL's: on a stream of their own, `wait()` orders streams and does not wait, a lost peer means a
  hang until `abort()`, and two ranks on one device are refused.
"""
