"""Pipeline parallelism: schedules as data (plain Python), and the executor that runs them (torch)."""
