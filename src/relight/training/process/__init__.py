"""One worker process between two orders of the controller: its rank, its generation, its progress."""
