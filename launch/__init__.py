"""Launchers: start one run's processes on this machine (local), under Slurm, on Kubernetes or on Ray."""
