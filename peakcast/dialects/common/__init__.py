"""What the readers of all projects share: settings that are read key by key, jobs, versions, the hub."""
