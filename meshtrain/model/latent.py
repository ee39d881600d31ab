class LatentAttention: pass
