"""Pipeline parallelism: schedules as tables. `training.executor` runs all of them."""
