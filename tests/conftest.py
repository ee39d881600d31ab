"""Eight simulated CPU devices for every test; the flags must stand before jax starts its backend."""
import os

os.environ["JAX_PLATFORMS"] = "cpu"
# The default CPU scheduler can deadlock programs whose collectives are independent of one another.
os.environ["XLA_FLAGS"] = ("--xla_force_host_platform_device_count=8 "
                           "--xla_cpu_enable_concurrency_optimized_scheduler=false")
# With one thread a device, collectives under way together can block every thread of the pool.
os.environ["NPROC"] = "32"
