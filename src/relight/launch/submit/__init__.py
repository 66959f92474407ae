"""`relight submit`: a job as a cluster manager wants it, for Slurm or for Kubernetes."""
