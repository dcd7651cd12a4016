"""ms-swift's commands and YAML."""
