"""Text environments: a protocol, a registry, and one file per environment."""
