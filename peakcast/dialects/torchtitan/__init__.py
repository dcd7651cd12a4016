"""torchtitan's TOML and Python configurations."""
