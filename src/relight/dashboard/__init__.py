"""A live page about one job: reads its run directory, and touches nothing of the job itself."""
