"""The cluster that the job runs in, in its own words: which of how many nodes this is, and where the first one is."""
