"""Trials as coroutines: the runtime that plays them, and the packing of their rows."""
