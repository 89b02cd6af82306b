"""What a server offers: Machine, its TOML files and those that are shipped, and how its links are shared."""
