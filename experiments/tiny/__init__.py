"""How the tiny models were made."""
