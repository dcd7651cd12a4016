"""Code that the readers of all projects share: settings that are read key by key, job files, versions, the hub."""
