"""How the same command starts on many processes: on this machine (local), under Slurm (slurm.sbatch), on Kubernetes (kubernetes.yaml)."""
