"""How the same command starts on many processes: on this machine (local), under Slurm, on Kubernetes, on Ray."""
