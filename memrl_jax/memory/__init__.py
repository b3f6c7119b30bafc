"""Memories that last: records and their store (SQLite), embeddings, search, and the command line."""
